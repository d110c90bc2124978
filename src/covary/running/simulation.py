"""A running simulation: what the runs of all runtimes have in common."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from covary.running.checkpoint import SavedClients, state_arrays, state_from
from covary.running.history import History, Log, Shapes, traffic_by_kind
from covary.running.job import Job
from covary.running.plan import Plan
from covary.running.state import State
from covary.running.watch import Watch
from covary.runs.files import Damaged

CHUNK = 100  # the most rounds between two looks at the clock


class Simulation(ABC):
    """One run: its state, which `advance` moves forward by some rounds, and its history.

    Args:
        job: what is to be run.
        log: the user's function of each round.
        shapes: how the shapes of messages are found.
        agreed: makes several hosts decide alike.
    """

    state: State
    seen: np.ndarray | None = None  # which clients have a state of their own, where that is known

    def __init__(self, job: Job, log: Log | None, shapes: Shapes, agreed: Callable[[int], int] = int):
        self.job, self.algorithm, self.rounds = job, job.algorithm, job.training.rounds
        self.history = History(log)
        self.watch = Watch(job.algorithm, job.p, job.starts[0].size, agreed)
        self.saved = 0  # the round of the last checkpoint
        self.traffic = traffic_by_kind(job.algorithm, job.plan.steps_on_wire, job.starts[0], shapes)

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
        """The states of all clients, field by field, in NumPy or read from NumPy when they are indexed."""

    @abstractmethod
    def state_on_host(self) -> State:
        """The state without the clients', in NumPy."""

    def control_error(self, clients: Any = None) -> float:
        """‖c - sum p_i c_i‖ over all clients; a difference beyond rounding stops the run."""
        return self.watch.error(self.state, self.clients() if clients is None else clients, self.seen)

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
        self.history.restore(columns, self.job.plan.cohort, (*self.job.names, *control))
        self.load(state_from(self.state_on_host(), arrays), saved_clients(self.rows(np.arange(1))))
        self.saved = self.done
        if not self.done == self.history.rounds <= self.rounds:
            raise Damaged("A checkpoint's round number does not match its history. Start a run in another folder.")


class Pace:
    """The number of rounds in one call: as many as take about half a second. Progress and interruptions are then
    handled soon, and the host's overhead is small."""

    def __init__(self, agreed: Callable[[int], int] = int):
        self.agreed, self.asked, self.since = agreed, 0, 0.0
        self.calls = 0

    def rounds(self) -> int:
        """The number for the next call, which starts now."""
        now = time.perf_counter()
        if self.calls < 2:  # the first compiles, the second can be timed
            self.asked = 1
        else:
            self.asked = self.agreed(int(np.clip(0.5 * self.asked / (now - self.since), 1, CHUNK)))
        self.calls, self.since = self.calls + 1, now
        return self.asked


def one_row(record: dict[str, Any], cohort: np.ndarray, plan: Plan) -> dict[str, np.ndarray]:
    """The record of a single round as rows, its cohort padded with -1."""
    rows = {name: np.asarray(value)[None] for name, value in record.items() if name != "cohort"}
    return rows | {"cohort": np.pad(cohort, (0, plan.cohort - len(cohort)), constant_values=-1)[None]}
