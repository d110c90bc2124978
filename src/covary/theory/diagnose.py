"""`diagnose`: will SCAFFOLD help here, and with which K, eta_l and eta_g? Measured, predicted, checked by running."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from covary._engine.plan import batches_of, cohort_size
from covary.algorithm import Algorithm
from covary.checks import whole
from covary.errors import CovaryError, DivergenceWarning, refused
from covary.problem import Problem
from covary.simulate import simulate
from covary.targets import target_of
from covary.theory import rates
from covary.theory.advice import Evidence, Point, cautions, predicted, reasons
from covary.theory.dissimilarity import gradient_dissimilarity, gradient_noise
from covary.theory.estimate import Estimate
from covary.theory.hessians import curvature
from covary.theory.oracle import Oracle
from covary.theory.trial import Check, Contest, Trial, check, compete, maker, to_what_all_reached

# In this order one of several that are equally good is chosen: the less work and memory, the earlier.
PREFERENCE = ("sgd", "fedavg", "scaffold", "mime", "fedprox", "feddyn", "dane")
LADDER = 4  # between two numbers of local steps that are tried


@dataclass(frozen=True)
class Diagnosis:
    """What was measured, and what follows from it."""

    # The constants. beta, delta and sigma are the largest and mu is the least from the start to where the trial ended;
    # with (G, B) A1 holds there, and G is as near the optimum.
    beta: float  # smoothness of the clients' functions, A5
    beta_se: float
    mu: float  # lowest curvature of f; below 0: f is not convex here
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
    eta_l_safe: float  # what the theorem guarantees for the algorithm, K and eta_g
    scaffold_beats_fedavg: bool
    reasons: dict[str, str]
    warnings: list[str]
    # What it rests on.
    convex: bool
    useful_local_steps: float  # beta / delta
    N: int
    S: int
    measured: dict[str, float]  # rounds until the goal in the trial, by algorithm; infinite: not reached
    predicted: dict[str, float]  # by Table 1, scaled so that SGD's is what was measured of it
    goal: str  # what `measured` counts rounds to
    trials: dict[str, Trial] = field(repr=False)
    points: list[dict[str, float]] = field(repr=False)  # the constants at each point where they were measured
    cost: int  # gradients of one example's loss that the constants took
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
        """Whether SCAFFOLD is worth it, in one sentence."""
        return self.reasons["scaffold"]

    def as_dict(self) -> dict[str, Any]:
        """All of it as plain values, for JSON."""
        plain = asdict(self)
        for trial in plain["trials"].values():
            trial["curve"] = [None if math.isnan(v) else float(v) for v in trial["curve"]]
        return plain


def diagnose(
    problem: Problem,
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
    """Measure the paper's constants on a problem, and say which algorithm, K and step-sizes to use.

    First the constants are measured at the start, then a short contest is run around the step-size they suggest, then
    the constants are measured again where it ended. The advice is what won; the constants explain it.

    Args:
        problem: your model and data, from `covary.supervised(...)`, say, with at least two clients.
        rounds: how many rounds you mean to train for.
        clients_per_round, batch_size, seed, x0, weights: as you will use them, and as in `simulate`.
        local_steps: your K, if it is settled; by default several are tried.
        target: what you want to reach, such as ("accuracy", 0.9): the contest is then for the fewest rounds to it. By
            default it is for the lowest training loss.
        max_local_steps: the most local steps to consider.
        trial_rounds: the length of the contest. Algorithms that need two trips a round get half as many rounds.
        trial_seeds: how many times to run it, for the mean.
        algorithms: which to consider besides SCAFFOLD and FedAvg. VRL-SGD is not among them: it takes SCAFFOLD's steps
            where it can be used at all.
        say: called with a line of text when something new is begun.

    Returns:
        A `Diagnosis`.

    >>> import numpy as np, covary as cv
    >>> A, b = [np.diag([1.0, 0.02]), np.diag([1.2, 0.03])], [[1.0, 1.0], [-1.0, -1.0]]
    >>> found = cv.diagnose(cv.quadratics(A, b), x0=[1.0, 1.0], trial_rounds=8, local_steps=20, algorithms=("sgd",))
    >>> round(found.beta, 3), round(found.delta, 3), found.algorithm, found.scaffold_beats_fedavg
    (1.2, 0.1, 'scaffold', True)
    """
    say = say or (lambda text: None)
    if isinstance(algorithms, str):
        raise refused("algorithms", "a list of names", repr(algorithms), f"Try [{algorithms!r}].")
    for name in algorithms:
        if name not in PREFERENCE:
            raise refused("algorithms", f"some of {', '.join(PREFERENCE)}", name, "See covary.algorithms.")
    whole("rounds", rounds, 1)
    whole("max_local_steps", max_local_steps, 1)
    whole("seed", seed, 0, most=2**31)
    seeds = tuple(range(seed, seed + whole("trial_seeds", trial_seeds, 1, most=1000)))
    whole("trial_rounds", trial_rounds, 2)
    if local_steps is not None:
        whole("local_steps", local_steps, 1)
    if isinstance(problem, Problem):
        target_of(target, ("loss", *problem.metric_names))
    oracle = Oracle(problem, weights, seed, x0)
    S = cohort_size(clients_per_round, problem.n_clients)
    batches_of(batch_size, problem.data.sizes)

    say("measuring the clients' gradients and Hessians at the start")
    first = _measure(oracle, oracle.start, batch_size)
    beta, delta = (getattr(first.curvature, name).value for name in ("beta", "delta"))
    useful = rates.useful_local_steps(beta, delta)
    steps = [local_steps] if local_steps is not None else _ladder(max_local_steps)
    contest = Contest(
        problem=problem,
        trips=max(2, min(rounds, trial_rounds)),
        seeds=seeds,
        target=target,
        prox=delta,
        settings={"clients_per_round": clients_per_round, "batch_size": batch_size, "weights": weights, "x0": x0},
        say=say,
    )
    trials = compete(contest, algorithms, steps, 1 / beta, S)
    best = min(trials.values(), key=contest.order)
    if not math.isfinite(best.value):
        raise CovaryError(
            "Every run of the trial diverged, even with the smallest step-size tried "
            f"({min(row['eta_l'] for row in best.tried):g}). Scale the features (mean 0, deviation 1), or start nearer."
        )
    chosen = next(trials[name] for name in PREFERENCE if name in trials and not contest.beats(best, trials[name]))
    points, x = [first], oracle.start
    way, goes_on = _trajectory(contest, trials["scaffold"], seed)
    for x in way:
        say(f"measuring along the way, {len(points)} of {len(way)}")
        points.append(_measure(oracle, x, batch_size, hessians=x is way[-1]))
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
            goes_on=goes_on,
        )
    )


def check_advice(
    diagnosis: Diagnosis,
    problem: Problem,
    target: Any,
    steps: Sequence[int],
    *,
    rounds: int = 300,
    seeds: tuple[int, ...] | None = None,
    say: Callable[[str], None] | None = None,
    **settings: Any,
) -> Check:
    """Run the full sweep that a diagnosis is to save, with other seeds, and hold its advice for SCAFFOLD against it.

    Args:
        diagnosis: from `diagnose` on the same problem.
        problem: the problem.
        target: what rounds are counted to.
        steps: the K to sweep over; step-sizes a factor of √10 apart are tried for each until the best lies inside.
        rounds: the most rounds of a run.
        seeds: of the sweep; by default three that the diagnosis has not seen.
        say: called with a line of text when something new is begun.
        settings: `clients_per_round`, `batch_size`, `weights` and `x0`, as they were given to `diagnose`.

    >>> import covary as cv
    >>> problem, goal = cv.lower_bound(G=10.0), ("loss", 1e-4)
    >>> found = cv.diagnose(problem, x0=1.0, target=goal, local_steps=4, algorithms=())
    >>> checked = cv.theory.check_advice(found, problem, goal, [2, 4], seeds=(1,), x0=1.0)
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
    """The numbers of local steps to try: the most that is allowed, a quarter and a sixteenth of it."""
    return sorted({max(1, most // LADDER**2), max(1, most // LADDER), most})


def _trajectory(contest: Contest, trial: Trial, seed: int) -> tuple[list[np.ndarray], bool]:
    """Where SCAFFOLD's best run was after a quarter of its rounds and at its end, and whether it could have gone on."""
    algorithm = maker("scaffold", trial.K, contest.prox, trial.eta_g)(trial.eta_l)
    settings: dict[str, Any] = contest.settings | {"local_steps": trial.K, "seed": seed}
    end = int(trial.rounds) if math.isfinite(trial.messages) else contest.trips
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", DivergenceWarning)
        simulate(algorithm, contest.problem, contest.trips, **settings)
        ends = sorted({max(1, end // 4), max(1, end)})
        points = [simulate(algorithm, contest.problem, r, eval_every=r, **settings).x for r in ends]
    for warning in told:
        if not issubclass(warning.category, DivergenceWarning):
            warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)
    return points, not any(issubclass(warning.category, DivergenceWarning) for warning in told)


def _conclude(e: Evidence) -> Diagnosis:
    shown = e.trials if e.contest.target else to_what_all_reached(e.trials)
    measured = {name: trial.rounds for name, trial in shown.items()}
    goal = e.contest.target
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
        goal=f"{goal[0]} {goal[-1]:g}" if goal else "the lowest loss that all reached in the trial",
        trials=shown,
        points=[point.as_dict() for point in e.points],
        cost=e.oracle.cost,
        seeds=e.contest.seeds,
        prox=e.contest.prox,
    )
