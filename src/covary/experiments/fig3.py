"""Figure 3 of the paper: SGD, FedAvg and SCAFFOLD on two simulated quadratics, by G and K.

The clients of the lower bound, f_1 = mu x² + G x and f_2 = -G x with mu = 1; full batches, no sampling; x^0 = 1 and
eta_l = 0.1 (the paper does not state them), eta_g = 1.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np

from covary.algorithms import fedavg, scaffold, sgd
from covary.experiments.common import shown
from covary.problem import lower_bound
from covary.report.story import Claim
from covary.simulate import simulate

TITLE = "SGD, FedAvg and SCAFFOLD on simulated quadratics"
GS = (1.0, 10.0, 100.0)
KS = (2, 10)
ROUNDS = 100
CURVES = len(GS) * (1 + 2 * len(KS))
ACCURACY = 1e-6  # f below this counts as solved


def run() -> Iterator[dict[str, Any]]:
    """All curves: algorithm, G, K, f by round, and the rounds until f < 1e-6."""
    for G in GS:
        for name, algorithm, K in [
            ("sgd", sgd(0.1), 1),
            *((name, factory(0.1), K) for name, factory in (("fedavg", fedavg), ("scaffold", scaffold)) for K in KS),
        ]:
            done = simulate(algorithm, lower_bound(G), ROUNDS, local_steps=K, x0=1.0)
            yield {
                "name": name if name == "sgd" else f"{name}, K = {K}",
                "panel": f"G = {G:g}",  # curves of one panel are of the same problem
                "algorithm": name,
                "G": G,
                "K": K,
                "f": [float(value) for value in done.history["loss"]],
                "rounds": done.rounds_to("loss", ACCURACY),
            }


def as_table(curves: list[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    header = ["algorithm", "K", *(f"G = {G:g}" for G in GS)]
    kinds = sorted(
        {(c["algorithm"], c["K"]) for c in curves}, key=lambda kind: ("sgd fedavg scaffold".find(kind[0]), kind[1])
    )
    body = []
    for name, K in kinds:
        own = {c["G"]: c for c in curves if (c["algorithm"], c["K"]) == (name, K)}
        body.append([name, str(K), *(_entry(own[G]) for G in GS)])
    return header, body


def _entry(curve: dict[str, Any]) -> str:
    return str(curve["rounds"]) if curve["rounds"] else f"never; f = {curve['f'][-1]:.3g} after {ROUNDS}"


def claims(curves: list[dict[str, Any]]) -> list[Claim]:
    def rounds(name: str, G: float, K: int) -> float:
        found = next(c["rounds"] for c in curves if (c["algorithm"], c["G"], c["K"]) == (name, G, K))
        return np.inf if found is None else found

    def last(G: float, K: int) -> float:
        return next(c["f"][-1] for c in curves if (c["algorithm"], c["G"], c["K"]) == ("fedavg", G, K))

    low, high = KS
    ours = {K: [rounds("scaffold", G, K) for G in GS] for K in KS}
    speed = {K: [rounds("sgd", G, 1) / r for G, r in zip(GS, ours[K], strict=True)] for K in KS}
    return [
        Claim(
            f"FedAvg gets worse with more local steps: K = {high} ends farther away than K = {low}.",
            all(last(G, high) > last(G, low) for G in GS),
            "; ".join(f"G = {G:g}: f = {last(G, low):.3g} and {last(G, high):.3g}" for G in GS),
        ),
        Claim(
            "FedAvg gets worse as G grows.",
            all(last(a, K) < last(b, K) for a, b in itertools.pairwise(GS) for K in KS),
            "; ".join(f"K = {K}: " + ", ".join(f"{last(G, K):.3g}" for G in GS) for K in KS),
        ),
        Claim(
            f"SCAFFOLD improves with more local steps: K = {high} is faster than K = {low}, which is faster than SGD.",
            all(rounds("sgd", G, 1) > rounds("scaffold", G, low) > rounds("scaffold", G, high) for G in GS),
            "; ".join(f"K = {K}: {'/'.join(shown(r, ROUNDS) for r in ours[K])}" for K in KS)
            + f"; sgd {'/'.join(shown(rounds('sgd', G, 1), ROUNDS) for G in GS)}",
        ),
        Claim(
            f"SCAFFOLD with K = {low} is twice as fast as SGD, with K = {high} about 5 times (between 4 and 6).",
            all(1.5 <= s <= 2.5 for s in speed[low]) and all(4 <= s <= 6 for s in speed[high]),
            "; ".join(f"K = {K}: {'/'.join(f'{s:.1f}×' for s in speed[K])}" for K in KS),
        ),
        Claim(
            "SCAFFOLD is identical for every G (the same number of rounds).",
            all(len(set(ours[K])) == 1 for K in KS),
            "; ".join(f"K = {K}: {'/'.join(shown(r, ROUNDS) for r in ours[K])} rounds for G = 1/10/100" for K in KS),
        ),
    ]
