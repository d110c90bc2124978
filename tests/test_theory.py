"""The paper's quadratics to the digit, and measured rates against its theorems."""

import numpy as np
import pytest
from helpers import random_quadratics

import covary as cv


@pytest.mark.parametrize(("G", "two", "ten"), [(1, 31, 11), (10, 32, 13), (100, 35, 18)])
def test_rounds_on_the_papers_quadratics(G, two, ten):
    def rounds(algorithm, K):
        run = cv.simulate(algorithm, cv.lower_bound(G), 300, local_steps=K, x0=1.0, target=("loss", 1e-6))
        return run.reached

    assert rounds(cv.sgd(0.1), 1) == 63
    assert rounds(cv.scaffold(0.1), 2) == two
    assert rounds(cv.scaffold(0.1), 10) == ten
    assert rounds(cv.fedavg(0.1), 10) is None


def floor_of_fedavg(G, K=10):
    return cv.simulate(cv.fedavg(0.1), cv.lower_bound(G), 300, local_steps=K, x0=1.0).history["loss"][-1]


def test_fedavgs_floor_grows_as_G_squared():
    G = np.array([1.0, 3.0, 10.0, 30.0, 100.0])
    slope = np.polyfit(np.log(G), np.log([floor_of_fedavg(g) for g in G]), 1)[0]
    assert slope == pytest.approx(2, abs=1e-3)


def test_more_local_steps_hurt_fedavg_on_heterogeneous_clients():
    floors = [floor_of_fedavg(10.0, K) for K in (2, 4, 8, 16)]
    assert floors == sorted(floors)


def test_scaffolds_linear_rate_does_not_depend_on_G():
    A, b = random_quadratics(N=8, d=6)
    b = b - b.mean(axis=0)  # the optimum stays at 0
    rates = []
    for G in (1.0, 10.0, 100.0, 1000.0):
        run = cv.simulate(cv.scaffold(0.05), cv.quadratics(A, G * b), 120, local_steps=5, x0=np.ones(6))
        loss = run.history["loss"]
        assert loss[-1] < loss[0] * 1e-6
        rates.append(np.polyfit(np.arange(60), 0.5 * np.log(loss[60:]), 1)[0])
    assert np.ptp(rates) < 0.05 * abs(np.mean(rates))
    # and it is at least as fast as K-times-larger-batch SGD of the same step-size
    assert np.mean(rates) < np.log(1 - 0.05 * np.linalg.eigvalsh(A.mean(axis=0))[0])


def test_fedavg_obeys_the_lower_bound_however_well_it_is_tuned():
    """Theorem II: f(x^R) >= Omega(G² / (mu R²)) for every step-size up to 1 / mu; the proof's constant is 1 / 256."""
    G, mu, R = 10.0, 1.0, np.array([8, 16, 32, 64, 128])
    problem = cv.lower_bound(G, mu)  # one, so that one program is compiled
    losses = np.stack(
        [
            cv.simulate(cv.fedavg(eta), problem, 128, local_steps=2, x0=10.0).history["loss"][R - 1]
            for eta in np.geomspace(1e-3, 1 / mu, 80)
        ]
    )
    best = losses.min(axis=0)
    assert (best >= 0.5 * mu * (G / (256 * mu * R)) ** 2).all()
    slope = np.polyfit(np.log(R), np.log(best), 1)[0]
    assert -2.3 < slope < -1.0  # no faster than 1 / R², unlike SCAFFOLD, which is linear


def test_scaffold_is_not_stopped_by_sampling_while_fedavg_is():
    A, b = random_quadratics(N=10, d=4)
    settings = {"rounds": 800, "clients_per_round": 2, "local_steps": 4}
    scaffold = cv.simulate(cv.scaffold(0.02), cv.quadratics(A, b), **settings)
    fedavg = cv.simulate(cv.fedavg(0.02), cv.quadratics(A, b), **settings)
    star = -np.linalg.solve(A.mean(axis=0), b.mean(axis=0))
    assert np.linalg.norm(scaffold.x - star) < 1e-7
    assert np.linalg.norm(fedavg.x - star) > 1e-2
    np.testing.assert_allclose(scaffold.clients.c_i, A @ star + b, atol=1e-6)  # c_i has become the gradient at x*


def test_theorem_4_more_local_steps_help_scaffold_when_hessians_agree():
    A, b = random_quadratics(N=6, d=5)
    shared = np.repeat(A[:1], 6, axis=0)  # delta = 0, however large G is
    b = 100 * (b - b.mean(axis=0))

    def rounds(K):
        run = cv.simulate(
            cv.scaffold(0.1), cv.quadratics(shared, b), 500, local_steps=K, x0=np.ones(5), target=("loss", 1e-8)
        )
        assert run.reached is not None
        return run.reached

    one = rounds(1)
    for K in (2, 4, 8):
        assert rounds(K) == pytest.approx(one / K, abs=3)
