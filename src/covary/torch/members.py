"""The members of a sweep of a PyTorch module: one run after the other, on the same workers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from covary import trees
from covary.algorithm import Algorithm
from covary.checks import whole
from covary.running.history import Log
from covary.running.job import grouped
from covary.running.members import Members
from covary.running.state import Accounts, Control, State
from covary.runs import machine
from covary.torch.crew import Crew
from covary.torch.prepare import Job
from covary.torch.rounds import Rounds, shapes_of


class RunsInTurn(Members):
    """A group at a time: a run for each of its seeds and points."""

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
        fit = _points_that_fit(job, len(seeds)) if at_once is None else whole("at_once", at_once, 1)
        super().__init__(job, algorithms, seeds, race, grouped(len(algorithms), fit), log, shapes_of)

    def begin(self, chosen: list[Algorithm]) -> None:
        job = self.job
        crew = Crew(job.way, job.examples, job.plan, job.layout)
        self.runs = [[self._run(crew, algorithm, s) for algorithm in chosen] for s in range(len(self.seeds))]

    def _run(self, crew: Crew, algorithm: Algorithm, s: int) -> Rounds:
        training = replace(self.job.training, seed=self.seeds[s])
        own = self.job._replace(algorithm=algorithm, training=training, starts=[self.job.starts[s]])
        return Rounds(own, None, crew=crew)

    def visit(self, r: int, cohort: np.ndarray) -> dict[str, Any]:
        records, _ = self._advanced(r)
        return {name: rows[0] for name, rows in records.items()}

    def advance_by(self, count: int) -> tuple[dict[str, Any], np.ndarray]:
        return self._advanced(self.done + count)

    def _advanced(self, until: int) -> tuple[dict[str, Any], np.ndarray]:
        """What the rounds after `self.done` measured, NaN where a member had ended, and the cohorts."""
        count, shape = until - self.done, (len(self.seeds), len(self.runs[0]))
        records: dict[str, np.ndarray] = {}
        cohorts = np.full((count, *shape, self.job.plan.cohort), -1)
        for at in np.ndindex(shape):
            run = self.runs[at[0]][at[1]]
            before = run.history.rounds  # which begins anew when a sweep is resumed
            run.advance(until, interrupted=lambda: False)
            for name, column in run.history.columns().items():
                rows = column[before:]
                if name == "cohort":
                    cohorts[: len(rows), *at] = rows
                elif name not in ("round", "bytes_up", "bytes_down"):
                    records.setdefault(name, np.full((count, *shape), np.nan))[: len(rows), *at] = rows
        return records, np.where(cohorts < 0, cohorts.max(), cohorts)  # of ended members: anyone of the others

    def control(self) -> Control:
        states = [[run.state.control for run in runs] for runs in self.runs]
        return Control(*(np.array([[getattr(c, name) for c in row] for row in states]) for name in Control._fields))

    def check(self) -> None:
        for run in self._all():
            run.control_error()

    def states_on_host(self) -> State:
        states = [run.state_on_host() for run in self._all()]
        shape = (len(self.seeds), len(self.runs[0]))
        return trees.map(lambda *leaves: np.stack(leaves).reshape(*shape, *leaves[0].shape), *states)

    def rows(self, ids: np.ndarray) -> list[np.ndarray]:
        fields = [run.rows(ids) for run in self._all()]
        shape = (len(ids), len(self.seeds), len(self.runs[0]))
        return [np.stack(rows, axis=1).reshape(*shape, *rows[0].shape[1:]) for rows in zip(*fields, strict=True)]

    def load(self, states: State, clients: Iterator[tuple[np.ndarray, list[np.ndarray]]]) -> None:
        for at in np.ndindex(len(self.seeds), len(self.runs[0])):
            own = trees.map(lambda leaf, at=at: leaf[at], states)
            accounts: Accounts = own.accounts
            self.runs[at[0]][at[1]].load(own._replace(accounts=accounts), iter(()))
        for ids, rows in clients:
            for at in np.ndindex(len(self.seeds), len(self.runs[0])):
                run = self.runs[at[0]][at[1]]
                run.load_rows(ids, [np.ascontiguousarray(field[:, *at]) for field in rows])

    def _all(self) -> list[Rounds]:
        return [run for runs in self.runs for run in runs]


def _points_that_fit(job: Job, n_seeds: int) -> int:
    """How many points keep their client states in memory together."""
    x = job.starts[0]
    fields = len(trees.leaves(job.algorithm.init_client(x)))
    member = x.nbytes * (fields * job.plan.n_clients + 4)
    return max(1, int(machine.host_memory() / 4 / (member * n_seeds)))
