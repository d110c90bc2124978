"""Measurements on gradients: dissimilarity between clients (A1), noise within clients (A4), and control lag.

Every estimate has a standard error and a cost in gradients of one example's loss (a Hessian-vector product counts as
two). With more clients than asked for, a random sample is measured, and the standard error accounts for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from covary.algorithm import Algorithm
from covary.checks import whole
from covary.errors import InvalidInput, refused
from covary.running.job import AnyProblem
from covary.running.plan import batches_of
from covary.runs.machine import device_memory
from covary.simulate import simulate
from covary.theory.estimate import Estimate, mean_error, reject_nan
from covary.theory.oracle import Oracle


@dataclass(frozen=True)
class Gradients:
    """The clients' gradients at one point."""

    G: Estimate  # A1 at this point with B = 1: G² = sum p_i ‖∇f_i‖² - ‖∇f‖² = sum p_i ‖∇f_i - ∇f‖²
    norm: float  # ‖∇f‖
    mean_square: float  # sum p_i ‖∇f_i‖²
    loss: float  # f


@dataclass(frozen=True)
class Noise:
    """The variance of gradients within clients."""

    variances: np.ndarray = field(repr=False)  # of each client: s_i² = sum_j ‖∇l_j - ∇f_i‖² / (n_i - 1)
    errors: np.ndarray = field(repr=False)  # the standard error of each s_i², due to examples left out
    sizes: np.ndarray = field(repr=False)  # n_i
    weights: np.ndarray = field(repr=False)
    left_out: float  # the share of clients that were not measured
    cost: int

    def sigma(self, batch_size: int | float | None) -> Estimate:
        """σ of A4 for batches drawn without replacement: σ² = sum_i p_i s_i² (1/b - 1/n_i).

        1/b is averaged over the batches of an epoch, the last of which can be smaller. σ² is the mean over clients,
        not the largest: the proofs use no more.

        >>> import numpy as np, covary as cv
        >>> data = cv.FederatedData((np.arange(8.0), np.zeros(8)), sizes=[4, 4])
        >>> class Mean:
        ...     def init(self, key):
        ...         return np.zeros(1)
        ...     def loss(self, w, batch):
        ...         return 0.5 * ((w - batch[0]) ** 2).mean()
        >>> noise = cv.theory.gradient_noise(cv.supervised(Mean(), data))
        >>> [round(noise.sigma(b).value ** 2, 3) for b in (1, 2, None)]  # (5/3)/b (1 - b/4)
        [1.25, 0.417, 0.0]
        """
        shrink = np.array([np.mean(1 / own) for own in _batches(batch_size, self.sizes)]) - 1 / self.sizes
        square = float(self.weights @ (self.variances * shrink))
        spread = mean_error(self.variances * shrink, self.weights, self.left_out)
        error = float(np.hypot(spread, np.linalg.norm(self.weights * shrink * self.errors)))
        sigma = float(np.sqrt(max(square, 0.0)))
        return Estimate(sigma, error / (2 * sigma) if sigma > 0 else 0.0, self.cost)


def gradient_dissimilarity(
    problem: AnyProblem | Oracle,
    x: Any = None,
    *,
    clients: int = 512,
    weights: str = "uniform",
    seed: int = 0,
) -> Gradients:
    """Gradient dissimilarity (A1) at a point: the smallest G for B = 1. At the optimum it is the same for every B.

    Args:
        problem: a problem with at least two clients, in JAX or PyTorch, or an `Oracle` of it, which measurements can
            share.
        x: the point, as params or as a flat vector; by default the model's initial point.
        clients: the maximum number of clients to measure; with more clients, a random sample.
        weights: "uniform" or "examples", as in `simulate`.
        seed: the seed of the sample and of the initial point.

    >>> import covary as cv
    >>> found = cv.theory.gradient_dissimilarity(cv.lower_bound(G=10.0), x=0.0)
    >>> found.G.value, found.norm
    (10.0, 0.0)
    """
    oracle = Oracle.of(problem, weights, seed)
    x, before = oracle.at(x), oracle.cost
    ids = oracle.some_clients(whole("clients", clients, 2))
    w = oracle.p[ids] / oracle.p[ids].sum()
    parts = oracle.clients(ids)
    loss, squares, _, mean = oracle.survey(x, parts, w, 0 * x)
    _, _, deviations, _ = oracle.survey(x, parts, w, mean)
    reject_nan(ids, squares + loss, "gradient")
    m, N = len(ids), oracle.problem.n_clients
    unbiased = 1.0 if m == N else m / (m - 1) * (N - 1) / N
    square = unbiased * float(w @ deviations.astype(float))
    error = unbiased * mean_error(deviations, w, 1 - m / N)
    G = np.sqrt(square)
    return Gradients(
        G=Estimate(float(G), float(error / (2 * G)) if G > 0 else 0.0, oracle.cost - before),
        norm=float(np.linalg.norm(mean.astype(float))),
        mean_square=float(w @ squares.astype(float)),
        loss=float(w @ loss.astype(float)),
    )


def envelope(
    points: Sequence[Gradients], beta: float | None = None, f_star: float | None = None
) -> tuple[float, float]:
    """A pair (G, B) for which A1 holds at all the points.

    Many pairs do. This G is the one (with B = 1) at the point nearest to the optimum, or up to a tenth more: near the
    optimum, G alone limits FedAvg. B is the smallest value that then covers the other points.

    Args:
        points: from `gradient_dissimilarity`, along a trajectory.
        beta, f_star: with both, the convex form, sum p_i ‖∇f_i‖² <= G² + 2 beta B² (f - f*); without them, the general
            form, sum p_i ‖∇f_i‖² <= G² + B² ‖∇f‖².

    >>> import covary as cv
    >>> problem = cv.lower_bound(G=10.0)
    >>> points = [cv.theory.gradient_dissimilarity(problem, x) for x in (0.0, -3.0, 5.0)]
    >>> G, B = cv.theory.envelope(points)
    >>> all(p.mean_square <= G**2 + B**2 * p.norm**2 + 1e-9 for p in points)
    True
    """
    if not points:
        raise refused("points", "at least one", "none", "Measure some with gradient_dissimilarity.")
    if (beta is None) != (f_star is None):
        raise InvalidInput("The convex form needs beta and f_star, the general form needs neither. Give both or none.")
    a = np.array([p.mean_square for p in points])
    if beta is None or f_star is None:
        b = np.array([p.norm**2 for p in points])
    else:
        b = 2 * beta * np.maximum([p.loss - f_star for p in points], 0)
    nearest = int(b.argmin())
    G2 = max(a[nearest] - b[nearest], 0.0)
    with np.errstate(divide="ignore", invalid="ignore"):
        exact, loose = (np.nan_to_num((a - g) / b, nan=1.0, posinf=1e30).max(initial=1.0) for g in (G2, 1.21 * G2))
    if exact > 4 * loose:  # otherwise two points near the optimum would make B large
        exact, G2 = loose, max(G2, float((a - loose * b).max()))
    return float(np.sqrt(G2)), float(np.sqrt(exact))


def gradient_noise(
    problem: AnyProblem | Oracle,
    x: Any = None,
    *,
    clients: int = 32,
    examples: int = 64,
    weights: str = "uniform",
    seed: int = 0,
) -> Noise:
    """The variance of single examples' gradients within clients, which gives σ for every batch size.

    Args:
        clients, examples: the maximum number of clients, and of examples per client, to measure.
        problem, x, weights, seed: as in `gradient_dissimilarity`.

    A client with one example has variance 0, because every batch is all its data.

    >>> import covary as cv
    >>> cv.theory.gradient_noise(cv.lower_bound(G=10.0)).sigma(None).value
    0.0
    """
    oracle = Oracle.of(problem, weights, seed)
    if not oracle.divisible:
        raise InvalidInput(
            "sigma is defined only if the loss of a batch is the mean of its examples' own losses; on the first "
            "examples it is not. Make each example's loss independent of the others (BatchNorm is not)."
        )
    x, before = oracle.at(x), oracle.cost
    ids = oracle.some_clients(whole("clients", clients, 2))
    data = oracle.problem.data
    sizes, offsets = data.sizes[ids], data.offsets[ids]
    count = min(whole("examples", examples, 2), int(sizes.max()))
    rows = np.stack(
        [
            offset + np.resize(oracle.rng.permutation(int(size))[:count], count)
            for size, offset in zip(sizes, offsets, strict=True)
        ]
    )
    taken = np.minimum(sizes, count)
    at_once = max(1, int(device_memory() / 8 / x.nbytes))
    squares = []
    for first in range(0, len(ids), at_once):
        some = slice(first, first + at_once)
        centres = oracle.gradients(x, oracle.clients(ids[some]))
        squares.append(oracle.square_deviations(x, rows[some], centres))
    squares = np.concatenate(squares).astype(float)
    reject_nan(ids, squares.sum(axis=1), "gradient")
    variances, errors = np.zeros(len(ids)), np.zeros(len(ids))
    for k, (n, size) in enumerate(zip(taken, sizes, strict=True)):
        if size > 1:
            own = squares[k, :n]
            variances[k] = own.mean() * size / (size - 1)
            errors[k] = own.std(ddof=1) / np.sqrt(n) * np.sqrt(1 - n / size) if n > 1 else 0.0
    w = oracle.p[ids] / oracle.p[ids].sum()
    return Noise(variances, errors, sizes, w, 1 - len(ids) / data.n_clients, oracle.cost - before)


def control_lag(problem: AnyProblem | Oracle, c_i: Any, x: Any, *, weights: str = "uniform") -> float:
    """sum p_i ‖c_i - ∇f_i(x)‖², the distance of the control variates from the gradients they estimate.

    With x = x* it is the paper's control lag C_r. With the current model it measures the error of the next correction.

    Args:
        c_i: the control variates, of shape (N, d), from `run.clients.c_i`.
        x: the point.
        problem, weights: as in `gradient_dissimilarity`.

    >>> import covary as cv
    >>> run = cv.simulate(cv.scaffold(eta_l=0.1), cv.lower_bound(G=10.0), rounds=100, local_steps=5, x0=1.0)
    >>> cv.theory.control_lag(cv.lower_bound(G=10.0), run.clients.c_i, x=0.0) < 1e-6
    True

    Reference: Karimireddy et al. 2020, appendix, definition of the control-lag.
    """
    oracle = Oracle.of(problem, weights, 0)
    x, N = oracle.at(x), oracle.problem.n_clients
    if np.shape(c_i) != (N, x.size):
        raise refused("c_i", f"of shape {(N, x.size)}", f"shape {np.shape(c_i)}", "Pass run.clients.c_i.")
    at_once, total = max(1, int(device_memory() / 8 / x.nbytes)), 0.0
    for first in range(0, N, at_once):
        ids = np.arange(first, min(N, first + at_once))
        apart = np.asarray(c_i[ids[0] : ids[-1] + 1]) - oracle.gradients(x, oracle.clients(ids))
        total += float(oracle.p[ids] @ np.sum(apart.astype(float) ** 2, axis=1))
    return total


def lag_along(
    algorithm: Algorithm, problem: AnyProblem, rounds: Sequence[int], x_star: Any = None, **settings: Any
) -> dict[str, np.ndarray]:
    """Client drift E_r and control lag along a run of an algorithm with control variates `c_i`.

    The run is repeated up to each of the given rounds, with the same numbers. Keep the list short.

    Args:
        algorithm: `covary.scaffold(...)`.
        problem: the problem to minimise.
        rounds: the rounds to measure.
        x_star: the optimum, for the paper's C_r; see `optimum`.
        settings: the other arguments of `simulate`.

    Returns:
        Arrays over the rounds: `round`, `drift` (E_r), `lag` (at the current model) and, with x_star, `lag_at_optimum`.

    >>> import covary as cv
    >>> found = cv.theory.lag_along(cv.scaffold(0.1), cv.lower_bound(10.0), [1, 10, 30], x_star=0.0, local_steps=5)
    >>> bool(found["lag_at_optimum"][0] > 1e3 * found["lag_at_optimum"][2])
    True
    """
    if algorithm.invariant != ("c", "c_i"):
        raise refused("algorithm", "one with control variates c_i", algorithm.name, "Try covary.scaffold(eta_l=0.1).")
    oracle = Oracle(problem, settings.get("weights", "uniform"), settings.get("seed", 0))
    rows: dict[str, list[float]] = {"round": [], "drift": [], "lag": []}
    for r in sorted({whole("rounds", r, 1) for r in rounds}):
        run = simulate(algorithm, problem, rounds=r, **(settings | {"eval_every": r, "store": "device"}))
        rows["round"].append(run.rounds)
        rows["drift"].append(float(run.history["drift"][-1]))
        rows["lag"].append(control_lag(oracle, run.clients.c_i, run.x))
        if x_star is not None:
            lag = control_lag(oracle, run.clients.c_i, x_star)
            rows.setdefault("lag_at_optimum", []).append(lag)
        if run.diverged:
            break
    return {name: np.array(values) for name, values in rows.items()}


def optimum(
    problem: AnyProblem | Oracle,
    x0: Any = None,
    *,
    steps: int = 500,
    weights: str = "uniform",
    seed: int = 0,
) -> tuple[np.ndarray, float]:
    """A minimiser x* of f by L-BFGS on all data, as a flat vector, and ‖∇f(x*)‖ / ‖∇f(x0)‖.

    If f is not convex, x* is a stationary point. If the second number is not small, f has no minimiser (separable data
    without regularisation), or more steps are needed.

    >>> import numpy as np, covary as cv
    >>> x, small = cv.theory.optimum(cv.quadratics(A=np.stack([np.eye(2), 3 * np.eye(2)]), b=[[1.0, 0.0], [0.0, 1.0]]))
    >>> bool(np.allclose(x, -0.25, atol=1e-4)), small < 1e-4
    (True, True)
    """
    from scipy.optimize import minimize

    oracle = Oracle.of(problem, weights, seed)
    x0 = oracle.at(x0)
    parts, one = oracle.everyone()[0], np.ones(1)
    if not oracle.divisible:
        one = oracle.p

    def value_and_slope(x: np.ndarray) -> tuple[float, np.ndarray]:
        loss, _, _, slope = oracle.survey(x.astype(x0.dtype), parts, one, 0 * x0)
        return float(one @ loss), slope.astype(float)

    first = np.linalg.norm(value_and_slope(x0)[1])
    options: Mapping[str, Any] = {
        "maxiter": whole("steps", steps, 1),
        "gtol": 1e-12,
        "ftol": 1e-15,
        "maxfun": 4 * steps,
    }
    found = minimize(value_and_slope, x0.astype(float), jac=True, method="L-BFGS-B", options=dict(options))
    return found.x.astype(x0.dtype), float(np.linalg.norm(found.jac) / first) if first > 0 else 0.0


def _batches(batch_size: int | float | None, sizes: np.ndarray) -> Iterator[np.ndarray]:
    """The sizes of the batches of each client's epoch."""
    kind, batch, counts = batches_of(batch_size, sizes)
    for n, b, k in zip(sizes, batch, counts, strict=True):
        ends = np.arange(k + 1) * n // k if kind == "parts" else np.minimum(np.arange(k + 1) * b, n)
        yield np.diff(ends)
