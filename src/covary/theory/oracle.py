"""The oracle of a problem: gradients and Hessian-vector products of its clients, and what they cost."""

from __future__ import annotations

from typing import Any

import numpy as np

from covary.checks import whole
from covary.errors import InvalidInput, refused
from covary.running.derivatives import Basis, Derivatives, Parts
from covary.running.engine import runtime_of
from covary.running.job import AnyProblem
from covary.running.plan import client_weights
from covary.training import check_weights

ROWS_AT_ONCE = 1024


class Oracle:
    """The clients' functions f_i and their weighted mean f. Their derivatives are computed by the problem's runtime."""

    def __init__(self, problem: AnyProblem, weights: str = "uniform", seed: int = 0, x0: Any = None):
        runtime = runtime_of(problem)
        check_weights(weights)
        if problem.n_clients < 2:
            raise InvalidInput(
                "problem must have at least 2 clients; got 1. With one client, G and delta are 0, and every algorithm "
                "is SGD with K steps per round."
            )
        if problem.data.streamed:
            raise InvalidInput(
                "The constants are measured on data in memory, but this data set is streamed from its folder. Measure "
                "a sample of its clients: FederatedData.from_clients([data.client(i) for i in ...])."
            )
        whole("seed", seed, 0, most=2**32 - 1)
        self.problem = problem
        self.derivatives: Derivatives = runtime.derivatives(problem, x0, seed)
        self.p = client_weights(problem.data.sizes, weights == "examples")
        self.rng = np.random.default_rng(seed)
        self.cost = 0  # gradients of one example's loss so far; a Hessian-vector product counts two

    @classmethod
    def of(cls, problem: Any, weights: str, seed: int) -> Oracle:
        """The oracle of a problem. An oracle is returned as it is, so that measurements share compiled programs."""
        return problem if isinstance(problem, Oracle) else cls(problem, weights, seed)

    @property
    def start(self) -> np.ndarray:
        """The initial point."""
        return self.derivatives.start

    @property
    def divisible(self) -> bool:
        """Whether the loss of a batch is the mean of its examples' losses."""
        return self.derivatives.divisible

    def at(self, x: Any) -> np.ndarray:
        """A point as a flat vector, from a vector or from params; None is the initial point."""
        if x is None:
            return self.start
        if hasattr(x, "shape") and np.shape(x) == self.start.shape:
            x = np.asarray(x, self.start.dtype)
            if not np.isfinite(x).all():
                raise refused("x", "finite", "NaN or infinity in it", "Choose a point at which the model is finite.")
            return x
        return self.problem.start(x, 0)[0]

    def some_clients(self, most: int) -> np.ndarray:
        """All clients, or a random sample of `most`."""
        N = self.problem.n_clients
        return np.arange(N) if most >= N else np.sort(self.rng.choice(N, most, replace=False))

    def clients(self, ids: np.ndarray) -> Parts:
        """The functions f_i of some clients."""
        sizes, offsets = self.problem.data.sizes[ids], self.problem.data.offsets[ids]
        if not self.divisible and (sizes == sizes[0]).all():
            return Parts(offsets[:, None] + np.arange(sizes[0]), None, np.arange(len(ids) + 1))
        length = int(sizes.max())
        if self.divisible:
            length = int(min(ROWS_AT_ONCE, length, max(16, 2 * np.median(sizes))))  # little padding for most clients
        counts = -(-sizes // length)
        first = np.concatenate([[0], np.cumsum(counts)])
        owner = np.repeat(np.arange(len(ids)), counts)
        place = (np.arange(first[-1]) - first[owner])[:, None] * length + np.arange(length)
        size = sizes[owner, None]
        rows = offsets[owner, None] + np.minimum(place, size - 1)
        return Parts(rows, (place < size) / size, first)

    def everyone(self, most: int | None = None) -> tuple[Parts, bool]:
        """f, and True; or, with more than `most` examples, f on a sample drawn from every client, and False."""
        data = self.problem.data
        if not self.divisible:
            return self.clients(np.arange(len(data.sizes))), True
        each = np.repeat(self.p / data.sizes, data.sizes)
        rows, complete = np.arange(data.n_examples), True
        if most is not None and data.n_examples > most:
            complete = False
            owner = np.repeat(np.arange(len(data.sizes)), data.sizes)
            quota = -(-data.sizes * most // data.n_examples)  # of each client
            shuffled = np.lexsort((self.rng.random(data.n_examples), owner))
            rows = shuffled[rows - data.offsets[owner] < quota[owner]]
            if len(rows) > 2 * most:  # far more clients than wanted examples
                rows = self.rng.choice(rows, most, replace=False)
            each = self.p[owner] / np.maximum(np.bincount(owner[rows], minlength=len(data.sizes)), 1)[owner]
        parts = -(-len(rows) // ROWS_AT_ONCE)
        length = -(-len(rows) // parts)
        share = np.pad(each[rows] / each[rows].sum(), (0, parts * length - len(rows)))
        rows = np.pad(rows, (0, parts * length - len(rows)))
        return Parts(rows.reshape(parts, length), share.reshape(parts, length), np.array([0, parts])), complete

    # The following methods process the parts one by one and add up their cost. V is an array of the runtime.

    def survey(self, x: np.ndarray, parts: Parts, p: np.ndarray, centre: np.ndarray) -> tuple[np.ndarray, ...]:
        """For each function the loss, ‖∇f_i‖² and ‖∇f_i - centre‖²; and the mean of the gradients weighted by p."""
        self.cost += _count(parts)
        return self.derivatives.survey(x, parts, p, centre)

    def responses(
        self, x: np.ndarray, v: np.ndarray, parts: Parts, p: np.ndarray, centre: np.ndarray
    ) -> tuple[np.ndarray, ...]:
        """For each function ‖∇²f_i v‖² and ‖∇²f_i v - centre‖²; and the mean of the products weighted by p."""
        self.cost += 2 * _count(parts)
        return self.derivatives.responses(x, v, parts, p, centre)

    def gradients(self, x: np.ndarray, parts: Parts) -> np.ndarray:
        """∇f_i(x) of all functions: (functions, d)."""
        self.cost += _count(parts)
        return self.derivatives.gradients(x, parts)

    def own_products(self, x: np.ndarray, V: Any, parts: Parts) -> Any:
        """∇²f_i(x) v_i, with one vector per function."""
        self.cost += 2 * _count(parts)
        return self.derivatives.own_products(x, V, parts)

    def common_products(self, x: np.ndarray, V: Any, parts: Parts) -> Any:
        """∇²f(x) v for each of the vectors, where f is the mean of the functions."""
        self.cost += 2 * _count(parts) * len(V)
        return self.derivatives.common_products(x, V, parts, self.p)

    def square_deviations(self, x: np.ndarray, rows: np.ndarray, centres: np.ndarray) -> np.ndarray:
        """‖∇l_j(x) - centre‖² of single examples, one row of examples per centre."""
        self.cost += rows.size
        return self.derivatives.square_deviations(x, rows, centres)

    def random(self, count: int, steps: int) -> Basis:
        """Where Lanczos' method starts: so many random vectors, and room for so many steps."""
        return self.basis(self.derivatives.vectors(self.rng.normal(size=(count, self.start.size))), steps)

    def basis(self, start: Any, steps: int) -> Basis:
        """Where Lanczos' method starts: given vectors, and room for so many steps."""
        return self.derivatives.basis(start, steps)


def _count(parts: Parts) -> int:
    return parts.rows.size if parts.share is None else int((parts.share > 0).sum())
