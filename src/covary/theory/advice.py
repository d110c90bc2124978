"""From what was measured to what to do, in plain sentences."""

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

VISITS = 5  # of each client, below which its control variate is mostly old
CHANCE = 1.3  # times what random parts of one data set would differ: no more than that is alike


@dataclass(frozen=True)
class Point:
    """What was measured at one point on the way."""

    gradients: Gradients
    sigma: Estimate  # for the batch size that will be used
    noise: Noise | None  # None where examples' losses depend on each other
    curvature: Curvature | None  # None where only gradients were measured

    def as_dict(self) -> dict[str, float]:
        told = {"loss": self.gradients.loss, "gradient_norm": self.gradients.norm, "G": self.gradients.G.value}
        told["sigma"] = self.sigma.value
        if self.curvature is not None:
            told |= {name: getattr(self.curvature, name).value for name in ("beta", "mu", "delta", "weak_convexity")}
        return told

    @property
    def against_chance(self) -> float:
        """G over what it would be if clients were random parts of one data set, √((1 - 1/N) sum p_i s_i²/n_i)."""
        if self.noise is None:
            return math.nan
        clients = len(self.noise.sizes) / (1 - self.noise.left_out)
        chance = (1 - 1 / clients) * float(self.noise.weights @ (self.noise.variances / self.noise.sizes))
        return self.gradients.G.value / math.sqrt(chance) if chance > 0 else math.inf


@dataclass(frozen=True)
class Evidence:
    """All that the advice rests on."""

    oracle: Oracle
    points: list[Point]  # from the start to where the trial ended
    moved: float  # from the first to the last
    contest: Contest
    trials: dict[str, Trial]
    chosen: Trial
    beats: bool  # SCAFFOLD beats FedAvg
    rounds: int  # that the user means to train for
    S: int
    useful: float  # local steps, by the constants at the start
    given: bool  # K was
    goes_on: bool  # SCAFFOLD's best does not diverge when it goes on after the target

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
        """(G, B) that hold at all points."""
        return envelope([point.gradients for point in self.points])

    @property
    def setting(self) -> rates.Setting:
        """What the theorems are applied to: the constants, and the chosen K and eta_g."""
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
        """How far the loss fell, which stands for f(x^0) - f*."""
        losses = [point.gradients.loss for point in self.points]
        return max(losses[0] - min(losses), 1e-12)

    @property
    def safe_step(self) -> float:
        """What the theorem guarantees: III for algorithms with controls, I for the others."""
        controlled = self.chosen.algorithm in ("scaffold", "feddyn", "mime")
        return rates.scaffold_step(self.setting) if controlled else rates.fedavg_step(self.setting)


def predicted(e: Evidence, measured: dict[str, float]) -> dict[str, float]:
    """Rounds by Table 1 for each algorithm's own K, scaled so that SGD's (else SCAFFOLD's, FedAvg's) is as measured.

    They are counted to a twentieth of the gap or, where f is not convex, of the squared gradient at the start.
    """
    s = e.setting
    epsilon = 0.05 * (e.gap if s.convex else max(e.points[0].gradients.norm ** 2, 1e-12))

    def rate(name: str) -> float:
        table = rates.table1(replace(s, K=e.trials[name].K), epsilon)
        if name == "sgd":  # full local data: no noise; Theorem I with K = 1, less what drifts there, for the sampling
            one = replace(s, K=1, sigma=0.0, B=1.0)
            sampling = rates.table1(one, epsilon)["fedavg"] - rates.table1(replace(one, S=s.N), epsilon)["fedavg"]
            return sampling + rates.table1(replace(one, S=s.N), epsilon)["sgd"]
        if name == "scaffold":
            return min(value for row, value in table.items() if row.startswith("scaffold"))
        return table.get(name, math.nan)

    told = {name: float(rate(name)) for name in e.trials}
    for name in ("sgd", "scaffold", "fedavg"):
        if math.isfinite(measured.get(name, math.inf)):
            scale = measured[name] / told[name]
            return {n: max(1.0, scale * value) for n, value in told.items() if not math.isnan(value)}
    return {}


def reasons(e: Evidence) -> dict[str, str]:
    """One sentence for the verdict on SCAFFOLD and for each part of the advice."""
    told = {name: _outcome(trial, e.contest) for name, trial in e.trials.items()}
    return {
        "scaffold": _verdict(e, told),
        "algorithm": (
            f"It came to {told[e.chosen.algorithm]} in the trial; the others: "
            + ", ".join(f"{name} {told[name]}" for name in e.trials if name != e.chosen.algorithm)
            + "."
        ),
        "K": _why_K(e),
        "eta_l": (
            f"{e.chosen.eta_l:g} was the best of a grid a factor of 3 apart; the theorem guarantees only "
            f"{e.safe_step:.2g}, which is safe and slow."
        ),
        "eta_g": _why_eta_g(e),
    }


def _verdict(e: Evidence, told: dict[str, str]) -> str:
    ends = f"{told['scaffold']} against {told['fedavg']} in the trial"
    ratio = e.points[-1].against_chance
    if e.beats and ratio >= CHANCE:
        much = f"{ratio:.2g} times as much as random parts of one data set would"
        much = much if math.isfinite(ratio) else "where those of random parts of one data set would not"
        return (
            f"SCAFFOLD will beat FedAvg here: {ends}. The clients' gradients differ {much}, and FedAvg drifts by that."
        )
    if e.beats:
        return (
            f"SCAFFOLD will beat FedAvg here: {ends}. The clients are alike, so it is not drift that its controls take "
            "out but the noise of cohorts and batches."
        )
    if e.contest.beats(e.trials["fedavg"], e.trials["scaffold"]):
        return (
            f"SCAFFOLD will not beat FedAvg here: {ends}. What it corrects is less than the noise that old controls "
            "add."
        )
    return f"SCAFFOLD will not beat FedAvg here: {ends}, no gain that is worth a state on every client."


def _why_K(e: Evidence) -> str:
    if e.chosen.algorithm == "sgd":
        return "SGD takes one step a round."
    if e.chosen.algorithm not in ("scaffold", "fedavg"):
        return f"{e.chosen.K} is SCAFFOLD's best."
    tried = sorted({row["K"] for row in e.chosen.tried})
    if math.isinf(e.useful):
        most = "by Theorem IV every local step pays, as all Hessians agree"
    else:
        more = ", but the trial saw more" if 2 * e.useful < e.chosen.K else ""
        most = f"Theorem IV (for quadratics) expects little beyond beta/delta = {e.useful:.3g}{more}"
    if e.given:
        return f"{e.chosen.K} was given; {most}."
    return f"Of {', '.join(map(str, tried))}, {e.chosen.K} is the fewest that did as well as any; {most}."


def _why_eta_g(e: Evidence) -> str:
    if e.chosen.eta_g != 1:
        return f"{e.chosen.eta_g:g}, about √S as in the theorems, did better than 1."
    if e.chosen.algorithm in ("scaffold", "fedavg") and e.S > 1:
        return f"1 did as well as the theorems' √S = {math.sqrt(e.S):.3g}."
    return "1 is the plain average."


def cautions(e: Evidence) -> list[str]:
    """Where SCAFFOLD will disappoint, and what is uncertain."""
    told: list[str] = []
    sizes, last, K = e.oracle.problem.data.sizes, e.points[-1], e.trials["scaffold"].K
    visits = e.rounds * e.S / e.N
    if visits < VISITS:
        told.append(
            f"Stale controls: with {e.S} of {e.N} clients a round, {e.rounds} rounds visit a client {visits:.2g} "
            "times, so most control variates are old or still 0. SCAFFOLD will disappoint. More clients a round, or "
            "more rounds, help it; mime needs no state on clients."
        )
    G2, noise = last.gradients.G.value**2, last.sigma.value**2 / K
    if noise > G2:
        told.append(
            f"Noise dominates: sigma²/K = {noise:.3g} is more than G² = {G2:.3g}, so a control variate is mostly "
            "noise. Larger batches or more local steps help more than SCAFFOLD does."
        )
    if last.against_chance < CHANCE:
        told.append(
            f"Clients are alike: their gradients differ {last.against_chance:.2g} times as much as those of random "
            "parts of one data set, so G is what chance makes it and vanishes with more data a client. There is little "
            "for SCAFFOLD to correct."
        )
    if not e.goes_on and math.isfinite(e.trials["scaffold"].messages):
        told.append(
            "SCAFFOLD's step-size reached the target, but the run diverges if it goes on. Stop at the target, or use a "
            "step-size a factor of 3 smaller."
        )
    if e.gap <= 1e-6 * max(1.0, abs(e.points[0].gradients.loss)):
        told.append("The loss hardly fell in the trial: the start is as good as optimal, or no step-size helped.")
    if not e.oracle.divisible:
        told.append(
            "An example's loss depends on the others of its batch, as under BatchNorm: f_i is no mean over examples, "
            "sigma is not defined, and control variates do not correct the statistics of batches. Prefer GroupNorm or "
            "LayerNorm."
        )
    if not e.convex:
        told.append(
            "f is not convex here (mu < 0). Theorems I and III have rates for that; Theorem IV, and so beta/delta, is "
            "proved for quadratics and is a guide only."
        )
    single = int(np.sum(sizes == 1))
    if single and sizes.max() > 1:
        told.append(
            f"{single} of {e.N} clients have one example: they have no noise to measure, and their share of G and "
            "delta tells of single examples, not of clients."
        )
    for name, estimate in (("beta", e.beta), ("delta", e.delta)):
        if estimate.se > 0.2 * estimate.value:
            told.append(f"{name} = {estimate} is uncertain: it is the largest of a sample of the clients.")
    goal = e.contest.target
    if goal and not any(math.isfinite(trial.messages) for trial in e.trials.values()):
        told.append(
            f"No run reached {goal[0]} {goal[-1]:g} within {e.contest.trips} rounds, so the advice goes by how far "
            "they came. A longer trial (trial_rounds) would tell more."
        )
    return told


def _outcome(trial: Trial, contest: Contest) -> str:
    """How a trial ended, in words."""
    if contest.target and math.isfinite(trial.messages):
        return f"{trial.rounds:.3g} round{'s' if trial.rounds != 1 else ''}" + (
            f" of {trial.trips} trips" if trial.trips > 1 else ""
        )
    if not math.isfinite(trial.value):
        return "divergence"
    came = f"{contest.metric} {trial.value:.3g}"
    return f"more than {len(trial.curve) // trial.trips} rounds ({came} by then)" if contest.target else came
