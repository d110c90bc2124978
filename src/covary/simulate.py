"""`simulate`: N clients and a server on one machine, at the machine's full speed."""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np

from covary.algorithm import Algorithm
from covary.data.folder import StreamedData
from covary.devices import to_host
from covary.errors import DivergenceWarning, refused
from covary.job import CHUNK, Job, direction, initial, prepare, traffic
from covary.plan import Plan
from covary.problem import Problem
from covary.program import State
from covary.rounds import compiled, compiled_warm_start
from covary.store import DiskStore, HostStore, mean_control
from covary.stream import Stream, streamed_loss


@dataclass(frozen=True)
class Run:
    """What came out of a simulation; all arrays are NumPy's."""

    algorithm: Algorithm
    params: Any  # the model, in the user's own form
    x: np.ndarray  # the same, flat
    server: Any  # NamedTuple: .x, and .c for SCAFFOLD
    clients: Any  # NamedTuple: .c_i of shape (N, d) for SCAFFOLD
    history: dict[str, np.ndarray] = field(repr=False)  # one row a round
    average: Any = None  # the paper's weighted output, in the form of params, where it was asked for
    reached: int | None = None  # the round that met the target
    diverged: int | None = None  # the round that left the finite numbers; the state is the one before it

    @property
    def rounds(self) -> int:
        """The rounds done."""
        return len(self.history["round"])

    def rounds_to(self, metric: str, value: float) -> int | None:
        """The first round whose metric met the value, or None.

        >>> import covary as cv
        >>> run = cv.simulate(cv.sgd(eta_l=0.1), cv.lower_bound(G=1), rounds=100, x0=1.0)
        >>> run.rounds_to("loss", 1e-6)
        63
        """
        if metric not in self.history or metric in ("round", "cohort"):
            names = [name for name in self.history if name not in ("round", "cohort")]
            raise refused("metric", f"one of {', '.join(names)}", repr(metric), "See run.history.")
        hits = np.flatnonzero(direction(metric) * (self.history[metric] - value) >= 0)
        return int(self.history["round"][hits[0]]) if hits.size else None


def simulate(
    algorithm: Algorithm,
    problem: Problem,
    rounds: int,
    clients_per_round: int | float | None = None,
    local_steps: int | None = None,
    local_epochs: int | None = None,
    batch_size: int | float | None = None,
    seed: int = 0,
    x0: Any = None,
    warm_start: bool = False,
    weights: str = "uniform",
    target: tuple[str, float] | tuple[str, str, float] | None = None,
    average: str | float | None = None,
    eval_every: int = 1,
    log: Callable[[int, dict[str, float]], None] | None = None,
    *,
    store: str | Path | None = None,
    devices: int | None = None,
    width: int | None = None,
    precision: str | None = None,
) -> Run:
    """Run an algorithm on a problem.

    Args:
        algorithm: from `covary.scaffold(...)` and its like.
        problem: from `covary.supervised(...)`, `covary.quadratics(...)` or `covary.lower_bound(...)`.
        rounds: communication rounds, those of the warm start included.
        clients_per_round: how many clients are sampled each round (uniformly, without replacement): a number S, a
            fraction in (0, 1), or None for all N.
        local_steps: K, the same for every client.
        local_epochs: passes over the local data instead, so that K differs where sizes do; 1 unless K is given.
        batch_size: a number of examples, a fraction in (0, 1) of each client's data (0.2 cuts an epoch into 5 equal
            batches), or None for full batches. Batches are drawn without replacement within an epoch.
        seed: decides initial parameters, cohorts and batches. Same seed, same machine: the same numbers, bit for bit.
        x0: where to start, as params or as a flat vector; by default the model's own `init`.
        warm_start: first visit every client once, S at a time, and set its c_i to its gradient at x^0.
        weights: "uniform", f = mean f_i as in the paper, or "examples", f = sum p_i f_i with p_i = n_i / n. Clients are
            sampled uniformly all the same, and an upload counts N p_i / S, so that the mean is right in expectation.
        target: stop at the first round that meets it, such as ("accuracy", 0.5), ("loss", 1e-6) or, to say which way,
            ("bleu", ">=", 30). Without that, names that end in loss, error, mse, rmse, mae, nll or perplexity are to
            fall to their target, and other metrics to rise to it.
        average: also keep the paper's weighted output: "uniform", or a number q in (0, 1) for the weights
            w_r = (1 - q)^(1 - r); the theorems use q = mu K eta_l eta_g / 2.
        eval_every: measure loss, metrics, drift and control error every so many rounds (and in the last); they are NaN
            in between.
        log: called as `log(round, values)` for each round, in order, while the run goes on.
        store: where client states live: "device", "host" (memory), "disk" (a temporary folder) or a folder of your
            own; by default the first of these that has room.
        devices: over how many devices to spread the cohort; by default as many as help.
        width: how many clients a device works on at the same time; by default what is fastest.
        precision: "bfloat16" rounds the factors of matrix products in local steps, on a GPU or TPU; states, sums and
            evaluation keep theirs.

    Returns:
        A `Run`. Its `history` has one row a round: `round`, `loss` (f at x), every metric, `cohort`, `drift` (E_r of
        the paper over the cohort), `control_error` (‖c - mean c_i‖), `bytes_up` and `bytes_down` (all clients
        together), and `average_loss` and so on where an average is kept. Rows of `cohort` that a warm start does not
        fill end in -1. Where reading all N controls would cost more than the round, `control_error` is measured at the
        end alone. Of streamed data the loss is measured only if it is the target or there is no test set: each time is
        a pass over everything. With the states on disk, `clients` reads them when it is indexed.

    A run that leaves the finite numbers stops, warns with a `DivergenceWarning`, and returns its last good state.

    >>> import covary as cv
    >>> (x, y), test = cv.datasets.digits()
    >>> data = cv.partition.by_similarity(x, y, n_clients=20, similarity=0.0)
    >>> problem = cv.supervised(cv.models.logistic_regression(64, 10), data, test)
    >>> algorithm = cv.scaffold(eta_l=0.3)
    >>> run = cv.simulate(algorithm, problem, rounds=20, clients_per_round=0.2, local_epochs=5, batch_size=0.2)
    >>> run.history["accuracy"].shape, run.history["cohort"].shape
    ((20,), (20, 4))
    """
    if log is not None and not callable(log):
        raise refused("log", "a function of (round, values)", type(log).__name__, "Try log=print.")
    job = prepare(
        algorithm,
        problem,
        rounds=rounds,
        clients_per_round=clients_per_round,
        local_steps=local_steps,
        local_epochs=local_epochs,
        batch_size=batch_size,
        seeds=[seed],
        x0=x0,
        warm_start=warm_start,
        weights=weights,
        target=target,
        average=average,
        eval_every=eval_every,
        store=store,
        devices=devices,
        width=width,
        precision=precision,
    )
    history = History(log)
    key = np.asarray(jax.random.key_data(jax.random.key(seed)))
    run = on_devices if job.program.resident else outside_devices
    state, clients, seen = run(job, algorithm, problem, key, rounds, history)

    columns = history.columns()
    if algorithm.invariant is not None and history.rounds and np.isnan(columns["control_error"][-1]):
        server_field, client_field = algorithm.invariant
        mean = mean_control(clients, client_field, job.layout.p, seen)
        columns["control_error"][-1] = np.linalg.norm(getattr(state.server, server_field) - mean)
    done = int(state.round)
    if state.diverged:
        warnings.warn(_divergence(algorithm, done + 1), DivergenceWarning, stacklevel=2)
    elif (text := _runaway(algorithm, columns.get("loss", np.empty(0)))) is not None:
        warnings.warn(text, DivergenceWarning, stacklevel=2)
    unravel = job.program.unravel
    return Run(
        algorithm=algorithm,
        params=jax.tree.map(np.asarray, unravel(state.server[0])),
        x=state.server[0],
        server=state.server,
        clients=clients,
        history=columns,
        average=None if average is None else jax.tree.map(np.asarray, unravel(state.average)),
        reached=done if state.reached else None,
        diverged=done + 1 if state.diverged else None,
    )


class History:
    """The rows of a run so far, told to the user's `log` as they come."""

    def __init__(self, log: Callable[[int, dict[str, float]], None] | None):
        self.parts: list[dict[str, np.ndarray]] = []
        self.log = log
        self.rounds = 0

    def add(self, rows: dict[str, Any], count: int, bytes_down: int, bytes_up: int) -> None:
        """The first `count` rows of a chunk's records."""
        rows = {name: np.asarray(values)[:count] for name, values in rows.items()}
        rows["round"] = np.arange(self.rounds + 1, self.rounds + count + 1)
        self.rounds += count
        replied = (rows["cohort"] >= 0).sum(axis=1)
        self.parts.append(rows | {"bytes_down": replied * bytes_down, "bytes_up": replied * bytes_up})
        if self.log is not None:
            for at, number in enumerate(rows["round"]):
                told = {name: float(v[at]) for name, v in rows.items() if v.ndim == 1 and name != "round"}
                self.log(int(number), told)

    def columns(self) -> dict[str, np.ndarray]:
        names = ["round", *(name for name in self.parts[0] if name != "round")]
        return {name: np.concatenate([part[name] for part in self.parts]) for name in names}


class Pace:
    """How many rounds to ask for in one call: as many as take about half a second, so that progress is seen and an
    interruption heard, and so that the host's part does not count."""

    def __init__(self, most: int = CHUNK):
        self.most, self.asked, self.since = most, 0, 0.0
        self.calls = 0

    def rounds(self) -> int:
        """For the next call, which begins now."""
        now = time.perf_counter()
        if self.calls < 2:  # the first compiles, the second can be timed
            self.asked = 1
        else:
            self.asked = int(np.clip(0.5 * self.asked / (now - self.since), 1, self.most))
        self.calls, self.since = self.calls + 1, now
        return self.asked


def on_devices(
    job: Job, algorithm: Algorithm, problem: Problem, key: np.ndarray, rounds: int, history: History
) -> tuple[State, Any, None]:
    """The run with all client states on the devices, in compiled chunks of rounds."""
    program, world, numbers = job.program, job.world, dict(algorithm.numbers)
    state = initial(algorithm, job)
    down, up = traffic(algorithm, algorithm.trips(job.plan.steps_on_wire), job.starts[0])
    done = 0
    for cohort in job.visits:
        state, row = compiled_warm_start(program)(numbers, state, key, done + 1, cohort, world)
        row = {name: np.asarray(value)[None] for name, value in row.items()} | {"cohort": _padded(cohort, job.plan)}
        history.add(row, int(state.round) - done, *traffic(algorithm, (algorithm.warm_start,), job.starts[0]))
        done = int(state.round)
        if state.diverged:
            break
    pace = Pace()
    while done < rounds and not (state.reached or state.diverged):
        until = min(rounds, done + pace.rounds())
        state, rows = compiled(program)(numbers, state, key, until, rounds, world)
        rows, after = jax.device_get((rows, state.round))  # all at once: each copy from a GPU has to be waited for
        history.add(rows, int(after) - done, down, up)
        done = int(after)
    clients = jax.tree.map(lambda leaf: leaf[: job.plan.n_clients], to_host(state.clients))
    return to_host(state._replace(clients=None)), clients, None


def outside_devices(
    job: Job, algorithm: Algorithm, problem: Problem, key: np.ndarray, rounds: int, history: History
) -> tuple[State, Any, np.ndarray | None]:
    """The run with client states in a store, or with streamed data: one compiled round after the other."""
    x = job.starts[0]
    row = jax.tree.map(lambda leaf: np.asarray(leaf, x.dtype), algorithm.init_client(x))
    if job.store == "host":
        store = HostStore(row, job.plan.n_clients)
    else:
        store = DiskStore(row, job.plan.n_clients, None if job.store == "disk" else Path(job.store))
    trips = algorithm.trips(job.plan.steps_on_wire)
    bytes_of = {False: traffic(algorithm, trips, x), True: traffic(algorithm, (algorithm.warm_start,), x)}
    start = initial(algorithm, job)._replace(clients=None)
    program = job.program

    def due(r: int) -> bool:
        return r % program.eval_every == 0 or r == rounds

    def pass_over_data(r: int, state: State) -> dict[str, Any]:
        """What the host measures itself: the loss of streamed data, where it was asked for."""
        if not isinstance(problem.data, StreamedData) or not job.passes or not due(r):
            return {}
        points = {"loss": state.server[0]} | ({"average_loss": state.average} if program.average else {})
        return {name: streamed_loss(program, problem.data, job.layout.p, x) for name, x in points.items()}

    measured_here = ("loss", "average_loss") if program.average else ("loss",)
    unmeasured = dict.fromkeys(measured_here, np.nan) if job.passes else {}
    stream = Stream(program, job.world, problem.data, store)
    final = start
    with contextlib.closing(stream.rounds(algorithm, start, key, job.visits, rounds, pass_over_data)) as handed_out:
        for state, record, cohort, warm in handed_out:
            state = to_host(state._replace(clients=None))
            row = unmeasured | {name: value for name, value in record.items() if name != "cohort"}
            row = {name: np.asarray(value)[None] for name, value in row.items()} | {"cohort": _padded(cohort, job.plan)}
            good = not (job.passes and due(history.rounds + 1)) or np.isfinite(row["loss"][0])
            history.add(row, int(state.round) - history.rounds if good else 0, *bytes_of[warm])
            if not good:
                final = final._replace(diverged=np.asarray(True))
                break
            final = state
            judged = job.passes and not warm and not state.diverged
            if judged and job.goal is not None and job.goal[1] * (row["loss"][0] - job.goal[2]) >= 0:
                final = state._replace(reached=np.asarray(True))
            if final.reached or final.diverged:
                break
    if isinstance(store, DiskStore):
        store.save_places()
    return final, store.clients, getattr(store, "seen", None)


def _padded(cohort: np.ndarray, plan: Plan) -> np.ndarray:
    return np.pad(cohort, (0, plan.cohort - len(cohort)), constant_values=-1)[None]


def _divergence(algorithm: Algorithm, round: int) -> str:
    return (
        f"{algorithm} diverged in round {round}: its model or loss is no longer finite. The run holds the state and "
        f"history before that round. {_smaller(algorithm)}"
    )


def _runaway(algorithm: Algorithm, losses: np.ndarray) -> str | None:
    """A word on a run whose loss has grown a million times and more, though it is finite still."""
    seen = losses[np.isfinite(losses)].astype(float)
    if len(seen) < 2 or abs(seen[-1]) < 1e6 * max(abs(seen[0]), 1e-300) or seen[-1] < seen.max():
        return None
    return f"{algorithm} is diverging: its loss grew from {seen[0]:.3g} to {seen[-1]:.3g}. {_smaller(algorithm)}"


def _smaller(algorithm: Algorithm) -> str:
    sizes = " and ".join(f"{name}={value:g}" for name, value in algorithm.numbers.items() if name in ("eta_l", "eta_g"))
    return (
        f"Its step-size is too large for this problem ({sizes or 'see the algorithm'}): try eta_l a factor of 3 to 10 "
        "smaller, or fewer local steps."
    )
