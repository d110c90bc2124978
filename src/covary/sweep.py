"""`sweep`: a whole grid of step-sizes and seeds as one compiled program."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from covary.algorithm import Algorithm
from covary.checks import flag, whole
from covary.errors import InvalidInput, refused
from covary.running.buffers import with_model
from covary.running.checkpoint import fingerprint, opened, run_to_end, state_sizes
from covary.running.engine import engine_of
from covary.running.history import Log
from covary.running.job import AnyProblem
from covary.running.members import Members
from covary.targets import direction_of, target_of
from covary.trackers import Tracker
from covary.training import Training

RATIO = 10**0.5  # between neighbouring step-sizes


@dataclass(frozen=True)
class Sweep:
    """The result of a sweep."""

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

    def _direction(self, metric: str) -> float:
        """+1 if a metric should rise, -1 if it should fall: by the target, else by its name."""
        target = target_of(self.target)
        return target.direction if target is not None and target.metric == metric else direction_of(metric)

    def best(self, metric: str | None = None) -> int:
        """The index of the best point: fewest mean rounds to the target, or without one the best mean of a metric.

        Ties, and points none of which reached the target, are decided by the metric (the target's own, or the first).
        A point that diverged with some seed comes after all that did not.

        >>> import covary as cv
        >>> grid, target = {"eta_l": [0.1, 0.3]}, ("loss", 1e-6)
        >>> tried = cv.sweep(cv.sgd, cv.lower_bound(G=1), grid, rounds=50, target=target, x0=1.0)
        >>> tried.points[tried.best()], tried.mean_rounds().tolist()
        ({'eta_l': 0.3}, [inf, 19.0])
        """
        metric = metric or (self.target[0] if self.target else self.metrics[0])
        if metric not in self.curves:
            raise refused("metric", f"one of {', '.join(self.curves)}", repr(metric), "See sweep.curves.")
        sign = self._direction(metric)
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
    problem: AnyProblem,
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
    log: Log | None = None,
    devices: int | None = None,
    width: int | None = None,
    microbatch: int | None = None,
    precision: str | None = None,
    checkpoint: str | Path | None = None,
    checkpoint_every: int = 100,
) -> Sweep:
    """Run an algorithm at every point of a grid, with every seed, as one compiled program.

    All points share cohorts and batches, seed by seed (common random numbers), so they differ by their numbers alone.
    Each member gives what `simulate` gives for its numbers and seed, up to rounding, which a step-size at the edge of
    stability can amplify. A member that reaches the target or diverges stops, and does not affect the others.

    Args:
        factory: `covary.scaffold` or another factory, or a function that calls one:
            `lambda eta_l: cv.scaffold(eta_l, 1.5)`.
        problem: as in `simulate`.
        grid: the values to try for each argument of the factory. Every combination is a point.
        seeds: every point is run once with each seed.
        rounds, clients_per_round, local_steps, local_epochs, batch_size, x0, warm_start, weights, eval_every, devices,
            width, microbatch, precision: as in `simulate`.
        target: as in `simulate`, for each member.
        race: also stop as soon as it is certain which point has the fewest mean rounds to the target. The members
            that are still running are marked "outpaced".
        measure_loss: also measure the training loss. Without it, the loss is measured only if it is the target or the
            only metric, and a member counts as diverged once its model is no longer finite.
        at_once: the number of points to run at a time. The default is as many as fit into memory.
        log: a function that is called as `log(round, values)` after each chunk of rounds, with the number of members
            still `running` and the best value so far of every metric.
        checkpoint, checkpoint_every: as in `simulate`, for all members together.

    Returns:
        A `Sweep`. Its `table` has one row for each point and seed: the point's numbers, `seed`, completed `rounds`,
        `outcome`, `reached`, `diverged`, and the last and best value of every metric. Its `curves` have every column
        of `simulate`'s history except the cohorts.

    >>> import covary as cv
    >>> (x, y), test = cv.datasets.digits()
    >>> data = cv.partition.by_similarity(x, y, n_clients=20, similarity=0.0)
    >>> problem = cv.supervised(cv.models.logistic_regression(64, 10), data, test)
    >>> tried = cv.sweep(cv.scaffold, problem, {"eta_l": [0.03, 1.0]}, rounds=10, seeds=[0, 1], local_steps=5)
    >>> tried.points[tried.best()], len(tried.table), tried.curves["accuracy"].shape
    ({'eta_l': 1.0}, 4, (2, 2, 10))
    """
    # The request
    points, algorithms = _points(factory, grid)
    if isinstance(log, Tracker):
        raise InvalidInput("A tracker follows one run, and a sweep is many. Log sweep.table when it is done.")
    if np.ndim(seeds) != 1 or np.asarray(seeds).dtype.kind not in "iu":
        raise refused("seeds", "a list of different whole numbers", seeds, "Try seeds=[0, 1, 2].")
    seeds = [whole("seed", int(seed), 0, most=2**32 - 1) for seed in seeds]
    if not seeds or len(set(seeds)) < len(seeds):
        raise refused("seeds", "a list of different whole numbers", seeds, "Try seeds=[0, 1, 2].")
    if flag("race", race) and target is None:
        raise InvalidInput(
            "race=True needs a target: the race is for the fewest rounds to it. Try target=('loss', 0.1)."
        )
    engine = engine_of(algorithms[0], problem)
    if problem.data.streamed:
        raise InvalidInput(
            "A sweep runs all members on data in memory, and this data set is streamed from its folder. Sweep over a "
            "sample of the clients that fits (FederatedData.from_clients), or call simulate for each member."
        )
    training, algorithm = Training.of(locals()), algorithms[0]
    job = engine.prepare(
        algorithm,
        problem,
        training,
        seeds=seeds,
        x0=x0,
        measure_loss=flag("measure_loss", measure_loss),
        store="device",
        devices=devices,
        width=width,
        microbatch=microbatch,
        members=len(points),
    )
    whole("checkpoint_every", checkpoint_every, 1)

    # All members, with checkpoints where a folder is given
    algorithms = [with_model(each, problem) for each in algorithms]
    members = engine.members(job, algorithms, seeds, race, at_once, log)
    if checkpoint is None:
        while not members.ended:
            members.advance(rounds, interrupted=lambda: False)
    else:
        own = {"points": points, "seeds": seeds, "race": race, "measure_loss": measure_loss, "groups": members.groups}
        about = fingerprint(job, algorithms, training.facts() | own, engine.about(job, algorithms[0]))
        count = len(points) * len(seeds)
        state, row = state_sizes(algorithm, job.starts[0], count)
        curves = 8 * rounds * count * (2 * len(job.names) + 16)
        with opened(checkpoint, about, job.plan.n_clients, state + curves, row, engine.hosts()) as checkpoints:
            run_to_end(members, checkpoints, checkpoint_every)

    # The result
    table = [
        _row(point, seed, members, (p, s), job.names) for p, point in enumerate(points) for s, seed in enumerate(seeds)
    ]
    quality = job.names
    if measure_loss and len(quality) > 1 and (target is None or target[0] != "loss"):
        quality = tuple(name for name in quality if name != "loss")  # recorded, but not requested
    return Sweep(points, seeds, table, members.curves, quality, target)


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
    if not callable(factory):
        raise refused("factory", "a function that returns an Algorithm", f"{factory}", "Try cv.scaffold, uncalled.")
    try:
        algorithms = [factory(**point) for point in points]
    except TypeError as error:
        if _takes(factory, points[0]):  # then the error is the factory's own
            raise
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


def _takes(factory: Any, arguments: Mapping[str, Any]) -> bool:
    """Whether this can be called with arguments of these names."""
    try:
        inspect.signature(factory).bind(**arguments)
    except (TypeError, ValueError):
        return False
    return True


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
            best = max if direction_of(name) > 0 else min
            row |= {f"last_{name}": float(seen[-1]) if seen.size else None}
            row |= {f"best_{name}": float(best(seen)) if seen.size else None}
    return row
