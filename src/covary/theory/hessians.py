"""Curvature from Hessian-vector products: smoothness (A5), convexity (A3) and Hessian dissimilarity (A2)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from covary.checks import whole
from covary.errors import InvalidInput
from covary.running.job import AnyProblem
from covary.runs.machine import device_memory
from covary.theory.estimate import Estimate, reject_nan
from covary.theory.lanczos import lanczos
from covary.theory.oracle import Oracle

TOLERANCE = 0.01  # of an eigenvalue
SMALL = 256  # up to this many parameters, Lanczos' method takes as many steps as parameters
STEPS, FEW = 40, 8  # steps for larger models, and for products that are costly
CHEAP = AFFORDABLE = 1e12  # operations: some seconds
SCREENED, VECTORS = 65_536, 2  # clients that are screened, and random vectors to screen them with


@dataclass(frozen=True)
class Curvature:
    """The clients' Hessians at one point."""

    beta: Estimate  # A5: max_i ‖∇²f_i‖
    mu: Estimate  # λ_min(∇²f); below 0 if f is not convex here
    delta: Estimate  # A2: max_i ‖∇²f_i - ∇²f‖
    weak_convexity: Estimate  # A2: the smallest w with ∇²f_i >= -w I for all i
    rounding: float  # the rounding error of an eigenvalue
    clients: np.ndarray = field(repr=False)  # the measured clients
    betas: np.ndarray = field(repr=False)  # ‖∇²f_i‖ of each
    deltas: np.ndarray = field(repr=False)  # ‖∇²f_i - ∇²f‖ of each; approximate for all but two if that is costly

    @property
    def convex(self) -> bool:
        """Whether no negative eigenvalue of ∇²f was found here. A found one exists, because mu is an upper bound."""
        return self.mu.value >= -self.rounding


def curvature(
    problem: AnyProblem | Oracle,
    x: Any = None,
    *,
    clients: int | None = None,
    weights: str = "uniform",
    seed: int = 0,
) -> Curvature:
    """beta, mu and the Hessian dissimilarity delta (A2) at a point, by Lanczos' method on Hessian-vector products.

    Args:
        problem: a problem with at least two clients, whose loss is twice differentiable (up to kinks such as ReLU's).
        x: the point, as params or as a flat vector; by default the model's initial point.
        clients: the maximum number of clients to measure. By default all if that is cheap, else 16: the 8 with the
            largest response to a random vector, and 8 at random. The standard error then covers the other clients.
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
    room = device_memory() / 4 / (2 * x.nbytes)  # vectors
    ids, others = _most_responsive(oracle, x, min(N, whole("clients", clients, 2), max(2, int(room / steps))))
    steps = max(4, min(steps, int(room / len(ids))))
    own = oracle.clients(ids)

    # beta: the largest eigenvalue, in size, of any client's Hessian
    alone = lanczos(lambda V: oracle.own_products(x, V, own), oracle.random(len(ids), steps), _both_ends_settled)
    reject_nan(ids, alone.values.sum(axis=1), "Hessian")
    beta = _largest(alone.norms, alone.norm_errors, others.beta, oracle.cost - before)
    lowest = _largest(-alone.values[:, 0], alone.errors[:, 0], None, beta.cost)
    _reject_kinks(oracle, x, beta.value)

    # delta: how far any client's Hessian is from that of f
    before = oracle.cost
    if len(ids) * product * STEPS <= CHEAP:
        everyone = oracle.everyone()[0]
        apart = lanczos(
            lambda V: oracle.own_products(x, V, own) - oracle.common_products(x, V, everyone),
            oracle.random(len(ids), steps),
            _norms_settled,
        )
        deltas, errors = apart.norms, apart.norm_errors
    else:
        deltas, errors = _deltas_by_sample(oracle, x, ids, others)
    delta = _largest(deltas, errors, others.delta, oracle.cost - before)

    # mu: the lowest eigenvalue of the Hessian of f
    before = oracle.cost
    mu, error = _lowest_of_all(oracle, x, steps, product, beta.value)
    weak, open_end = max(0.0, lowest.value), lowest.se if lowest.value > 0 else 0.0
    if others.delta is not None:  # for unmeasured clients: no eigenvalue of ∇²f_i is below mu - delta
        open_end = max(open_end, delta.value + delta.se - (mu - error) - weak)
    return Curvature(
        beta=beta,
        mu=Estimate(mu, error, oracle.cost - before),
        delta=delta,
        weak_convexity=Estimate(weak, open_end, lowest.cost),
        rounding=100 * float(np.finfo(x.dtype).eps) * beta.value,
        clients=ids,
        betas=alone.norms,
        deltas=deltas,
    )


class Responses(NamedTuple):
    """The norms of Hessians times random vectors, which also cover clients that are not measured."""

    measured: np.ndarray
    unmeasured: np.ndarray
    drawn: np.ndarray  # which of the measured clients were drawn at random, not for their response


class Others(NamedTuple):
    beta: Responses | None  # ‖∇²f_i v‖; None if all clients are measured
    delta: Responses | None  # ‖∇²f_i v - ∇²f v‖


def _most_responsive(oracle: Oracle, x: np.ndarray, most: int) -> tuple[np.ndarray, Others]:
    """The clients to measure: half of them with the largest curvature or difference, half at random."""
    N = oracle.problem.n_clients
    if most >= N:
        return np.arange(N), Others(None, None)
    ids = oracle.some_clients(max(SCREENED, most + 1))
    parts, w = oracle.clients(ids), oracle.p[ids] / oracle.p[ids].sum()
    squares, deviations = np.zeros(len(ids)), np.zeros(len(ids))
    for v in oracle.rng.normal(size=(VECTORS, x.size)).astype(x.dtype):
        one, _, mean = oracle.responses(x, v, parts, w, 0 * x)
        squares += one
        deviations += oracle.responses(x, v, parts, w, mean)[1]
    reject_nan(ids, squares, "Hessian")
    ranks = np.minimum(*(np.argsort(np.argsort(-response)) for response in (squares, deviations)))
    striking = np.zeros(len(ids), bool)
    striking[np.argsort(ranks, kind="stable")[: -(-most // 2)]] = True
    drawn = np.zeros(len(ids), bool)
    drawn[oracle.rng.choice(np.flatnonzero(~striking), most // 2, replace=False)] = True
    chosen = striking | drawn
    known = []
    for response in (np.sqrt(squares), np.sqrt(deviations)):
        unmeasured = response[~chosen]
        if len(ids) < N:  # how much the largest of N exceeds the largest seen, for an exponential tail
            ordered = np.sort(response)[::-1]
            tail = max(1, len(ids) // 4)
            beyond = ordered[0] + np.log(N / len(ids)) * (ordered[:tail].mean() - ordered[tail])
            unmeasured = np.append(unmeasured, beyond)
        known.append(Responses(response[chosen], unmeasured, drawn[chosen]))
    return ids[chosen], Others(*known)


def _deltas_by_sample(oracle: Oracle, x: np.ndarray, ids: np.ndarray, others: Others) -> tuple[np.ndarray, np.ndarray]:
    """‖∇²f_i - ∇²f‖ if ∇²f of all examples is costly. A sample of the examples gives the directions. The two clients
    that differ most, by the sample and by the response to a random vector, are then measured on all examples."""
    examples = int(
        np.clip(AFFORDABLE / 10 / (_operations(x.size) * len(ids) * FEW), 256, oracle.problem.data.n_examples)
    )
    start = oracle.random(len(ids), FEW)
    own, reference = oracle.clients(ids), oracle.everyone(examples)[0]
    apart = lanczos(
        lambda V: oracle.own_products(x, V, own) - oracle.common_products(x, V, reference), start, _norms_settled
    )
    candidates = {int(apart.norms.argmax())} | ({int(others.delta.measured.argmax())} if others.delta else set())
    top = np.array(sorted(candidates))
    ends = np.abs(apart.values[top]).argmax(axis=1)
    theirs, everyone = oracle.clients(ids[top]), oracle.everyone()[0]
    found = lanczos(
        lambda V: oracle.own_products(x, V, theirs) - oracle.common_products(x, V, everyone),
        oracle.basis(apart.vectors[top, ends], FEW),
        _norms_settled,
    )
    deltas = apart.norms * min(
        1.0, float(np.max(found.norms / apart.norms[top]))
    )  # corrects for the noise of the sample
    errors = np.zeros_like(deltas)
    deltas[top], errors[top] = found.norms, found.norm_errors
    return deltas, errors


def _lowest_of_all(oracle: Oracle, x: np.ndarray, steps: int, product: float, beta: float) -> tuple[float, float]:
    """An upper bound on the lowest eigenvalue of ∇²f, and its error."""
    floor = 0.0 if x.size <= SMALL else 1e-3 * beta

    def settled(values: np.ndarray, errors: np.ndarray) -> bool:
        return errors[0, 0] <= max(TOLERANCE * abs(values[0, 0]), floor)

    start = oracle.random(1, steps)
    if product * steps > AFFORDABLE:  # a sample gives the direction; then few steps on all examples
        examples = int(np.clip(AFFORDABLE / 10 / (_operations(x.size) * steps), 256, oracle.problem.data.n_examples))
        reference = oracle.everyone(examples)[0]
        found = lanczos(lambda V: oracle.common_products(x, V, reference), start, settled)
        start = oracle.basis(found.vectors[:, 0], int(np.clip(AFFORDABLE / 2 / product, 2, steps)))
    everyone = oracle.everyone()[0]
    found = lanczos(lambda V: oracle.common_products(x, V, everyone), start, settled)
    return float(found.values[0, 0]), float(found.errors[0, 0])


def _operations(d: int) -> float:
    """The approximate number of operations of a Hessian-vector product of one example, with overhead."""
    return 12.0 * (d + 100)


def _norms_settled(values: np.ndarray, errors: np.ndarray) -> bool:
    """Whether no matrix can have a norm much above the largest found."""
    norms = np.abs(values).max(axis=1)
    return bool((np.abs(values) + errors).max() <= (1 + TOLERANCE) * norms.max())


def _both_ends_settled(values: np.ndarray, errors: np.ndarray) -> bool:
    """The same, and whether no matrix can have an eigenvalue much below the lowest found."""
    lowest, norm = values[:, 0].min(), np.abs(values).max()
    return _norms_settled(values, errors) and bool((values - errors)[:, 0].min() >= lowest - TOLERANCE * norm)


def _largest(values: np.ndarray, errors: np.ndarray, responses: Responses | None, cost: int) -> Estimate:
    """The largest measured value, and how much larger the true one could be: for measured clients by the error of the
    search, for unmeasured ones by their response times the worst ratio among the clients drawn at random."""
    largest = float(values.max())
    unfinished = max(float((values + errors).max()) - largest, 0.0)
    unseen = 0.0
    if responses is not None:
        worst = float(np.max(values[responses.drawn] / np.maximum(responses.measured[responses.drawn], 1e-30)))
        unseen = max(0.0, worst * float(responses.unmeasured.max()) - largest)
    return Estimate(largest, float(np.hypot(unfinished, unseen)), cost)


def _reject_kinks(oracle: Oracle, x: np.ndarray, beta: float) -> None:
    """Reject a loss whose gradient jumps, because its second derivative is then meaningless.

    A step along the gradient that should change it by a hundredth or a tenth must not change it ten times as much.
    """
    parts = oracle.everyone(4096)[0]
    w = np.ones(1) if oracle.divisible else oracle.p
    here = oracle.survey(x, parts, w, 0 * x)[3]
    length = float(np.linalg.norm(here))
    direction = here / length if length > 0 else np.ones_like(x) / np.sqrt(x.size)
    size = max(1.0, float(np.sqrt(np.mean(np.square(x, dtype=float)))))
    steps = [0.01 * length / beta, 0.1 * length / beta] if beta * size > 1e-12 * length else [0.01 * size, size]
    changes = []
    for step in steps:
        there = oracle.survey((x + step * direction).astype(x.dtype), parts, w, 0 * x)[3]
        changes.append(float(np.linalg.norm(there - here)) / step if step > 0 else 0.0)
    change = max(changes)
    if beta == 0 and change == 0:
        raise InvalidInput(
            "The loss has no curvature at all here: its gradient is constant. Either f has no minimum, or the model "
            "does not depend on its parameters. Check the loss, and the initial point."
        )
    if change > 10 * beta:
        raise InvalidInput(
            f"The loss must be twice differentiable. Its gradient changes by {change:.3g} per unit step, "
            f"but its second derivative is at most {beta:.3g}, so the loss has kinks (a hinge, an absolute value, a "
            "maximum, a rounding), and beta, mu and delta are meaningless. Smooth the loss (softplus, Huber, "
            "logsumexp), or compare algorithms with covary.sweep."
        )
