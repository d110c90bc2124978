"""A short contest: every algorithm with its step-size tuned, SCAFFOLD and FedAvg over the number of local steps too.

Theory's step-sizes are safe and slow, so the ones to use are found by running a few rounds. All members of a sweep
share cohorts and batches, and an algorithm with two trips a round has half the rounds: communication is compared.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from covary import algorithms
from covary.algorithm import Algorithm
from covary.problem import Problem
from covary.sweep import RATIO, Sweep, half_decade, sweep
from covary.targets import direction_of, target_of

NEAR = 1.1  # needing up to this many times the fewest trips is as good


@dataclass(frozen=True)
class Trial:
    """The best that was found of one algorithm."""

    algorithm: str
    K: int
    eta_l: float
    eta_g: float
    trips: int  # to the clients and back, a round
    messages: float  # trips until the goal; infinite where it was not reached
    value: float  # the metric after the last of them
    curve: np.ndarray = field(repr=False)  # the metric by trip, NaN where not measured
    tried: list[dict[str, Any]] = field(repr=False)  # every member of the sweeps

    @property
    def rounds(self) -> float:
        """Rounds until the goal."""
        return self.messages / self.trips


@dataclass(frozen=True)
class Contest:
    """What all runs of a trial share."""

    problem: Problem
    trips: int
    seeds: tuple[int, ...]
    target: tuple[str, float] | tuple[str, str, float] | None
    prox: float  # the strength of proximal terms
    settings: dict[str, Any]  # clients_per_round, batch_size, weights, x0
    say: Callable[[str], None]

    @property
    def metric(self) -> str:
        return self.target[0] if self.target else "loss"

    @property
    def way(self) -> float:
        """+1 where the metric is to rise, -1 where it is to fall."""
        target = target_of(self.target)
        return direction_of(self.metric) if target is None else target.direction

    def order(self, trial: Trial) -> tuple[float, float]:
        """Fewest trips to the goal first, then the best value."""
        return trial.messages, -self.way * trial.value

    def as_good(self, first: Trial, second: Trial) -> bool:
        """Whether the first needs at most a tenth more communication than the second."""
        own, other = self.trips_of(first, second)
        return own <= NEAR * other

    def beats(self, first: Trial, second: Trial) -> bool:
        """Whether the first saves more than a tenth of the second's communication, and more than one round."""
        own, other = self.trips_of(first, second)
        return other > NEAR * own and other > own + first.trips

    def trips_of(self, first: Trial, second: Trial) -> tuple[float, float]:
        """What each needed to the target or, where neither reached it, to where the better one was a tenth before its
        end, give or take a thousandth of the progress: two that have converged are compared by when they had."""
        if math.isfinite(first.messages) or math.isfinite(second.messages):
            return first.messages, second.messages
        better = max((first, second), key=lambda trial: self.way * trial.value)
        if not math.isfinite(better.value):
            return math.inf, math.inf
        seen = better.curve[np.isfinite(better.curve)]
        early = better.curve[: max(better.trips, int(len(better.curve) / NEAR))]
        goal = self.way * early[np.isfinite(early)][-1] - 1e-3 * float(np.ptp(seen))

        def trips(trial: Trial) -> float:
            there = np.flatnonzero(self.way * trial.curve >= goal)
            return float(there[0] + 1) if there.size and math.isfinite(trial.value) else math.inf

        return trips(first), trips(second)

    def tune(self, name: str, K: int, centre: float, eta_g: float = 1.0) -> Trial:
        """The best step-size around a centre; the grid is continued while the best lies at an end of it."""
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
        build, trips = maker(name, K, self.prox, eta_g), len(maker(name, K, self.prox, eta_g)(1.0).exchanges)
        rounds = max(2, self.trips // trips)
        swept = sweep(
            build,
            self.problem if self.target else replace(self.problem, metrics=None),  # the loss is measured then
            {"eta_l": eta_l},
            self.seeds,
            rounds=rounds,
            local_steps=K,
            target=self.target,
            race=self.target is not None,
            **self.settings,
        )
        return [self._trial(name, K, eta_g, trips, swept, p) for p in range(len(eta_l))]

    def _trial(self, name: str, K: int, eta_g: float, trips: int, swept: Sweep, p: int) -> Trial:
        members = swept.table[p * len(self.seeds) : (p + 1) * len(self.seeds)]
        by_round = np.mean([_carried_on(curve) for curve in swept.curves[self.metric][p]], axis=0)
        curve = np.full(trips * len(by_round), np.nan)
        curve[trips - 1 :: trips] = by_round
        seen = curve[np.isfinite(curve)]
        broken = any(row["outcome"] == "diverged" for row in members) or not seen.size
        return Trial(
            algorithm=name,
            K=K,
            eta_l=swept.points[p]["eta_l"],
            eta_g=eta_g,
            trips=trips,
            messages=trips * float(swept.mean_rounds()[p]) if self.target and not broken else math.inf,
            value=-self.way * math.inf if broken else float(seen[-1]),
            curve=curve,
            tried=[{"algorithm": name, "K": K, "eta_g": eta_g, **row} for row in members],
        )


def _carried_on(curve: np.ndarray) -> np.ndarray:
    """A seed's curve with its last value in the rounds after it reached the target."""
    last = np.maximum.accumulate(np.where(np.isnan(curve), 0, np.arange(len(curve))))
    return curve[last]


def compete(
    contest: Contest, names: Sequence[str], steps: Sequence[int], eta_l: float, cohort: int
) -> dict[str, Trial]:
    """The best of every algorithm; of SCAFFOLD and FedAvg with the fewest local steps that do as well as any."""
    found: dict[str, Trial] = {}
    for name in ("scaffold", "fedavg"):
        over_K: list[Trial] = []
        for K in sorted(steps):
            over_K.append(contest.tune(name, K, over_K[-1].eta_l if over_K else eta_l))
        best = min(over_K, key=contest.order)
        chosen = next(trial for trial in over_K if contest.as_good(trial, best))
        if cohort > 1:  # the theorems' two step-sizes: a larger one at the server, a smaller one at the clients
            eta_g = float(f"{math.sqrt(cohort):.2g}")
            over_K.append(contest.tune(name, chosen.K, chosen.eta_l / eta_g, eta_g))
            if not contest.as_good(chosen, over_K[-1]):
                chosen = over_K[-1]
        found[name] = replace(chosen, tried=[member for trial in over_K for member in trial.tried])
        if math.isfinite(chosen.messages):  # whoever needs three times as long is out of the race
            contest = replace(contest, trips=min(contest.trips, max(10, int(3 * chosen.messages))))
    for name in names:
        if name not in found:
            like = found["scaffold"]
            found[name] = contest.tune(name, 1 if name == "sgd" else like.K, eta_l if name == "sgd" else like.eta_l)
    return found


def maker(name: str, K: int, prox: float, eta_g: float) -> Callable[[Any], Algorithm]:
    """An algorithm with everything but its local step-size settled."""
    if name in ("fedprox", "dane"):
        return lambda eta_l: getattr(algorithms, name)(eta_l, mu=prox)
    if name == "feddyn":  # as strong as makes K steps reach as far as SCAFFOLD's
        return lambda eta_l: algorithms.feddyn(eta_l, alpha=1 / (K * eta_l))
    if name in ("scaffold", "fedavg"):
        return lambda eta_l: getattr(algorithms, name)(eta_l, eta_g=eta_g)
    return getattr(algorithms, name)


@dataclass(frozen=True)
class Check:
    """The advice for SCAFFOLD against a full sweep over K and step-sizes."""

    best: Trial  # SCAFFOLD's best cell
    fedavg: Trial  # FedAvg's
    advised: float  # rounds with the advised K, eta_l and eta_g
    beats: bool  # whether SCAFFOLD beats FedAvg
    as_predicted: bool
    seeds: tuple[int, ...]

    @property
    def ratio(self) -> float:
        """How many times the rounds of the best cell the advised setting needs."""
        return self.advised / self.best.rounds

    @property
    def cells(self) -> int:
        """The combinations of K and eta_l that were run of SCAFFOLD."""
        return len(self.best.tried) // len(self.seeds)

    def as_dict(self) -> dict[str, Any]:
        """All but the curves as plain values, for JSON."""
        plain = {"advised": self.advised, "ratio": self.ratio, "cells": self.cells, "seeds": self.seeds}
        plain |= {"beats": self.beats, "as_predicted": self.as_predicted}
        for name, trial in (("scaffold", self.best), ("fedavg", self.fedavg)):
            plain[name] = {key: getattr(trial, key) for key in ("K", "eta_l", "eta_g", "rounds", "value", "tried")}
        return plain


def check(contest: Contest, advised: Trial, beats: bool, steps: Sequence[int]) -> Check:
    """Run the full sweep that the advice is to save: SCAFFOLD and FedAvg, every K, tuned for each."""
    best: dict[str, Trial] = {}
    for name in ("scaffold", "fedavg"):
        over_K = [contest.tune(name, K, advised.eta_l) for K in steps]
        tried = [member for trial in over_K for member in trial.tried]
        best[name] = replace(min(over_K, key=contest.order), tried=tried)
    (own,) = contest.run("scaffold", advised.K, [advised.eta_l], advised.eta_g)
    measured = contest.beats(min((best["scaffold"], own), key=contest.order), best["fedavg"])
    return Check(best["scaffold"], best["fedavg"], own.rounds, measured, measured == beats, contest.seeds)


def to_what_all_reached(found: dict[str, Trial]) -> dict[str, Trial]:
    """With the trips that each needed to the lowest loss that all of them reached."""
    goal = max((trial.value for trial in found.values() if math.isfinite(trial.value)), default=math.inf)

    def messages(trial: Trial) -> float:
        there = np.flatnonzero(trial.curve <= goal)
        return float(there[0] + 1) if there.size and math.isfinite(trial.value) else math.inf

    return {name: replace(trial, messages=messages(trial)) for name, trial in found.items()}
