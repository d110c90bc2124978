"""Table 4 of the paper: rounds to 0.45 test accuracy with logistic regression on EMNIST, by the clients sampled.

100 clients, 5 local epochs of 5 steps, eta_g = 1, eta_l tuned for every cell, at most 1,000 rounds.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from covary.experiments.common import Budget, Case, Cell, every, fewer, find, shown
from covary.report.story import Claim

TITLE = "Rounds to 0.45 test accuracy, logistic regression on EMNIST, by the share of clients sampled"
NETWORK = False
PAPER_WHITE = True
TARGET = 0.45
SIMILARITIES = (0.0, 0.1)
FRACTIONS = (0.2, 0.05, 0.01)
CENTRE = {"scaffold": 0.0316, "fedavg": 0.0316}
PAPER = {  # the paper's own numbers; None: more than 1,000
    ("scaffold", 0.0): (143, 290, 790),
    ("scaffold", 0.1): (9, 13, 28),
    ("fedavg", 0.0): (179, 334, None),
    ("fedavg", 0.1): (12, 17, 35),
}
FULL = Budget()
QUICK = Budget(clients=20, examples=3000, test_examples=1000, rounds=200, seeds=(0,), step_sizes=3)
QUICK_TARGET, QUICK_FRACTIONS = 0.3, (0.2, 0.05)


def cases(quick: bool) -> list[Case]:
    fractions = QUICK_FRACTIONS if quick else FRACTIONS
    return [Case(a, s, 5, fraction) for s in SIMILARITIES for a in CENTRE for fraction in fractions]


def as_table(cells: Sequence[Cell], limit: int) -> tuple[list[str], list[list[str]]]:
    """One row per algorithm and share, with the slow-down against the largest share, and the paper's numbers."""
    fractions = sorted({c.case.clients_per_round for c in cells}, reverse=True)
    columns = [f"{100 * s:g} % similarity{what}" for s in SIMILARITIES for what in ("", " (the paper)")]
    body = []
    for algorithm in CENTRE:
        for fraction in fractions:
            row = [algorithm, f"{100 * fraction:g} %"]
            for s in SIMILARITIES:
                own = find(cells, algorithm=algorithm, similarity=s, clients_per_round=fraction)
                base = find(cells, algorithm=algorithm, similarity=s, clients_per_round=fractions[0]).mean_rounds
                row += [_entry(own, base, limit), _papers(algorithm, s, fraction)]
            body.append(row)
    return ["algorithm", "clients", *columns], body


def _entry(cell: Cell, base: float, limit: int) -> str:
    if not np.isfinite(cell.mean_rounds):
        return shown(cell.mean_rounds, limit)
    seen = [r for r in cell.rounds if r is not None]
    spread = f" [{min(seen)}–{max(seen)}]" if len(seen) > 1 else ""
    slower = f" ({cell.mean_rounds / base:.1f}×)" if np.isfinite(base) else ""
    return f"{shown(cell.mean_rounds, limit)}{spread}{slower}"


def _papers(algorithm: str, similarity: float, fraction: float) -> str:
    if fraction not in FRACTIONS:
        return ""
    numbers = PAPER[algorithm, similarity]
    own = numbers[FRACTIONS.index(fraction)]
    return f"1k+ ({1000 / numbers[0]:.1f}+×)" if own is None else f"{own} ({own / numbers[0]:.1f}×)"


def claims(cells: Sequence[Cell], limit: int) -> list[Claim]:
    fractions = sorted({c.case.clients_per_round for c in cells}, reverse=True)

    def rounds(algorithm: str, similarity: float) -> list[float]:
        wanted = {"algorithm": algorithm, "similarity": similarity}
        return [find(cells, **wanted, clients_per_round=f).mean_rounds for f in fractions]

    def line(algorithm: str, similarity: float) -> str:
        return f"{algorithm} at {100 * similarity:g} %: " + "/".join(
            shown(r, limit) for r in rounds(algorithm, similarity)
        )

    def slow_down(algorithm: str, similarity: float) -> tuple[float, bool]:
        """The rounds of the smallest share over those of the largest, and whether this is exact or a lower bound."""
        first, *_, last = rounds(algorithm, similarity)
        return min(last, limit) / first, bool(np.isfinite(last) and np.isfinite(first))

    def slow_down_text(algorithm: str, similarity: float) -> str:
        value, exact = slow_down(algorithm, similarity)
        text = f"{'' if exact else 'more than '}{value:.1f}×" if value > 0 else "unknown"
        return f"{algorithm} at {100 * similarity:g} %: {text}"

    def sub_linear(algorithm: str) -> Claim:
        times = fractions[0] / fractions[-1]

        def below(value: float, exact: bool) -> bool | None:
            return None if value == 0 or (value < times and not exact) else value < times

        return Claim(
            f"{algorithm} slows down sub-linearly: {times:g} times fewer clients, under {times:g} times the rounds.",
            every(below(*slow_down(algorithm, s)) for s in SIMILARITIES),
            "; ".join(slow_down_text(algorithm, s) for s in SIMILARITIES),
        )

    def more_resilient(algorithm: str) -> bool | None:
        (low_value, _), (high_value, exact) = (slow_down(algorithm, s) for s in SIMILARITIES)
        return high_value <= low_value if exact and low_value > 0 else None

    def scaffold_first(similarities: Sequence[float]) -> bool | None:
        pairs = [pair for s in similarities for pair in zip(rounds("scaffold", s), rounds("fedavg", s), strict=True)]
        return every(fewer(ours, theirs) for ours, theirs in pairs)

    low, _ = SIMILARITIES
    return [
        Claim(
            "SCAFFOLD is faster than FedAvg at every share and similarity.",
            scaffold_first(SIMILARITIES),
            "; ".join(line(a, s) for s in SIMILARITIES for a in CENTRE),
        ),
        Claim(
            "SCAFFOLD is faster than FedAvg at every share at 0 % similarity.",
            scaffold_first([low]),
            "; ".join(line(a, low) for a in CENTRE),
        ),
        sub_linear("scaffold"),
        sub_linear("fedavg"),
        Claim(
            "More similar clients make both methods more resilient to sampling.",
            every(more_resilient(a) for a in CENTRE),
            "; ".join(slow_down_text(a, s) for a in CENTRE for s in SIMILARITIES),
        ),
    ]
