"""How wide a round runs: the devices and the clients at once, by rule, or by a short trial that is remembered."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
import os
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from covary._engine.devices import Place, available, cache_folder, lay_out, memory
from covary._engine.plan import Layout
from covary._engine.program import Program, State, Target, World
from covary._engine.rounds import compiled_round
from covary.algorithm import Algorithm
from covary.checks import whole
from covary.data.federated import FederatedData

# Floating-point operations below which a CPU is busy with the machinery around them: of a round, for several devices to
# pay; of a local step, for clients one by one to pay.
SMALL_ROUND, SMALL_STEP = 1e7, 1e6
# Operations of a device in one round from which on a trial of widths pays: a few seconds, once a machine.
LONG_ROUND = {"cpu": 1e11, "gpu": 5e11, "tpu": 5e12}
TRIAL_STEPS = 12
_TRIED: dict[str, int] = {}  # by this process, where there is no folder to remember in


def tuned(
    program: Program,
    algorithm: Algorithm,
    x: np.ndarray,
    data: FederatedData,
    devices: int | None,
    width: int | None,
    members: int = 1,
) -> Program:
    """The program with its place: what the user asked for, else what is fastest.

    Every device has its part of the cohort, except that small rounds stay on one CPU device. A CPU takes its clients
    one by one unless steps are small, an accelerator takes them all at once; for long rounds a trial decides.
    """
    plan, found, examples = program.plan, available(devices), data.examples
    step = step_cost(program, x.shape, x.dtype, shapes_of(examples))
    kind, work = found[0].platform, step.flops * members * plan.max_steps * plan.cohort
    if devices is None and jax.process_count() == 1:
        found = found[: 1 if kind == "cpu" and work < SMALL_ROUND else plan.cohort]
        if kind == "cpu" and not data.streamed:  # each CPU device has its own copy of the data
            size = sum(leaf.nbytes for leaf in jax.tree.leaves(examples))
            found = found[: max(1, int(memory() / 4 / size))]
    each = -(-plan.cohort // len(found))
    if width is not None:
        return dataclasses.replace(program, place=Place(found, min(whole("width", width, 1), each)))
    one_by_one = kind == "cpu" and step.flops * members >= SMALL_STEP
    program = dataclasses.replace(program, place=Place(found, 1 if one_by_one else each))
    short = work / len(found) < LONG_ROUND.get(kind, 5e11)
    if each == 1 or members > 1 or jax.process_count() > 1 or short:
        return program
    about = f"{step.text} {plan} {algorithm.name} {kind} {found[0].device_kind} {len(found)} {jax.__version__}"
    chosen = remembered_or_tried(hashlib.sha256(about.encode()).hexdigest()[:24], program, algorithm, x, examples)
    return dataclasses.replace(program, place=Place(found, min(chosen, each)))


@dataclasses.dataclass(frozen=True)
class Cost:
    flops: float
    text: str  # the step as XLA sees it


def shapes_of(examples: Any) -> tuple[Any, Any]:
    """The form of the examples, hashable."""
    leaves, tree = jax.tree.flatten(examples)
    return tree, tuple((tuple(leaf.shape[1:]), jnp.asarray(leaf[:0]).dtype) for leaf in leaves)


@functools.lru_cache(maxsize=256)
def _step_cost(loss: Any, unravel: Any, rows: int, shape: Any, dtype: Any, form: Any) -> Cost:
    tree, leaves = form
    batch = jax.tree.unflatten(tree, [jax.ShapeDtypeStruct((rows, *rest), kind) for rest, kind in leaves])
    x = jax.ShapeDtypeStruct(shape, dtype)
    with _counting():
        lowered = jax.jit(jax.grad(lambda y, batch: loss(unravel(y), batch))).lower(x, batch)
    analysis = lowered.cost_analysis() or {}
    return Cost(float(analysis.get("flops", 0.0)), lowered.as_text())


def _counting() -> contextlib.AbstractContextManager[Any]:
    """Lowering for the CPU, which counts operations before it compiles. A GPU does not."""
    with contextlib.suppress(RuntimeError):  # where JAX was told to leave the CPU out
        return jax.default_device(jax.devices("cpu")[0])
    return contextlib.nullcontext()


def step_cost(program: Program, shape: Any, dtype: Any, form: Any) -> Cost:
    return _step_cost(program.loss, program.unravel, program.plan.max_batch, shape, dtype, form)


def remembered_or_tried(name: str, program: Program, algorithm: Algorithm, x: np.ndarray, examples: Any) -> int:
    """The width that a few steps are fastest with, from the last time or from a trial now."""
    known = _TRIED | _read()
    if name not in known:
        each = -(-program.plan.cohort // len(program.place.devices))
        times = {width: _time(program, width, algorithm, x, examples) for width in sorted({1, min(4, each), each})}
        known[name] = _TRIED[name] = min(times, key=lambda width: times[width])
        _write(known)
    return known[name]


def _time(program: Program, width: int, algorithm: Algorithm, x: np.ndarray, examples: Any) -> float:
    """Seconds of a round of a few steps with made-up data, or infinity if it does not fit into memory."""
    plan, S = program.plan, program.plan.cohort
    steps = min(TRIAL_STEPS, plan.max_steps)
    plan = dataclasses.replace(plan, max_steps=steps, steps=steps, epochs=-(-steps * plan.epochs // plan.max_steps))
    place = Place(program.place.devices, width)
    trial = dataclasses.replace(
        program, plan=plan, place=place, evaluated=(), metrics=None, average=False, resident=False, streamed=True
    )
    slots = S + -S % len(place.devices)
    data = jax.tree.map(lambda leaf: np.zeros((slots, plan.max_size, *leaf.shape[1:]), leaf.dtype), examples)
    sizes = np.full(S, plan.max_size)
    layout = Layout(
        0 * sizes, sizes, np.full(S, plan.max_batch), sizes // plan.max_batch + 1, 0 * sizes + steps, 1 / sizes
    )
    world = World(lay_out(place, data), None, None, layout, Target(0, 1.0, np.inf), 1.0)
    rows = jax.tree.map(lambda leaf: np.zeros((slots, *np.shape(leaf)), x.dtype), algorithm.init_client(x))
    clients = jax.block_until_ready(lay_out(place, rows))  # else every round of the trial would carry them over
    server = jax.tree.map(lambda leaf: np.asarray(leaf, x.dtype), algorithm.init_server(x))
    key = np.asarray(jax.random.key_data(jax.random.key(0)))
    one, no = np.asarray(1, x.dtype), np.asarray(False)
    state = State(np.asarray(0), server, clients, x, one, no, no, 0 * one)
    seconds = [float("inf")]
    with contextlib.suppress(jax.errors.JaxRuntimeError):
        for _ in range(3):
            start = time.perf_counter()
            done = compiled_round(trial, False)(dict(algorithm.numbers), state, key, 1, np.arange(S), world)
            jax.block_until_ready(done)
            seconds.append(time.perf_counter() - start)
    return min(seconds)  # not the first, which compiles


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
