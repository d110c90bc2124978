"""From measured constants and a trial to advice in sentences."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from covary.theory import rates
from covary.theory.dissimilarity import Gradients, Noise, envelope
from covary.theory.estimate import Estimate
from covary.theory.hessians import Curvature
from covary.theory.oracle import Oracle
from covary.theory.trial import Contest, Trial

VISITS = 5  # with fewer visits per client, most control variates are stale
ALIKE = 1.3  # clients count as alike if G is below this many times the G of random parts of one data set


@dataclass(frozen=True)
class Point:
    """The measurements at one point of the trajectory."""

    gradients: Gradients
    sigma: Estimate  # for the batch size of the training
    noise: Noise | None  # None if examples' losses depend on each other
    curvature: Curvature | None  # None if only gradients were measured

    def as_dict(self) -> dict[str, float]:
        values = {"loss": self.gradients.loss, "gradient_norm": self.gradients.norm, "G": self.gradients.G.value}
        values["sigma"] = self.sigma.value
        if self.curvature is not None:
            values |= {name: getattr(self.curvature, name).value for name in ("beta", "mu", "delta", "weak_convexity")}
        return values

    @property
    def against_chance(self) -> float:
        """G over the G of clients that are random parts of one data set, √((1 - 1/N) sum p_i s_i²/n_i)."""
        if self.noise is None:
            return math.nan
        clients = len(self.noise.sizes) / (1 - self.noise.left_out)
        chance = (1 - 1 / clients) * float(self.noise.weights @ (self.noise.variances / self.noise.sizes))
        return self.gradients.G.value / math.sqrt(chance) if chance > 0 else math.inf


@dataclass(frozen=True)
class Evidence:
    """The measurements and trials behind the advice."""

    oracle: Oracle
    points: list[Point]  # from the start to the end of the trial
    moved: float  # the distance from the first to the last point
    contest: Contest
    trials: dict[str, Trial]
    chosen: Trial
    beats: bool  # SCAFFOLD beats FedAvg
    rounds: int  # that the user plans to train for
    S: int
    useful: float  # useful local steps, beta/delta at the start
    given: bool  # whether the user gave K
    stable: bool  # SCAFFOLD's best run does not diverge after the target

    @property
    def N(self) -> int:
        return self.oracle.problem.n_clients

    @property
    def curved(self) -> list[Curvature]:
        return [point.curvature for point in self.points if point.curvature is not None]

    @property
    def beta(self) -> Estimate:
        return max((c.beta for c in self.curved), key=float)

    @property
    def delta(self) -> Estimate:
        return max((c.delta for c in self.curved), key=float)

    @property
    def mu(self) -> Estimate:
        return min((c.mu for c in self.curved), key=float)

    @property
    def convex(self) -> bool:
        return all(c.convex for c in self.curved)

    @property
    def sigma(self) -> Estimate:
        return max((point.sigma for point in self.points), key=float)

    @property
    def dissimilarity(self) -> tuple[float, float]:
        """(G, B) for which A1 holds at all points."""
        return envelope([point.gradients for point in self.points])

    @property
    def setting(self) -> rates.Setting:
        """The quantities in the theorems: the constants, and the chosen K and eta_g."""
        mu, (G, B) = self.mu, self.dissimilarity
        strongly = self.convex and mu.value - mu.se > 1e-4 * self.beta.value
        return rates.Setting(
            beta=self.beta.value,
            mu=min(mu.value - mu.se, self.beta.value) if strongly else 0.0,
            convex=self.convex,
            sigma=0.0 if math.isnan(self.sigma.value) else float(self.sigma.value),
            G=G,
            B=B,
            delta=self.delta.value,
            N=self.N,
            S=self.S,
            K=self.chosen.K,
            D=max(self.moved, 1e-12),
            F=self.gap,
            eta_g=self.chosen.eta_g,
        )

    @property
    def gap(self) -> float:
        """The decrease of the loss, as an estimate of f(x^0) - f*."""
        losses = [point.gradients.loss for point in self.points]
        return max(losses[0] - min(losses), 1e-12)

    @property
    def safe_step(self) -> float:
        """The largest eta_l of Theorem III (SCAFFOLD) or Theorem I (FedAvg, and SGD with K = 1).

        The paper has no theorem for the other algorithms. FedDyn and Mime get SCAFFOLD's bound as a guide, FedProx and
        DANE get FedAvg's.
        """
        return rates.scaffold_step(self.setting) if self.controlled else rates.fedavg_step(self.setting)

    @property
    def controlled(self) -> bool:
        return self.chosen.algorithm in ("scaffold", "feddyn", "mime")


def predicted(e: Evidence, measured: dict[str, float]) -> dict[str, float]:
    """Rounds by Table 1 for each algorithm's own K, scaled so that SGD's (else SCAFFOLD's, FedAvg's) is as measured.

    The accuracy is a twentieth of the gap or, if f is not convex, of the squared gradient at the start.
    """
    s = e.setting
    epsilon = 0.05 * (e.gap if s.convex else max(e.points[0].gradients.norm ** 2, 1e-12))

    def rate(name: str) -> float:
        table = rates.table1(replace(s, K=e.trials[name].K), epsilon)
        if name == "sgd":  # no noise on full local data; the sampling term is that of Theorem I with K = 1
            one = replace(s, K=1, sigma=0.0, B=1.0)
            sampling = rates.table1(one, epsilon)["fedavg"] - rates.table1(replace(one, S=s.N), epsilon)["fedavg"]
            return sampling + rates.table1(replace(one, S=s.N), epsilon)["sgd"]
        if name == "scaffold":
            return min(value for row, value in table.items() if row.startswith("scaffold"))
        return table.get(name, math.nan)

    expected = {name: float(rate(name)) for name in e.trials}
    for name in ("sgd", "scaffold", "fedavg"):
        if math.isfinite(measured.get(name, math.inf)):
            scale = measured[name] / expected[name]
            return {n: max(1.0, scale * value) for n, value in expected.items() if not math.isnan(value)}
    return {}


def reasons(e: Evidence) -> dict[str, str]:
    """One sentence for the verdict on SCAFFOLD and for each part of the advice."""
    outcomes = {name: _outcome(trial, e.contest) for name, trial in e.trials.items()}
    return {
        "scaffold": _verdict(e, outcomes),
        "algorithm": (
            f"In the trial: {outcomes[e.chosen.algorithm]}. The others: "
            + ", ".join(f"{name} {outcomes[name]}" for name in e.trials if name != e.chosen.algorithm)
            + "."
        ),
        "K": _why_K(e),
        "eta_l": _why_eta_l(e),
        "eta_g": _why_eta_g(e),
    }


def _verdict(e: Evidence, outcomes: dict[str, str]) -> str:
    both = f"{outcomes['scaffold']} against {outcomes['fedavg']} in the trial"
    ratio = e.points[-1].against_chance
    if e.beats and ratio >= ALIKE:
        much = f"{ratio:.2g} times as much as for random parts of one data set"
        much = much if math.isfinite(ratio) else "while those of random parts of one data set would not"
        return f"SCAFFOLD will beat FedAvg here: {both}. The clients' gradients differ {much}, so FedAvg drifts."
    if e.beats:
        return (
            f"SCAFFOLD will beat FedAvg here: {both}. The clients are alike, so its control variates reduce the noise "
            "of cohorts and batches, not drift."
        )
    if e.contest.beats(e.trials["fedavg"], e.trials["scaffold"]):
        return (
            f"SCAFFOLD will not beat FedAvg here: {both}. Stale control variates add more noise than the drift they "
            "correct."
        )
    return f"SCAFFOLD will not beat FedAvg here: {both}. The gain is not worth a state on every client."


def _why_K(e: Evidence) -> str:
    if e.chosen.algorithm == "sgd":
        return "SGD takes one step per round."
    if e.chosen.algorithm not in ("scaffold", "fedavg"):
        return f"{e.chosen.K} was SCAFFOLD's best."
    tried = sorted({row["K"] for row in e.chosen.tried})
    if math.isinf(e.useful):
        most = "all Hessians agree, so by Theorem IV every local step helps"
    else:
        more = ", but the trial gained from more" if 2 * e.useful < e.chosen.K else ""
        most = f"Theorem IV (for quadratics) expects little gain beyond beta/delta = {e.useful:.3g}{more}"
    if e.given:
        return f"{e.chosen.K} was given; {most}."
    return f"Of {', '.join(map(str, tried))}, {e.chosen.K} is the smallest that did as well as any; {most}."


def _why_eta_l(e: Evidence) -> str:
    name, bound = e.chosen.algorithm, f"{e.safe_step:.2g}"
    best = f"{e.chosen.eta_l:g} was the best of a grid with factors of about 3."
    if name in ("scaffold", "fedavg", "sgd"):
        theorem = "III" if e.controlled else "I"
        return f"{best} Theorem {theorem} guarantees convergence only up to {bound}, which is safe but slow."
    like = "SCAFFOLD (Theorem III)" if e.controlled else "FedAvg (Theorem I)"
    return f"{best} The paper has no theorem for {name}; the bound for {like} is {bound}."


def _why_eta_g(e: Evidence) -> str:
    if e.chosen.eta_g != 1:
        return f"{e.chosen.eta_g:g}, about √S as in the theorems, did better than 1."
    if e.chosen.algorithm in ("scaffold", "fedavg") and e.S > 1:
        return f"1 did as well as the theorems' √S = {math.sqrt(e.S):.3g}."
    return "1 is the plain average."


def cautions(e: Evidence) -> list[str]:
    """Where SCAFFOLD will help little, and what is uncertain."""
    found: list[str] = []
    sizes, last, K = e.oracle.problem.data.sizes, e.points[-1], e.trials["scaffold"].K
    visits = e.rounds * e.S / e.N
    if visits < VISITS:
        found.append(
            f"Stale control variates: with {e.S} of {e.N} clients per round, {e.rounds} rounds visit a client "
            f"{visits:.2g} times, so most control variates are old or still 0 and SCAFFOLD gains little. Use more "
            "clients per round or more rounds, or mime, which needs no state on clients."
        )
    G2, noise = last.gradients.G.value**2, last.sigma.value**2 / K
    if noise > G2:
        found.append(
            f"Noise dominates: sigma²/K = {noise:.3g} is larger than G² = {G2:.3g}, so a control variate is mostly "
            "noise. Larger batches or more local steps help more than SCAFFOLD."
        )
    if last.against_chance < ALIKE:
        found.append(
            f"Clients are alike: their gradients differ {last.against_chance:.2g} times as much as those of random "
            "parts of one data set. G is due to chance and vanishes with more data per client, so SCAFFOLD has little "
            "to correct."
        )
    if not e.stable and math.isfinite(e.trials["scaffold"].messages):
        found.append(
            "SCAFFOLD reached the target with this step-size, but the run diverges after it. Stop at the target, or "
            "use a step-size 3 times smaller."
        )
    if e.gap <= 1e-6 * max(1.0, abs(e.points[0].gradients.loss)):
        found.append("The loss hardly fell in the trial: the start is nearly optimal, or no step-size works.")
    if not e.oracle.divisible:
        found.append(
            "An example's loss depends on the others in its batch, as with BatchNorm: f_i is not a mean over examples, "
            "sigma is not defined, and control variates do not correct batch statistics. Prefer GroupNorm or LayerNorm."
        )
    if not e.convex:
        found.append(
            "f is not convex here (mu < 0). Theorems I and III have rates for this case. Theorem IV, and so "
            "beta/delta, is proved for quadratics and is only a guide."
        )
    single = int(np.sum(sizes == 1))
    if single and sizes.max() > 1:
        found.append(
            f"{single} of {e.N} clients have one example. Their noise cannot be measured, and their share of G and "
            "delta reflects single examples, not clients."
        )
    for name, estimate in (("beta", e.beta), ("delta", e.delta)):
        if estimate.se > 0.2 * estimate.value:
            found.append(f"{name} = {estimate} is uncertain, because only a sample of the clients was measured.")
    target = e.contest.target
    if target and not any(math.isfinite(trial.messages) for trial in e.trials.values()):
        found.append(
            f"No run reached {target[0]} {target[-1]:g} within {e.contest.exchanges} rounds, so the advice compares "
            f"the final {target[0]}. A longer trial (trial_rounds) is more reliable."
        )
    return found


def _outcome(trial: Trial, contest: Contest) -> str:
    """How a trial ended, in words."""
    if contest.target and math.isfinite(trial.messages):
        return f"{trial.rounds:.3g} round{'s' if trial.rounds != 1 else ''}" + (
            f" of {trial.trips} exchanges" if trial.trips > 1 else ""
        )
    if not math.isfinite(trial.value):
        return "divergence"
    value = f"{contest.metric} {trial.value:.3g}"
    return f"more than {len(trial.curve) // trial.trips} rounds ({value} by then)" if contest.target else value
