"""What the paper's EMNIST experiments share: the data, tuning, and claims that are checked against measurements."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from covary.algorithms import ALGORITHMS
from covary.data import datasets, partition
from covary.models import logistic_regression, mlp
from covary.problem import Problem, supervised
from covary.report.story import Claim
from covary.sweep import RATIO, Sweep, half_decade, sweep

COMPARED = ("sgd", "fedavg", "fedprox", "scaffold")
Log = Callable[[str, int, dict[str, float]], None]


@dataclass(frozen=True)
class Case:
    """The settings of one cell of a table, without the step-size, which is tuned."""

    algorithm: str
    similarity: float
    local_epochs: int = 5
    clients_per_round: float = 0.2

    def place(self, folder: Path | None) -> Path | None:
        """The folder of this cell's checkpoints."""
        if folder is None:
            return None
        parts = (self.similarity, self.clients_per_round, self.local_epochs)
        return folder / "-".join([self.algorithm, *(f"{part:g}" for part in parts)])

    def __str__(self) -> str:
        epochs = "" if self.algorithm == "sgd" else f", {self.local_epochs} epochs"
        return (
            f"{self.algorithm}, {100 * self.similarity:g} % similar, {100 * self.clients_per_round:g} % sampled{epochs}"
        )


@dataclass(frozen=True)
class Budget:
    """The size of an experiment: the paper's scale, or a `quick` form of it with the same code."""

    clients: int = 100
    examples: int | None = None  # of the training data; None for all
    test_examples: int | None = None
    rounds: int = 1000
    seeds: tuple[int, ...] = (0, 1, 2)
    step_sizes: int = 8
    eval_every: int = 1
    hidden: int = 200  # units of the 2-layer network, which the paper does not state


@dataclass(frozen=True)
class Cell:
    """The measurements of one cell at its best step-size."""

    case: Case
    eta_l: float
    rounds: list[int | None]  # to the target, per seed
    accuracy: list[float]  # the best test accuracy, per seed
    tried: list[dict[str, Any]]  # every member of the sweep
    seconds: float

    @property
    def mean_rounds(self) -> float:
        return float(np.mean([np.inf if r is None else r for r in self.rounds]))

    @property
    def mean_accuracy(self) -> float:
        return float(np.mean(self.accuracy))


@dataclass(frozen=True)
class Outcome:
    """The results of an experiment, for its report."""

    name: str
    header: dict[str, Any]
    table: tuple[list[str], list[list[str]]]
    claims: list[Claim]
    results: list[Any]  # cells, or the curves of the figure
    seconds: float


@dataclass(frozen=True)
class Emnist:
    """The images of the paper's experiments."""

    train: tuple[np.ndarray, np.ndarray]
    test: tuple[np.ndarray, np.ndarray]
    source: str

    def problem(self, similarity: float, budget: Budget, network: bool = False) -> Problem:
        x, y = self.train
        if budget.examples is not None:
            chosen = np.random.default_rng(0).permutation(len(y))[: budget.examples]
            x, y = x[chosen], y[chosen]
        test = tuple(part[: budget.test_examples] for part in self.test)  # the official order is random
        model = mlp(784, budget.hidden, 62) if network else logistic_regression(784, 62)
        return supervised(model, partition.by_similarity(x, y, budget.clients, similarity), test)


def load_emnist(root: str | Path, paper_white: bool) -> Emnist:
    """EMNIST ByClass: the official split if its training file exists, or else the test file cut in two."""
    pixels = "paper = 1, ink = 0" if paper_white else "ink = 1, paper = 0"
    if (Path(root) / "emnist-byclass-train-images-idx3-ubyte.gz").is_file():
        train, test = datasets.emnist(root, "byclass", paper_white)
        return Emnist(train, test, f"EMNIST ByClass, official split, {pixels}")
    train, test = datasets.emnist_cut(root, paper_white)
    return Emnist(train, test, f"EMNIST ByClass, the official test file cut into 97,523 + 18,800 examples, {pixels}")


def step_sizes(centre: float, count: int) -> list[float]:
    """`count` step-sizes a factor of √10 apart around a centre: ..., 0.00316, 0.01, 0.0316, 0.1, ..."""
    return [half_decade(centre * RATIO ** (i - (count - 1) // 2)) for i in range(count)]


def attempt(
    case: Case,
    problem: Problem,
    budget: Budget,
    grid: Sequence[float],
    rounds: int,
    target: float | None,
    log: Log | None = None,
    checkpoint: Path | None = None,
    *,
    measure_loss: bool = False,
) -> Sweep:
    """The sweep of a cell over step-sizes and seeds, as a race to the target accuracy if there is one."""
    return sweep(
        ALGORITHMS[case.algorithm],
        problem,
        {"eta_l": list(grid)},
        rounds=rounds,
        seeds=budget.seeds,
        clients_per_round=case.clients_per_round,
        local_epochs=case.local_epochs,
        batch_size=0.2,
        target=None if target is None else ("accuracy", target),
        eval_every=budget.eval_every,
        race=target is not None,
        measure_loss=measure_loss,
        log=functools.partial(log, str(case)) if log is not None else None,
        checkpoint=checkpoint,
    )


def tune(
    case: Case,
    problem: Problem,
    budget: Budget,
    centre: float,
    target: float | None,
    log: Log | None = None,
    checkpoint: Path | None = None,
) -> Cell:
    """Find the best step-size of a cell, as the paper does for every algorithm.

    The best step-size has the fewest mean rounds to the target accuracy or, without a target, the best mean accuracy.
    If it lies at an end of the grid, the grid is extended until it lies inside.
    """
    started = time.perf_counter()
    grid = step_sizes(centre, budget.step_sizes)
    places = [None if checkpoint is None else checkpoint / str(number) for number in range(7)]
    members = attempt(case, problem, budget, grid, budget.rounds, target, log, places[0]).table
    for place in places[1:]:
        best, least = _best(members), min(m["eta_l"] for m in members)
        if best not in (least, max(m["eta_l"] for m in members)):
            break
        beyond = half_decade(best / RATIO if best == least else best * RATIO)
        score = _score(members, best)[0]
        most = len(budget.seeds) * score  # after so many rounds the new point has a worse mean
        rounds = budget.rounds if np.isinf(most) else min(budget.rounds, int(most) + 1)
        members += attempt(case, problem, budget, [beyond], rounds, target, log, place).table
    best = _best(members)
    chosen = [m for m in members if m["eta_l"] == best]
    return Cell(
        case=case,
        eta_l=best,
        rounds=[m["reached"] for m in chosen],
        accuracy=[m["best_accuracy"] or 0.0 for m in chosen],
        tried=members,
        seconds=time.perf_counter() - started,
    )


def measure_cells(
    emnist: Emnist,
    budget: Budget,
    todo: Sequence[Case],
    centre: Mapping[str, float],
    target: float | None,
    network: bool,
    log: Log | None = None,
    checkpoint: Path | None = None,
) -> Iterator[Cell]:
    """Measure the cells of a table one by one, with step-sizes tuned around the centre of each algorithm."""
    problems = {s: emnist.problem(s, budget, network) for s in {case.similarity for case in todo}}
    for case in todo:
        problem, place = problems[case.similarity], case.place(checkpoint)
        yield tune(case, problem, budget, centre[case.algorithm], target, log, place)


def _score(members: list[dict[str, Any]], eta_l: float) -> tuple[float, float]:
    """The score, smaller is better: mean rounds to the target, then minus the best accuracy."""
    own = [m for m in members if m["eta_l"] == eta_l]
    rounds = np.mean([np.inf if m["reached"] is None else m["reached"] for m in own])
    return float(rounds), -float(np.mean([m["best_accuracy"] or 0.0 for m in own]))


def _best(members: list[dict[str, Any]]) -> float:
    return min({m["eta_l"] for m in members}, key=lambda eta_l: _score(members, eta_l))


def fewer(first: float, second: float) -> bool | None:
    """Whether the first number of rounds is smaller; None if neither reached the target."""
    return None if np.isinf(first) and np.isinf(second) else first < second


def every(answers: Iterable[bool | None]) -> bool | None:
    """False if any answer is False, else None if any is None, else True."""
    answers = list(answers)
    return False if False in answers else None if None in answers else True


def find(cells: Sequence[Cell], **wanted: Any) -> Cell:
    """The cell with the given settings."""
    return next(c for c in cells if all(getattr(c.case, name) == value for name, value in wanted.items()))


def shown(rounds: float, limit: int) -> str:
    """A number of rounds as the paper prints it: 1k+ if the target was not reached within the limit."""
    return f"{rounds:.0f}" if np.isfinite(rounds) else f"{limit:,}+".replace("1,000+", "1k+")
