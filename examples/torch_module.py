"""A PyTorch module as it is: a small CNN on handwritten digits, SCAFFOLD against FedAvg.

Run it: python examples/torch_module.py

`loss` gets the module and a batch. The module itself never changes: `run.params` is the trained state_dict, and
`run.model()` a trained copy. Put the module on a GPU, and everything runs there.
"""

import tempfile
from pathlib import Path

import torch
from torch import nn

import covary as cv
import covary.torch as cvt


def network():
    return nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)), nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(8 * 4 * 4, 10),
    )  # fmt: skip


def loss(module, batch):
    x, y = batch
    return nn.functional.cross_entropy(module(x), y)


def metrics(module, batch):
    x, y = batch
    return {"accuracy": module(x).argmax(1) == y}  # one value per example; covary takes the mean


def main():
    torch.manual_seed(0)
    (x, y), test = cv.datasets.digits()
    data = cv.partition.by_similarity(x, y, n_clients=20, similarity=0.0)  # each client has one or two digits
    problem = cvt.supervised(network(), loss, data, test, metrics)
    runs = {}
    for algorithm in (cv.fedavg(eta_l=0.2), cv.scaffold(eta_l=0.2)):
        run = cv.simulate(algorithm, problem, rounds=40, clients_per_round=0.2, local_epochs=5, batch_size=0.2)
        print(f"{algorithm.name:8}  test accuracy {run.history['accuracy'][-1]:.3f} after {run.rounds} rounds")
        runs[algorithm.name] = run

    file = Path(tempfile.mkdtemp()) / "digits.pt"  # yours: "digits.pt"
    torch.save(runs["scaffold"].params, file)
    restored = network()
    restored.load_state_dict(torch.load(file))
    print("The first test image is a", restored(torch.tensor(test[0][:1], dtype=torch.float32)).argmax().item())
    return runs


if __name__ == "__main__":
    main()
