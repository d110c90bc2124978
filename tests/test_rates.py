"""The theorems as functions: consistent in units, equal to the paper's, and obeyed by real runs."""

import dataclasses
import math

import numpy as np
import pytest
from helpers import optimum, random_quadratics
from hypothesis import given, settings
from hypothesis import strategies as st

import covary as cv
from covary.theory import rates

positive = st.floats(0.1, 10.0)


@st.composite
def cases(draw, everyone=False):
    N = draw(st.integers(2, 100))
    kind = draw(st.sampled_from(["strongly convex", "convex", "not convex"]))
    beta = draw(positive)
    return rates.Setting(
        beta=beta,
        mu=0.05 * beta if kind == "strongly convex" else 0.0,
        convex=kind != "not convex",
        sigma=draw(st.sampled_from([0.0, 1.3])),
        G=draw(st.sampled_from([0.0, 2.7])),
        B=draw(st.floats(1, 5)),
        delta=beta * draw(st.floats(0, 2)),
        N=N,
        S=N if everyone else draw(st.integers(1, N)),
        K=draw(st.integers(1, 50)),
        D=draw(positive),
        F=draw(positive),
        eta_g=1.0 if everyone else draw(st.floats(1, 5)),
    )


def in_other_units(s, f, x):
    """f(x) measured in units f times, and x in units x times as small."""
    slope, curvature = f / x, f / x**2
    scaled = {"beta": s.beta * curvature, "mu": s.mu * curvature, "delta": s.dissimilarity * curvature}
    scaled |= {"sigma": s.sigma * slope, "G": s.G * slope, "D": s.D * x, "F": s.F * f}
    return dataclasses.replace(s, **scaled)


@settings(max_examples=150, deadline=None)
@given(s=cases(everyone=True), epsilon=st.floats(1e-4, 1e-1), f=st.floats(0.01, 100), x=st.floats(0.01, 100))
def test_rounds_do_not_depend_on_units_and_step_sizes_scale_with_them(s, epsilon, f, x):
    other, of_gradient = in_other_units(s, f, x), (f / x) ** 2
    accuracy = epsilon * (f if s.convex else of_gradient)
    for name, value in rates.table1(s, epsilon).items():
        assert rates.table1(other, accuracy)[name] == pytest.approx(value), name
    for rounds in (rates.fedavg_rounds, rates.scaffold_rounds):
        assert rounds(other, accuracy) == pytest.approx(rounds(s, epsilon), rel=1e-6, abs=1.01)
    assert rates.similar_rounds(other, epsilon * of_gradient) == pytest.approx(
        rates.similar_rounds(s, epsilon), rel=1e-6, abs=1.01
    )
    for step in (rates.fedavg_step, rates.scaffold_step, rates.similar_step):
        assert step(other) == pytest.approx(step(s) * x**2 / f)
    if s.mu > 0 and s.K > 1:
        assert rates.lower_bound_rounds(other, accuracy) == pytest.approx(rates.lower_bound_rounds(s, epsilon))


@settings(max_examples=100, deadline=None)
@given(s=cases(), epsilon=st.floats(1e-4, 1e-1))
def test_rounds_are_the_first_whose_error_is_small_enough(s, epsilon):
    for rounds, error in ((rates.fedavg_rounds, rates.fedavg_error), (rates.scaffold_rounds, rates.scaffold_error)):
        R = rounds(s, epsilon)
        assert error(s, R) <= epsilon
        assert rounds(s, epsilon / 2) >= R
        assert error(s, 2 * R) <= error(s, R)


@settings(max_examples=60, deadline=None)
@given(s=cases())
def test_what_the_paper_concludes_from_its_rates(s):
    epsilon, table = 1e-3, rates.table1(s, 1e-3)
    worse = dataclasses.replace(s, G=10 * s.G + 1, B=2 * s.B)
    assert rates.table1(worse, epsilon)["scaffold"] == table["scaffold"]  # no assumption on the clients
    assert rates.table1(worse, epsilon)["fedavg"] > table["fedavg"]
    if s.unsampled == 0:
        assert table["sgd"] <= table["fedavg"] * (1 + 1e-9)  # "SGD is still faster (B >= 1)"
        identical = dataclasses.replace(s, delta=0.0, sigma=0.0, K=2 * s.K)
        half = dataclasses.replace(s, delta=0.0, sigma=0.0)
        ratio = rates.table1(half, epsilon)["scaffold, similar"] / rates.table1(identical, epsilon)["scaffold, similar"]
        assert ratio == pytest.approx(2)  # identical functions: linear in K


def test_rates_by_hand():
    s = rates.Setting(beta=2.0, mu=0.5, sigma=3.0, G=4.0, B=1.5, delta=0.25, N=10, S=5, K=4, eta_g=2.0)
    e = 0.01
    table = rates.table1(s, e)
    assert table["fedavg"] == pytest.approx(
        (9 + 4 * 0.5 * 16) / (0.5 * 5 * 4 * e) + 4 * math.sqrt(2 / e) / 0.5 + 2.25 * 4
    )
    assert table["fedavg, at least"] == pytest.approx(9 / (0.5 * 10 * 4 * e) + 4 / math.sqrt(0.5 * e))
    assert table["scaffold"] == pytest.approx(9 / (0.5 * 5 * 4 * e) + 4 + 2)
    assert "sgd" not in table
    assert rates.fedavg_step(s) == pytest.approx(1 / (8 * 3.25 * 2 * 4 * 2))
    assert rates.scaffold_step(s) == pytest.approx(min(1 / (81 * 2 * 4 * 2), 5 / (15 * 0.5 * 10 * 4 * 2)))
    plain = dataclasses.replace(s, eta_g=1.0)
    assert rates.similar_step(plain) == pytest.approx(min(1 / 20, 1 / (22 * 0.25 * 4), 1 / (10 * 0.5 * 4)))
    not_convex = dataclasses.replace(s, mu=0.0, convex=False)
    assert rates.scaffold_step(not_convex) == pytest.approx(0.5 ** (2 / 3) / (24 * 4 * 2 * 2))
    assert rates.table1(not_convex, e)["scaffold"] == pytest.approx(2 * 9 / (5 * 4 * e**2) + 2 ** (2 / 3) * 2 / e)
    assert rates.useful_local_steps(2.0, 0.25) == 8
    everyone = rates.table1(rates.Setting(beta=1.0, convex=False, sigma=2.0, G=3.0, N=10, K=5), e)
    assert everyone["fedavg (Yu et al. 2019)"] == pytest.approx(4 / (10 * 5 * e**2) + 9 * 10 * 5 / e)
    assert everyone["vrl_sgd"] == pytest.approx(10 * 4 / (5 * e**2) + 10 / e)


def measured_setting(A, b, x0, **more):
    star = optimum(A, b)
    H = A.mean(axis=0)
    slopes = A @ star + b
    values = [0.5 * x @ H @ x + b.mean(axis=0) @ x for x in (x0, star)]
    return values[1], rates.Setting(
        beta=max(np.linalg.norm(a, 2) for a in A),
        mu=np.linalg.eigvalsh(A).min(),
        G=float(np.sqrt(2 * np.mean(np.sum(slopes**2, axis=1)))),  # with B² = 2: the appendix, for convex clients
        B=math.sqrt(2),
        delta=max(np.linalg.norm(a - H, 2) for a in A),
        N=len(A),
        D=float(np.linalg.norm(x0 - star)),
        F=float(values[0] - values[1]),
        **more,
    )


@pytest.mark.parametrize("S", [8, 2])
def test_runs_at_the_safe_step_size_keep_what_the_theorems_promise(S):
    A, b = random_quadratics(N=8, d=5)
    x0, K = np.full(5, 3.0), 4
    f_star, s = measured_setting(A, b, x0, S=S, K=K)
    problem = cv.quadratics(A, b)
    settings = {"local_steps": K, "clients_per_round": S, "x0": x0, "rounds": 3000}
    scaffold = cv.simulate(cv.scaffold(rates.scaffold_step(s)), problem, warm_start=True, **settings)
    fedavg = cv.simulate(cv.fedavg(rates.fedavg_step(s)), problem, **settings)
    for R in (500, 1000, 3000):
        assert scaffold.history["loss"][R - 1] - f_star <= rates.scaffold_error(s, R)
        assert fedavg.history["loss"][R - 1] - f_star <= rates.fedavg_error(s, R)


def test_fedavg_is_never_better_than_its_lower_bound_says():
    """Theorem II's functions, the best of 40 step-sizes: a constant times G²/(mu R²) is left after R rounds."""
    s = rates.Setting(beta=2.0, mu=1.0, G=10.0, N=2, K=2, F=50.0)
    tried = cv.sweep(
        cv.fedavg, cv.lower_bound(10.0), {"eta_l": np.geomspace(1e-3, 1, 40)}, rounds=100, local_steps=2, x0=10.0
    )
    best = np.nanmin(tried.curves["loss"][:, 0], axis=0)
    for R in (10, 30, 100):
        assert best[R - 1] >= rates.lower_bound_error(s, R) / 256**2


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"beta": 0.0}, "beta must be a number above 0"),
        ({"mu": 2.0}, "mu must be at most beta"),
        ({"mu": 0.1, "convex": False}, "mu must be at most beta"),
        ({"B": 0.5}, "B must be a number of at least 1"),
        ({"S": 3}, "S must be at most 2"),
        ({"eta_g": 0.5}, "eta_g must be at least 1"),
        ({"delta": -1.0}, "delta must be a number of 0 or more"),
    ],
)
def test_impossible_settings_are_rejected(wrong, said):
    with pytest.raises(cv.CovaryError, match=said):
        rates.Setting(**{"beta": 1.0, **wrong})


def test_theorems_are_rejected_where_they_are_not_stated():
    with pytest.raises(cv.CovaryError, match="Theorem II"):
        rates.lower_bound_rounds(rates.Setting(beta=1.0, K=2), 0.1)
    with pytest.raises(cv.CovaryError, match="One local step is SGD"):
        rates.lower_bound_rounds(rates.Setting(beta=1.0, mu=1.0), 0.1)
    with pytest.raises(cv.CovaryError, match="eta_g must be 1 for Theorem IV"):
        rates.similar_step(rates.Setting(beta=1.0, eta_g=2.0))
    with pytest.raises(cv.CovaryError, match="Theorem IV"):
        rates.similar_rounds(rates.Setting(beta=1.0, N=4, S=2), 0.1)
    with pytest.raises(cv.CovaryError, match="epsilon must be"):
        rates.table1(rates.Setting(beta=1.0), 0.0)
