"""The paper's rates: Table 1, and Theorems I to IV in the full form of the appendix.

Constants hidden in O(...) are set to 1, and the logarithms of Table 1 are left out, as in the paper. Constants in the
full statements (step-sizes, exponents) are kept. A number of rounds is therefore an order of magnitude: compare two of
them with each other only. All formulas are consistent in units: rescaling f or x changes no number of rounds. Where
the printed formula is not, the form of the proof is used, and the docstring says so.

`epsilon` is the target accuracy: E[f] - f* for convex f, E‖∇f‖² otherwise and in Theorem IV.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from covary.checks import non_negative, positive, whole
from covary.errors import refused

MOST_ROUNDS = 2**62


@dataclass(frozen=True)
class Setting:
    """The quantities in the rates, in the paper's notation.

    Args:
        beta: smoothness of every f_i (A5).
        mu: strong convexity (A3); 0 for general convex f.
        convex: False if f is not convex.
        sigma: deviation of a client's stochastic gradient (A4).
        G, B: gradient dissimilarity (A1).
        delta: Hessian dissimilarity (A2); at most 2 beta, which is the default.
        N, S, K: clients, clients per round (all by default), local steps.
        D: ‖x^0 - x*‖.
        F: f(x^0) - f*.
        eta_g: the global step-size.

    >>> from covary.theory import rates
    >>> rates.Setting(beta=2.0, mu=0.1, N=100, S=20, K=10).S
    20
    """

    beta: float
    mu: float = 0.0
    convex: bool = True
    sigma: float = 0.0
    G: float = 0.0
    B: float = 1.0
    delta: float | None = None
    N: int = 2
    S: int | None = None
    K: int = 1
    D: float = 1.0
    F: float = 1.0
    eta_g: float = 1.0

    def __post_init__(self) -> None:
        for name in ("beta", "D", "F", "eta_g"):
            positive(name, getattr(self, name))
        if self.eta_g < 1:
            raise refused("eta_g", "at least 1 in the theorems", self.eta_g, "Use 1, or √S as in the theorems.")
        for name in ("mu", "sigma", "G"):
            non_negative(name, getattr(self, name))
        if self.mu > self.beta or (self.mu > 0 and not self.convex):
            fix = "A strongly convex f is convex, and its mu is at most beta."
            raise refused("mu", f"at most beta = {self.beta:g}, and 0 if f is not convex", self.mu, fix)
        if not self.B >= 1:
            raise refused("B", "a number of at least 1", self.B, "With a smaller B, A1 cannot hold at large gradients.")
        whole("N", self.N, 1)
        whole("K", self.K, 1)
        if self.S is None:
            object.__setattr__(self, "S", self.N)
        whole("S", self.S, 1, self.N)
        if self.delta is None:
            object.__setattr__(self, "delta", 2 * self.beta)
        non_negative("delta", self.delta)

    @property
    def unsampled(self) -> float:
        """1 - S/N."""
        return 1 - self.cohort / self.N

    @property
    def cohort(self) -> int:
        assert self.S is not None
        return self.S

    @property
    def dissimilarity(self) -> float:
        assert self.delta is not None
        return self.delta


def fedavg_step(s: Setting) -> float:
    """The largest eta_l of Theorem I (full form): 1 / (8 (1 + B²) beta K eta_g).

    >>> from covary.theory import rates
    >>> rates.fedavg_step(rates.Setting(beta=1.0, K=10))
    0.00625
    """
    return 1 / (8 * (1 + s.B**2) * s.beta * s.K * s.eta_g)


def fedavg_error(s: Setting, rounds: float) -> float:
    """The error after R rounds of FedAvg by Theorem I (full form).

    With M² = sigma² (1 + S/eta_g²) + K (1 - S/N) G² it is
    M²/(mu R K S) + beta G²/(mu² R²) + mu D² exp(-mu R/(16 (1 + B²) beta)) for strongly convex f, and
    M D/√(R K S) + D^(4/3) (beta G²)^(1/3)/R^(2/3) + B² beta D²/R for convex f. For other f the paper prints
    beta M √F and (beta G²)^(1/3); its lemma gives M √(beta F) and (beta G)^(2/3), whose units are consistent.

    >>> from covary.theory import rates
    >>> s = rates.Setting(beta=1.0, mu=0.1, G=10.0)
    >>> rates.fedavg_error(s, 1000) > rates.fedavg_error(s, 2000)
    True
    """
    R, S, K = rounds, s.cohort, s.K
    M = math.sqrt(s.sigma**2 * (1 + S / s.eta_g**2) + K * s.unsampled * s.G**2)
    if s.mu > 0:
        decay = s.mu * s.D**2 * math.exp(-s.mu * R / (16 * (1 + s.B**2) * s.beta))
        return M**2 / (s.mu * R * K * S) + s.beta * s.G**2 / (s.mu * R) ** 2 + decay
    if s.convex:
        drift = s.D ** (4 / 3) * (s.beta * s.G**2) ** (1 / 3) / R ** (2 / 3)
        return M * s.D / math.sqrt(R * K * S) + drift + s.B**2 * s.beta * s.D**2 / R
    drift = (s.F * s.beta * s.G / R) ** (2 / 3)
    return M * math.sqrt(s.beta * s.F / (R * K * S)) + drift + s.B**2 * s.beta * s.F / R


def fedavg_rounds(s: Setting, epsilon: float) -> float:
    """The rounds to an error of epsilon by Theorem I (full form); at least 8 (1 + B²) beta/mu.

    >>> from covary.theory import rates
    >>> easy, hard = (rates.Setting(beta=1.0, mu=0.1, G=G) for G in (0.0, 100.0))
    >>> rates.fedavg_rounds(easy, 1e-4) < 0.1 * rates.fedavg_rounds(hard, 1e-4)
    True
    """
    least = 8 * (1 + s.B**2) * s.beta / s.mu if s.mu > 0 else 1
    return _first(lambda R: fedavg_error(s, R), epsilon, least)


def lower_bound_error(s: Setting, rounds: float) -> float:
    """The lower bound on FedAvg's error after R rounds for any step-sizes (Theorem II): min(F, G²/(mu R²)).

    It needs K >= 2 and eta_g = 1. It holds for the worst functions with this G and mu, even with sigma = 0 and S = N.

    >>> from covary.theory import rates
    >>> rates.lower_bound_error(rates.Setting(beta=1.0, mu=1.0, G=10.0, F=50.0, K=2), 100)
    0.01
    """
    _lower_bound_holds(s)
    return min(s.F, s.G**2 / (s.mu * rounds**2))


def lower_bound_rounds(s: Setting, epsilon: float) -> float:
    """The lower bound on FedAvg's rounds on the worst such functions: G/√(mu epsilon) (Theorem II).

    >>> from covary.theory import rates
    >>> rates.lower_bound_rounds(rates.Setting(beta=1.0, mu=1.0, G=10.0, K=2), 1e-4)
    1000.0
    """
    _lower_bound_holds(s)
    positive("epsilon", epsilon)
    return s.G / math.sqrt(s.mu * epsilon) if epsilon < s.F else 0.0


def scaffold_step(s: Setting) -> float:
    """The largest eta_l of Theorem III: min(1/(81 beta K eta_g), S/(15 mu N K eta_g)) for strongly convex f, the first
    of these for convex f, and (S/N)^(2/3) / (24 beta K eta_g) for other f.

    >>> from covary.theory import rates
    >>> rates.scaffold_step(rates.Setting(beta=1.0, K=10)) == 1 / 810
    True
    """
    smooth = 1 / (s.beta * s.K * s.eta_g)
    if not s.convex:
        return smooth / 24 * (s.cohort / s.N) ** (2 / 3)
    return min(smooth / 81, s.cohort / (15 * s.mu * s.N * s.K * s.eta_g)) if s.mu > 0 else smooth / 81


def scaffold_error(s: Setting, rounds: float) -> float:
    """The error after R rounds of SCAFFOLD by Theorem III (full form), with a warm start.

    With the warm start, D̃² = D² + F/beta + sigma²/(K beta²) replaces D² below (the remark after the theorem).

    sigma² (1 + S/eta_g²)/(mu R K S) + (N mu/S) D² exp(-min(S/(30 N), mu/(162 beta)) R) for strongly convex f,
    sigma D √(1 + S/eta_g²)/√(R K S) + √(N/S) beta D²/R for convex f, and
    sigma √(beta F) √(1 + N/eta_g²)/√(R K S) + (N/S)^(2/3) beta F/R for other f (the print lacks the first beta).
    G and delta do not appear: the rate does not depend on how different the clients are.

    >>> from covary.theory import rates
    >>> a, b = (rates.Setting(beta=1.0, mu=0.1, G=G) for G in (0.0, 1e6))
    >>> rates.scaffold_error(a, 500) == rates.scaffold_error(b, 500)
    True
    """
    R, S, K, share = rounds, s.cohort, s.K, s.cohort / s.N
    D2 = s.D**2 + s.F / s.beta + (s.sigma / s.beta) ** 2 / K
    if s.mu > 0:
        noise = s.sigma**2 * (1 + S / s.eta_g**2) / (s.mu * R * K * S)
        return noise + s.mu * D2 / share * math.exp(-min(share / 30, s.mu / (162 * s.beta)) * R)
    if s.convex:
        noise = s.sigma * math.sqrt(D2 * (1 + S / s.eta_g**2) / (R * K * S))
        return noise + s.beta * D2 / (math.sqrt(share) * R)
    noise = s.sigma * math.sqrt(s.beta * s.F * (1 + s.N / s.eta_g**2) / (R * K * S))
    return noise + s.beta * s.F / (share ** (2 / 3) * R)


def scaffold_rounds(s: Setting, epsilon: float) -> float:
    """The rounds to an error of epsilon by Theorem III (full form); at least max(162 beta/mu, 30 N/S).

    >>> from covary.theory import rates
    >>> few, all = (rates.Setting(beta=1.0, N=100, S=S) for S in (1, 100))
    >>> rates.scaffold_rounds(few, 0.01) == 10 * rates.scaffold_rounds(all, 0.01)  # √(N/S)
    True
    """
    least = max(162 * s.beta / s.mu, 30 * s.N / s.cohort) if s.mu > 0 else 1
    return _first(lambda R: scaffold_error(s, R), epsilon, least)


def similar_step(s: Setting) -> float:
    """The largest eta_l of Theorem IV (full form): min(1/(10 beta), 1/(22 delta K)) and, for mu > 0, 1/(10 mu K).

    Unlike in Theorem III, it does not shrink with K as long as the clients' Hessians agree (delta K < beta).

    >>> from covary.theory import rates
    >>> rates.similar_step(rates.Setting(beta=1.0, delta=0.0, K=50))
    0.1
    """
    if s.eta_g != 1:
        raise refused("eta_g", "1 for Theorem IV", s.eta_g, "It is stated for the plain average.")
    bounds = [1 / (10 * s.beta)]
    if s.dissimilarity > 0:
        bounds.append(1 / (22 * s.dissimilarity * s.K))
    if s.mu > 0:
        bounds.append(1 / (10 * s.mu * s.K))
    return min(bounds)


def similar_error(s: Setting, rounds: float) -> float:
    """E‖∇f‖² after R rounds of SCAFFOLD on quadratics by Theorem IV (full form), with eta_g = 1 and S = N.

    beta sigma²/(mu R K N) + mu beta D² exp(-mu R K/(20 beta + 44 delta K + 20 mu K)) for strongly convex f (the print
    lacks the second beta), else sigma √(beta F)/√(R K N) + (beta + delta K) F/(R K).

    >>> from covary.theory import rates
    >>> same, other = (rates.Setting(beta=1.0, mu=0.01, delta=delta, K=20) for delta in (0.0, 1.0))
    >>> rates.similar_error(same, 500) < rates.similar_error(other, 500)
    True
    """
    _everyone(s)
    R, K, N, delta = rounds, s.K, s.N, s.dissimilarity
    if s.mu > 0:
        decay = math.exp(-s.mu * R * K / (20 * s.beta + 44 * delta * K + 20 * s.mu * K))
        return s.beta * s.sigma**2 / (s.mu * R * K * N) + s.mu * s.beta * s.D**2 * decay
    return s.sigma * math.sqrt(s.beta * s.F / (R * K * N)) + (s.beta + delta * K) * s.F / (R * K)


def similar_rounds(s: Setting, epsilon: float) -> float:
    """The rounds to E‖∇f‖² <= epsilon on quadratics by Theorem IV.

    For mu > 0 it needs at least max(20 beta/mu, (44 delta + 20 mu) K/mu, 20 K) local steps, that is 1/K as many rounds.
    The paper prints this number as rounds, but the proof applies its lemma to steps.

    >>> from covary.theory import rates
    >>> one, ten = (rates.Setting(beta=1.0, delta=0.0, K=K) for K in (1, 10))
    >>> round(rates.similar_rounds(one, 1e-3) / rates.similar_rounds(ten, 1e-3))  # equal Hessians: K times fewer
    10
    """
    steps = max(20 * s.beta / s.mu, (44 * s.dissimilarity + 20 * s.mu) * s.K / s.mu, 20 * s.K) if s.mu > 0 else 1
    return _first(lambda R: similar_error(s, R), epsilon, max(1, steps / s.K))


def useful_local_steps(beta: float, delta: float) -> float:
    """beta/delta: beyond this K, no number of local steps can halve SCAFFOLD's rounds again.

    At this K the two terms of Theorem IV's (beta + delta K)/(mu K) are equal (section "Usefulness of local steps"). It
    is infinite if all Hessians agree.

    >>> from covary.theory import rates
    >>> rates.useful_local_steps(beta=10.0, delta=0.5)
    20.0
    """
    positive("beta", beta)
    non_negative("delta", delta)
    return math.inf if delta == 0 else max(1.0, beta / delta)


def table1(s: Setting, epsilon: float) -> dict[str, float]:
    """Table 1 of the paper with beta, D and F written out: rounds to epsilon by method, without logarithms.

    For general convex f (mu = 0), mu = epsilon/D², as the table's caption says. A method without a rate for the case is
    left out; with S < N, so is a method that needs all clients in every round.

    >>> from covary.theory import rates
    >>> table = rates.table1(rates.Setting(beta=1.0, mu=0.01, G=10.0, delta=0.1, N=20, K=10), epsilon=1e-4)
    >>> table["sgd"], round(table["fedavg"]), table["scaffold"], round(table["scaffold, similar"])
    (100.0, 100100, 101.0, 20)

    Reference: Karimireddy et al. 2020, Table 1 (in print without beta), Theorems I, III and IV.
    """
    positive("epsilon", epsilon)
    N, S, K, delta, e = s.N, s.cohort, s.K, s.dissimilarity, epsilon
    M2 = s.sigma**2 + K * s.unsampled * s.G**2
    rows: dict[str, float] = {}
    if s.convex:
        mu = s.mu if s.mu > 0 else e / s.D**2
        linear = s.beta / mu
        if S == N:
            rows["sgd"] = s.sigma**2 / (mu * N * K * e) + linear
            rows["fedavg (Khaled et al. 2020)"] = (
                (s.sigma**2 + s.G**2) / (mu * N * K * e)
                + (s.sigma + s.G) * math.sqrt(s.beta) / (mu * math.sqrt(e))
                + N * s.B**2 * linear
            )
            rows["fedavg (Li et al. 2020)"] = s.beta * (s.sigma**2 / N / K + s.G**2 * K) / (mu**2 * e)
        rows["fedavg"] = M2 / (mu * S * K * e) + s.G * math.sqrt(s.beta / e) / mu + s.B**2 * linear
        if K > 1:
            rows["fedavg, at least"] = s.sigma**2 / (mu * N * K * e) + s.G / math.sqrt(mu * e)
        if s.sigma == 0 and s.G == 0:
            rows["fedprox"] = s.B**2 * linear
        if s.sigma == 0 and S == N:
            rows["dane"] = (delta / mu) ** 2
        rows["scaffold"] = s.sigma**2 / (mu * S * K * e) + linear + N / S
        if S == N:
            rows["scaffold, similar"] = s.sigma**2 / (mu * N * K * e) + linear / K + delta / mu
        return rows
    linear, noise = s.beta * s.F / e, s.beta * s.F / e**2
    if S == N:
        rows["sgd"] = noise * s.sigma**2 / (N * K) + linear
        rows["fedavg (Yu et al. 2019)"] = noise * s.sigma**2 / (N * K) + s.G**2 * N * K / e
        rows["vrl_sgd"] = noise * N * s.sigma**2 / K + N * linear
    rows["fedavg"] = noise * M2 / (S * K) + s.beta * s.F * s.G / e**1.5 + s.B**2 * linear
    if s.sigma == 0 and s.G == 0:
        rows["fedprox"] = s.B**2 * linear
    rows["scaffold"] = noise * s.sigma**2 / (S * K) + linear * (N / S) ** (2 / 3)
    if S == N:
        rows["scaffold, similar"] = noise * s.sigma**2 / (N * K) + linear / K + delta * s.F / e
    return rows


def _first(error: Callable[[float], float], epsilon: float, least: float) -> float:
    """The smallest number of rounds, at least `least`, with an error of at most epsilon, for a decreasing error."""
    positive("epsilon", epsilon)
    low, high = 0, max(1, math.ceil(least))
    if error(high) <= epsilon:
        return float(high)
    while error(high) > epsilon:
        low, high = high, 2 * high
        if high > MOST_ROUNDS:
            return math.inf
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if error(middle) <= epsilon else (middle, high)
    return float(high)


def _lower_bound_holds(s: Setting) -> None:
    if s.mu <= 0:
        raise refused("mu", "above 0 for Theorem II", s.mu, "It is stated for strongly convex f.")
    if s.K < 2 or s.eta_g != 1:
        came = f"K = {s.K} and eta_g = {s.eta_g:g}"
        raise refused("K", "at least 2, and eta_g must be 1, for Theorem II", came, "One local step is SGD.")


def _everyone(s: Setting) -> None:
    if s.cohort != s.N:
        raise refused("S", f"N = {s.N} for Theorem IV", s.cohort, "It is stated for all clients in every round.")
    if s.eta_g != 1:
        raise refused("eta_g", "1 for Theorem IV", s.eta_g, "It is stated for the plain average.")
