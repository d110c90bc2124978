"""The constants of the paper's assumptions, measured: how different, how curved and how noisy the clients are.

Every figure comes with a standard error and with its cost in gradients of one example's loss (a Hessian-vector product
counts as two). Of more clients than asked for a random sample is measured, and the error says so.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from covary.algorithm import Algorithm
from covary.checks import whole
from covary.devices import memory
from covary.errors import CovaryError, refused
from covary.plan import batches_of
from covary.problem import Problem
from covary.simulate import simulate
from covary.theory.lanczos import lanczos
from covary.theory.oracle import Oracle

TOLERANCE = 0.01  # of an eigenvalue
SMALL = 256  # parameters up to which as many steps of Lanczos' method can be taken
STEPS, FEW = 40, 8  # beyond that, and where each is costly
CHEAP = AFFORDABLE = 1e12  # operations: some seconds
SCREENED = 4096  # clients whose responses are looked at


@dataclass(frozen=True)
class Estimate:
    """A measured number. `se` is 0 where nothing was sampled and nothing cut short."""

    value: float
    se: float = 0.0
    cost: int = 0  # gradients of one example's loss

    def __float__(self) -> float:
        return float(self.value)

    def __str__(self) -> str:
        return f"{self.value:.4g}" + (f" ± {self.se:.2g}" if self.se > 0 else "")


@dataclass(frozen=True)
class Gradients:
    """The clients' gradients at one point."""

    G: Estimate  # A1 at this point with B = 1: G² = sum p_i ‖∇f_i‖² - ‖∇f‖² = sum p_i ‖∇f_i - ∇f‖²
    norm: float  # ‖∇f‖
    mean_square: float  # sum p_i ‖∇f_i‖²
    loss: float  # f


@dataclass(frozen=True)
class Curvature:
    """The clients' Hessians at one point."""

    beta: Estimate  # A5: max_i ‖∇²f_i‖
    mu: Estimate  # λ_min(∇²f); below 0: not convex here
    delta: Estimate  # A2: max_i ‖∇²f_i - ∇²f‖
    weak_convexity: Estimate  # A2: the least w with ∇²f_i >= -w I for all i
    rounding: float  # of an eigenvalue
    clients: np.ndarray = field(repr=False)  # those that were measured
    betas: np.ndarray = field(repr=False)  # ‖∇²f_i‖ of each
    deltas: np.ndarray = field(repr=False)  # ‖∇²f_i - ∇²f‖ of each; where that is costly, roughly for all but two

    @property
    def convex(self) -> bool:
        """Whether no negative eigenvalue of ∇²f was found here; one that is found is there, as mu is from above."""
        return self.mu.value >= -self.rounding


@dataclass(frozen=True)
class Noise:
    """The variance of gradients within clients."""

    variances: np.ndarray = field(repr=False)  # of each client: s_i² = sum_j ‖∇l_j - ∇f_i‖² / (n_i - 1)
    errors: np.ndarray = field(repr=False)  # of each s_i², from the examples that were left out
    sizes: np.ndarray = field(repr=False)  # n_i
    weights: np.ndarray = field(repr=False)
    left_out: float  # the share of clients that were not measured
    cost: int

    def sigma(self, batch_size: int | float | None) -> Estimate:
        """σ of A4 for batches drawn without replacement: σ² = sum_i p_i s_i² (1/b - 1/n_i).

        1/b is its mean over the batches of an epoch, the last of which can be smaller.

        The mean over clients, not the worst of them: it is all that the proofs use.

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
        spread = _mean_error(self.variances * shrink, self.weights, self.left_out)
        error = float(np.hypot(spread, np.linalg.norm(self.weights * shrink * self.errors)))
        sigma = float(np.sqrt(max(square, 0.0)))
        return Estimate(sigma, error / (2 * sigma) if sigma > 0 else 0.0, self.cost)


def gradient_dissimilarity(
    problem: Problem | Oracle,
    x: Any = None,
    *,
    clients: int = 512,
    weights: str = "uniform",
    seed: int = 0,
) -> Gradients:
    """Gradient dissimilarity (A1) at a point: the least G for B = 1. At the optimum it is that for every B.

    Args:
        problem: with at least two clients; or an `Oracle` of it, which measurements can share.
        x: where, as params or as a flat vector; by default the model's own start.
        clients: the most clients to look at; of more, a random sample.
        weights: "uniform" or "examples", as in `simulate`.
        seed: of the sample, and of the model's start.

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
    _refuse_nan(ids, squares + loss, "gradient")
    m, N = len(ids), oracle.problem.n_clients
    unbiased = 1.0 if m == N else m / (m - 1) * (N - 1) / N
    square = unbiased * float(w @ deviations.astype(float))
    error = unbiased * _mean_error(deviations, w, 1 - m / N)
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
    """A pair (G, B) with which A1 holds at all the points.

    Many do. This one's G is what holds (with B = 1) where the right-hand side is smallest, nearest to the optimum, or
    up to a tenth more: there G alone decides how far FedAvg can get. B is the least that then covers the other points.

    Args:
        points: from `gradient_dissimilarity`, along a trajectory.
        beta, f_star: for the convex form, sum p_i ‖∇f_i‖² <= G² + 2 beta B² (f - f*); without them the general form,
            sum p_i ‖∇f_i‖² <= G² + B² ‖∇f‖².

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
        raise CovaryError("The convex form needs beta and f_star, the general form neither. Give both or none.")
    a = np.array([p.mean_square for p in points])
    if beta is None or f_star is None:
        b = np.array([p.norm**2 for p in points])
    else:
        b = 2 * beta * np.maximum([p.loss - f_star for p in points], 0)
    nearest = int(b.argmin())
    G2 = max(a[nearest] - b[nearest], 0.0)
    with np.errstate(divide="ignore", invalid="ignore"):
        exact, loose = (np.nan_to_num((a - g) / b, nan=1.0, posinf=1e30).max(initial=1.0) for g in (G2, 1.21 * G2))
    if exact > 4 * loose:  # two points near the optimum alone would drive B up
        exact, G2 = loose, max(G2, float((a - loose * b).max()))
    return float(np.sqrt(G2)), float(np.sqrt(exact))


def curvature(
    problem: Problem | Oracle,
    x: Any = None,
    *,
    clients: int | None = None,
    weights: str = "uniform",
    seed: int = 0,
) -> Curvature:
    """beta, mu and the Hessian dissimilarity delta (A2) at a point, by Lanczos' method on Hessian-vector products.

    Args:
        problem: with at least two clients; its loss has to be twice differentiable (up to kinks such as ReLU's).
        x: where, as params or as a flat vector; by default the model's own start.
        clients: the most clients whose Hessians are measured; by default all where that is cheap, else 16: half of them
            those that respond most to a random vector, half at random. The standard error of the largest then says how
            much larger one of the others could be.
        weights, seed: as in `gradient_dissimilarity`.

    >>> import numpy as np, covary as cv
    >>> A = np.stack([np.eye(3), np.diag([1.0, 2.0, 5.0])])
    >>> found = cv.theory.curvature(cv.quadratics(A, b=np.zeros((2, 3))))
    >>> [round(value.value, 6) for value in (found.beta, found.mu, found.delta)]
    [5.0, 1.0, 2.0]
    """
    oracle = Oracle.of(problem, weights, seed)
    x, d, before = oracle.at(x), oracle.start.size, oracle.cost
    N, product = oracle.problem.n_clients, _operations(d) * oracle.problem.data.n_examples  # for one vector
    if clients is None:
        clients = N if N * product * STEPS <= CHEAP else 16
    steps = d if d <= SMALL else STEPS
    room = memory() / 4 / (2 * x.nbytes)  # vectors
    ids, others = _most_responsive(oracle, x, min(N, whole("clients", clients, 2), max(2, int(room / steps))))
    steps = max(4, min(steps, int(room / len(ids))))
    own = oracle.clients(ids)

    def random(count: int) -> Any:
        return jnp.asarray(oracle.rng.normal(size=(count, d)), x.dtype)

    alone = lanczos(lambda V: oracle.own_products(x, V, own), random(len(ids)), steps, _both_ends_settled)
    _refuse_nan(ids, alone.values.sum(axis=1), "Hessian")
    beta = _largest(alone.norms, alone.norm_errors, others.beta, oracle.cost - before)
    lowest = _largest(-alone.values[:, 0], alone.errors[:, 0], None, beta.cost)
    _refuse_kinks(oracle, x, beta.value)

    before = oracle.cost
    if len(ids) * product * STEPS <= CHEAP:
        everyone = oracle.everyone()[0]
        apart = lanczos(
            lambda V: oracle.own_products(x, V, own) - oracle.common_products(x, V, everyone),
            random(len(ids)),
            steps,
            _norms_settled,
        )
        deltas, errors = apart.norms, apart.norm_errors
    else:
        deltas, errors = _apart_by_a_sample(oracle, x, ids, others, random(len(ids)))
    delta = _largest(deltas, errors, others.delta, oracle.cost - before)

    before = oracle.cost
    mu, error = _lowest_of_all(oracle, x, random(1), steps, product, beta.value)
    return Curvature(
        beta=beta,
        mu=Estimate(mu, error, oracle.cost - before),
        delta=delta,
        weak_convexity=Estimate(max(0.0, lowest.value), lowest.se if lowest.value > 0 else 0.0, lowest.cost),
        rounding=100 * float(np.finfo(x.dtype).eps) * beta.value,
        clients=ids,
        betas=alone.norms,
        deltas=deltas,
    )


class Responses(NamedTuple):
    """How much clients' Hessians respond to one random vector: what is known of those that are not measured."""

    measured: np.ndarray
    unmeasured: np.ndarray
    drawn: np.ndarray  # which of the measured were drawn at random, and not for their response


class Others(NamedTuple):
    beta: Responses | None  # ‖∇²f_i v‖; None: all are measured
    delta: Responses | None  # ‖∇²f_i v - ∇²f v‖


def _most_responsive(oracle: Oracle, x: np.ndarray, most: int) -> tuple[np.ndarray, Others]:
    """The clients to measure: half of them because they seem most curved or most different, half at random."""
    ids = oracle.some_clients(SCREENED)
    if most >= len(ids):
        return ids, Others(None, None)
    parts, w = oracle.clients(ids), oracle.p[ids] / oracle.p[ids].sum()
    v = oracle.rng.normal(size=x.size).astype(x.dtype)
    squares, _, mean = oracle.responses(x, v, parts, w, 0 * x)
    _, deviations, _ = oracle.responses(x, v, parts, w, mean)
    _refuse_nan(ids, squares, "Hessian")
    ranks = np.minimum(*(np.argsort(np.argsort(-response)) for response in (squares, deviations)))
    striking = np.zeros(len(ids), bool)
    striking[np.argsort(ranks, kind="stable")[: -(-most // 2)]] = True
    drawn = np.zeros(len(ids), bool)
    drawn[oracle.rng.choice(np.flatnonzero(~striking), most // 2, replace=False)] = True
    chosen = striking | drawn
    known = (Responses(np.sqrt(r[chosen]), np.sqrt(r[~chosen]), drawn[chosen]) for r in (squares, deviations))
    return ids[chosen], Others(*known)


def _apart_by_a_sample(
    oracle: Oracle, x: np.ndarray, ids: np.ndarray, others: Others, start: Any
) -> tuple[np.ndarray, np.ndarray]:
    """‖∇²f_i - ∇²f‖ where ∇²f of all examples is costly: a sample of them leads to the directions, and the two clients
    that differ most, by the sample and by the response to a random vector, are then measured against all."""
    examples = int(
        np.clip(AFFORDABLE / 10 / (_operations(x.size) * len(ids) * FEW), 256, oracle.problem.data.n_examples)
    )
    own, reference = oracle.clients(ids), oracle.everyone(examples)[0]
    apart = lanczos(
        lambda V: oracle.own_products(x, V, own) - oracle.common_products(x, V, reference), start, FEW, _norms_settled
    )
    candidates = {int(apart.norms.argmax())} | ({int(others.delta.measured.argmax())} if others.delta else set())
    top = np.array(sorted(candidates))
    ends = np.abs(apart.values[top]).argmax(axis=1)
    theirs, everyone = oracle.clients(ids[top]), oracle.everyone()[0]
    found = lanczos(
        lambda V: oracle.own_products(x, V, theirs) - oracle.common_products(x, V, everyone),
        apart.vectors[top, ends],
        FEW,
        _norms_settled,
    )
    deltas = apart.norms * min(1.0, float(np.max(found.norms / apart.norms[top])))  # less what the sample's noise added
    errors = np.zeros_like(deltas)
    deltas[top], errors[top] = found.norms, found.norm_errors
    return deltas, errors


def _lowest_of_all(
    oracle: Oracle, x: np.ndarray, start: Any, steps: int, product: float, beta: float
) -> tuple[float, float]:
    """The lowest eigenvalue of ∇²f, from above, and how much lower one can be."""
    floor = 0.0 if x.size <= SMALL else 1e-3 * beta

    def settled(values: np.ndarray, errors: np.ndarray) -> bool:
        return errors[0, 0] <= max(TOLERANCE * abs(values[0, 0]), floor)

    if product * steps > AFFORDABLE:  # a sample leads to the direction, from which few steps are taken on all examples
        examples = int(np.clip(AFFORDABLE / 10 / (_operations(x.size) * steps), 256, oracle.problem.data.n_examples))
        reference = oracle.everyone(examples)[0]
        start = lanczos(lambda V: oracle.common_products(x, V, reference), start, steps, settled).vectors[:, 0]
        steps = int(np.clip(AFFORDABLE / 2 / product, 2, steps))
    everyone = oracle.everyone()[0]
    found = lanczos(lambda V: oracle.common_products(x, V, everyone), start, steps, settled)
    return float(found.values[0, 0]), float(found.errors[0, 0])


def gradient_noise(
    problem: Problem | Oracle,
    x: Any = None,
    *,
    clients: int = 32,
    examples: int = 64,
    weights: str = "uniform",
    seed: int = 0,
) -> Noise:
    """The variance of single examples' gradients within clients, from which σ follows for every batch size.

    Args:
        clients, examples: the most clients, and the most examples of each, to look at.
        problem, x, weights, seed: as in `gradient_dissimilarity`.

    A client with one example has no variance: every batch is all its data.

    >>> import covary as cv
    >>> cv.theory.gradient_noise(cv.lower_bound(G=10.0)).sigma(None).value
    0.0
    """
    oracle = Oracle.of(problem, weights, seed)
    if not oracle.divisible:
        raise CovaryError(
            "loss(params, batch) must be the mean of its examples' own losses for sigma to be defined; on the first "
            "examples it is not. Let no example's loss depend on the others, as it does under BatchNorm."
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
    at_once = max(1, int(memory() / 8 / x.nbytes))
    squares = []
    for first in range(0, len(ids), at_once):
        some = slice(first, first + at_once)
        centres = oracle.gradients(x, oracle.clients(ids[some]))
        squares.append(oracle.square_deviations(x, rows[some], centres))
    squares = np.concatenate(squares).astype(float)
    _refuse_nan(ids, squares.sum(axis=1), "gradient")
    variances, errors = np.zeros(len(ids)), np.zeros(len(ids))
    for k, (n, size) in enumerate(zip(taken, sizes, strict=True)):
        if size > 1:
            own = squares[k, :n]
            variances[k] = own.mean() * size / (size - 1)
            errors[k] = own.std(ddof=1) / np.sqrt(n) * np.sqrt(1 - n / size) if n > 1 else 0.0
    w = oracle.p[ids] / oracle.p[ids].sum()
    return Noise(variances, errors, sizes, w, 1 - len(ids) / data.n_clients, oracle.cost - before)


def control_lag(problem: Problem | Oracle, c_i: Any, x: Any, *, weights: str = "uniform") -> float:
    """sum p_i ‖c_i - ∇f_i(x)‖², how far the controls are from the gradients they stand for.

    With x = x* it is the paper's control lag C_r; with the current model it is what misleads the next round.

    Args:
        c_i: of shape (N, d), from `run.clients.c_i`.
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
    at_once, total = max(1, int(memory() / 8 / x.nbytes)), 0.0
    for first in range(0, N, at_once):
        ids = np.arange(first, min(N, first + at_once))
        apart = np.asarray(c_i[ids[0] : ids[-1] + 1]) - np.asarray(oracle.gradients(x, oracle.clients(ids)))
        total += float(oracle.p[ids] @ np.sum(apart.astype(float) ** 2, axis=1))
    return total


def lag_along(
    algorithm: Algorithm, problem: Problem, rounds: Sequence[int], x_star: Any = None, **settings: Any
) -> dict[str, np.ndarray]:
    """Client drift E_r and control lag along a run of an algorithm with controls `c_i`.

    The run is repeated up to each of the rounds, which gives the same numbers: keep the list short.

    Args:
        algorithm: `covary.scaffold(...)`.
        problem: what it is to minimise.
        rounds: the rounds to look at.
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
        raise refused("algorithm", "one with controls c_i", algorithm.name, "Try covary.scaffold(eta_l=0.1).")
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
    problem: Problem | Oracle,
    x0: Any = None,
    *,
    steps: int = 500,
    weights: str = "uniform",
    seed: int = 0,
) -> tuple[np.ndarray, float]:
    """A minimiser x* of f by L-BFGS on all data, as a flat vector, and how small the gradient has become there.

    Of a function that is not convex it is a stationary point. The second number is ‖∇f(x*)‖ / ‖∇f(x0)‖: where it is
    not small, f has no minimiser (separable data without regularisation), or more steps are needed.

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


def _operations(d: int) -> float:
    """About as many as a Hessian-vector product of one example takes, with what a small model takes besides."""
    return 12.0 * (d + 100)


def _norms_settled(values: np.ndarray, errors: np.ndarray) -> bool:
    """Whether no matrix can have a norm much above the largest that was found."""
    norms = np.abs(values).max(axis=1)
    return bool((np.abs(values) + errors).max() <= (1 + TOLERANCE) * norms.max())


def _both_ends_settled(values: np.ndarray, errors: np.ndarray) -> bool:
    """The same, and whether no matrix can have an eigenvalue much below the lowest that was found."""
    lowest, norm = values[:, 0].min(), np.abs(values).max()
    return _norms_settled(values, errors) and bool((values - errors)[:, 0].min() >= lowest - TOLERANCE * norm)


def _largest(values: np.ndarray, errors: np.ndarray, responses: Responses | None, cost: int) -> Estimate:
    """The largest of the measured values, and how much larger one could be: of those by what their search left open, of
    the unmeasured if its value stood to its response as in the worst case among those drawn at random."""
    largest = float(values.max())
    unfinished = max(float((values + errors).max()) - largest, 0.0)
    unseen = 0.0
    if responses is not None:
        worst = float(np.max(values[responses.drawn] / np.maximum(responses.measured[responses.drawn], 1e-30)))
        unseen = max(0.0, worst * float(responses.unmeasured.max()) - largest)
    return Estimate(largest, float(np.hypot(unfinished, unseen)), cost)


def _batches(batch_size: int | float | None, sizes: np.ndarray) -> Iterator[np.ndarray]:
    """The sizes of the batches of each client's epoch."""
    kind, batch, counts = batches_of(batch_size, sizes)
    for n, b, k in zip(sizes, batch, counts, strict=True):
        ends = np.arange(k + 1) * n // k if kind == "parts" else np.minimum(np.arange(k + 1) * b, n)
        yield np.diff(ends)


def _mean_error(values: np.ndarray, weights: np.ndarray, left_out: float) -> float:
    """The standard error of a weighted mean over a sample of the clients."""
    if left_out <= 0:
        return 0.0
    values = values.astype(float)
    return float(np.linalg.norm(weights * (values - weights @ values)) * np.sqrt(left_out))


def _refuse_nan(ids: np.ndarray, values: np.ndarray, what: str) -> None:
    bad = ids[~np.isfinite(values)]
    if bad.size:
        raise CovaryError(
            f"The {what} of client {bad[0]} ({len(bad)} of {len(ids)} clients) is NaN or infinite at this point: its "
            "loss has no such derivative there, as a root or a norm at 0, or overflows. Measure at another x, scale "
            "the data, or smooth the loss (jnp.sqrt(z + 1e-12), say)."
        )


def _refuse_kinks(oracle: Oracle, x: np.ndarray, beta: float) -> None:
    """Refuse a loss whose gradient jumps, so that its second derivative says nothing about it.

    A step along the gradient that ought to change it by a hundredth or a tenth must not change it ten times as much.
    """
    parts = oracle.everyone(4096)[0]
    w = np.ones(1) if oracle.divisible else oracle.p
    here = oracle.survey(x, parts, w, 0 * x)[3]
    length = float(np.linalg.norm(here))
    way = here / length if length > 0 else np.ones_like(x) / np.sqrt(x.size)
    size = max(1.0, float(np.sqrt(np.mean(np.square(x, dtype=float)))))
    steps = [0.01 * length / beta, 0.1 * length / beta] if beta * size > 1e-12 * length else [0.01 * size, size]
    changes = []
    for step in steps:
        there = oracle.survey((x + step * way).astype(x.dtype), parts, w, 0 * x)[3]
        changes.append(float(np.linalg.norm(there - here)) / step if step > 0 else 0.0)
    change = max(changes)
    if beta == 0 and change == 0:
        raise CovaryError(
            "The loss has no curvature at all here: its gradient is the same all around. Such an f has no minimum to "
            "go to, or the model does not depend on its parameters. Check loss and init."
        )
    if change > 10 * beta:
        raise CovaryError(
            f"loss(params, batch) must be twice differentiable: its gradient changes by {change:.3g} per unit step "
            f"where its second derivative is at most {beta:.3g}, so it has kinks (a hinge, an absolute value, a "
            "maximum, a rounding), and beta, mu and delta mean nothing for it. Smooth it (softplus, Huber, logsumexp), "
            "or compare algorithms by running them: covary.sweep."
        )
