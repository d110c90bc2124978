"""From a request to a job: every check that needs the problem, and all that the engine needs."""

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

from covary._engine.buffers import carrying
from covary._engine.devices import AXIS, Place, lay_out, layout_of, on_devices
from covary._engine.evaluate import evaluation_of
from covary._engine.local import LocalProgram
from covary._engine.memory import fitted, step_flops
from covary._engine.place import DEEP_STEP, choose_place
from covary._engine.plan import Layout, Plan, plan_rounds
from covary._engine.program import NEVER, Accounts, Control, Program, Roster, State, TargetAt, World
from covary._engine.store import OWNER
from covary.algorithm import Algorithm
from covary.data.federated import StreamedData
from covary.errors import InvalidInput, refused
from covary.problem import Problem
from covary.runs import machine
from covary.targets import Target, target_of
from covary.training import Training

CHUNK = 100  # the most rounds in one call of a program


class Job(NamedTuple):
    """A request that has passed every check, ready for the engine."""

    algorithm: Algorithm
    problem: Problem
    training: Training
    plan: Plan
    layout: Layout  # (N,) in each field
    p: np.ndarray  # (N,): the clients' weights
    program: Program
    world: World
    starts: list[np.ndarray]  # x^0, one per seed
    visits: list[np.ndarray]  # the cohorts of the warm start
    store: str  # "device", "host", "disk" or a folder
    passes: bool  # the loss is measured by the host, in passes over streamed data
    target: Target | None


def prepare(
    algorithm: Algorithm,
    problem: Problem,
    training: Training,
    *,
    seeds: Sequence[int],
    x0: Any,
    measure_loss: bool = True,
    store: str | Path | None = None,
    resumable: bool = False,
    devices: int | None = None,
    width: int | None = None,
    microbatch: int | None = None,
    members: int = 1,
) -> Job:
    """Check a request against its problem, and lay out what the engine needs. Nothing of the run is compiled yet."""
    reject_others(algorithm, problem)
    algorithm = with_model(algorithm, problem)
    plan, layout, p = plan_rounds(training, algorithm, problem.data.sizes)
    visits = _warm_start_cohorts(algorithm, plan, training.rounds) if training.warm_start else []

    # What is measured, and what ends the run
    names = ("loss", *problem.metric_names)
    target = target_of(training.target, names)
    wants_loss = len(names) == 1 or (target is not None and target.metric == "loss")
    measured = names if wants_loss or (measure_loss and not problem.data.streamed) else names[1:]
    passes = isinstance(problem.data, StreamedData) and "loss" in measured
    in_program = tuple(name for name in measured if name != "loss") if passes else measured
    judged = target is not None and not passes

    # Where it starts
    starts, unravel = [], None
    for seed in seeds:
        x, unravel = problem.start(x0, seed)
        starts.append(x)
    assert unravel is not None
    _reject_numbers_beyond(algorithm, starts[0].dtype)
    problem.refuse_other_losses(one_by_one=plan.local.ragged_batches or plan.local.ragged_sizes or passes)

    # What is compiled, and where it runs
    where = _store(store, algorithm, plan, starts[0], problem.data.streamed, resumable)
    loss = problem.in_precision(_supported(training.precision)).holding()
    local = LocalProgram(plan.local, loss, unravel)
    flops = step_flops(local, problem)
    place = choose_place(plan, flops, local, starts[0], problem, devices, width, members)
    local = fitted(local, problem, place.width * members, microbatch)
    of_one = flops / 3 / plan.local.max_batch  # a gradient takes three times as much as the loss
    evaluation = evaluation_of(problem, in_program, unravel, members, of_one)
    program = Program(
        recipe=algorithm.recipe or algorithm,
        plan=plan,
        local=local,
        evaluation=evaluation,
        place=place,
        chunk=CHUNK,
        eval_every=training.eval_every,
        average=training.average is not None,
        resident=where == "device",
        streamed=problem.data.streamed,
        deep=flops >= DEEP_STEP,
    )

    # What it reads
    example_weights = None
    if not plan.flat_weights and not problem.data.streamed:
        example_weights = np.repeat(p / layout.size, layout.size).astype(starts[0].dtype)
    roster = Roster(problem.data.offsets, p, layout)
    ends = TargetAt(in_program.index(target.metric), *target[1:]) if target is not None and judged else NEVER
    rest: Any = (example_weights, roster, ends, np.asarray(training.decay))
    if program.resident:
        rest = lay_out(place, rest)
    examples, tested_on, frozen = on_devices(problem, place)
    world = World(examples, tested_on if problem.metrics is not None else None, frozen, *rest)
    return Job(algorithm, problem, training, plan, layout, p, program, world, starts, visits, where, passes, target)


def reject_others(algorithm: Any, problem: Any) -> None:
    """Reject a value that is not an algorithm, or not a problem."""
    if not isinstance(algorithm, Algorithm):
        raise refused(
            "algorithm", "an Algorithm", type(algorithm).__name__, "Build one, say covary.scaffold(eta_l=0.1)."
        )
    if not isinstance(problem, Problem):
        raise refused("problem", "a Problem", type(problem).__name__, "Build one, say covary.supervised(model, data).")


def with_model(algorithm: Algorithm, problem: Problem) -> Algorithm:
    """The algorithm for a model: with its buffers, if it has any."""
    return algorithm if problem.buffers is None else carrying(algorithm, problem.buffers)


def _reject_numbers_beyond(algorithm: Algorithm, dtype: np.dtype[Any]) -> None:
    """Reject numbers of an algorithm that the model's precision turns into 0 or infinity."""
    for name, value in algorithm.numbers.items():
        with np.errstate(over="ignore"):
            cast = float(dtype.type(value))
        if (abs(cast) < float(jnp.finfo(dtype).tiny) and value != 0) or not np.isfinite(cast):
            raise refused(name, f"a number that {dtype} can hold", f"{value:g}", "Choose a less extreme one.")


def _warm_start_cohorts(algorithm: Algorithm, plan: Plan, rounds: int) -> list[np.ndarray]:
    if algorithm.warm_start is None:
        raise InvalidInput(
            f"warm_start=True needs control variates to set, and {algorithm.name} has none that a gradient can set. "
            "Use warm_start=False, or scaffold."
        )
    cohorts = np.split(np.arange(plan.n_clients), range(plan.cohort, plan.n_clients, plan.cohort))
    if rounds <= len(cohorts):
        raise InvalidInput(
            f"rounds={rounds} leaves no round to train in: the warm start visits {plan.n_clients} clients, "
            f"{plan.cohort} at a time, which takes {len(cohorts)} rounds. Use more rounds or warm_start=False."
        )
    return cohorts


def _supported(precision: str | None) -> str | None:
    if precision is not None and jax.devices()[0].platform == "cpu":
        fix = "Leave precision out: XLA's CPU products gain nothing from it."
        raise refused("precision", "None on a CPU", repr(precision), fix)
    return precision


def _store(
    store: str | Path | None, algorithm: Algorithm, plan: Plan, x: np.ndarray, streamed: bool, resumable: bool
) -> str:
    """Where client states live: the user's choice, else the first place with enough room."""
    allowed = '"device", "host", "disk" or a new or empty folder'
    if store is not None and not isinstance(store, str | Path):
        raise refused("store", allowed, repr(store), "None decides by the size.")
    if streamed and store == "device":
        raise refused("store", '"host", "disk" or a folder for streamed data', repr(store), "Leave it out.")
    if store is None:
        rows = plan.n_clients * len(jax.tree.leaves(algorithm.init_client(x))) * x.nbytes
        devices = 1 if jax.devices()[0].platform == "cpu" else len(jax.devices())  # CPU devices share one memory
        fits = rows <= devices * machine.device_memory() / 4 and not streamed
        store = "device" if fits else "host" if rows <= machine.host_memory() / 3 else "disk"
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
        fix = "Give a new folder: covary does not overwrite the files of another run."
        raise refused("store", allowed, str(store), fix)
    return str(Path(store).absolute())


def initial(algorithm: Algorithm, job: Job, points: int | None = None) -> State:
    """The state before the first round, on the devices: of one run, or of all seeds and points of a sweep."""
    place, (x, *_) = job.program.place, job.starts

    def for_members(leaves: list[Any], *rows: int) -> np.ndarray:
        """One array per seed, repeated for all rows (the clients) and for all points."""
        stacked = np.stack([np.asarray(leaf, x.dtype) for leaf in leaves])
        shape = stacked.shape[1:]
        stacked = stacked.reshape(len(leaves), *[1] * (len(rows) + 1), *shape)
        whole = np.broadcast_to(stacked, (len(leaves), points or 1, *rows, *shape))
        return whole if points is not None else whole[0, 0]

    def of_all_seeds(init: Callable[[Any], Any], *rows: int) -> Any:
        return jax.tree.map(lambda *leaves: for_members(list(leaves), *rows), *[init(start) for start in job.starts])

    axes = () if points is None else (len(job.starts), points)
    state = State(
        server=of_all_seeds(algorithm.init_server),
        clients=None,
        control=Control(round=np.zeros(axes, int), reached=np.zeros(axes, bool), diverged=np.zeros(axes, bool)),
        accounts=Accounts(
            average=of_all_seeds(lambda start: start),
            average_mass=np.ones(axes, x.dtype),  # x^0 has weight w_1
            scale=np.zeros(axes, x.dtype),
        ),
    )
    if not job.program.resident:
        return state
    rows = of_all_seeds(algorithm.init_client, job.plan.n_clients + -job.plan.n_clients % len(place.devices))
    spec = PartitionSpec(*[None] * len(axes), AXIS)
    return lay_out(place, state)._replace(clients=jax.tree.map(functools.partial(_first_rows, place, spec), rows))


def _first_rows(place: Place, spec: PartitionSpec, rows: np.ndarray) -> Any:
    """The clients' states before the first round, all the same, on the devices. Zeros are made there."""
    if jax.process_count() > 1 or rows.take([0], axis=len(spec) - 1).any():
        return lay_out(place, rows, spec)
    one = len(place.devices) == 1
    return jnp.zeros(rows.shape, rows.dtype, device=place.devices[0] if one else layout_of(place, spec))
