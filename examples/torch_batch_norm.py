"""BatchNorm and dropout in a PyTorch module, without extra code.

Run it: python examples/torch_batch_norm.py

BatchNorm's running statistics are averaged over the cohort, and control variates never correct them. What dropout
draws is fixed by the seed, round, client and step, so a second run gives the same numbers.
"""

import torch
from torch import nn

import covary as cv
import covary.torch as cvt


def network():
    return nn.Sequential(
        nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.2),
        nn.Linear(64, 10),
    )  # fmt: skip


def loss(module, batch):
    x, y = batch
    return nn.functional.cross_entropy(module(x), y)


def metrics(module, batch):  # measured in evaluation mode
    x, y = batch
    return {"accuracy": module(x).argmax(1) == y}


def main():
    torch.manual_seed(0)
    (x, y), test = cv.datasets.digits()
    data = cv.partition.by_similarity(x, y, n_clients=20, similarity=0.2)
    problem = cvt.supervised(network(), loss, data, test, metrics)
    settings = {"rounds": 20, "clients_per_round": 0.2, "local_epochs": 5, "batch_size": 0.2}
    run = cv.simulate(cv.scaffold(eta_l=0.05), problem, **settings)
    again = cv.simulate(cv.scaffold(eta_l=0.05), problem, **settings)
    same = all(torch.equal(value, again.params[name]) for name, value in run.params.items())
    print(f"Test accuracy {run.history['accuracy'][-1]:.3f} after {run.rounds} rounds, twice the same: {same}")
    print("Averaged, and in no control variate:", ", ".join(run.buffers))
    return {"scaffold": run, "again": again}


if __name__ == "__main__":
    main()
