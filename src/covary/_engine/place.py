"""The devices of a round and the width on each, chosen by rule."""

from __future__ import annotations

import jax
import numpy as np

from covary._engine.devices import Place, agreed, available
from covary._engine.local import LocalProgram
from covary._engine.memory import clients_convolve, clients_that_fit
from covary.checks import whole
from covary.problem import Problem
from covary.running.plan import Plan
from covary.runs.machine import device_memory

# Below these numbers of floating-point operations, overhead dominates on a CPU: several devices do not pay off for a
# round, and one client at a time does not pay off for a local step.
SMALL_ROUND, SMALL_STEP = 1e7, 1e6
SMALL_CONVOLUTION = 5e9  # on an accelerator, the same for a step with convolutions
DEEP_STEP = 1e9  # operations of a step beside which those of its measurement do not count


def choose_place(
    plan: Plan,
    flops: float,
    local: LocalProgram,
    x: np.ndarray,
    problem: Problem,
    devices: int | None,
    width: int | None,
    members: int = 1,
) -> Place:
    """The place that the user asked for, else the fastest by rules; a local step takes so many `flops`.

    Every device has its part of the cohort, except that small rounds stay on one CPU device. A CPU takes its clients
    one by one unless steps are small. An accelerator takes as many at once as fit into its memory, because products of
    several clients are faster together. Convolutions of several clients, each with kernels of its own, are slower
    together unless they are small.
    """
    found, data = available(devices), problem.data
    kind, work = found[0].platform, flops * members * plan.local.max_steps * plan.cohort
    if devices is None and jax.process_count() == 1:
        found = found[: 1 if kind == "cpu" and work < SMALL_ROUND else plan.cohort]
        if kind == "cpu" and not data.streamed:  # each CPU device has its own copy of the data
            size = sum(leaf.nbytes for leaf in jax.tree.leaves(data.examples))
            found = found[: max(1, int(device_memory() / 4 / size))]
    each = -(-plan.cohort // len(found))
    if width is not None:
        return Place(found, min(whole("width", width, 1), each))
    if kind == "cpu":
        return Place(found, 1 if flops * members >= SMALL_STEP else each)
    if flops * members >= SMALL_CONVOLUTION and clients_convolve(local, problem):
        return Place(found, 1)
    fit = clients_that_fit(local, problem, x) // members
    return Place(found, agreed(max(1, min(each, fit))))
