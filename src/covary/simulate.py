"""`simulate`: N clients and a server on one machine, at the machine's full speed."""

from __future__ import annotations

import contextlib
import os
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import PartitionSpec

from covary.algorithm import Algorithm
from covary.checks import whole
from covary.data.folder import StreamedData
from covary.devices import AXIS, Place, lay_out, memory, to_host
from covary.errors import CovaryError, DivergenceWarning, refused
from covary.plan import Layout, Plan, make_plan
from covary.problem import Problem
from covary.rounds import Program, State, Target, World, compiled, compiled_warm_start
from covary.store import DiskStore, HostStore, mean_control
from covary.stream import Stream, streamed_loss
from covary.tune import tuned

CHUNK = 100  # most rounds between two looks from the host


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
            if job.passes and not warm and job.goal is not None and job.goal[1] * (row["loss"][0] - job.goal[2]) >= 0:
                final = state._replace(reached=np.asarray(True))
            if final.reached or final.diverged:
                break
    if isinstance(store, DiskStore):
        store.save_places()
    return final, store.clients, getattr(store, "seen", None)


def _padded(cohort: np.ndarray, plan: Plan) -> np.ndarray:
    return np.pad(cohort, (0, plan.cohort - len(cohort)), constant_values=-1)[None]


class Job(NamedTuple):
    """A request that has passed every check, ready for the engine."""

    plan: Plan
    layout: Layout
    program: Program
    world: World
    starts: list[np.ndarray]  # x^0, one a seed
    visits: list[np.ndarray]  # the cohorts of the warm start
    store: str  # "device", "host", "disk" or a folder
    passes: bool  # the loss is measured by the host, in passes over streamed data
    goal: tuple[str, float, float] | None  # the metric that ends the run, +1 to rise or -1 to fall, and the value


def prepare(
    algorithm: Algorithm,
    problem: Problem,
    *,
    rounds: int,
    clients_per_round: int | float | None,
    local_steps: int | None,
    local_epochs: int | None,
    batch_size: int | float | None,
    seeds: Sequence[int],
    x0: Any,
    warm_start: bool,
    weights: str,
    target: tuple[str, float] | tuple[str, str, float] | None,
    eval_every: int,
    average: str | float | None = None,
    measure_loss: bool = True,
    store: str | Path | None = None,
    devices: int | None = None,
    width: int | None = None,
    precision: str | None = None,
    members: int = 1,
) -> Job:
    """Check a request whole, before anything is compiled, and lay out what the engine needs."""
    if not isinstance(algorithm, Algorithm):
        raise refused(
            "algorithm", "an Algorithm", type(algorithm).__name__, "Build one, say covary.scaffold(eta_l=0.1)."
        )
    if not isinstance(problem, Problem):
        raise refused("problem", "a Problem", type(problem).__name__, "Build one, say covary.supervised(model, data).")
    if not isinstance(warm_start, bool | np.bool_):
        raise refused("warm_start", "True or False", repr(warm_start), "It costs N / S rounds at the start.")
    whole("rounds", rounds, 1)
    whole("eval_every", eval_every, 1)
    for seed in seeds:
        whole("seed", seed, 0, most=2**32 - 1)
    plan, layout = make_plan(problem, algorithm, clients_per_round, local_steps, local_epochs, batch_size, weights)
    visits = _warm_start_cohorts(algorithm, plan, rounds) if warm_start else []
    names = ("loss", *problem.metric_names)
    goal = _target(target, names)
    wants_loss = len(names) == 1 or (goal is not None and goal[0] == "loss")
    evaluated = names if wants_loss or (measure_loss and not problem.data.streamed) else names[1:]
    passes = isinstance(problem.data, StreamedData) and "loss" in evaluated
    never = Target(0, 1.0, np.inf)
    met_at = never if goal is None or passes else Target(evaluated.index(goal[0]), *goal[1:])
    decay = _decay(average)
    starts, unravel = [], None
    for seed in seeds:
        x, unravel = problem.start(x0, seed)
        starts.append(x)
    for name, value in algorithm.numbers.items():
        with np.errstate(over="ignore"):
            cast = float(starts[0].dtype.type(value))
        if (cast == 0 and value != 0) or not np.isfinite(cast):
            raise refused(name, f"a number that {starts[0].dtype} can hold", f"{value:g}", "Choose a less extreme one.")
    problem.refuse_other_losses(one_by_one=plan.ragged_batches or plan.ragged_sizes or passes)
    assert unravel is not None
    where = _store(store, algorithm, plan, starts[0], problem.data.streamed)
    program = Program(
        recipe=algorithm.recipe or algorithm,
        plan=plan,
        loss=problem.loss,
        metrics=problem.metrics,
        evaluated=tuple(name for name in evaluated if name != "loss") if passes else evaluated,
        unravel=unravel,
        chunk=CHUNK,
        eval_every=eval_every,
        average=average is not None,
        place=Place((), 1),
        precision=_precision(precision),
        resident=where == "device",
        streamed=problem.data.streamed,
        divisible=not problem.mixes_examples,
    )
    program = tuned(program, algorithm, starts[0], problem.data, devices, width, members)
    example_weights = None
    if not plan.flat_weights and not problem.data.streamed:
        example_weights = np.repeat(layout.p / layout.size, layout.size).astype(starts[0].dtype)
    examples, evaluated_on = problem.on(program.place)
    small = World(None, None, example_weights, layout, met_at, np.asarray(decay))
    if program.resident:
        small = lay_out(program.place, small)
    world = small._replace(examples=examples, evaluated_on=evaluated_on if problem.metrics is not None else None)
    return Job(plan, layout, program, world, starts, visits, where, passes, goal)


def _store(store: str | Path | None, algorithm: Algorithm, plan: Plan, x: np.ndarray, streamed: bool) -> str:
    """Where client states live: what the user says, else the first place that has room for all."""
    allowed = '"device", "host", "disk" or a new or empty folder'
    if store is not None and not isinstance(store, str | Path):
        raise refused("store", allowed, repr(store), "None decides by the size.")
    if streamed and store == "device":
        raise refused("store", '"host", "disk" or a folder for streamed data', repr(store), "Leave it out.")
    if store is None:
        rows = plan.n_clients * len(jax.tree.leaves(algorithm.init_client(x))) * x.nbytes
        devices = 1 if jax.devices()[0].platform == "cpu" else len(jax.devices())  # CPU devices share one memory
        fits = rows <= devices * memory() / 4 and not streamed
        store = "device" if fits else "host" if rows <= memory(device=False) / 3 else "disk"
    if jax.process_count() > 1 and (streamed or store != "device"):
        fix = "Use more hosts, so that the states fit, and data that fits into each host's memory."
        raise refused("store", '"device" and data in memory when several hosts run together', repr(str(store)), fix)
    if store in ("device", "host", "disk"):
        return str(store)
    if isinstance(store, str) and os.sep not in store:
        raise refused("store", allowed, repr(store), f"A folder here is './{store}' or a Path.")
    try:
        Path(store).mkdir(parents=True, exist_ok=True)
        empty = not any(Path(store).iterdir())
    except (OSError, ValueError) as error:
        raise refused("store", allowed, f"{str(store)!r} ({error})", "Give a folder you can write to.") from None
    if not empty:
        fix = "Give a new folder: what another run left is not overwritten."
        raise refused("store", allowed, str(store), fix)
    return str(store)


def _precision(precision: str | None) -> str | None:
    if precision not in (None, "bfloat16"):
        raise refused("precision", '"bfloat16" or None', repr(precision), "None keeps the model's own.")
    if precision is not None and jax.devices()[0].platform == "cpu":
        fix = "Leave precision out: XLA's CPU products gain nothing from it."
        raise refused("precision", "None on a CPU", repr(precision), fix)
    return precision


def initial(algorithm: Algorithm, job: Job, points: int | None = None) -> State:
    """The state before the first round, on the devices: of one run, or of all seeds and points of a sweep."""
    place, (x, *_) = job.program.place, job.starts

    def for_members(leaves: list[Any], *rows: int) -> np.ndarray:
        """One array a seed, repeated for all rows (the clients) and for all points."""
        stacked = np.stack([np.asarray(leaf, x.dtype) for leaf in leaves])
        shape = stacked.shape[1:]
        stacked = stacked.reshape(len(leaves), *[1] * (len(rows) + 1), *shape)
        whole = np.broadcast_to(stacked, (len(leaves), points or 1, *rows, *shape))
        return whole if points is not None else whole[0, 0]

    def of_all_seeds(init: Callable[[Any], Any], *rows: int) -> Any:
        return jax.tree.map(lambda *leaves: for_members(list(leaves), *rows), *[init(start) for start in job.starts])

    axes = () if points is None else (len(job.starts), points)
    state = State(
        round=np.zeros(axes, int),
        server=of_all_seeds(algorithm.init_server),
        clients=None,
        average=of_all_seeds(lambda start: start),
        average_mass=np.ones(axes, x.dtype),  # x^0 has weight w_1
        reached=np.zeros(axes, bool),
        diverged=np.zeros(axes, bool),
    )
    if not job.program.resident:
        return state
    rows = of_all_seeds(algorithm.init_client, job.plan.n_clients + -job.plan.n_clients % len(place.devices))
    spec = PartitionSpec(*[None] * len(axes), AXIS)
    return lay_out(place, state)._replace(clients=lay_out(place, rows, spec))


def traffic(algorithm: Algorithm, trips: Any, x: np.ndarray) -> tuple[int, int]:
    """Bytes down to and up from one client in one round: all that `broadcast` and `finish` put on the wire."""
    server, client = (
        jax.tree.map(lambda leaf: np.asarray(leaf, x.dtype), state)
        for state in (algorithm.init_server(x), algorithm.init_client(x))
    )
    total_down = total_up = 0
    for trip in trips:
        if trip is None:
            continue

        def up_of(down: Any, client: Any, trip: Any = trip) -> Any:
            def grad(y: Any) -> Any:
                return y

            return trip.finish(trip.start(down, client, grad), down, client, grad, 1)[0]

        down = jax.eval_shape(trip.broadcast, server)
        up = jax.eval_shape(up_of, down, client)
        total_down += sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(down))
        total_up += sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(up))
    return total_down, total_up


def _warm_start_cohorts(algorithm: Algorithm, plan: Plan, rounds: int) -> list[np.ndarray]:
    if algorithm.warm_start is None:
        raise CovaryError(
            f"warm_start=True needs control variates to set, and {algorithm.name} has none that a gradient can set. "
            "Use warm_start=False, or scaffold."
        )
    cohorts = np.split(np.arange(plan.n_clients), range(plan.cohort, plan.n_clients, plan.cohort))
    if rounds <= len(cohorts):
        raise CovaryError(
            f"rounds={rounds} leaves no round to train in: the warm start visits {plan.n_clients} clients, "
            f"{plan.cohort} at a time, which takes {len(cohorts)} rounds. Use more rounds or warm_start=False."
        )
    return cohorts


def _target(target: Any, names: tuple[str, ...]) -> tuple[str, float, float] | None:
    """The metric's name, +1 to rise or -1 to fall, and the value."""
    if target is None:
        return None
    form = f"(name, value) or (name, '<=' or '>=', value) with a name among {', '.join(names)}"
    if not isinstance(target, tuple | list) or len(target) not in (2, 3):
        raise refused("target", form, repr(target), "Try ('loss', 0.1).")
    name, *way, value = target
    if not isinstance(name, str) or name not in names or (way and way[0] not in ("<=", ">=")):
        raise refused("target", form, repr(target), "Try ('loss', 0.1).")
    if isinstance(value, bool) or not isinstance(value, int | float | np.number) or not np.isfinite(value):
        raise refused("target", f"{form} and a finite value", repr(target), "Try ('loss', 0.1).")
    sign = {"<=": -1.0, ">=": 1.0}[way[0]] if way else direction(name)
    return name, sign, float(value)


def direction(metric: str) -> float:
    """+1 for a metric that is to rise, -1 for one that is to fall, by its name."""
    return -1.0 if metric.endswith(("loss", "error", "mse", "rmse", "mae", "nll", "perplexity")) else 1.0


def _decay(average: str | float | None) -> float:
    if average is None or (isinstance(average, str) and average == "uniform"):
        return 1.0
    if not isinstance(average, float | np.floating) or not 0 < average < 1:
        raise refused(
            "average", '"uniform" or a number in (0, 1)', repr(average), "The theorems use mu K eta_l eta_g / 2."
        )
    return 1 - float(average)


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
