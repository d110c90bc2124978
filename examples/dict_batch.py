"""Batches as dicts of `input_ids`, `attention_mask` and `labels`: a small text classifier on embedded words.

Run it: python examples/dict_batch.py

Examples may be any nesting of arrays; `loss` gets a batch of the same nesting. The texts are synthetic: words with even
numbers are more common in texts with label 1, and each client writes about its own subjects.
"""

import jax
import jax.numpy as jnp
import numpy as np

import covary as cv

WORDS, LONGEST = 200, 12


class BagOfWords:
    def init(self, key):
        return {"embedding": 0.1 * jax.random.normal(key, (WORDS, 16)), "w": jnp.ones(16), "b": jnp.zeros(())}

    def score(self, params, batch):
        mask = batch["attention_mask"][:, :, None]
        words = params["embedding"][batch["input_ids"]] * mask
        return words.sum(axis=1) / mask.sum(axis=1) @ params["w"] + params["b"]

    def loss(self, params, batch):
        signs = 2 * batch["labels"] - 1
        return jnp.mean(jax.nn.softplus(-signs * self.score(params, batch)))

    def metrics(self, params, batch):
        return {"accuracy": jnp.mean((self.score(params, batch) > 0) == batch["labels"])}


def texts(rng, count, subject, positive):
    labels = (rng.random(count) < positive).astype(int)
    ids = (subject + rng.integers(0, WORDS // 2, (count, LONGEST))) % WORDS
    even = rng.random(ids.shape) < np.where(labels, 0.75, 0.25)[:, None]
    lengths = rng.integers(4, LONGEST + 1, count)
    mask = (np.arange(LONGEST) < lengths[:, None]).astype(int)
    return {"input_ids": (ids // 2 * 2 + ~even) * mask, "attention_mask": mask, "labels": labels}


def main():
    rng = np.random.default_rng(0)
    clients = [texts(rng, 60, subject=20 * i, positive=0.1 + 0.8 * (i % 2)) for i in range(10)]
    test = texts(rng, 1000, subject=rng.integers(0, WORDS, (1000, 1)), positive=0.5)
    problem = cv.supervised(BagOfWords(), cv.FederatedData.from_clients(clients), test)
    run = cv.simulate(cv.scaffold(eta_l=1.0), problem, rounds=100, clients_per_round=4, local_epochs=2, batch_size=10)
    print(
        f"Test accuracy {run.history['accuracy'][0]:.3f} after one round, {run.history['accuracy'][-1]:.3f} at the end"
    )
    return {"scaffold": run}


if __name__ == "__main__":
    main()
