"""The members of a sweep: every point of a grid with every seed, as one compiled program."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec

from covary._engine.devices import AXIS, agreed, lay_out, to_host
from covary._engine.prepare import Job, initial
from covary._engine.resident import rows_of
from covary._engine.rounds import compiled_sweep, compiled_warm_start
from covary.algorithm import Algorithm
from covary.checks import whole
from covary.running.history import Log
from covary.running.job import grouped
from covary.running.members import Members
from covary.running.state import Control, State
from covary.runs.machine import device_memory


class CompiledMembers(Members):
    """A group at a time, its points and seeds as axes of the states."""

    job: Job

    def __init__(
        self,
        job: Job,
        algorithms: list[Algorithm],
        seeds: Sequence[int],
        race: bool,
        at_once: int | None,
        log: Log | None,
    ):
        self.keys = np.stack([np.asarray(jax.random.key_data(jax.random.key(seed))) for seed in seeds])
        at_once = whole("at_once", points_that_fit(job, len(seeds)) if at_once is None else at_once, 1)
        groups = grouped(len(algorithms), at_once)
        super().__init__(job, algorithms, seeds, race, groups, log, jax.eval_shape, agreed)

    def begin(self, chosen: list[Algorithm]) -> None:
        dtype = self.job.starts[0].dtype
        self.numbers = {name: np.array([a.numbers[name] for a in chosen], dtype) for name in chosen[0].numbers}
        self.states = initial(chosen[0], self.job, points=len(chosen))

    def visit(self, r: int, cohort: np.ndarray) -> dict[str, Any]:
        warm = compiled_warm_start(self.job.program, sweep=True)
        self.states, record = warm(self.numbers, self.states, self.keys, r, cohort, self.job.world)
        return record

    def advance_by(self, count: int) -> tuple[dict[str, Any], np.ndarray]:
        given = (self.numbers, self.states, self.keys, self.done, self.done + count, self.rounds, self.job.world)
        self.states, records = compiled_sweep(self.job.program)(*given)
        return records, np.asarray(records["cohort"])[:count]

    def control(self) -> Control:
        return Control(*(np.asarray(field) for field in self.states.control))

    def check(self) -> None:
        states = to_host(self.states)
        for at in np.ndindex(states.control.round.shape):
            own = jax.tree.map(lambda leaf, at=at: leaf[at], states)
            self.watch.error(own, jax.tree.map(lambda leaf: leaf[: self.job.plan.n_clients], own.clients))

    def states_on_host(self) -> State:
        return to_host(self.states._replace(clients=None))

    def rows(self, ids: np.ndarray) -> list[np.ndarray]:
        # a field is (seeds, points, N, d); what is saved has the clients first
        return [np.moveaxis(rows_of(leaf, ids, 2), 2, 0) for leaf in jax.tree.leaves(self.states.clients)]

    def load(self, states: State, clients: Iterator[tuple[np.ndarray, list[np.ndarray]]]) -> None:
        fields, form = jax.tree.flatten(to_host(self.states.clients))
        fields = [np.array(everyone) for everyone in fields]
        for ids, rows in clients:
            for everyone, row in zip(fields, rows, strict=True):
                everyone[:, :, ids] = np.moveaxis(row, 0, 2)
        place, spec = self.job.program.place, PartitionSpec(None, None, AXIS)
        everyone = lay_out(place, jax.tree.unflatten(form, fields), spec)
        self.states = lay_out(place, states)._replace(clients=everyone)


def points_that_fit(job: Job, n_seeds: int) -> int:
    """How many points fit into memory together: a member keeps N client states and works on S models at a time."""
    x = job.starts[0]
    fields = len(jax.tree.leaves(job.algorithm.init_client(x)))
    member = x.nbytes * (2 * fields * job.plan.n_clients + 8 * job.plan.cohort + 8)
    return max(1, int(0.4 * device_memory() / (member * n_seeds)))
