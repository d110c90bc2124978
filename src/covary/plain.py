"""A server in plain Python and NumPy: the algorithms as the paper's pseudocode runs them.

Read it to see what a round does, test the compiled engine against it, or set a breakpoint in it:
`cv.simulate(..., debug=True)` runs it with the engine's cohorts and batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from covary._engine.cohort import cohort_key, sample
from covary._engine.evaluate import averaged
from covary._engine.history import History, Log, traffic_by_kind
from covary._engine.local import key_of_step, keys_of_examples, loss_at, order_of_epoch
from covary._engine.plan import Layout, aggregation_weights, batch_bounds
from covary._engine.prepare import Job
from covary.algorithm import Algorithm, Exchange, Gradient
from covary.client import client_loop


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


class PlainRun(NamedTuple):
    """What `simulate` makes a `Run` of."""

    server: Any
    clients: Any
    average: np.ndarray
    history: dict[str, np.ndarray]
    reached: bool
    diverged: bool


def run(job: Job, log: Log | None) -> PlainRun:
    """The job's rounds, one client and one step after the other.

    The loss is called with plain numbers before each of its gradients is taken, so that a breakpoint in it sees them.
    """
    with jax.disable_jit(), np.errstate(over="ignore", invalid="ignore"):
        return _run(job, log)


def _run(job: Job, log: Log | None) -> PlainRun:
    algorithm, training, x = job.algorithm, job.training, job.starts[0]
    slope = gradient_of(job)
    clients = [client_of(job, i, slope) for i in range(job.plan.n_clients)]
    traffic = traffic_by_kind(algorithm, job.plan.steps_on_wire, x)
    server, states = algorithm.init_server(x), [algorithm.init_client(x) for _ in clients]
    average, mass = x, 1.0
    history, reached, diverged = History(log), False, False
    for r in range(1, training.rounds + 1):
        # The cohort and its exchanges: the warm start's, or the algorithm's own
        warm = r <= len(job.visits)
        cohort = job.visits[r - 1] if warm else drawn(job, r)
        exchanges = (algorithm.warm_start,) if warm else algorithm.trips(job.plan.steps_on_wire)
        before = server, states
        server, states, drift = one_round([e for e in exchanges if e], server, states, clients, cohort, job.p, r)

        # What is kept and measured
        if training.average is not None and not warm:
            mass = 1 + training.decay * mass
            average = average + (server[0] - average) / mass
        due = warm or r % training.eval_every == 0 or r == training.rounds
        row = measured(job, server, states, before[1], cohort, average, drift)
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
    rows = jax.tree.map(lambda *leaves: np.stack(leaves), *states)
    return PlainRun(server, rows, average, history.columns(), reached, diverged)


def drawn(job: Job, r: int) -> np.ndarray:
    """The cohort that the engine draws for round r."""
    key = cohort_key(jax.random.key(job.training.seed), r)
    with jax.disable_jit(False):
        return np.asarray(sample(key, job.plan.n_clients, job.plan.cohort))


def gradient_of(job: Job) -> Callable[[Any, Any], Gradient]:
    """(batch, key) -> y -> the gradient of the loss on the batch."""
    loss, unravel = job.problem.loss, job.program.local.unravel

    def at(y: Any, batch: Any, key: Any) -> Any:
        numbers = np.arange(len(jax.tree.leaves(batch)[0]))
        return loss_at(loss, unravel(y), batch, None, keys_of_examples(key, numbers) if loss.draws else None)

    compiled = jax.jit(jax.grad(at))

    def on(batch: Any, key: Any) -> Gradient:
        def slope(y: np.ndarray) -> np.ndarray:
            loss(unravel(y), batch)
            with jax.disable_jit(False):
                return np.asarray(compiled(y, batch, key))

        return slope

    return on


def client_of(job: Job, i: int, gradient: Callable[[Any, Any], Gradient]) -> Client:
    """Client i of a job, with the batches that the engine draws for it."""
    data = job.problem.data.client(i)
    plan, layout = job.plan.local, Layout(*(field[i] for field in job.layout))
    size, per_epoch, K = int(layout.size), int(layout.per_epoch), int(layout.steps)

    def at_step(r: int, number: int, k: int, batch: Any) -> Gradient:
        with jax.disable_jit(False):
            return gradient(batch, key_of_step(job.training.seed, r, number, i, k))

    def batch_of_step(r: int, number: int, k: int) -> Any:
        if plan.batching == "full":
            return data
        low, high = batch_bounds(plan.batching, int(layout.batch), per_epoch, size, k)
        with jax.disable_jit(False):
            rows = order_of_epoch(job.training.seed, r, number, i, k // per_epoch, size)[low:high]
        return jax.tree.map(lambda leaf: leaf[rows], data)

    return Client(
        full_grad=lambda r, number: at_step(r, number, 0, data),
        grads=lambda r, number: (at_step(r, number, k + 1, batch_of_step(r, number, k)) for k in range(K)),
    )


def measured(
    job: Job, server: Any, states: list[Any], before: list[Any], cohort: Any, average: Any, drift: float
) -> dict[str, Any]:
    """A row of the history."""
    problem, evaluation = job.problem, job.program.evaluation
    points = {"": server[0]} | ({"average_": average} if job.training.average is not None else {})
    row: dict[str, Any] = {}
    for prefix, x in points.items():
        params = evaluation.unravel(x)
        if "loss" in evaluation.names:
            losses = [problem.loss(params, problem.data.client(i)) for i in range(problem.n_clients)]
            row[f"{prefix}loss"] = np.asarray(job.p @ np.asarray(losses), x.dtype)
        if problem.metrics is not None:
            tested_on = problem.data.examples if problem.test is None else problem.test
            for name, value in averaged(problem.metrics(params, tested_on)).items():
                row[f"{prefix}{name}"] = np.asarray(value, x.dtype)
    if job.algorithm.invariant is not None:
        c, c_i = job.algorithm.invariant
        controls, old = (np.stack([getattr(state, c_i) for state in group]) for group in (states, before))
        row["control_error"] = np.linalg.norm(getattr(server, c) - np.tensordot(job.p, controls, 1))
        row["control_change"] = np.mean(np.sum((controls[cohort] - old[cohort]) ** 2, axis=1))
    return {**row, "drift": drift}


def _like(new: Any, old: Any) -> Any:
    """The new state in the old one's precision."""
    return type(old)(*(np.asarray(field, was.dtype) for field, was in zip(new, old, strict=True)))
