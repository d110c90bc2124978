"""The devices of a round and the width on each, chosen by rule or by a short trial."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
import os
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from covary._engine.cohort import Cohort, exchange_all
from covary._engine.configure import cache_folder
from covary._engine.devices import AXIS, Place, available, lay_out, sharded
from covary._engine.local import LocalProgram, work_of_client
from covary._engine.plan import Layout, Plan
from covary.algorithm import Algorithm, Exchange, rebuild
from covary.checks import whole
from covary.problem import Problem
from covary.runs.machine import device_memory

# Below these numbers of floating-point operations, overhead dominates on a CPU: several devices do not pay off for a
# round, and one client at a time does not pay off for a local step.
SMALL_ROUND, SMALL_STEP = 1e7, 1e6
# Operations per device and round above which a trial of widths pays off: a few seconds, once per machine.
LONG_ROUND = {"cpu": 1e11, "gpu": 5e11, "tpu": 5e12}
TRIAL_STEPS = 12
_TRIED: dict[str, int] = {}  # in this process, if there is no cache folder


def choose_place(
    plan: Plan,
    local: LocalProgram,
    algorithm: Algorithm,
    x: np.ndarray,
    problem: Problem,
    devices: int | None,
    width: int | None,
    members: int = 1,
) -> Place:
    """The place that the user asked for, else the fastest.

    Every device has its part of the cohort, except that small rounds stay on one CPU device. A CPU takes its clients
    one by one unless steps are small, an accelerator takes them all at once; for long rounds a trial decides.
    """
    found, data = available(devices), problem.data
    examples = data.examples
    step = step_cost(local, x, problem)
    kind, work = found[0].platform, step.flops * members * plan.local.max_steps * plan.cohort
    if devices is None and jax.process_count() == 1:
        found = found[: 1 if kind == "cpu" and work < SMALL_ROUND else plan.cohort]
        if kind == "cpu" and not data.streamed:  # each CPU device has its own copy of the data
            size = sum(leaf.nbytes for leaf in jax.tree.leaves(examples))
            found = found[: max(1, int(device_memory() / 4 / size))]
    each = -(-plan.cohort // len(found))
    if width is not None:
        return Place(found, min(whole("width", width, 1), each))
    short = work / len(found) < LONG_ROUND.get(kind, 5e11)
    if each == 1 or members > 1 or jax.process_count() > 1 or short:
        one_by_one = kind == "cpu" and step.flops * members >= SMALL_STEP
        return Place(found, 1 if one_by_one else each)
    about = f"{step.text} {plan} {algorithm.name} {kind} {found[0].device_kind} {len(found)} {jax.__version__}"
    name = hashlib.sha256(about.encode()).hexdigest()[:24]
    return Place(found, min(each, remembered_or_tried(name, found, plan, local, algorithm, x, problem)))


@dataclasses.dataclass(frozen=True)
class Cost:
    flops: float
    text: str  # the step as XLA sees it


def step_cost(local: LocalProgram, x: np.ndarray, problem: Problem) -> Cost:
    """Floating-point operations of one local step."""
    forms = []
    for tree, rows in ((problem.data.examples, 1), (problem.held, 0)):
        leaves, form = jax.tree.flatten(tree)
        kinds = tuple((tuple(leaf.shape[rows:]), jax.dtypes.canonicalize_dtype(leaf.dtype)) for leaf in leaves)
        forms.append((form, kinds))
    return _step_cost(local.loss, local.unravel, local.plan.max_batch, x.shape, x.dtype, *forms)


@functools.lru_cache(maxsize=256)
def _step_cost(loss: Any, unravel: Any, rows: int, shape: Any, dtype: Any, examples: Any, held: Any) -> Cost:
    def shapes(form: Any, *rows: int) -> Any:
        tree, leaves = form
        return jax.tree.unflatten(tree, [jax.ShapeDtypeStruct((*rows, *rest), kind) for rest, kind in leaves])

    def slope(y: Any, batch: Any, held: Any) -> Any:
        return jax.grad(lambda y: loss.holding(*held)(unravel(y), batch))(y)

    with _counting():
        lowered = jax.jit(slope).lower(jax.ShapeDtypeStruct(shape, dtype), shapes(examples, rows), shapes(held))
    analysis = lowered.cost_analysis() or {}
    return Cost(float(analysis.get("flops", 0.0)), lowered.as_text())


def _counting() -> contextlib.AbstractContextManager[Any]:
    """Lowering for the CPU, which counts operations before it compiles. A GPU does not."""
    with contextlib.suppress(RuntimeError):  # where JAX is configured without the CPU
        return jax.default_device(jax.devices("cpu")[0])
    return contextlib.nullcontext()


# The trial


def remembered_or_tried(
    name: str,
    devices: tuple[Any, ...],
    plan: Plan,
    local: LocalProgram,
    algorithm: Algorithm,
    x: np.ndarray,
    problem: Problem,
) -> int:
    """The width with the fastest steps: remembered from an earlier trial, or from a trial now."""
    known = _TRIED | _read()
    if name not in known:
        each = -(-plan.cohort // len(devices))
        widths = sorted({1, min(4, each), each})
        times = {w: time_of_cohort(Place(devices, w), plan.cohort, local, algorithm, x, problem) for w in widths}
        known[name] = _TRIED[name] = min(times, key=lambda width: times[width])
        _write(known)
    return known[name]


def time_of_cohort(
    place: Place, S: int, local: LocalProgram, algorithm: Algorithm, x: np.ndarray, problem: Problem
) -> float:
    """Seconds that a cohort of S needs for a few steps on made-up data, or infinity if it does not fit into memory."""
    plan = local.plan
    steps = min(TRIAL_STEPS, plan.max_steps)
    epochs = -(-steps * plan.epochs // plan.max_steps)
    local = dataclasses.replace(local, plan=dataclasses.replace(plan, max_steps=steps, steps=steps, epochs=epochs))
    slots = S + -S % len(place.devices)
    # data: (slots, max_size, ...); rows: fields (slots, d)
    data = jax.tree.map(
        lambda leaf: np.zeros((slots, plan.max_size, *leaf.shape[1:]), leaf.dtype), problem.data.examples
    )
    rows = jax.tree.map(lambda leaf: np.zeros((slots, *np.shape(leaf)), x.dtype), algorithm.init_client(x))
    data, rows = jax.block_until_ready(lay_out(place, (data, rows), PartitionSpec(AXIS)))
    server = lay_out(place, jax.tree.map(lambda leaf: np.asarray(leaf, x.dtype), algorithm.init_server(x)))
    frozen = lay_out(place, problem.frozen)
    run = _cohort_at_work(place, S, local, algorithm)
    seconds = [float("inf")]
    with contextlib.suppress(jax.errors.JaxRuntimeError):
        for _ in range(3):
            start = time.perf_counter()
            jax.block_until_ready(run(dict(algorithm.numbers), server, rows, data, frozen))
            seconds.append(time.perf_counter() - start)
    return min(seconds)  # not the first, which compiles


def _cohort_at_work(place: Place, S: int, local: LocalProgram, algorithm: Algorithm) -> Callable[..., Any]:
    """`(numbers, server, rows, data, frozen) -> server, rows`, compiled: a round without draw and evaluation."""
    plan = local.plan
    layout = Layout(plan.max_size, plan.max_batch, plan.max_size // plan.max_batch + 1, plan.max_steps)
    recipe = algorithm.recipe or algorithm

    def run(numbers: Any, server: Any, rows: Any, data: Any, frozen: Any) -> Any:
        own = local.holding(frozen)

        def bind(number: int, exchange: Exchange, down: Any) -> Callable[..., Any]:
            def work(i: Any, at: Any, slot: Any, client: Any) -> Any:
                def fetch(positions: Any) -> Any:
                    return jax.tree.map(lambda leaf: leaf[slot, positions], data)

                key = jax.random.fold_in(jax.random.key(number), i)
                return work_of_client(own, exchange, down, client, fetch, layout, key, measured=False)

            return work

        everyone = jnp.arange(S)
        cohort = Cohort(everyone, everyone, jnp.full(S, 1 / S), 1.0)
        exchanges = rebuild(recipe, numbers).trips(plan.steps)
        return exchange_all(place, exchanges, server, rows, cohort, bind, measured=False)[:2]

    if len(place.devices) == 1:
        return jax.jit(run)
    everything, parts = PartitionSpec(), PartitionSpec(AXIS)
    return jax.jit(sharded(run, place, (everything, everything, parts, parts, everything), (everything, parts)))


def _read() -> dict[str, int]:
    folder = cache_folder()
    with contextlib.suppress(OSError, ValueError, TypeError, AttributeError):
        if folder is not None:
            return {str(k): int(v) for k, v in json.loads((folder / "widths.json").read_text()).items() if int(v) > 0}
    return {}


def _write(widths: dict[str, int]) -> None:
    folder = cache_folder()
    with contextlib.suppress(OSError):
        if folder is not None:
            draft = folder / f"widths.json.{os.getpid()}"
            draft.write_text(json.dumps(widths))
            draft.replace(folder / "widths.json")
