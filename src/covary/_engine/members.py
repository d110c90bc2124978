"""The members of a sweep: every point of a grid with every seed, as one compiled program."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec

from covary._engine.checkpoint import SavedClients, state_arrays, state_from
from covary._engine.devices import AXIS, lay_out, to_host
from covary._engine.history import Log, traffic_by_kind
from covary._engine.invariant import Watch
from covary._engine.prepare import Job, initial
from covary._engine.program import State
from covary._engine.resident import rows_of
from covary._engine.rounds import compiled_sweep, compiled_warm_start
from covary._engine.simulation import Pace
from covary.algorithm import Algorithm
from covary.checks import whole
from covary.runs.files import Damaged
from covary.runs.machine import device_memory
from covary.targets import direction_of

RACE = 25  # rounds between two checks of a race: fixed, so that its result does not depend on the machine's speed


class Members:
    """The members of a running sweep: groups of points one after the other, all seeds of a group at once."""

    def __init__(
        self,
        job: Job,
        algorithms: list[Algorithm],
        seeds: Sequence[int],
        race: bool,
        groups: list[list[int]],
        log: Log | None,
    ):
        self.job, self.algorithms, self.race, self.groups = job, algorithms, race, groups
        self.rounds = job.training.rounds
        self.log, self.saved_group = log, 0  # the group of the last checkpoint
        self.keys = np.stack([np.asarray(jax.random.key_data(jax.random.key(seed))) for seed in seeds])
        shape = (len(algorithms), len(seeds))
        self.curves: dict[str, np.ndarray] = {}  # (points, seeds, rounds), NaN where a member had ended
        self.done_by = np.zeros(shape, int)  # rounds of each member
        self.reached, self.diverged = np.zeros(shape, bool), np.zeros(shape, bool)
        self.group, self.pace = 0, Pace()
        self.watch = Watch(algorithms[0], job.p, job.starts[0].size)
        self.traffic = traffic_by_kind(algorithms[0], job.plan.steps_on_wire, job.starts[0])
        self._begin()

    def _begin(self) -> None:
        """Prepare the first round of a group."""
        chosen = [self.algorithms[p] for p in self.groups[self.group]]
        x = self.job.starts[0]
        self.numbers = {name: np.array([a.numbers[name] for a in chosen], x.dtype) for name in chosen[0].numbers}
        self.states = initial(chosen[0], self.job, points=len(chosen))
        self.done, self.changed = 0, np.empty(0, int)

    @property
    def ended(self) -> bool:
        return self.group == len(self.groups)

    def advance(self, until: int, interrupted: Callable[[], bool]) -> None:
        """Advance the group to a round or to its end. At its end, the next group starts."""
        job, program = self.job, self.job.program
        while not interrupted():
            alive = ~(np.asarray(self.states.control.reached) | np.asarray(self.states.control.diverged))
            if self.done < len(job.visits):
                cohort, warm = job.visits[self.done], compiled_warm_start(program, sweep=True)
                given = (self.numbers, self.states, self.keys, self.done + 1, cohort, job.world)
                self.states, record = warm(*given)
                self._keep({name: np.asarray(value)[None] for name, value in record.items()}, 1, alive, cohort)
            else:
                count = min(self.pace.rounds(), self.rounds - self.done, RACE - self.done % RACE, until - self.done)
                given = (self.numbers, self.states, self.keys, self.done, self.done + count, self.rounds, job.world)
                self.states, records = compiled_sweep(program)(*given)
                self._keep(records, count, alive, np.asarray(records["cohort"])[:count])
                if self.watch.due:
                    self._check()
                running = ~(np.asarray(self.states.control.reached) | np.asarray(self.states.control.diverged))
                if self.log is not None:
                    self.log(self.done, {"running": float(running.sum()), **self._best_so_far()})
                decided = self.race and self.done % RACE == 0 and _decided(self.states, self._best_before())
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
        for name in self.job.program.evaluation.names:
            seen = self.curves[name][self.groups[self.group]]
            seen = seen[np.isfinite(seen)]
            if seen.size:
                best[name] = float(seen.max() if direction_of(name) > 0 else seen.min())
        return best

    def arrays(self) -> dict[str, np.ndarray]:
        """All but the clients' states, for a checkpoint."""
        mine = {name: getattr(self, name) for name in ("done_by", "reached", "diverged")}
        mine |= {"group": np.asarray(self.group), "done": np.asarray(self.done)}
        mine |= {f"curve.{name}": curve for name, curve in self.curves.items()}
        return mine if self.ended else mine | state_arrays(to_host(self.states._replace(clients=None)))

    def rows(self, ids: np.ndarray) -> list[np.ndarray]:
        """The states of some clients, field by field, of all members."""
        # a field is (seeds, points, N, d); what is saved has the clients first
        return [np.moveaxis(rows_of(leaf, ids, 2), 2, 0) for leaf in jax.tree.leaves(self.states.clients)]

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
        fields, form = jax.tree.flatten(to_host(self.states.clients))
        fields = [np.array(everyone) for everyone in fields]
        for ids, rows in clients:
            for everyone, row in zip(fields, rows, strict=True):
                everyone[:, :, ids] = np.moveaxis(row, 0, 2)
        place, spec = self.job.program.place, PartitionSpec(None, None, AXIS)
        small = state_from(to_host(self.states._replace(clients=None)), arrays)
        self.states = lay_out(place, small)._replace(clients=lay_out(place, jax.tree.unflatten(form, fields), spec))

    def _check(self) -> None:
        """Check that c is the mean of c_i for every member."""
        states = to_host(self.states)
        for at in np.ndindex(states.control.round.shape):
            own = jax.tree.map(lambda leaf, at=at: leaf[at], states)
            self.watch.error(own, jax.tree.map(lambda leaf: leaf[: self.job.plan.n_clients], own.clients))

    def _best_before(self) -> float:
        """The mean rounds of the best point of the earlier groups."""
        before = [p for group in self.groups[: self.group] for p in group]
        return float(np.where(self.reached, self.done_by, np.inf)[before].mean(axis=1).min(initial=np.inf))

    def _keep(self, records: dict[str, Any], count: int, alive: np.ndarray, cohorts: np.ndarray) -> None:
        """Curves as (points, seeds, rounds), NaN for the rounds of members that had ended."""
        group = self.groups[self.group]
        numbered = self.done + 1 + np.arange(count)
        went_on = numbered[:, None, None] <= np.where(alive, np.asarray(self.states.control.round), self.done)
        sent = self.traffic[self.done < len(self.job.visits)]
        for name, each in zip(("bytes_down", "bytes_up"), sent, strict=True):
            records = {**records, name: np.full((count, 1, 1), each * np.shape(cohorts)[-1])}
        for name, values in records.items():
            if name != "cohort":
                shape = (len(self.algorithms), len(self.keys), self.rounds)
                curve = self.curves.setdefault(name, np.full(shape, np.nan))
                seen = np.where(went_on, np.array(values)[:count], np.nan)  # (rounds, seeds, points)
                curve[group, :, self.done : self.done + count] = seen.transpose(2, 1, 0)
        self.done += count
        self.changed = np.union1d(self.changed, cohorts)
        for mine, theirs in (("done_by", "round"), ("reached", "reached"), ("diverged", "diverged")):
            getattr(self, mine)[group] = np.asarray(getattr(self.states.control, theirs)).T


def _decided(states: State, to_beat: float) -> bool:
    """Whether no point that is still running can have fewer mean rounds to the target than the best that has ended."""
    reached, diverged, at = (
        np.asarray(v) for v in (states.control.reached, states.control.diverged, states.control.round)
    )
    least = np.where(reached, at, np.where(diverged, np.inf, at + 1)).mean(axis=0)  # a bound from below, per point
    complete = reached.all(axis=0)
    best = min(to_beat, least[complete].min() if complete.any() else np.inf)
    return bool((least[~complete] >= best).all())


def grouped(n_points: int, n_seeds: int, job: Job, algorithm: Algorithm, at_once: int | None) -> list[list[int]]:
    """The points in groups that fit into memory: a member keeps N client states and works on S models at a time."""
    if at_once is None:
        x = job.starts[0]
        fields = len(jax.tree.leaves(algorithm.init_client(x)))
        member = x.nbytes * (2 * fields * job.plan.n_clients + 8 * job.plan.cohort + 8)
        at_once = max(1, int(0.4 * device_memory() / (member * n_seeds)))
    n_groups = -(-n_points // whole("at_once", at_once, 1))
    return [part.tolist() for part in np.array_split(np.arange(n_points), n_groups)]
