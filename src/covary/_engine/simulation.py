"""A running simulation in JAX: what runs with states on the devices and runs with a store have in common."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from covary._engine.devices import agreed, to_host
from covary._engine.prepare import Job
from covary._engine.program import Program
from covary.running.history import Log
from covary.running.simulation import Simulation
from covary.running.state import State


class Compiled(Simulation):
    """One run by compiled rounds."""

    job: Job

    def __init__(self, job: Job, log: Log | None):
        super().__init__(job, log, jax.eval_shape, agreed)
        self.key = np.asarray(jax.random.key_data(jax.random.key(job.training.seed)))

    def state_on_host(self) -> State:
        return to_host(self.state._replace(clients=None))

    def in_memory(self, rounds: Callable[[Program], Any]) -> Any:
        """What some rounds return. If the device runs out of memory, they are run again with fewer examples at once."""
        while True:
            try:
                return jax.block_until_ready(rounds(self.job.program))
            except jax.errors.JaxRuntimeError as error:
                if "RESOURCE_EXHAUSTED" not in str(error):
                    raise
                alone = jax.process_count() == 1  # several hosts would not decide alike
                less = in_less_memory(self.job) if alone else None
                arrays = [leaf for leaf in jax.tree.leaves(self.state) if isinstance(leaf, jax.Array)]
                if less is None or any(array.is_deleted() for array in arrays):
                    error.add_note("The device is out of memory. Try width=1, microbatch=1 or a smaller batch_size.")
                    raise
                self.job = less


def in_less_memory(job: Job) -> Job | None:
    """The job with half as many examples at once, in gradients and in measurements; None if there is no less."""
    program, evaluation, size = job.program, job.program.evaluation, job.program.local.plan.max_size
    divisible = evaluation.divisible
    steps = min(size, program.local.at_once or size) // 2 if divisible else 0
    loss = evaluation.at_once // 2 if divisible else 0
    tested = evaluation.tested_at_once // 2 if evaluation.means else 0
    if steps == loss == tested == 0:
        return None
    local = replace(program.local, at_once=max(steps, 1)) if divisible else program.local
    evaluation = replace(evaluation, at_once=max(loss, 1), tested_at_once=max(tested, 1))
    return job._replace(program=replace(program, local=local, evaluation=evaluation))
