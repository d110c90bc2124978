"""The paper's comparison in small: logistic regression on handwritten digits, clients of 0, 10 and 100 % similarity."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from covary.algorithms import fedavg, fedprox, scaffold, sgd
from covary.data import datasets, partition
from covary.errors import DivergenceWarning
from covary.models import logistic_regression
from covary.problem import Problem, supervised
from covary.simulate import Run, simulate

ALGORITHMS = {"sgd": sgd, "fedavg": fedavg, "fedprox": fedprox, "scaffold": scaffold}


@dataclass(frozen=True)
class Settings:
    """As in the paper's tables: 20 % of the clients a round, 5 epochs of 5 steps, eta_g = 1, eta_l tuned."""

    n_clients: int = 20
    clients_per_round: float = 0.2
    local_epochs: int = 5
    batch_size: float = 0.2
    similarities: tuple[float, ...] = (0.0, 0.1, 1.0)
    step_sizes: tuple[float, ...] = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
    rounds: int = 300
    target: float = 0.95
    seeds: tuple[int, ...] = (0, 1, 2)

    @property
    def runs(self) -> int:
        """How many runs `compare` makes."""
        return len(self.similarities) * len(ALGORITHMS) * (len(self.step_sizes) * len(self.seeds) + 1)


@dataclass(frozen=True)
class Trial:
    """One run of the comparison: while tuning it stops at the target, and the best step-size then runs to the end."""

    similarity: float
    algorithm: str
    eta_l: float
    seed: int
    run: Run
    tuned: bool  # the full curve of the best step-size
    rounds_to_target: float | None  # of this run; where `tuned`, the mean over the seeds


def problem_of(settings: Settings, similarity: float) -> Problem:
    (x, y), test = datasets.digits()
    data = partition.by_similarity(x, y, settings.n_clients, similarity)
    return supervised(logistic_regression(x.shape[1], 10), data, test)


def compare(settings: Settings) -> Iterator[Trial]:
    """Every run of the comparison, as it ends."""
    for similarity in settings.similarities:
        problem = problem_of(settings, similarity)
        for algorithm in ALGORITHMS:
            yield from tune(settings, problem, similarity, algorithm)


def tune(settings: Settings, problem: Problem, similarity: float, algorithm: str) -> Iterator[Trial]:
    """Try every step-size with every seed; then run the best, by mean rounds to the target, without stopping."""

    def trial(eta_l: float, seed: int, target: tuple[str, float] | None) -> Run:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DivergenceWarning)  # a step-size too large is an outcome here
            return simulate(
                ALGORITHMS[algorithm](eta_l),
                problem,
                rounds=settings.rounds,
                clients_per_round=settings.clients_per_round,
                local_epochs=settings.local_epochs,
                batch_size=settings.batch_size,
                seed=seed,
                target=target,
            )

    score: dict[float, float] = {}
    for eta_l in settings.step_sizes:
        rounds = []
        for seed in settings.seeds:
            run = trial(eta_l, seed, ("accuracy", settings.target))
            rounds.append(run.reached or np.inf)
            yield Trial(similarity, algorithm, eta_l, seed, run, tuned=False, rounds_to_target=run.reached)
        score[eta_l] = float(np.mean(rounds))
    best = min(score, key=lambda eta_l: score[eta_l])
    mean = score[best] if np.isfinite(score[best]) else None
    full = trial(best, settings.seeds[0], None)
    yield Trial(similarity, algorithm, best, settings.seeds[0], full, tuned=True, rounds_to_target=mean)
