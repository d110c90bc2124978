"""LoRA on a Hugging Face model, with texts divided by author: in simulation, and on Flower with this same file.

Run it: python examples/transformers_lora.py (pip install 'covary[torch,flower]' transformers peft)

peft freezes the model, so only its adapters are trained and sent, and have control variates. Here the model is tiny,
not pretrained, and reads bytes; yours is `AutoModelForCausalLM.from_pretrained(...)`, with its tokenizer. To deploy,
name `transformers_lora:server` and `transformers_lora:client` in the `pyproject.toml` that `covary new-app` writes.
"""

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

import covary as cv
import covary.torch as cvt
from covary.flower import Limits, server_app, torch_client_app

AUTHORS = {
    "Austen": """It is a truth universally acknowledged, that a single man in possession of a good fortune, must be in
want of a wife. However little known the feelings or views of such a man may be on his first entering a neighbourhood,
this truth is so well fixed in the minds of the surrounding families, that he is considered as the rightful property""",
    "Melville": """Call me Ishmael. Some years ago, never mind how long precisely, having little or no money in my
purse, and nothing particular to interest me on shore, I thought I would sail about a little and see the watery part of
the world. It is a way I have of driving off the spleen, and regulating the circulation. Whenever I find myself""",
    "Dickens": """It was the best of times, it was the worst of times, it was the age of wisdom, it was the age of
foolishness, it was the epoch of belief, it was the epoch of incredulity, it was the season of Light, it was the season
of Darkness, it was the spring of hope, it was the winter of despair, we had everything before us, we had nothing""",
    "Carroll": """Alice was beginning to get very tired of sitting by her sister on the bank, and of having nothing to
do: once or twice she had peeped into the book her sister was reading, but it had no pictures or conversations in it,
and what is the use of a book, thought Alice, without pictures or conversations? So she was considering in her own""",
}
SETTINGS = {"rounds": 20, "clients_per_round": 2, "local_epochs": 2, "batch_size": 0.2}
ALGORITHM = cv.scaffold(eta_l=0.1)


def network():
    torch.manual_seed(0)  # all nodes build the same frozen weights
    small = LlamaConfig(
        vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        initializer_range=0.1, use_cache=False,
    )  # fmt: skip
    base = LlamaForCausalLM(small)
    layers = ["q_proj", "v_proj", "up_proj", "down_proj", "lm_head"]
    return get_peft_model(base, LoraConfig(r=4, lora_alpha=16, target_modules=layers))


def loss(module, batch):
    return module(**batch, labels=batch["input_ids"]).loss  # the mean over all bytes


def texts(author):
    """The author's text in pieces of 32 bytes."""
    ids = torch.tensor(list(AUTHORS[author].encode()))
    return {"input_ids": ids.unfold(0, 32, 6)}


client = torch_client_app(
    lambda context: network(),
    loss,
    lambda context: texts(list(AUTHORS)[context.node_config["partition-id"]]),  # yours: a file of this node
    limits=Limits(private_batches=False),  # the batches of the simulation
)
server = server_app(ALGORITHM, network, min_clients=len(AUTHORS), **SETTINGS)


def main():
    problem = cvt.supervised(network(), loss, [texts(author) for author in AUTHORS])
    run = cv.simulate(ALGORITHM, problem, **SETTINGS)
    module = run.model()  # a PeftModel: module.save_pretrained("adapters")
    print(f"loss {run.history['loss'][0]:.3f} after one round, {run.history['loss'][-1]:.3f} after {run.rounds}")
    print(f"A client trains {run.x.size} of {sum(p.numel() for p in module.parameters())} numbers and sends only these")
    return {"scaffold": run}


if __name__ == "__main__":
    main()
