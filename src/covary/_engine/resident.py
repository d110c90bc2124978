"""A run with all client states on the devices, in compiled chunks of rounds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec

from covary._engine.devices import AXIS, agreed, lay_out, to_host
from covary._engine.prepare import Job, initial
from covary._engine.rounds import compiled, compiled_warm_start
from covary._engine.simulation import Compiled
from covary.running.history import Log
from covary.running.simulation import Pace, one_row
from covary.running.state import State


class Resident(Compiled):
    def __init__(self, job: Job, log: Log | None):
        super().__init__(job, log)
        self.state = initial(self.algorithm, job)
        self.pace = Pace(agreed)

    def advance(self, until: int, interrupted: Callable[[], bool]) -> None:
        job, numbers = self.job, dict(self.algorithm.numbers)
        while self.done < until and not self.ended and not interrupted():
            before = self.done
            if before < len(job.visits):
                cohort = job.visits[before]
                given = (numbers, self.state, self.key, before + 1, cohort, job.world)
                self.state, record = self.in_memory(lambda program, given=given: compiled_warm_start(program)(*given))
                self.history.add(one_row(record, cohort, job.plan), self.done - before, *self.traffic[True])
                continue
            end = min(until, before + self.pace.rounds())
            given = (numbers, self.state, self.key, end, self.rounds, job.world)
            self.state, rows = self.in_memory(lambda program, given=given: compiled(program)(*given))
            rows, after = jax.device_get((rows, self.state.control.round))  # together, because each copy blocks
            self.history.add(rows, int(after) - before, *self.traffic[False])
            if self.watch.due:
                self.control_error()

    def clients(self) -> Any:
        return jax.tree.map(lambda leaf: leaf[: self.job.plan.n_clients], to_host(self.state.clients))

    def rows(self, ids: np.ndarray) -> list[np.ndarray]:
        return [rows_of(leaf, ids, 0) for leaf in jax.tree.leaves(self.state.clients)]

    def load(self, state: State, clients: Iterator[tuple[np.ndarray, list[np.ndarray]]]) -> None:
        fields, form = jax.tree.flatten(to_host(self.state.clients))
        fields = [np.array(field) for field in fields]
        for ids, rows in clients:
            for field, row in zip(fields, rows, strict=True):
                field[ids] = row
        place = self.job.program.place
        self.state = lay_out(place, state._replace(clients=None))._replace(
            clients=lay_out(place, jax.tree.unflatten(form, fields), PartitionSpec(AXIS))
        )


def rows_of(array: Any, ids: np.ndarray, axis: int) -> np.ndarray:
    """Some rows of an array on the devices. Their number is rounded up to a power of two, because JAX compiles a
    program for each number of rows."""
    fetched = np.pad(ids, (0, (1 << (len(ids) - 1).bit_length()) - len(ids)), mode="edge")
    return np.asarray(jax.device_get(array.take(fetched, axis=axis))).take(np.arange(len(ids)), axis=axis)
