"""The members of a sweep, whichever runtime computes them: their curves, their race and their checkpoints."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from covary.algorithm import Algorithm
from covary.running.checkpoint import SavedClients, state_arrays, state_from
from covary.running.history import Log, Shapes, traffic_by_kind
from covary.running.job import Job
from covary.running.simulation import Pace
from covary.running.state import Control, State
from covary.running.watch import Watch
from covary.runs.files import Damaged
from covary.targets import direction_of

RACE = 25  # rounds between two checks of a race: fixed, so that its result does not depend on the machine's speed


class Members(ABC):
    """The members of a running sweep: groups of points one after the other, all seeds of a group together.

    Args:
        job: what is to be run, with a start for each seed.
        algorithms: of each point.
        seeds: of each point's members.
        race: whether a group ends when no running point can be the best.
        groups: the points that are run together.
        log: the user's function of each chunk of rounds.
        shapes: how the shapes of messages are found.
        agreed: makes several hosts decide alike.
    """

    def __init__(
        self,
        job: Job,
        algorithms: list[Algorithm],
        seeds: Sequence[int],
        race: bool,
        groups: list[list[int]],
        log: Log | None,
        shapes: Shapes,
        agreed: Callable[[int], int] = int,
    ):
        self.job, self.algorithms, self.seeds, self.race, self.groups = job, algorithms, seeds, race, groups
        self.rounds = job.training.rounds
        self.log, self.saved_group = log, 0  # the group of the last checkpoint
        shape = (len(algorithms), len(seeds))
        self.curves: dict[str, np.ndarray] = {}  # (points, seeds, rounds), NaN where a member had ended
        self.done_by = np.zeros(shape, int)  # rounds of each member
        self.reached, self.diverged = np.zeros(shape, bool), np.zeros(shape, bool)
        self.group, self.pace = 0, Pace(agreed)
        self.watch = Watch(algorithms[0], job.p, job.starts[0].size, agreed)
        self.traffic = traffic_by_kind(algorithms[0], job.plan.steps_on_wire, job.starts[0], shapes)
        self._begin()

    # What a runtime does for a group, whose states have the axes (seeds, points)

    @abstractmethod
    def begin(self, chosen: list[Algorithm]) -> None:
        """Prepare the first round of a group: one algorithm for each of its points."""

    @abstractmethod
    def visit(self, r: int, cohort: np.ndarray) -> dict[str, Any]:
        """Round r, one of the warm start. Returns what it measured: (seeds, points) for each name."""

    @abstractmethod
    def advance_by(self, count: int) -> tuple[dict[str, Any], np.ndarray]:
        """So many rounds, of members that have not ended. Returns what they measured, (rounds, seeds, points) for each
        name, and the cohorts."""

    @abstractmethod
    def control(self) -> Control:
        """How far the members are, in NumPy."""

    @abstractmethod
    def check(self) -> None:
        """Check that c is the mean of c_i for every member."""

    @abstractmethod
    def states_on_host(self) -> State:
        """The states without the clients', in NumPy."""

    @abstractmethod
    def rows(self, ids: np.ndarray) -> list[np.ndarray]:
        """The states of some clients of all members, field by field: (clients, seeds, points, ...)."""

    @abstractmethod
    def load(self, states: State, clients: Iterator[tuple[np.ndarray, list[np.ndarray]]]) -> None:
        """Replace the group's states by saved ones."""

    # What is the same for all

    def _begin(self) -> None:
        self.begin([self.algorithms[p] for p in self.groups[self.group]])
        self.done, self.changed = 0, np.empty(0, int)

    @property
    def ended(self) -> bool:
        return self.group == len(self.groups)

    def advance(self, until: int, interrupted: Callable[[], bool]) -> None:
        """Advance the group to a round or to its end. At its end, the next group starts."""
        while not interrupted():
            before = self.control()
            alive = ~(before.reached | before.diverged)
            if self.done < len(self.job.visits):
                cohort = self.job.visits[self.done]
                record = self.visit(self.done + 1, cohort)
                self._keep({name: np.asarray(value)[None] for name, value in record.items()}, 1, alive, cohort)
            else:
                count = min(self.pace.rounds(), self.rounds - self.done, RACE - self.done % RACE, until - self.done)
                records, cohorts = self.advance_by(count)
                self._keep(records, count, alive, cohorts)
                if self.watch.due:
                    self.check()
                control = self.control()
                running = ~(control.reached | control.diverged)
                if self.log is not None:
                    self.log(self.done, {"running": float(running.sum()), **self._best_so_far()})
                decided = self.race and self.done % RACE == 0 and _decided(control, self._best_before())
                if self.done == self.rounds or not running.any() or decided:
                    self.group += 1
                    if not self.ended:
                        self._begin()
                    return
            if self.done >= until:
                return

    def _best_so_far(self) -> dict[str, float]:
        """The best value so far of every metric in the current group."""
        best = {}
        for name in self.job.names:
            seen = self.curves[name][self.groups[self.group]]
            seen = seen[np.isfinite(seen)]
            if seen.size:
                best[name] = float(seen.max() if direction_of(name) > 0 else seen.min())
        return best

    def _best_before(self) -> float:
        """The mean rounds of the best point of the earlier groups."""
        before = [p for group in self.groups[: self.group] for p in group]
        return float(np.where(self.reached, self.done_by, np.inf)[before].mean(axis=1).min(initial=np.inf))

    def _keep(self, records: dict[str, Any], count: int, alive: np.ndarray, cohorts: np.ndarray) -> None:
        """Curves as (points, seeds, rounds), NaN for the rounds of members that had ended."""
        group, control = self.groups[self.group], self.control()
        numbered = self.done + 1 + np.arange(count)
        went_on = numbered[:, None, None] <= np.where(alive, control.round, self.done)
        sent = self.traffic[self.done < len(self.job.visits)]
        for name, each in zip(("bytes_down", "bytes_up"), sent, strict=True):
            records = {**records, name: np.full((count, 1, 1), each * np.shape(cohorts)[-1])}
        for name, values in records.items():
            if name != "cohort":
                shape = (*self.done_by.shape, self.rounds)
                curve = self.curves.setdefault(name, np.full(shape, np.nan))
                seen = np.where(went_on, np.array(values)[:count], np.nan)  # (rounds, seeds, points)
                curve[group, :, self.done : self.done + count] = seen.transpose(2, 1, 0)
        self.done += count
        self.changed = np.union1d(self.changed, cohorts)
        for mine, theirs in (("done_by", "round"), ("reached", "reached"), ("diverged", "diverged")):
            getattr(self, mine)[group] = getattr(control, theirs).T

    # For checkpoints

    def arrays(self) -> dict[str, np.ndarray]:
        """All but the clients' states."""
        mine = {name: getattr(self, name) for name in ("done_by", "reached", "diverged")}
        mine |= {"group": np.asarray(self.group), "done": np.asarray(self.done)}
        mine |= {f"curve.{name}": curve for name, curve in self.curves.items()}
        return mine if self.ended else mine | state_arrays(self.states_on_host())

    def changes(self) -> tuple[int, np.ndarray, bool]:
        """The number of the next checkpoint, the clients that changed since the last one, and whether all did."""
        changed = np.empty(0, int) if self.ended else self.changed
        all_changed, self.saved_group, self.changed = self.group != self.saved_group, self.group, np.empty(0, int)
        return self.group * self.rounds + self.done * (not self.ended), changed, all_changed

    def restore(self, arrays: dict[str, np.ndarray], saved_clients: SavedClients) -> None:
        """Restore a checkpoint."""
        shape, empty = self.done_by.shape, np.empty(0, int)
        curves = {name[6:]: np.array(value) for name, value in arrays.items() if name.startswith("curve.")}
        fits = all(arrays.get(name, empty).shape == shape for name in ("done_by", "reached", "diverged"))
        fits = fits and all(curve.shape == (*shape, self.rounds) for curve in curves.values())
        fits = fits and all(arrays.get(name, empty).shape == () for name in ("group", "done"))
        if not fits or not 0 <= arrays["group"] <= len(self.groups) or not 0 <= arrays["done"] <= self.rounds:
            raise Damaged("A checkpoint has another form than this sweep's. Start a new sweep in another folder.")
        for name in ("done_by", "reached", "diverged"):
            setattr(self, name, np.array(arrays[name]))
        self.curves = curves
        self.group = self.saved_group = int(arrays["group"])
        if self.ended:
            return
        self._begin()
        self.done = int(arrays["done"])
        clients = saved_clients(self.rows(np.arange(1)))
        self.load(state_from(self.states_on_host(), arrays), clients)


def _decided(control: Control, to_beat: float) -> bool:
    """Whether no point that is still running can have fewer mean rounds to the target than the best that has ended."""
    reached, diverged, at = control.reached, control.diverged, control.round
    least = np.where(reached, at, np.where(diverged, np.inf, at + 1)).mean(axis=0)  # a bound from below, per point
    complete = reached.all(axis=0)
    best = min(to_beat, least[complete].min() if complete.any() else np.inf)
    return bool((least[~complete] >= best).all())
