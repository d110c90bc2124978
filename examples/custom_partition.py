"""Your own partition: a few clients have most of the data, and each client rotates its images by its own angle.

Run it: python examples/custom_partition.py

`FederatedData.from_clients` needs only a list with one batch per client; sizes may differ.
"""

import numpy as np
from scipy import ndimage

import covary as cv

CLIENTS = 20


def rotated(x, angle):
    return ndimage.rotate(x.reshape(-1, 8, 8), angle, axes=(1, 2), reshape=False, order=1).reshape(len(x), 64)


def main():
    rng = np.random.default_rng(0)
    (x, y), (test_x, test_y) = cv.datasets.digits()
    shares = 1 / np.arange(1, CLIENTS + 1)  # the second client has half as much data as the first, the third a third
    ends = np.round(len(y) * np.cumsum(shares) / shares.sum()).astype(int)
    parts = np.split(rng.permutation(len(y)), ends[:-1])
    angles = rng.uniform(-60, 60, CLIENTS)
    data = cv.FederatedData.from_clients([(rotated(x[p], a), y[p]) for p, a in zip(parts, angles, strict=True)])
    print(data)

    test = np.concatenate([rotated(test_x, angle) for angle in angles]), np.tile(test_y, CLIENTS)
    problem = cv.supervised(cv.models.mlp(64, 32, 10), data, test)
    runs = {}
    for algorithm in (cv.fedavg(eta_l=0.1), cv.scaffold(eta_l=0.1)):
        run = cv.simulate(algorithm, problem, rounds=60, clients_per_round=5, local_steps=25, batch_size=10)
        print(
            f"{algorithm.name:8}  loss {run.history['loss'][-1]:.3f}, test accuracy {run.history['accuracy'][-1]:.3f}"
        )
        runs[algorithm.name] = run
    return runs


if __name__ == "__main__":
    main()
