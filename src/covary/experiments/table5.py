"""Table 5 of the paper: best test accuracy within 1,000 rounds of a 2-layer network on EMNIST.

100 clients, 20 % sampled, 5 local epochs of 5 steps (SGD: one full step), eta_g = 1, eta_l tuned for every cell. The
accuracy is measured every 5 rounds.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from covary.experiments.common import Budget, Case, Cell, find
from covary.report.story import Claim

TITLE = "Best test accuracy within 1,000 rounds, 2-layer network on EMNIST"
TARGET = QUICK_TARGET = None  # no target: the table shows the best accuracy of all rounds
NETWORK = True
PAPER_WHITE = False  # with the pixels as in the files, the network is closest to the paper's accuracies
SIMILARITIES = (0.0, 0.1)
CENTRE = {"sgd": 1.0, "fedavg": 0.1, "scaffold": 0.1}
PAPER = {
    ("sgd", 0.0): 0.766,
    ("sgd", 0.1): 0.764,
    ("fedavg", 0.0): 0.787,
    ("fedavg", 0.1): 0.828,
    ("scaffold", 0.0): 0.801,
    ("scaffold", 0.1): 0.842,
}
FULL = Budget(eval_every=5)
QUICK = Budget(
    eval_every=5, clients=20, examples=6000, test_examples=2000, rounds=60, seeds=(0,), step_sizes=3, hidden=50
)


def cases(quick: bool) -> list[Case]:
    return [Case(a, s, 5) for s in SIMILARITIES for a in CENTRE]


def as_table(cells: Sequence[Cell], limit: int) -> tuple[list[str], list[list[str]]]:
    columns = [f"{100 * s:g} % similarity{what}" for s in SIMILARITIES for what in ("", " (the paper)")]
    body = []
    for algorithm in CENTRE:
        row = [algorithm]
        for s in SIMILARITIES:
            cell = find(cells, algorithm=algorithm, similarity=s)
            spread = f" ± {np.std(cell.accuracy):.3f}" if len(cell.accuracy) > 1 else ""
            row += [f"{cell.mean_accuracy:.3f}{spread}", f"{PAPER[algorithm, s]:.3f}"]
        body.append(row)
    return ["algorithm", *columns], body


def claims(cells: Sequence[Cell], limit: int) -> list[Claim]:
    def accuracy(algorithm: str, similarity: float) -> float:
        return find(cells, algorithm=algorithm, similarity=similarity).mean_accuracy

    def line(similarity: float) -> str:
        return f"{100 * similarity:g} %: " + ", ".join(f"{a} {accuracy(a, similarity):.3f}" for a in CENTRE)

    ordered = all(accuracy("scaffold", s) >= accuracy("fedavg", s) >= accuracy("sgd", s) for s in SIMILARITIES)
    both = "; ".join(line(s) for s in SIMILARITIES)
    low, high = SIMILARITIES
    return [
        Claim("SCAFFOLD has the best accuracy, then FedAvg, then SGD, at both similarities.", ordered, both),
        Claim(
            "The local methods improve with similarity.",
            all(accuracy(a, high) > accuracy(a, low) for a in ("fedavg", "scaffold")),
            both,
        ),
        Claim(
            "SGD is unaffected by similarity (within 0.01).",
            abs(accuracy("sgd", high) - accuracy("sgd", low)) < 0.01,
            f"sgd {accuracy('sgd', low):.3f} and {accuracy('sgd', high):.3f}",
        ),
    ]
