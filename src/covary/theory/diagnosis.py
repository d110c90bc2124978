"""`diagnose`: whether SCAFFOLD helps on a problem, and with which K, eta_l and eta_g."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from covary.algorithm import Algorithm
from covary.checks import whole
from covary.errors import DivergenceWarning, InvalidInput, refused
from covary.running.engine import runtime_of
from covary.running.job import AnyProblem
from covary.running.plan import batches_of, cohort_size
from covary.simulate import simulate
from covary.targets import target_of
from covary.theory import rates
from covary.theory.advice import Evidence, Point, cautions, predicted, reasons
from covary.theory.dissimilarity import gradient_dissimilarity, gradient_noise
from covary.theory.estimate import Estimate
from covary.theory.hessians import curvature
from covary.theory.oracle import Oracle
from covary.theory.trial import Check, Contest, Trial, check, compete, maker, to_common_loss

# Among equally good algorithms, the first in this list is chosen: less work and memory first.
PREFERENCE = ("sgd", "fedavg", "scaffold", "mime", "fedprox", "feddyn", "dane")
LADDER = 4  # the ratio between numbers of local steps that are tried


@dataclass(frozen=True)
class Diagnosis:
    """Measured constants, and the advice that follows from them."""

    # The constants. beta, delta and sigma are the largest, and mu the smallest, of all points from the start to the end
    # of the trial. With (G, B), A1 holds at all points; G is measured nearest to the optimum.
    beta: float  # smoothness of the clients' functions, A5
    beta_se: float
    mu: float  # lowest curvature of f; below 0 if f is not convex here
    mu_se: float
    sigma: float  # deviation of a minibatch's gradient within a client, A4
    sigma_se: float
    G: float  # gradient dissimilarity, A1
    G_se: float
    B: float
    delta: float  # Hessian dissimilarity, A2
    delta_se: float
    # The advice.
    algorithm: str
    K: int
    eta_l: float
    eta_g: float
    eta_l_safe: float  # the largest eta_l of Theorem III (SCAFFOLD) or I (FedAvg, SGD); a guide for other algorithms
    scaffold_beats_fedavg: bool
    reasons: dict[str, str]
    warnings: list[str]
    # The evidence.
    convex: bool
    useful_local_steps: float  # beta / delta
    N: int
    S: int
    measured: dict[str, float]  # rounds until the target in the trial, by algorithm; infinite if not reached
    predicted: dict[str, float]  # rounds by Table 1, scaled so that SGD's equal the measured ones
    goal: str  # the target of `measured`, in words
    trials: dict[str, Trial] = field(repr=False)
    points: list[dict[str, float]] = field(repr=False)  # the constants at each measured point
    cost: int  # the constants' cost in gradients of one example's loss
    seeds: tuple[int, ...]  # of the trial
    prox: float = field(repr=False)

    def build(self) -> Algorithm:
        """The recommended algorithm, ready for `simulate`; its K is `diagnosis.K`.

        >>> import covary as cv
        >>> found = cv.diagnose(cv.lower_bound(G=10.0), x0=1.0, trial_rounds=5, local_steps=4, algorithms=())
        >>> cv.simulate(found.build(), cv.lower_bound(G=10.0), rounds=9, local_steps=found.K, x0=1.0).rounds
        9
        """
        return maker(self.algorithm, self.K, self.prox, self.eta_g)(self.eta_l)

    @property
    def verdict(self) -> str:
        """Whether SCAFFOLD is worth using, in one sentence."""
        return self.reasons["scaffold"]

    def as_dict(self) -> dict[str, Any]:
        """Everything as plain values, for JSON."""
        plain = asdict(self)
        for trial in plain["trials"].values():
            trial["curve"] = [None if math.isnan(v) else float(v) for v in trial["curve"]]
        return plain


def diagnose(
    problem: AnyProblem,
    rounds: int = 100,
    clients_per_round: int | float | None = None,
    local_steps: int | None = None,
    batch_size: int | float | None = None,
    seed: int = 0,
    x0: Any = None,
    weights: str = "uniform",
    target: tuple[str, float] | tuple[str, str, float] | None = None,
    *,
    max_local_steps: int = 100,
    trial_rounds: int = 30,
    trial_seeds: int = 2,
    algorithms: tuple[str, ...] = PREFERENCE,
    say: Callable[[str], None] | None = None,
) -> Diagnosis:
    """Measure the paper's constants on a problem, and recommend an algorithm, K and step-sizes.

    It measures the constants at the start, runs a short trial around the step-size they suggest, and measures the
    constants again at the end of the trial. The advice is the best setting of the trial; the constants explain it.

    Args:
        problem: your model and data with at least two clients, from `covary.supervised(...)` for example, or from
            `covary.torch.supervised(...)` with tensors. Dropout is off in all measurements, and BatchNorm normalises
            by all of a client's examples.
        rounds: the number of rounds you plan to train for.
        clients_per_round, batch_size, seed, x0, weights: your settings, as in `simulate`.
        local_steps: your K, if it is fixed; by default several are tried.
        target: the target of the training, such as ("accuracy", 0.9): the trial then looks for the fewest rounds to
            it. By default it looks for the lowest training loss.
        max_local_steps: the largest K to consider.
        trial_rounds: the length of the trial. Algorithms with two exchanges per round get half as many rounds.
        trial_seeds: the number of seeds to average over.
        algorithms: the algorithms to consider besides SCAFFOLD and FedAvg. VRL-SGD is not among them: where it can be
            used, it takes the same steps as SCAFFOLD.
        say: called with a line of text at each new step.

    Returns:
        A `Diagnosis`.

    >>> import numpy as np, covary as cv
    >>> A, b = [np.diag([1.0, 0.02]), np.diag([1.2, 0.03])], [[1.0, 1.0], [-1.0, -1.0]]
    >>> found = cv.diagnose(cv.quadratics(A, b), x0=[1.0, 1.0], trial_rounds=8, local_steps=20, algorithms=("sgd",))
    >>> round(found.beta, 3), round(found.delta, 3), found.algorithm, found.scaffold_beats_fedavg
    (1.2, 0.1, 'scaffold', True)
    """
    # The request
    say = say or (lambda text: None)
    if isinstance(algorithms, str):
        raise refused("algorithms", "a list of names", repr(algorithms), f"Try [{algorithms!r}].")
    for name in algorithms:
        if name not in PREFERENCE:
            raise refused("algorithms", f"any of {', '.join(PREFERENCE)}", name, "See covary.algorithms.")
    whole("rounds", rounds, 1)
    whole("max_local_steps", max_local_steps, 1)
    whole("seed", seed, 0, most=2**31)
    seeds = tuple(range(seed, seed + whole("trial_seeds", trial_seeds, 1, most=1000)))
    whole("trial_rounds", trial_rounds, 2)
    if local_steps is not None:
        whole("local_steps", local_steps, 1)
    runtime_of(problem)  # rejects what is no problem
    target_of(target, ("loss", *problem.metric_names))
    oracle = Oracle(problem, weights, seed, x0)
    S = cohort_size(clients_per_round, problem.n_clients)
    batches_of(batch_size, problem.data.sizes)

    # The constants at the start
    say("measuring the clients' gradients and Hessians at the start")
    first = _measure(oracle, oracle.start, batch_size)
    beta, delta = (getattr(first.curvature, name).value for name in ("beta", "delta"))
    useful = rates.useful_local_steps(beta, delta)

    # The trial, around the step-size that they suggest
    steps = [local_steps] if local_steps is not None else _ladder(max_local_steps)
    contest = Contest(
        problem=problem,
        exchanges=max(2, min(rounds, trial_rounds)),
        seeds=seeds,
        target=target,
        prox=delta,
        settings={"clients_per_round": clients_per_round, "batch_size": batch_size, "weights": weights, "x0": x0},
        say=say,
    )
    trials = compete(contest, algorithms, steps, 1 / beta, S)
    best = min(trials.values(), key=contest.order)
    if not math.isfinite(best.value):
        raise InvalidInput(
            "Every run of the trial diverged, even with the smallest step-size tried "
            f"({min(row['eta_l'] for row in best.tried):g}). Scale the features to mean 0 and deviation 1, or start "
            "closer to the optimum."
        )
    chosen = next(trials[name] for name in PREFERENCE if name in trials and not contest.beats(best, trials[name]))

    # The constants along the trajectory
    points, x = [first], oracle.start
    trajectory, stable = _trajectory(contest, trials["scaffold"], seed)
    for x in trajectory:
        say(f"measuring along the trajectory, {len(points)} of {len(trajectory)}")
        points.append(_measure(oracle, x, batch_size, hessians=x is trajectory[-1]))
    return _conclude(
        Evidence(
            oracle=oracle,
            points=points,
            moved=float(np.linalg.norm((x - oracle.start).astype(float))),
            contest=contest,
            trials=trials,
            chosen=chosen,
            beats=contest.beats(trials["scaffold"], trials["fedavg"]),
            rounds=rounds,
            S=S,
            useful=useful,
            given=local_steps is not None,
            stable=stable,
        )
    )


def check_advice(
    diagnosis: Diagnosis,
    problem: AnyProblem,
    target: Any,
    steps: Sequence[int],
    *,
    rounds: int = 300,
    seeds: tuple[int, ...] | None = None,
    say: Callable[[str], None] | None = None,
    **settings: Any,
) -> Check:
    """Compare the advice for SCAFFOLD with a full sweep over K and step-sizes, with other seeds.

    Args:
        diagnosis: from `diagnose` on the same problem.
        problem: the problem.
        target: the target that rounds are counted to.
        steps: the values of K. For each, step-sizes a factor of √10 apart are tried until the best lies inside.
        rounds: the maximum number of rounds per run.
        seeds: the seeds of the sweep; by default three that the diagnosis did not use.
        say: called with a line of text at each new step.
        settings: `clients_per_round`, `batch_size`, `weights` and `x0`, as given to `diagnose`.

    >>> import covary as cv
    >>> problem, target = cv.lower_bound(G=10.0), ("loss", 1e-4)
    >>> found = cv.diagnose(problem, x0=1.0, target=target, local_steps=4, algorithms=())
    >>> checked = cv.theory.check_advice(found, problem, target, [2, 4], seeds=(1,), x0=1.0)
    >>> checked.as_predicted, checked.ratio <= 1.5
    (True, True)
    """
    say = say or (lambda text: None)
    seeds = tuple(max(diagnosis.seeds) + k for k in (1, 2, 3)) if seeds is None else tuple(seeds)
    contest = Contest(problem, whole("rounds", rounds, 2), seeds, target, diagnosis.prox, settings, say)
    return check(contest, diagnosis.trials["scaffold"], diagnosis.scaffold_beats_fedavg, steps)


def _measure(oracle: Oracle, x: np.ndarray, batch_size: Any, hessians: bool = True) -> Point:
    noise = gradient_noise(oracle, x) if oracle.divisible else None
    return Point(
        gradients=gradient_dissimilarity(oracle, x),
        sigma=Estimate(math.nan) if noise is None else noise.sigma(batch_size),
        noise=noise,
        curvature=curvature(oracle, x) if hessians else None,
    )


def _ladder(most: int) -> list[int]:
    """The values of K to try: the largest allowed, a quarter and a sixteenth of it."""
    return sorted({max(1, most // LADDER**2), max(1, most // LADDER), most})


def _trajectory(contest: Contest, trial: Trial, seed: int) -> tuple[list[np.ndarray], bool]:
    """The models of SCAFFOLD's best run after a quarter of its rounds and at its end, and whether it stays stable."""
    algorithm = maker("scaffold", trial.K, contest.prox, trial.eta_g)(trial.eta_l)
    settings: dict[str, Any] = contest.settings | {"local_steps": trial.K, "seed": seed}
    end = int(trial.rounds) if math.isfinite(trial.messages) else contest.exchanges
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", DivergenceWarning)
        simulate(algorithm, contest.problem, contest.exchanges, **settings)
        ends = sorted({max(1, end // 4), max(1, end)})
        points = [simulate(algorithm, contest.problem, r, eval_every=r, **settings).x for r in ends]
    for warning in caught:
        if not issubclass(warning.category, DivergenceWarning):
            warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)
    return points, not any(issubclass(warning.category, DivergenceWarning) for warning in caught)


def _conclude(e: Evidence) -> Diagnosis:
    shown = e.trials if e.contest.target else to_common_loss(e.trials)
    measured = {name: trial.rounds for name, trial in shown.items()}
    target = e.contest.target
    (G, B), widest = e.dissimilarity, max((point.gradients.G for point in e.points), key=float)
    return Diagnosis(
        beta=e.beta.value,
        beta_se=e.beta.se,
        mu=e.mu.value,
        mu_se=e.mu.se,
        sigma=float(e.sigma.value),
        sigma_se=e.sigma.se,
        G=G,
        G_se=widest.se * G / widest.value if widest.value > 0 else 0.0,
        B=B,
        delta=e.delta.value,
        delta_se=e.delta.se,
        algorithm=e.chosen.algorithm,
        K=e.chosen.K,
        eta_l=e.chosen.eta_l,
        eta_g=e.chosen.eta_g,
        eta_l_safe=e.safe_step,
        scaffold_beats_fedavg=e.beats,
        reasons=reasons(e),
        warnings=cautions(e),
        convex=e.convex,
        useful_local_steps=e.useful,
        N=e.N,
        S=e.S,
        measured=measured,
        predicted=predicted(e, measured),
        goal=f"{target[0]} {target[-1]:g}" if target else "the lowest loss that all reached in the trial",
        trials=shown,
        points=[point.as_dict() for point in e.points],
        cost=e.oracle.cost,
        seeds=e.contest.seeds,
        prox=e.contest.prox,
    )
