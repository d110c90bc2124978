"""The workloads: the paper's round, with three models on synthetic images of EMNIST's shape."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from covary.data.federated import FederatedData
from covary.models import cnn, logistic_regression, mlp
from covary.problem import Problem, supervised


@dataclass(frozen=True)
class Workload:
    """A round of S of N clients, each with K steps on batches of `batch` images of 28 x 28 pixels in 62 classes."""

    name: str
    model: str  # "logistic", "mlp" or "cnn"
    n_clients: int = 100
    cohort: int = 20
    steps: int = 25
    batch: int = 195
    size: int = 975  # examples of each client
    features: int = 784
    hidden: int = 200  # of the mlp
    classes: int = 62

    @cached_property
    def x(self) -> np.ndarray:
        """Images in unsigned bytes, of shape (clients, examples, pixels)."""
        rng = np.random.default_rng(0)
        return rng.integers(0, 256, (self.n_clients, self.size, self.features), dtype=np.uint8)

    @cached_property
    def y(self) -> np.ndarray:
        rng = np.random.default_rng(1)
        return rng.integers(0, self.classes, (self.n_clients, self.size), dtype=np.int32)

    def problem(self) -> Problem:
        """The workload as a covary problem."""
        examples = (self.x.reshape(-1, self.features), self.y.reshape(-1))
        data = FederatedData(examples, [self.size] * self.n_clients)
        model = {
            "logistic": lambda: logistic_regression(self.features, self.classes),
            "mlp": lambda: mlp(self.features, self.hidden, self.classes),
            "cnn": lambda: cnn(self.classes),
        }[self.model]()
        return supervised(model, data, test=tuple(a[:1000] for a in examples))


W1 = Workload("W1", "logistic")
W2 = Workload("W2", "mlp")
CNN = Workload("CNN", "cnn")
