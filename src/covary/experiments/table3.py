"""Table 3 of the paper: rounds to 0.5 test accuracy with logistic regression on EMNIST, by local epochs and similarity.

100 clients, 20 % of them sampled each round; an epoch is 5 steps (batches of 0.2 of the local data); eta_g = 1, eta_l
tuned for every cell; FedProx with mu = 1; SCAFFOLD with option II; at most 1,000 rounds.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from covary.experiments.common import (
    COMPARED,
    Budget,
    Case,
    Cell,
    every,
    fewer,
    find,
    shown,
)
from covary.report.story import Claim

TITLE = "Rounds to 0.5 test accuracy, logistic regression on EMNIST"
NETWORK = False
PAPER_WHITE = True  # the pixel convention whose numbers are closest to the paper's
TARGET = 0.5
SIMILARITIES = (0.0, 0.1, 1.0)
EPOCHS = (1, 5, 10, 20)
CENTRE = {"sgd": 0.1, "fedavg": 0.0316, "fedprox": 0.0316, "scaffold": 0.0316}  # of the grid of step-sizes
FULL = Budget()
QUICK = Budget(clients=20, examples=3000, test_examples=1000, rounds=200, seeds=(0,), step_sizes=3)
QUICK_TARGET, QUICK_EPOCHS = 0.35, (1, 5)


def cases(quick: bool) -> list[Case]:
    """All cells. SGD takes one step per round for any number of epochs."""
    epochs = QUICK_EPOCHS if quick else EPOCHS
    return [
        Case(algorithm, similarity, e)
        for similarity in SIMILARITIES
        for algorithm in COMPARED
        for e in (epochs[:1] if algorithm == "sgd" else epochs)
    ]


def as_table(cells: Sequence[Cell], limit: int) -> tuple[list[str], list[list[str]]]:
    """The table: a header, and one row per similarity and algorithm, with the speed-up over SGD."""
    epochs = sorted({c.case.local_epochs for c in cells})
    header = ["similarity", "algorithm", *(f"{e} epoch{'s' if e > 1 else ''}" for e in epochs)]
    body = []
    for similarity in sorted({c.case.similarity for c in cells}):
        base = find(cells, similarity=similarity, algorithm="sgd").mean_rounds
        for algorithm in COMPARED:
            own = [c for c in cells if (c.case.similarity, c.case.algorithm) == (similarity, algorithm)]
            body.append([f"{100 * similarity:g} %", algorithm, *(_entry(c, base, limit) for c in own)])
            body[-1] += ["same"] * (len(header) - len(body[-1]))
    return header, body


def _entry(cell: Cell, base: float, limit: int) -> str:
    """Rounds, their range over the seeds, the speed-up over SGD, and a bar in which 10 blocks are SGD's rounds."""
    if not np.isfinite(cell.mean_rounds):
        return f"{shown(cell.mean_rounds, limit)}\n{'█' * 12}▶"
    seen = [r for r in cell.rounds if r is not None]
    spread = f" [{min(seen)}–{max(seen)}]" if len(seen) > 1 else ""
    blocks = min(12.0, 10 * cell.mean_rounds / min(base, limit))
    speed_up = f" ({base / cell.mean_rounds:.1f}×)" if np.isfinite(base) else ""
    bar = "█" * int(blocks) + " ▏▎▍▌▋▊▉"[int(8 * (blocks % 1))].strip() + ("▶" if blocks == 12 else "")
    return f"{shown(cell.mean_rounds, limit)}{spread}{speed_up}\n{bar or '▏'}"


def claims(cells: Sequence[Cell], limit: int) -> list[Claim]:
    """The claims of the caption and the text."""
    epochs = sorted({c.case.local_epochs for c in cells if c.case.algorithm != "sgd"})

    def rounds(algorithm: str, similarity: float, e: int | None = None) -> float:
        wanted = {"algorithm": algorithm, "similarity": similarity}
        return find(cells, **wanted, **({} if e is None or algorithm == "sgd" else {"local_epochs": e})).mean_rounds

    def line(algorithm: str, similarity: float) -> str:
        return f"{algorithm} {'/'.join(shown(rounds(algorithm, similarity, e), limit) for e in epochs)}"

    def scaffold_first(similarities: Sequence[float]) -> bool | None:
        others = [a for a in COMPARED if a != "scaffold"]
        pairs = [(rounds("scaffold", s, e), rounds(a, s, e)) for s in similarities for e in epochs for a in others]
        return every(True if ours == theirs < np.inf else fewer(ours, theirs) for ours, theirs in pairs)

    by_epochs = [rounds("fedavg", 0.0, e) for e in epochs]
    sgd_rounds = [rounds("sgd", s) for s in SIMILARITIES]
    local = ("fedavg", "scaffold")
    faster = every(fewer(rounds(a, 0.1, e), rounds(a, 0.0, e)) for a in local for e in epochs)
    worse = every(fewer(first, second) for first, second in itertools.pairwise(by_epochs))
    harmless = [(rounds(a, 1.0, e), rounds(a, 1.0, f)) for a in local for e, f in itertools.pairwise(epochs)]
    slowest = every(
        fewer(rounds(a, s, e), rounds("fedprox", s, e)) for a in local for s in SIMILARITIES for e in epochs
    )
    at_0 = ", ".join(line(a, 0.0) for a in ("fedavg", "fedprox", "scaffold"))
    return [
        Claim(
            "At 0 % similarity SCAFFOLD needs fewer rounds than SGD, FedAvg and FedProx for every number of epochs.",
            scaffold_first([0.0]),
            f"{'/'.join(str(e) for e in epochs)} epochs: {at_0}; sgd {shown(sgd_rounds[0], limit)}",
        ),
        Claim(
            "No method is faster than SCAFFOLD, for every number of epochs and every similarity.",
            scaffold_first(SIMILARITIES),
            "; ".join(f"{100 * s:g} %: {line('scaffold', s)}, {line('fedavg', s)}" for s in SIMILARITIES[1:]),
        ),
        Claim(
            "At 0 % similarity FedAvg gets worse as the number of epochs grows.",
            worse,
            line("fedavg", 0.0),
        ),
        Claim(
            "At 0 % similarity FedAvg with many epochs is slower than SGD.",
            fewer(sgd_rounds[0], by_epochs[-1]),
            f"{line('fedavg', 0.0)}; sgd {shown(sgd_rounds[0], limit)}",
        ),
        Claim(
            "FedAvg and SCAFFOLD get faster with similarity (0 to 10 %), for every number of epochs.",
            faster,
            "; ".join(f"{100 * s:g} %: {line('fedavg', s)}, {line('scaffold', s)}" for s in SIMILARITIES[:2]),
        ),
        Claim(
            "SGD does not change much with similarity (within a factor of 2).",
            max(sgd_rounds) <= 2 * min(sgd_rounds) if np.isfinite(max(sgd_rounds)) else None,
            "sgd at "
            + ", ".join(f"{100 * s:g} %: {shown(r, limit)}" for s, r in zip(SIMILARITIES, sgd_rounds, strict=True)),
        ),
        Claim(
            "With i.i.d. clients more epochs never hurt FedAvg and SCAFFOLD.",
            every(True if second == first < np.inf else fewer(second, first) for first, second in harmless),
            f"100 %: {line('fedavg', 1.0)}, {line('scaffold', 1.0)}",
        ),
        Claim(
            "FedProx is always slower than the other local methods.",
            slowest,
            "; ".join(f"{100 * s:g} %: {', '.join(line(a, s) for a in ('fedprox', *local))}" for s in SIMILARITIES),
        ),
    ]
