"""A run with client states in a store, or with streamed data: one compiled round after the other."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from covary._engine.devices import to_host
from covary._engine.prepare import Job, initial
from covary._engine.rounds import due
from covary._engine.simulation import Compiled
from covary._engine.stream import Span, Stream, streamed_loss
from covary.data.federated import StreamedData
from covary.running.buffers import buffers_of
from covary.running.history import Log
from covary.running.simulation import one_row
from covary.running.state import State
from covary.running.store import DiskStore, HostStore


class Streamed(Compiled):
    def __init__(self, job: Job, log: Log | None, owner: str | None = None):
        super().__init__(job, log)
        x = job.starts[0]
        row = jax.tree.map(lambda leaf: np.asarray(leaf, x.dtype), self.algorithm.init_client(x))
        if job.store == "host":
            self.store: Any = HostStore(row, job.plan.n_clients)
        else:
            self.store = DiskStore(row, job.plan.n_clients, None if job.store == "disk" else Path(job.store), owner)
        self.state = initial(self.algorithm, job)._replace(clients=None)
        self.form = jax.tree.structure(row)

    def advance(self, until: int, interrupted: Callable[[], bool]) -> None:
        job, program = self.job, self.job.program
        by_host = ("loss", "average_loss") if program.average else ("loss",)
        unmeasured = dict.fromkeys(by_host, np.nan) if job.passes else {}
        stream = Stream(program, job.world, job.problem.data, self.store)
        span = Span(self.done + 1, until, self.rounds, interrupted)
        going = stream.rounds(self.algorithm, self.state, self.key, job.visits, span, self._pass_over_data)
        with contextlib.closing(going) as handed_out:
            for state, record, cohort, warm in handed_out:
                state = to_host(state._replace(clients=None))
                row = one_row(unmeasured | record, cohort, job.plan)
                judged_here = job.passes and due(program, self.history.rounds + 1, self.rounds)
                good = not judged_here or bool(np.isfinite(row["loss"][0]))
                count = int(state.control.round) - self.history.rounds if good else 0
                self.history.add(row, count, *self.traffic[warm])
                if not good:
                    self._end(diverged=np.asarray(True))
                    break
                self.state = state
                judged = job.passes and not warm and not state.control.diverged
                if judged and job.target is not None and job.target.met(row["loss"][0]):
                    self._end(reached=np.asarray(True))
                if self.state.control.reached or self.state.control.diverged:
                    break
        self._save_places()
        if self.watch.due:
            self.control_error()

    def _pass_over_data(self, r: int, state: State) -> dict[str, Any]:
        """What the host measures itself: the loss of streamed data, if it is needed."""
        data = self.job.problem.data
        if not isinstance(data, StreamedData) or not self.job.passes or not due(self.job.program, r, self.rounds):
            return {}
        program, held = self.job.program, (self.job.world.frozen, buffers_of(state.server))
        at_once = program.evaluation.at_once
        points = {"loss": state.server[0]}
        if self.job.program.average:
            points["average_loss"] = state.accounts.average
        return {name: streamed_loss(program.local, data, self.job.p, x, held, at_once) for name, x in points.items()}

    def _end(self, **how: np.ndarray) -> None:
        self.state = self.state._replace(control=self.state.control._replace(**how))

    def _save_places(self) -> None:
        if isinstance(self.store, DiskStore):
            self.store.save_places()
            self.seen = self.store.seen

    def clients(self) -> Any:
        return self.store.clients

    def rows(self, ids: np.ndarray) -> list[np.ndarray]:
        return jax.tree.leaves(self.store.read(ids))

    def load(self, state: State, clients: Iterator[tuple[np.ndarray, list[np.ndarray]]]) -> None:
        for ids, rows in clients:
            self.store.write(ids, jax.tree.unflatten(self.form, rows))
        self.state = state
        self._save_places()
