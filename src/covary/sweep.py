"""`sweep`: a whole grid of step-sizes and seeds as one compiled program."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from covary.algorithm import Algorithm
from covary.checks import whole
from covary.devices import memory
from covary.engine import Pace
from covary.errors import CovaryError, refused
from covary.job import Job, direction, initial, prepare
from covary.problem import Problem
from covary.program import State
from covary.rounds import compiled_sweep, compiled_warm_start

LAP = (
    25  # rounds between two looks at a race: a fixed number, so that its result does not depend on the machine's speed
)
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
    at_once: int | None = None,
    log: Callable[[int, dict[str, float]], None] | None = None,
    devices: int | None = None,
    width: int | None = None,
    precision: str | None = None,
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
            width, precision: as in `simulate`. The training loss is measured only where it is the target or there is
            no other metric; without it, a member has diverged once its model is no longer finite.
        target: as in `simulate`, for each member.
        race: also stop as soon as it is certain which point has the fewest mean rounds to the target. The members
            that were still running are marked "outpaced".
        at_once: how many points to run at a time; by default as many as fit into memory.
        log: called as `log(round, values)` after each chunk of rounds, with how many members are still `running`.

    Returns:
        A `Sweep`: its `table` has one row for each point and seed (the point's numbers, `seed`, `rounds` done,
        `outcome`, `reached`, `diverged`, and the last and best value of every metric), its `curves` every value.

    >>> import covary as cv
    >>> (x, y), test = cv.datasets.digits()
    >>> data = cv.partition.by_similarity(x, y, n_clients=20, similarity=0.0)
    >>> problem = cv.supervised(cv.models.logistic_regression(64, 10), data, test)
    >>> tried = cv.sweep(cv.scaffold, problem, {"eta_l": [0.03, 1.0]}, rounds=10, seeds=[0, 1], local_steps=5)
    >>> tried.points[tried.best()], len(tried.table), tried.curves["accuracy"].shape
    ({'eta_l': 1.0}, 4, (2, 2, 10))
    """
    points, algorithms = _points(factory, grid)
    if np.ndim(seeds) != 1 or np.asarray(seeds).dtype.kind not in "iu":
        raise refused("seeds", "a list of different whole numbers", seeds, "Try seeds=[0, 1, 2].")
    seeds = [int(seed) for seed in seeds]
    if not seeds or len(set(seeds)) < len(seeds):
        raise refused("seeds", "a list of different whole numbers", seeds, "Try seeds=[0, 1, 2].")
    if race and target is None:
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
        measure_loss=False,
        store="device",
        devices=devices,
        width=width,
        precision=precision,
        members=len(points),
    )
    groups = _groups(len(points), len(seeds), job, algorithms[0], at_once)
    curves: dict[str, np.ndarray] = {}
    table: list[dict[str, Any]] = []
    best = np.inf  # mean rounds of the best point so far
    for group in groups:
        states, parts, best = _run(job, [algorithms[p] for p in group], seeds, rounds, best if race else None, log)
        for name, values in parts.items():
            curve = curves.setdefault(name, np.full((len(points), len(seeds), rounds), np.nan))
            curve[group, :, : values.shape[2]] = values
        table += [
            _row(
                points[p],
                seed,
                states,
                (s, at),
                {name: curve[p, s] for name, curve in curves.items()},
                job.program.evaluated,
                rounds,
            )
            for at, p in enumerate(group)
            for s, seed in enumerate(seeds)
        ]
    return Sweep(points, seeds, table, curves, job.program.evaluated, target)


def _run(
    job: Job, algorithms: list[Algorithm], seeds: list[int], rounds: int, to_beat: float | None, log: Any
) -> tuple[State, dict[str, np.ndarray], float]:
    """One group of points, all seeds: the final states, the curves, and the best mean rounds to the target yet."""
    x = job.starts[0]
    numbers = {name: np.array([a.numbers[name] for a in algorithms], x.dtype) for name in algorithms[0].numbers}
    keys = np.stack([np.asarray(jax.random.key_data(jax.random.key(seed))) for seed in seeds])
    states = initial(algorithms[0], job, points=len(algorithms))

    chunks: list[dict[str, np.ndarray]] = []
    done = 0

    def keep(records: dict[str, Any], count: int, alive: np.ndarray) -> None:
        """Curves as (points, seeds, rounds), NaN for the rounds of members that had ended."""
        values = {k: np.array(v)[:count] for k, v in records.items() if k != "cohort"}
        numbered = done + 1 + np.arange(count)
        went_on = numbered[:, None, None] <= np.where(alive, np.asarray(states.round), done)
        chunks.append({k: np.where(went_on, v, np.nan).transpose(2, 1, 0) for k, v in values.items()})

    for cohort in job.visits:
        alive = ~np.asarray(states.diverged)
        warm = compiled_warm_start(job.program, sweep=True)
        states, record = warm(numbers, states, keys, done + 1, cohort, job.world)
        keep({name: np.asarray(value)[None] for name, value in record.items()}, 1, alive)
        done += 1
    pace = Pace()
    while done < rounds:
        alive = ~(np.asarray(states.reached) | np.asarray(states.diverged))
        count = min(pace.rounds(), rounds - done, LAP - done % LAP)
        states, records = compiled_sweep(job.program)(numbers, states, keys, done, done + count, rounds, job.world)
        keep(records, count, alive)
        done += count
        ended = np.asarray(states.reached) | np.asarray(states.diverged)
        if log is not None:
            log(done, {"running": float((~ended).sum())})
        if ended.all():
            break
        if to_beat is not None and done % LAP == 0 and _decided(states, to_beat):
            break
    curves = {name: np.concatenate([part[name] for part in chunks], axis=2) for name in chunks[0]}
    finished = np.where(states.reached, states.round, np.inf).mean(axis=0).min()
    return jax.tree.map(np.asarray, states._replace(clients=None)), curves, min(finished, to_beat or np.inf)


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
    point: dict[str, float],
    seed: int,
    states: State,
    at: tuple[int, int],
    curves: dict[str, np.ndarray],
    metrics: Sequence[str],
    rounds: int,
) -> dict[str, Any]:
    done, reached, diverged = int(states.round[at]), bool(states.reached[at]), bool(states.diverged[at])
    outcome = "target" if reached else "diverged" if diverged else "finished" if done == rounds else "outpaced"
    row = {
        **point,
        "seed": seed,
        "rounds": done,
        "outcome": outcome,
        "reached": done if reached else None,
        "diverged": done + 1 if diverged else None,
    }
    for name, curve in curves.items():
        seen = curve[~np.isnan(curve)]
        if name in metrics:
            best = max if direction(name) > 0 else min
            row |= {f"last_{name}": float(seen[-1]) if seen.size else None}
            row |= {f"best_{name}": float(best(seen)) if seen.size else None}
    return row
