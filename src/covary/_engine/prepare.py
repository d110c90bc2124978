"""From a request to a job: every check that needs the problem, and all that the engine needs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from covary._engine.devices import AXIS, Place, lay_out, layout_of, on_devices
from covary._engine.evaluate import evaluation_of
from covary._engine.local import LocalProgram
from covary._engine.memory import fitted, step_flops
from covary._engine.place import DEEP_STEP, choose_place
from covary._engine.program import NEVER, Program, Roster, TargetAt, World
from covary.algorithm import Algorithm
from covary.errors import refused
from covary.problem import Problem
from covary.running.buffers import with_model
from covary.running.job import measured_by, reject_numbers_beyond, warm_start_cohorts
from covary.running.plan import Layout, Plan, plan_rounds
from covary.running.simulation import CHUNK
from covary.running.state import Accounts, Control, State
from covary.running.store import chosen_store, store_folder
from covary.runs.machine import device_memory
from covary.targets import Target
from covary.training import Training


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

    @property
    def names(self) -> tuple[str, ...]:
        """What compiled rounds measure."""
        return self.program.evaluation.names


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
    algorithm = with_model(algorithm, problem)
    plan, layout, p = plan_rounds(training, algorithm, problem.data.sizes)
    visits = warm_start_cohorts(algorithm, plan, training)
    in_program, passes, target = measured_by(problem, training, measure_loss)
    judged = target is not None and not passes

    # Where it starts
    starts, unravel = [], None
    for seed in seeds:
        x, unravel = problem.start(x0, seed)
        starts.append(x)
    assert unravel is not None
    reject_numbers_beyond(algorithm, starts[0].dtype)
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


def _supported(precision: str | None) -> str | None:
    if precision is not None and jax.devices()[0].platform == "cpu":
        fix = "Leave precision out: XLA's CPU products gain nothing from it."
        raise refused("precision", "None on a CPU", repr(precision), fix)
    return precision


def _store(
    store: str | Path | None, algorithm: Algorithm, plan: Plan, x: np.ndarray, streamed: bool, resumable: bool
) -> str:
    """Where client states live: the user's choice, else the first place with enough room."""
    rows = plan.n_clients * len(jax.tree.leaves(algorithm.init_client(x))) * x.nbytes
    devices = 1 if jax.devices()[0].platform == "cpu" else len(jax.devices())  # CPU devices share one memory
    store = chosen_store(store, rows, devices * device_memory() / 4, streamed)
    if jax.process_count() > 1 and (streamed or store != "device"):
        fix = "Use more hosts, so that the states fit, and data that fits into each host's memory."
        raise refused("store", '"device" and data in memory when several hosts run together', repr(str(store)), fix)
    return store_folder(store, resumable)


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
