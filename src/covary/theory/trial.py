"""A short trial: every algorithm with its step-size tuned, SCAFFOLD and FedAvg also with the number of local steps.

The step-sizes of the theorems are safe but slow, so the trial finds better ones in a few rounds. All members of a
sweep share cohorts and batches. The trial compares communication: an algorithm with two exchanges per round gets half
the rounds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from covary import algorithms
from covary.algorithm import Algorithm
from covary.running.job import AnyProblem
from covary.sweep import RATIO, Sweep, half_decade, sweep
from covary.targets import direction_of, met, target_of

NEAR = 1.1  # two results count as equally good up to this ratio of exchanges


@dataclass(frozen=True)
class Trial:
    """The best result of one algorithm."""

    algorithm: str
    K: int
    eta_l: float
    eta_g: float
    trips: int  # exchanges per round
    messages: float  # exchanges until the target; infinite if it was not reached
    value: float  # the metric after the last exchange
    curve: np.ndarray = field(repr=False)  # the metric after each exchange, NaN if not measured
    tried: list[dict[str, Any]] = field(repr=False)  # every member of the sweeps

    @property
    def rounds(self) -> float:
        """Rounds until the target."""
        return self.messages / self.trips

    def exchanges_to(self, direction: float, value: float) -> float:
        """Exchanges until the metric meets a value; infinite if it never does, or if the trial diverged."""
        if not math.isfinite(self.value):
            return math.inf
        hits = np.flatnonzero(met(direction, self.curve, value))
        return float(hits[0] + 1) if hits.size else math.inf


@dataclass(frozen=True)
class Contest:
    """What all runs of a trial share."""

    problem: AnyProblem
    exchanges: int  # of each run
    seeds: tuple[int, ...]
    target: tuple[str, float] | tuple[str, str, float] | None
    prox: float  # the strength of proximal terms
    settings: dict[str, Any]  # clients_per_round, batch_size, weights, x0
    say: Callable[[str], None]

    @property
    def metric(self) -> str:
        return self.target[0] if self.target else "loss"

    @property
    def sign(self) -> float:
        """+1 if a larger metric is better, -1 if a smaller one is."""
        target = target_of(self.target)
        return direction_of(self.metric) if target is None else target.direction

    def order(self, trial: Trial) -> tuple[float, float]:
        """The sort key: exchanges to the target, then the final value."""
        return trial.messages, -self.sign * trial.value

    def as_good(self, first: Trial, second: Trial) -> bool:
        """Whether the first needs at most a tenth more communication than the second."""
        own, other = self.exchanges_of(first, second)
        return own <= NEAR * other

    def beats(self, first: Trial, second: Trial) -> bool:
        """Whether the first saves more than a tenth of the second's communication, and more than one round."""
        own, other = self.exchanges_of(first, second)
        return other > NEAR * own and other > own + first.trips

    def exchanges_of(self, first: Trial, second: Trial) -> tuple[float, float]:
        """The exchanges each needed to the target.

        If neither reached it, the target is the value of the better one a tenth before its end, minus a thousandth of
        its progress. Two trials that have converged are thus compared by when they converged.
        """
        if math.isfinite(first.messages) or math.isfinite(second.messages):
            return first.messages, second.messages
        better = max((first, second), key=lambda trial: self.sign * trial.value)
        if not math.isfinite(better.value):
            return math.inf, math.inf
        seen = better.curve[np.isfinite(better.curve)]
        early = better.curve[: max(better.trips, int(len(better.curve) / NEAR))]
        target = early[np.isfinite(early)][-1] - self.sign * 1e-3 * float(np.ptp(seen))
        return first.exchanges_to(self.sign, target), second.exchanges_to(self.sign, target)

    def tune(self, name: str, K: int, centre: float, eta_g: float = 1.0) -> Trial:
        """The best step-size around a centre. The grid is extended while the best lies at an end of it."""
        found = self.run(name, K, [half_decade(centre * RATIO**j) for j in (-2, -1, 0, 1)], eta_g)
        for _ in range(3):
            best, tried = min(found, key=self.order).eta_l, [trial.eta_l for trial in found]
            if min(tried) < best < max(tried):
                break
            way = -1 if best == min(tried) else 1
            found += self.run(name, K, [half_decade(best * RATIO ** (way * j)) for j in (1, 2, 3, 4)], eta_g)
        members = [member for trial in found for member in trial.tried]
        return replace(min(found, key=self.order), tried=members)

    def run(self, name: str, K: int, eta_l: list[float], eta_g: float) -> list[Trial]:
        """One sweep over local step-sizes."""
        self.say(f"{name}, K = {K}, eta_l = {', '.join(f'{eta:g}' for eta in eta_l)}")
        build = maker(name, K, self.prox, eta_g)
        exchanges = len(build(eta_l[0]).exchanges)
        rounds = max(2, self.exchanges // exchanges)
        swept = sweep(
            build,
            self.problem if self.target else self.problem.without_metrics(),  # then the loss is measured
            {"eta_l": eta_l},
            self.seeds,
            rounds=rounds,
            local_steps=K,
            target=self.target,
            race=self.target is not None,
            **self.settings,
        )
        return [self._trial(name, K, eta_g, exchanges, swept, p) for p in range(len(eta_l))]

    def _trial(self, name: str, K: int, eta_g: float, exchanges: int, swept: Sweep, p: int) -> Trial:
        members = swept.table[p * len(self.seeds) : (p + 1) * len(self.seeds)]
        by_round = np.mean([_extended(curve) for curve in swept.curves[self.metric][p]], axis=0)
        curve = np.full(exchanges * len(by_round), np.nan)
        curve[exchanges - 1 :: exchanges] = by_round
        seen = curve[np.isfinite(curve)]
        broken = any(row["outcome"] == "diverged" for row in members) or not seen.size
        return Trial(
            algorithm=name,
            K=K,
            eta_l=swept.points[p]["eta_l"],
            eta_g=eta_g,
            trips=exchanges,
            messages=exchanges * float(swept.mean_rounds()[p]) if self.target and not broken else math.inf,
            value=-self.sign * math.inf if broken else float(seen[-1]),
            curve=curve,
            tried=[{"algorithm": name, "K": K, "eta_g": eta_g, **row} for row in members],
        )


def _extended(curve: np.ndarray) -> np.ndarray:
    """A seed's curve, with its last value repeated in the rounds after it reached the target."""
    last = np.maximum.accumulate(np.where(np.isnan(curve), 0, np.arange(len(curve))))
    return curve[last]


def compete(
    contest: Contest, names: Sequence[str], steps: Sequence[int], eta_l: float, cohort: int
) -> dict[str, Trial]:
    """The best trial of every algorithm; for SCAFFOLD and FedAvg with the smallest K that does as well as any."""
    found: dict[str, Trial] = {}
    for name in ("scaffold", "fedavg"):
        over_K: list[Trial] = []
        for K in sorted(steps):
            over_K.append(contest.tune(name, K, over_K[-1].eta_l if over_K else eta_l))
        best = min(over_K, key=contest.order)
        chosen = next(trial for trial in over_K if contest.as_good(trial, best))
        if cohort > 1:  # as in the theorems: a larger step-size at the server, a smaller one at the clients
            eta_g = float(f"{math.sqrt(cohort):.2g}")
            over_K.append(contest.tune(name, chosen.K, chosen.eta_l / eta_g, eta_g))
            if not contest.as_good(chosen, over_K[-1]):
                chosen = over_K[-1]
        found[name] = replace(chosen, tried=[member for trial in over_K for member in trial.tried])
        if math.isfinite(chosen.messages):  # the others stop after three times as many exchanges
            contest = replace(contest, exchanges=min(contest.exchanges, max(10, int(3 * chosen.messages))))
    for name in names:
        if name not in found:
            like = found["scaffold"]
            found[name] = contest.tune(name, 1 if name == "sgd" else like.K, eta_l if name == "sgd" else like.eta_l)
    return found


def maker(name: str, K: int, prox: float, eta_g: float) -> Callable[[Any], Algorithm]:
    """The factory of an algorithm in which only the local step-size is open."""
    if name in ("fedprox", "dane"):
        return lambda eta_l: getattr(algorithms, name)(eta_l, mu=prox)
    if name == "feddyn":  # with this alpha, K steps reach as far as SCAFFOLD's
        return lambda eta_l: algorithms.feddyn(eta_l, alpha=1 / (K * eta_l))
    if name in ("scaffold", "fedavg"):
        return lambda eta_l: getattr(algorithms, name)(eta_l, eta_g=eta_g)
    return getattr(algorithms, name)


@dataclass(frozen=True)
class Check:
    """The advice for SCAFFOLD against a full sweep over K and step-sizes."""

    best: Trial  # SCAFFOLD's best cell
    fedavg: Trial  # FedAvg's best cell
    advised: float  # rounds with the advised K, eta_l and eta_g
    beats: bool  # whether SCAFFOLD beats FedAvg
    as_predicted: bool
    seeds: tuple[int, ...]

    @property
    def ratio(self) -> float:
        """The rounds of the advised settings over those of the best cell."""
        return self.advised / self.best.rounds

    @property
    def cells(self) -> int:
        """The number of combinations of K and eta_l that were run for SCAFFOLD."""
        return len(self.best.tried) // len(self.seeds)

    def as_dict(self) -> dict[str, Any]:
        """Everything but the curves as plain values, for JSON."""
        plain = {"advised": self.advised, "ratio": self.ratio, "cells": self.cells, "seeds": self.seeds}
        plain |= {"beats": self.beats, "as_predicted": self.as_predicted}
        for name, trial in (("scaffold", self.best), ("fedavg", self.fedavg)):
            plain[name] = {key: getattr(trial, key) for key in ("K", "eta_l", "eta_g", "rounds", "value", "tried")}
        return plain


def check(contest: Contest, advised: Trial, beats: bool, steps: Sequence[int]) -> Check:
    """Run the full sweep that the advice replaces: SCAFFOLD and FedAvg, with eta_l tuned for every K."""
    best: dict[str, Trial] = {}
    for name in ("scaffold", "fedavg"):
        over_K = [contest.tune(name, K, advised.eta_l) for K in steps]
        tried = [member for trial in over_K for member in trial.tried]
        best[name] = replace(min(over_K, key=contest.order), tried=tried)
    (own,) = contest.run("scaffold", advised.K, [advised.eta_l], advised.eta_g)
    measured = contest.beats(min((best["scaffold"], own), key=contest.order), best["fedavg"])
    return Check(best["scaffold"], best["fedavg"], own.rounds, measured, measured == beats, contest.seeds)


def to_common_loss(found: dict[str, Trial]) -> dict[str, Trial]:
    """The trials, with the lowest loss that all of them reached as the target."""
    target = max((trial.value for trial in found.values() if math.isfinite(trial.value)), default=math.inf)
    return {name: replace(trial, messages=trial.exchanges_to(-1.0, target)) for name, trial in found.items()}
