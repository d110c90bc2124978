"""`sweep`: a whole grid of step-sizes and seeds as one compiled program."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec

from covary._engine.checkpoint import description, drive, opened, sizes, state_arrays, state_from
from covary._engine.devices import AXIS, lay_out, memory, to_host
from covary._engine.engine import Pace, SavedClients, Watch, rows_of
from covary._engine.job import Job, direction, initial, prepare, traffic
from covary._engine.program import State
from covary._engine.rounds import compiled_sweep, compiled_warm_start
from covary.algorithm import Algorithm
from covary.checks import flag, whole
from covary.errors import CovaryError, refused
from covary.problem import Problem
from covary.runs.files import Damaged
from covary.trackers import Tracker

LAP = 25  # rounds between two looks at a race: fixed, so that its result does not depend on the machine's speed
RATIO = 10**0.5  # between neighbouring step-sizes


@dataclass(frozen=True)
class Sweep:
    """What came out of a sweep."""

    points: list[dict[str, float]]  # the grid, every combination of its values
    seeds: list[int]
    table: list[dict[str, Any]] = field(repr=False)  # one row for each point and seed
    curves: dict[str, np.ndarray] = field(repr=False)  # metric -> (points, seeds, rounds); NaN where not measured
    metrics: tuple[str, ...]  # those of the curves that measure quality: the metrics, or "loss" where there are none
    target: tuple[str, float] | tuple[str, str, float] | None = None

    def mean_rounds(self) -> np.ndarray:
        """The mean over seeds of the rounds to the target, for each point; infinite where a seed has not reached it."""
        reached = [np.inf if row["reached"] is None else row["reached"] for row in self.table]
        return np.mean(np.reshape(reached, (len(self.points), len(self.seeds))), axis=1)

    def _way(self, metric: str) -> float:
        """+1 or -1: the way a metric is to go, as the target says or else by its name."""
        if self.target and len(self.target) == 3 and self.target[0] == metric:
            return 1.0 if self.target[1] == ">=" else -1.0
        return direction(metric)

    def best(self, metric: str | None = None) -> int:
        """The index of the best point: fewest mean rounds to the target, or without one the best mean of a metric.

        Ties, and points none of which reached the target, are decided by the metric (the target's own, or the first).
        A point that diverged with some seed comes after all that did not.

        >>> import covary as cv
        >>> grid, goal = {"eta_l": [0.1, 0.3]}, ("loss", 1e-6)
        >>> tried = cv.sweep(cv.sgd, cv.lower_bound(G=1), grid, rounds=50, target=goal, x0=1.0)
        >>> tried.points[tried.best()], tried.mean_rounds().tolist()
        ({'eta_l': 0.3}, [inf, 19.0])
        """
        metric = metric or (self.target[0] if self.target else self.metrics[0])
        if metric not in self.curves:
            raise refused("metric", f"one of {', '.join(self.curves)}", repr(metric), "See sweep.curves.")
        sign = self._way(metric)
        seen = np.where(np.isnan(self.curves[metric]), -np.inf, sign * self.curves[metric]).max(axis=2).mean(axis=1)
        rounds = self.mean_rounds() if self.target else np.zeros(len(self.points))
        endings = np.reshape([row["outcome"] for row in self.table], (len(self.points), len(self.seeds)))
        diverged = np.any(endings == "diverged", axis=1)
        return min(range(len(self.points)), key=lambda p: (diverged[p], rounds[p], -seen[p]))


def half_decade(value: float) -> float:
    """The nearest of ..., 0.0316, 0.1, 0.316, 1, 3.16, ..."""
    return float(f"{10 ** (round(2 * np.log10(value)) / 2):.3g}")


def sweep(
    factory: Callable[..., Algorithm],
    problem: Problem,
    grid: Mapping[str, Sequence[float]],
    seeds: Sequence[int] = (0,),
    *,
    rounds: int,
    clients_per_round: int | float | None = None,
    local_steps: int | None = None,
    local_epochs: int | None = None,
    batch_size: int | float | None = None,
    x0: Any = None,
    warm_start: bool = False,
    weights: str = "uniform",
    target: tuple[str, float] | tuple[str, str, float] | None = None,
    eval_every: int = 1,
    race: bool = False,
    measure_loss: bool = False,
    at_once: int | None = None,
    log: Callable[[int, dict[str, float]], None] | None = None,
    devices: int | None = None,
    width: int | None = None,
    precision: str | None = None,
    checkpoint: str | Path | None = None,
    checkpoint_every: int = 100,
) -> Sweep:
    """Run an algorithm at every point of a grid, with every seed, as one compiled program.

    All points share cohorts and batches, seed by seed (common random numbers): they differ by their numbers alone, and
    each member is what `simulate` gives for its numbers and seed, up to rounding (which a step-size at the edge of
    stability can amplify). A member that has reached the target or diverged stops, and does not disturb the others.

    Args:
        factory: `covary.scaffold` and its like, or a function that calls one: `lambda eta_l: cv.scaffold(eta_l, 1.5)`.
        grid: the values to try for each argument of the factory; every combination is a point.
        seeds: one run for each.
        rounds, clients_per_round, local_steps, local_epochs, batch_size, x0, warm_start, weights, eval_every, devices,
            width, precision: as in `simulate`.
        target: as in `simulate`, for each member.
        race: also stop as soon as it is certain which point has the fewest mean rounds to the target. The members
            that were still running are marked "outpaced".
        measure_loss: also measure the training loss, which is else done only where it is the target or there is no
            other metric; without it, a member has diverged once its model is no longer finite.
        at_once: how many points to run at a time; by default as many as fit into memory.
        log: called as `log(round, values)` after each chunk of rounds, with how many members are still `running`
            and the best value so far of every metric.
        checkpoint, checkpoint_every: as in `simulate`, for all members together.

    Returns:
        A `Sweep`: its `table` has one row for each point and seed (the point's numbers, `seed`, `rounds` done,
        `outcome`, `reached`, `diverged`, and the last and best value of every metric), its `curves` every value of
        the columns that `simulate` has in its history, but for the cohorts.

    >>> import covary as cv
    >>> (x, y), test = cv.datasets.digits()
    >>> data = cv.partition.by_similarity(x, y, n_clients=20, similarity=0.0)
    >>> problem = cv.supervised(cv.models.logistic_regression(64, 10), data, test)
    >>> tried = cv.sweep(cv.scaffold, problem, {"eta_l": [0.03, 1.0]}, rounds=10, seeds=[0, 1], local_steps=5)
    >>> tried.points[tried.best()], len(tried.table), tried.curves["accuracy"].shape
    ({'eta_l': 1.0}, 4, (2, 2, 10))
    """
    points, algorithms = _points(factory, grid)
    if isinstance(log, Tracker):
        raise CovaryError("A tracker follows one run, and a sweep is many. Log sweep.table when it is done.")
    if np.ndim(seeds) != 1 or np.asarray(seeds).dtype.kind not in "iu":
        raise refused("seeds", "a list of different whole numbers", seeds, "Try seeds=[0, 1, 2].")
    seeds = [int(seed) for seed in seeds]
    if not seeds or len(set(seeds)) < len(seeds):
        raise refused("seeds", "a list of different whole numbers", seeds, "Try seeds=[0, 1, 2].")
    if flag("race", race) and target is None:
        raise CovaryError(
            "race=True needs a target: the race is for the fewest rounds to it. Try target=('loss', 0.1)."
        )
    if isinstance(problem, Problem) and problem.data.streamed:
        raise CovaryError(
            "A sweep runs all members on data in memory, and this data set is streamed from its folder. Sweep over a "
            "sample of the clients that fits (FederatedData.from_clients), or call simulate for each member."
        )
    job = prepare(
        algorithms[0],
        problem,
        rounds=rounds,
        clients_per_round=clients_per_round,
        local_steps=local_steps,
        local_epochs=local_epochs,
        batch_size=batch_size,
        seeds=seeds,
        x0=x0,
        warm_start=warm_start,
        weights=weights,
        target=target,
        eval_every=eval_every,
        measure_loss=flag("measure_loss", measure_loss),
        store="device",
        devices=devices,
        width=width,
        precision=precision,
        members=len(points),
    )
    whole("checkpoint_every", checkpoint_every, 1)
    groups = _groups(len(points), len(seeds), job, algorithms[0], at_once)
    going = Members(job, algorithms, seeds, rounds, race, groups, log)
    if checkpoint is None:
        while not going.ended:
            going.advance(rounds, interrupted=lambda: False)
    else:
        about = description(
            algorithms,
            problem,
            np.stack(job.starts),
            algorithms[0].trips(job.plan.steps_on_wire),
            points=points,
            seeds=seeds,
            rounds=rounds,
            clients_per_round=job.plan.cohort,
            local_steps=local_steps,
            local_epochs=1 if local_epochs is None and local_steps is None else local_epochs,
            batch_size=batch_size,
            warm_start=bool(warm_start),
            weights=weights,
            target=target,
            eval_every=eval_every,
            race=race,
            measure_loss=measure_loss,
            groups=going.groups,
            precision=precision,
        )
        members = len(points) * len(seeds)
        state, row = sizes(algorithms[0], job.starts[0], members)
        curves = 8 * rounds * members * (2 * len(job.program.evaluated) + 16)
        with opened(checkpoint, about, job.plan.n_clients, state + curves, row) as checkpoints:
            drive(going, checkpoints, checkpoint_every)
    table = [
        _row(point, seed, going, (p, s), job.program.evaluated)
        for p, point in enumerate(points)
        for s, seed in enumerate(seeds)
    ]
    quality = job.program.evaluated
    if measure_loss and len(quality) > 1 and (target is None or target[0] != "loss"):
        quality = tuple(name for name in quality if name != "loss")  # recorded, but not what is wanted
    return Sweep(points, seeds, table, going.curves, quality, target)


class Members:
    """The members of a sweep under way: groups of points one after the other, all seeds of a group at once."""

    def __init__(
        self,
        job: Job,
        algorithms: list[Algorithm],
        seeds: list[int],
        rounds: int,
        race: bool,
        groups: list[list[int]],
        log: Callable[[int, dict[str, float]], None] | None,
    ):
        self.job, self.algorithms, self.rounds, self.race, self.groups = job, algorithms, rounds, race, groups
        self.log, self.saved_group = log, 0  # the group of the last checkpoint
        self.keys = np.stack([np.asarray(jax.random.key_data(jax.random.key(seed))) for seed in seeds])
        shape = (len(algorithms), len(seeds))
        self.curves: dict[str, np.ndarray] = {}  # (points, seeds, rounds), NaN where a member had ended
        self.done_by = np.zeros(shape, int)  # rounds of each member
        self.reached, self.diverged = np.zeros(shape, bool), np.zeros(shape, bool)
        self.group, self.pace = 0, Pace()
        self.watch = Watch(algorithms[0], job.layout.p)
        trips, x = algorithms[0].trips(job.plan.steps_on_wire), job.starts[0]
        self.bytes_of = {
            warm: traffic(algorithms[0], t, x) for warm, t in ((False, trips), (True, (algorithms[0].warm_start,)))
        }
        self._begin()

    def _begin(self) -> None:
        """The first round of a group lies ahead."""
        chosen = [self.algorithms[p] for p in self.groups[self.group]]
        x = self.job.starts[0]
        self.numbers = {name: np.array([a.numbers[name] for a in chosen], x.dtype) for name in chosen[0].numbers}
        self.states = initial(chosen[0], self.job, points=len(chosen))
        self.done, self.touched = 0, np.empty(0, int)

    @property
    def ended(self) -> bool:
        return self.group == len(self.groups)

    def advance(self, until: int, interrupted: Callable[[], bool]) -> None:
        """Take the group on to a round, or to its end; the next one is begun then."""
        job, program = self.job, self.job.program
        while not interrupted():
            alive = ~(np.asarray(self.states.reached) | np.asarray(self.states.diverged))
            if self.done < len(job.visits):
                cohort, warm = job.visits[self.done], compiled_warm_start(program, sweep=True)
                given = (self.numbers, self.states, self.keys, self.done + 1, cohort, job.world)
                self.states, record = warm(*given)
                self._keep({name: np.asarray(value)[None] for name, value in record.items()}, 1, alive, cohort)
            else:
                count = min(self.pace.rounds(), self.rounds - self.done, LAP - self.done % LAP, until - self.done)
                given = (self.numbers, self.states, self.keys, self.done, self.done + count, self.rounds, job.world)
                self.states, records = compiled_sweep(program)(*given)
                self._keep(records, count, alive, np.asarray(records["cohort"])[:count])
                if self.watch.due:
                    self._check()
                running = ~(np.asarray(self.states.reached) | np.asarray(self.states.diverged))
                if self.log is not None:
                    self.log(self.done, {"running": float(running.sum()), **self._best_so_far()})
                decided = self.race and self.done % LAP == 0 and _decided(self.states, self._to_beat())
                if self.done == self.rounds or not running.any() or decided:
                    self.group += 1
                    if not self.ended:
                        self._begin()
                    return
            if self.done >= until:
                return

    def _best_so_far(self) -> dict[str, float]:
        """Of the group under way."""
        best = {}
        for name in self.job.program.evaluated:
            seen = self.curves[name][self.groups[self.group]]
            seen = seen[np.isfinite(seen)]
            if seen.size:
                best[name] = float(seen.max() if direction(name) > 0 else seen.min())
        return best

    def arrays(self) -> dict[str, np.ndarray]:
        """All but the clients' states, for a checkpoint."""
        mine = {name: getattr(self, name) for name in ("done_by", "reached", "diverged")}
        mine |= {"group": np.asarray(self.group), "done": np.asarray(self.done)}
        mine |= {f"curve.{name}": curve for name, curve in self.curves.items()}
        return mine if self.ended else mine | state_arrays(to_host(self.states._replace(clients=None)))

    def rows(self, ids: np.ndarray) -> list[np.ndarray]:
        """The states of some clients, field by field, of all members."""
        return [np.moveaxis(rows_of(leaf, ids, 2), 2, 0) for leaf in jax.tree.leaves(self.states.clients)]

    def news(self) -> tuple[int, np.ndarray, bool]:
        """The number of the next checkpoint, the clients that changed since the last one, and whether all did."""
        touched = np.empty(0, int) if self.ended else self.touched
        anew, self.saved_group, self.touched = self.group != self.saved_group, self.group, np.empty(0, int)
        return self.group * self.rounds + self.done * (not self.ended), touched, anew

    def restore(self, arrays: dict[str, np.ndarray], saved_clients: SavedClients) -> None:
        """Put back what was saved."""
        shape, empty = self.done_by.shape, np.empty(0, int)
        curves = {name[6:]: np.array(value) for name, value in arrays.items() if name.startswith("curve.")}
        fits = all(arrays.get(name, empty).shape == shape for name in ("done_by", "reached", "diverged"))
        fits = fits and all(curve.shape == (*shape, self.rounds) for curve in curves.values())
        fits = fits and all(arrays.get(name, empty).shape == () for name in ("group", "done"))
        if not fits or not 0 <= arrays["group"] <= len(self.groups) or not 0 <= arrays["done"] <= self.rounds:
            raise Damaged("A checkpoint has another form than this sweep's. Start anew in another folder.")
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
        """c is the mean of c_i for every member."""
        states = to_host(self.states)
        for at in np.ndindex(states.round.shape):
            own = jax.tree.map(lambda leaf, at=at: leaf[at], states)
            self.watch.error(own, jax.tree.map(lambda leaf: leaf[: self.job.plan.n_clients], own.clients))

    def _to_beat(self) -> float:
        """The mean rounds of the best point of the groups before."""
        before = [p for group in self.groups[: self.group] for p in group]
        return float(np.where(self.reached, self.done_by, np.inf)[before].mean(axis=1).min(initial=np.inf))

    def _keep(self, records: dict[str, Any], count: int, alive: np.ndarray, cohorts: np.ndarray) -> None:
        """Curves as (points, seeds, rounds), NaN for the rounds of members that had ended."""
        group = self.groups[self.group]
        numbered = self.done + 1 + np.arange(count)
        went_on = numbered[:, None, None] <= np.where(alive, np.asarray(self.states.round), self.done)
        sent = self.bytes_of[self.done < len(self.job.visits)]
        for name, each in zip(("bytes_down", "bytes_up"), sent, strict=True):
            records = {**records, name: np.full((count, 1, 1), each * np.shape(cohorts)[-1])}
        for name, values in records.items():
            if name != "cohort":
                shape = (len(self.algorithms), len(self.keys), self.rounds)
                curve = self.curves.setdefault(name, np.full(shape, np.nan))
                seen = np.where(went_on, np.array(values)[:count], np.nan)
                curve[group, :, self.done : self.done + count] = seen.transpose(2, 1, 0)
        self.done += count
        self.touched = np.union1d(self.touched, cohorts)
        for mine, theirs in (("done_by", "round"), ("reached", "reached"), ("diverged", "diverged")):
            getattr(self, mine)[group] = np.asarray(getattr(self.states, theirs)).T


def _decided(states: State, to_beat: float) -> bool:
    """Whether no point that is still running can have fewer mean rounds to the target than the best that has ended."""
    reached, diverged, at = (np.asarray(v) for v in (states.reached, states.diverged, states.round))
    least = np.where(reached, at, np.where(diverged, np.inf, at + 1)).mean(axis=0)  # a bound from below, per point
    complete = reached.all(axis=0)
    best = min(to_beat, least[complete].min() if complete.any() else np.inf)
    return bool((least[~complete] >= best).all())


def _points(
    factory: Callable[..., Algorithm], grid: Mapping[str, Sequence[float]]
) -> tuple[list[dict[str, float]], list[Algorithm]]:
    try:
        flat = isinstance(grid, Mapping) and grid and all(np.ndim(v) == 1 and len(v) > 0 for v in grid.values())
    except ValueError:
        flat = False
    if not flat:
        raise refused("grid", "a dict of lists of numbers", grid, "Try {'eta_l': [0.01, 0.1, 1.0]}.")
    points = [
        {name: np.asarray(value).item() for name, value in zip(grid, values, strict=True)}
        for values in itertools.product(*grid.values())
    ]
    try:
        algorithms = [factory(**point) for point in points]
    except TypeError as error:
        raise refused("grid", "named after the factory's arguments", ", ".join(grid), str(error)) from None
    for algorithm in algorithms:
        if not isinstance(algorithm, Algorithm) or algorithm.recipe is None:
            raise refused(
                "factory",
                "a function that returns an Algorithm made by @factory",
                type(algorithm).__name__,
                "Try cv.scaffold.",
            )
        if algorithm.recipe != algorithms[0].recipe:
            raise refused(
                "grid", "over numbers only", ", ".join(grid), "Sweep once for each other choice, such as option."
            )
    return points, algorithms


def _groups(n_points: int, n_seeds: int, job: Job, algorithm: Algorithm, at_once: int | None) -> list[list[int]]:
    """The points in groups that fit into memory: a member keeps N client states and works on S models at a time."""
    if at_once is None:
        x = job.starts[0]
        fields = len(jax.tree.leaves(algorithm.init_client(x)))
        member = x.nbytes * (2 * fields * job.plan.n_clients + 8 * job.plan.cohort + 8)
        at_once = max(1, int(0.4 * memory() / (member * n_seeds)))
    n_groups = -(-n_points // whole("at_once", at_once, 1))
    return [part.tolist() for part in np.array_split(np.arange(n_points), n_groups)]


def _row(
    point: dict[str, float], seed: int, members: Members, at: tuple[int, int], metrics: Sequence[str]
) -> dict[str, Any]:
    done, reached, diverged = int(members.done_by[at]), bool(members.reached[at]), bool(members.diverged[at])
    finished = done == members.rounds
    outcome = "target" if reached else "diverged" if diverged else "finished" if finished else "outpaced"
    row = {
        **point,
        "seed": seed,
        "rounds": done,
        "outcome": outcome,
        "reached": done if reached else None,
        "diverged": done + 1 if diverged else None,
    }
    for name, curve in members.curves.items():
        seen = curve[at][~np.isnan(curve[at])]
        if name in metrics:
            best = max if direction(name) > 0 else min
            row |= {f"last_{name}": float(seen[-1]) if seen.size else None}
            row |= {f"best_{name}": float(best(seen)) if seen.size else None}
    return row
