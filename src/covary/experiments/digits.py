"""A small form of the paper's comparison: logistic regression on handwritten digits with 0, 10 and 100 % similarity.

20 clients, 20 % of them sampled each round, 5 local epochs of 5 steps, eta_g = 1, eta_l tuned for every cell.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from covary.data import datasets, partition
from covary.experiments.common import COMPARED, Budget, Case, Cell, Log, attempt, tune
from covary.models import logistic_regression, mlp
from covary.problem import Problem, supervised
from covary.targets import Target

SIMILARITIES = (0.0, 0.1, 1.0)
CENTRE = 1.0  # of the grid of step-sizes
CASES = [Case(algorithm, similarity) for similarity in SIMILARITIES for algorithm in COMPARED]


def digits_problem(clients: int, similarity: float, hidden: int = 0) -> Problem:
    """Digits divided by similarity, for logistic regression or a network with `hidden` hidden units."""
    (x, y), test = datasets.digits()
    model = mlp(x.shape[1], hidden, 10) if hidden else logistic_regression(x.shape[1], 10)
    return supervised(model, partition.by_similarity(x, y, clients, similarity), test)


def compare(
    todo: Sequence[Case], budget: Budget, target: float, log: Log | None = None, checkpoint: Path | None = None
) -> Iterator[tuple[Cell, dict[str, np.ndarray]]]:
    """Cells with tuned step-sizes, and the full curves of the best step-size: metric -> (seeds, rounds).

    The rounds of a cell are counted on these curves. Large step-sizes can amplify rounding, so that the same setting
    can take another number of rounds within a sweep of other members.
    """
    problems = {similarity: digits_problem(budget.clients, similarity) for similarity in SIMILARITIES}
    for case in todo:
        problem, place = problems[case.similarity], case.place(checkpoint)
        cell = tune(case, problem, budget, CENTRE, target, log, place)
        own = None if place is None else place / "curves"
        whole = attempt(case, problem, budget, [cell.eta_l], budget.rounds, None, log, own, measure_loss=True)
        curves = {name: curve[0] for name, curve in whole.curves.items()}
        accuracy = curves["accuracy"]
        met = Target("accuracy", 1.0, target).first_met
        first = [met(curve) for curve in accuracy]
        rounds, best = [None if r is None else r + 1 for r in first], np.nanmax(accuracy, axis=1).tolist()
        yield replace(cell, rounds=rounds, accuracy=best), curves
