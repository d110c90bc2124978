"""A running simulation: what runs with states on the devices and runs with a store have in common."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from covary._engine.checkpoint import SavedClients, state_arrays, state_from
from covary._engine.devices import agreed, to_host
from covary._engine.history import History, Log, traffic_by_kind
from covary._engine.invariant import Watch
from covary._engine.plan import Plan
from covary._engine.prepare import CHUNK, Job
from covary._engine.program import Program, State
from covary.runs.files import Damaged


class Simulation(ABC):
    """One run: its state, which `advance` moves forward by some rounds, and its history."""

    state: State
    seen: np.ndarray | None = None  # which clients have a state of their own, where that is known

    def __init__(self, job: Job, log: Log | None):
        self.job, self.algorithm, self.rounds = job, job.algorithm, job.training.rounds
        self.key = np.asarray(jax.random.key_data(jax.random.key(job.training.seed)))
        self.history = History(log)
        self.watch, self.saved = Watch(job.algorithm, job.p, job.starts[0].size), 0  # the round of the last checkpoint
        self.traffic = traffic_by_kind(job.algorithm, job.plan.steps_on_wire, job.starts[0])

    @property
    def done(self) -> int:
        """Rounds done."""
        return int(self.state.control.round)

    @property
    def ended(self) -> bool:
        """Whether the run is at its end, at its target, or diverged."""
        return self.done >= self.rounds or bool(self.state.control.reached) or bool(self.state.control.diverged)

    @abstractmethod
    def advance(self, until: int, interrupted: Callable[[], bool]) -> None:
        """Run until that round, the end, or an interruption."""

    @abstractmethod
    def clients(self) -> Any:
        """The states of all clients, field by field."""

    def control_error(self, clients: Any = None) -> float:
        """‖c - sum p_i c_i‖ over all clients; a difference beyond rounding stops the run."""
        return self.watch.error(self.state, self.clients() if clients is None else clients, self.seen)

    def state_on_host(self) -> State:
        """The state without the clients', in NumPy."""
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

    # For checkpoints

    def arrays(self) -> dict[str, np.ndarray]:
        """All but the clients' states, by name."""
        columns = enumerate(self.history.columns().items())  # numbered, because a file does not keep their order
        return state_arrays(self.state_on_host()) | {f"history.{number:03d}.{name}": v for number, (name, v) in columns}

    def changes(self) -> tuple[int, np.ndarray, bool]:
        """The number of the next checkpoint, the clients that changed since the last one, and whether all did."""
        changed, self.saved = self.history.participants(self.saved), self.done
        return self.done, changed, False

    @abstractmethod
    def rows(self, ids: np.ndarray) -> list[np.ndarray]:
        """The states of some clients, field by field."""

    @abstractmethod
    def load(self, state: State, clients: Iterator[tuple[np.ndarray, list[np.ndarray]]]) -> None:
        """Replace the state by a saved one."""

    def restore(self, arrays: dict[str, np.ndarray], saved_clients: SavedClients) -> None:
        """Resume from a checkpoint."""
        columns = {name[12:]: arrays[name] for name in sorted(arrays) if name.startswith("history.")}
        control = ("control_error", "control_change") if self.algorithm.invariant is not None else ()
        self.history.restore(columns, self.job.plan.cohort, (*self.job.program.evaluation.names, *control))
        self.load(state_from(self.state_on_host(), arrays), saved_clients(self.rows(np.arange(1))))
        self.saved = self.done
        if not self.done == self.history.rounds <= self.rounds:
            raise Damaged("A checkpoint's round number does not match its history. Start a run in another folder.")


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


class Pace:
    """The number of rounds in one call: as many as take about half a second. Progress and interruptions are then
    handled soon, and the host's overhead is small."""

    def __init__(self, most: int = CHUNK):
        self.most, self.asked, self.since = most, 0, 0.0
        self.calls = 0

    def rounds(self) -> int:
        """The number for the next call, which starts now."""
        now = time.perf_counter()
        if self.calls < 2:  # the first compiles, the second can be timed
            self.asked = 1
        else:
            self.asked = agreed(int(np.clip(0.5 * self.asked / (now - self.since), 1, self.most)))
        self.calls, self.since = self.calls + 1, now
        return self.asked


def one_row(record: dict[str, Any], cohort: np.ndarray, plan: Plan) -> dict[str, np.ndarray]:
    """The record of a single round as rows, its cohort padded with -1."""
    rows = {name: np.asarray(value)[None] for name, value in record.items() if name != "cohort"}
    return rows | {"cohort": np.pad(cohort, (0, plan.cohort - len(cohort)), constant_values=-1)[None]}
