"""From a request to a job: every check before anything is compiled, and all that the engine needs."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from covary.algorithm import Algorithm
from covary.checks import whole
from covary.client import dry_run
from covary.data.folder import StreamedData
from covary.devices import AXIS, Place, lay_out, memory
from covary.errors import CovaryError, refused
from covary.plan import Layout, Plan, make_plan
from covary.problem import Problem
from covary.program import Program, State, Target, World
from covary.store import OWNER
from covary.tune import tuned

CHUNK = 100  # most rounds between two looks from the host


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
    resumable: bool = False,
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
    goal = goal_of(target, names)
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
        if (abs(cast) < float(jnp.finfo(starts[0].dtype).tiny) and value != 0) or not np.isfinite(cast):
            raise refused(name, f"a number that {starts[0].dtype} can hold", f"{value:g}", "Choose a less extreme one.")
    problem.refuse_other_losses(one_by_one=plan.ragged_batches or plan.ragged_sizes or passes)
    assert unravel is not None
    where = _store(store, algorithm, plan, starts[0], problem.data.streamed, resumable)
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


def _store(
    store: str | Path | None, algorithm: Algorithm, plan: Plan, x: np.ndarray, streamed: bool, resumable: bool
) -> str:
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
        names = {path.name for path in Path(store).iterdir()}
        empty = not names or (resumable and (OWNER in names or names <= {"lock", f"{OWNER}.draft"}))
    except (OSError, ValueError) as error:
        raise refused("store", allowed, f"{str(store)!r} ({error})", "Give a folder you can write to.") from None
    if not empty:
        fix = "Give a new folder: what another run left is not overwritten."
        raise refused("store", allowed, str(store), fix)
    return str(Path(store).absolute())


def _precision(precision: str | None) -> str | None:
    if precision is not None and not (isinstance(precision, str) and precision == "bfloat16"):
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
        scale=np.zeros(axes, x.dtype),
    )
    if not job.program.resident:
        return state
    rows = of_all_seeds(algorithm.init_client, job.plan.n_clients + -job.plan.n_clients % len(place.devices))
    spec = PartitionSpec(*[None] * len(axes), AXIS)
    return lay_out(place, state)._replace(clients=lay_out(place, rows, spec))


def first_met(metric: str, curves: np.ndarray, value: float) -> list[int | None]:
    """The first round of each curve of (seeds, rounds) that met a value; in float32, as most are measured."""
    met = direction(metric) * (curves.astype(np.float32) - np.float32(value)) >= 0
    return [int(seed.argmax()) + 1 if seed.any() else None for seed in met]


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

        down, up, _ = jax.eval_shape(functools.partial(dry_run, trip), server, client)
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


def goal_of(target: Any, names: tuple[str, ...]) -> tuple[str, float, float] | None:
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
