"""A server in plain Python and NumPy: the algorithms as the paper's pseudocode runs them.

Read it to see what a round does, test the compiled engine against it, or set a breakpoint in it:
`cv.simulate(..., debug=True)` runs it with the engine's cohorts and batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from covary import draws, trees
from covary.algorithm import Algorithm, Exchange, Gradient
from covary.client import client_loop
from covary.running.engine import Debugged
from covary.running.history import History, Log, traffic_by_kind
from covary.running.job import Job
from covary.running.plan import Layout, aggregation_weights, batch_bounds


class Client(NamedTuple):
    """A client as the server's loop needs it."""

    full_grad: Callable[[int, int], Gradient]  # (round, exchange) -> the gradient over all its data
    grads: Callable[[int, int], Iterable[Gradient]]  # (round, exchange) -> each step's gradient, on that step's batch


def full_batch(gradient: Gradient, K: int) -> Client:
    """A client that takes K steps on all its data."""
    return Client(lambda r, number: gradient, lambda r, number: [gradient] * K)


def train(
    algorithm: Algorithm,
    clients: Sequence[Client],
    x: np.ndarray,
    cohorts: Iterable[Iterable[int]],
    p: np.ndarray | None = None,
    K: int | None = None,
) -> tuple[Any, list[Any]]:
    """The server's and the clients' states after one round with each cohort.

    Args:
        algorithm: from `covary.scaffold(...)` and its like.
        clients: one `Client` each.
        x: where to start.
        cohorts: the clients of each round.
        p: the clients' weights, which sum to 1; 1 / N each by default.
        K: the steps of every client, where all take the same number: option II then needs no `dc` on the wire.

    >>> import numpy as np, covary as cv
    >>> clients = [cv.plain.full_batch(lambda y, a=a: y - a, K=5) for a in (0.0, 4.0)]  # f_i(y) = ½ ‖y - a‖²
    >>> server, states = cv.plain.train(cv.scaffold(eta_l=0.1), clients, np.zeros(1), cohorts=[[0, 1]] * 50)
    >>> server.x.round(6), (server.c == np.mean([state.c_i for state in states], axis=0)).all()
    (array([2.]), np.True_)
    """
    server, states = algorithm.init_server(x), [algorithm.init_client(x) for _ in clients]
    p = np.full(len(clients), 1 / len(clients)) if p is None else p
    for r, cohort in enumerate(cohorts, start=1):
        server, states, _ = one_round(algorithm.trips(K), server, states, clients, cohort, p, r)
    return server, states


def one_round(
    exchanges: Sequence[Exchange],
    server: Any,
    states: Sequence[Any],
    clients: Sequence[Client],
    cohort: Iterable[int],
    p: np.ndarray,
    r: int,
) -> tuple[Any, list[Any], float]:
    """Round r: every exchange with the cohort. Returns the new states, and the cohort's drift."""
    cohort, states, drift = list(cohort), list(states), 0.0
    fraction = len(cohort) / len(clients)
    for number, exchange in enumerate(exchanges, start=1):
        down = exchange.broadcast(server)
        ups, drifts = [], []
        for i in cohort:
            full_grad, grads = clients[i].full_grad(r, number), clients[i].grads(r, number)
            up, states[i], moved = client_loop(exchange, down, states[i], full_grad, grads)
            ups.append(up)
            drifts.append(moved)
        weights = aggregation_weights(p[cohort], fraction, exchange.together, np.float64)
        mean = type(ups[0])(*(np.tensordot(weights, np.stack(field), 1) for field in zip(*ups, strict=True)))
        server = _like(exchange.aggregate(server, mean, fraction), server)
        drift += float(np.mean(drifts))
    return server, states, drift


# A job of `simulate`, with its cohorts and batches

Slope = Callable[[Any, tuple[int, int, int, int]], Gradient]
"""(batch, (round, exchange, client, step)) -> the gradient of the loss on the batch. Steps are numbered from 1; 0 is
for the gradients over all the client's data."""
Measure = Callable[[np.ndarray], dict[str, Any]]
"""x -> f and the metrics at x."""


def run(job: Job, log: Log | None, slope: Slope, measure: Measure) -> Debugged:
    """The job's rounds, one client and one step after the other. Its runtime supplies the model's gradients and
    measurements."""
    algorithm, training, x = job.algorithm, job.training, job.starts[0]
    clients = [client_of(job, i, slope) for i in range(job.plan.n_clients)]
    traffic = traffic_by_kind(algorithm, job.plan.steps_on_wire, x, lambda work, *states: work(*states))
    server, states = algorithm.init_server(x), [algorithm.init_client(x) for _ in clients]
    average, mass = x, 1.0
    history, reached, diverged = History(log), False, False
    for r in range(1, training.rounds + 1):
        # The cohort and its exchanges: the warm start's, or the algorithm's own
        warm = r <= len(job.visits)
        S = job.plan.cohort
        cohort = job.visits[r - 1] if warm else draws.cohort(training.seed, r, job.plan.n_clients, S)
        exchanges = (algorithm.warm_start,) if warm else algorithm.trips(job.plan.steps_on_wire)
        before = server, states
        server, states, drift = one_round([e for e in exchanges if e], server, states, clients, cohort, job.p, r)

        # What is kept and measured
        if training.average is not None and not warm:
            mass = 1 + training.decay * mass
            average = average + (server[0] - average) / mass
        due = warm or r % training.eval_every == 0 or r == training.rounds
        row = measured(job, measure, server, states, before[1], cohort, average, drift)
        row = row if due else dict.fromkeys(row, np.nan)
        finite = all(np.isfinite(field).all() for field in server) and not (due and not np.isfinite(row.get("loss", 0)))
        diverged = not finite
        row = {name: np.asarray(value, x.dtype) for name, value in row.items()}
        row["cohort"] = np.pad(cohort, (0, job.plan.cohort - len(cohort)), constant_values=-1)
        history.add({name: value[None] for name, value in row.items()}, int(finite), *traffic[warm])
        if diverged:
            server, states = before
            break
        reached = due and not warm and job.target is not None and bool(job.target.met(row[job.target.metric]))
        if reached:
            break
    rows = trees.map(lambda *leaves: np.stack(leaves), *states)
    return Debugged(server, rows, average, history.columns(), reached, diverged)


def client_of(job: Job, i: int, slope: Slope) -> Client:
    """Client i of a job, with the batches that the engine draws for it."""
    data = job.problem.data.client(i)
    plan, layout = job.plan.local, Layout(*(field[i] for field in job.layout))
    size, per_epoch, K = int(layout.size), int(layout.per_epoch), int(layout.steps)

    def batch_of_step(r: int, number: int, k: int) -> Any:
        if plan.batching == "full":
            return data
        low, high = batch_bounds(plan.batching, int(layout.batch), per_epoch, size, k)
        rows = draws.order_of_epoch(job.training.seed, r, number, i, k // per_epoch, size)[low:high]
        return trees.map(lambda leaf: leaf[rows], data)

    return Client(
        full_grad=lambda r, number: slope(data, (r, number, i, 0)),
        grads=lambda r, number: (slope(batch_of_step(r, number, k), (r, number, i, k + 1)) for k in range(K)),
    )


def measured(
    job: Job,
    measure: Measure,
    server: Any,
    states: list[Any],
    before: list[Any],
    cohort: Any,
    average: Any,
    drift: float,
) -> dict[str, Any]:
    """A row of the history."""
    points = {"": server[0]} | ({"average_": average} if job.training.average is not None else {})
    row = {f"{prefix}{name}": value for prefix, x in points.items() for name, value in measure(x).items()}
    if job.algorithm.invariant is not None:
        c, c_i = job.algorithm.invariant
        controls, old = (np.stack([getattr(state, c_i) for state in group]) for group in (states, before))
        row["control_error"] = np.linalg.norm(getattr(server, c) - np.tensordot(job.p, controls, 1))
        row["control_change"] = np.mean(np.sum((controls[cohort] - old[cohort]) ** 2, axis=1))
    return {**row, "drift": drift}


def _like(new: Any, old: Any) -> Any:
    """The new state in the old one's precision."""
    return type(old)(*(np.asarray(field, was.dtype) for field, was in zip(new, old, strict=True)))
