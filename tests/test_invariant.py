"""c = mean(c_i), or its weighted form, at every round, whatever happens in it."""

from types import SimpleNamespace

import numpy as np
import pytest
from helpers import random_quadratics, small_logistic
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import covary as cv
from covary.running.watch import BrokenInvariant, Watch

pytestmark = pytest.mark.usefixtures("every_engine")


@st.composite
def setups(draw):
    sizes = draw(st.lists(st.integers(3, 9), min_size=1, max_size=6))
    S = draw(st.integers(1, len(sizes)))
    steps = draw(st.sampled_from([{"local_steps": 3}, {"local_epochs": 1}, {"local_epochs": 2}]))
    batch = draw(st.sampled_from([None, 2, 3, 0.4]))
    warm = draw(st.booleans())
    weights = draw(st.sampled_from(["uniform", "examples"]))
    option = draw(st.sampled_from(["I", "II"]))
    seed = draw(st.integers(0, 1000))
    return sizes, S, steps, batch, warm, weights, option, seed


@settings(max_examples=4, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(setups())
def test_the_servers_control_is_the_mean_of_its_clients(setup):
    sizes, S, steps, batch, warm, weights, option, seed = setup
    run = cv.simulate(
        cv.scaffold(eta_l=0.05, eta_g=1.3, option=option),
        small_logistic(sizes, seed),
        rounds=12,
        clients_per_round=S,
        batch_size=batch,
        warm_start=warm,
        weights=weights,
        seed=seed,
        **steps,
    )
    p = np.array(sizes) / sum(sizes) if weights == "examples" else np.full(len(sizes), 1 / len(sizes))
    scale = np.abs(run.clients.c_i).max()
    assert np.abs(run.server.c - p @ run.clients.c_i).max() <= 1e-12 * scale
    assert run.history["control_error"].shape == (12,)
    assert np.nanmax(run.history["control_error"]) <= 1e-11 * max(1.0, scale)


def test_a_wrong_control_update_stops_the_run():
    """Averaging dc over the cohort instead of over all clients, a common mistake, is detected at once."""
    from dataclasses import replace

    right = cv.scaffold(0.1)
    (exchange,) = right.exchanges
    wrong_exchange = replace(exchange, aggregate=lambda server, mean, fraction: exchange.aggregate(server, mean, 1.0))
    wrong = replace(right, exchanges=(wrong_exchange,), with_equal_steps=None, recipe=None)
    with pytest.raises(BrokenInvariant, match="away from the mean of the clients' c_i"):
        cv.simulate(wrong, small_logistic([5, 5, 5, 5]), rounds=3, clients_per_round=2, local_steps=2)


@pytest.mark.parametrize("weights", ["uniform", "examples"])
def test_feddyns_h_is_the_mean_of_its_clients(weights):
    sizes = [4, 9, 6]
    run = cv.simulate(
        cv.feddyn(0.1, alpha=0.3),
        small_logistic(sizes),
        20,
        clients_per_round=2,
        local_epochs=2,
        batch_size=2,
        weights=weights,
    )
    assert np.nanmax(run.history["control_error"]) < 1e-12


def test_vrl_sgds_corrections_cancel():
    run = cv.simulate(cv.vrl_sgd(0.1), small_logistic([6, 6, 6]), 10, local_steps=3, batch_size=2)
    state = run.clients
    corrections = state.delta_i + state.rate_i[:, None] * (run.x - state.y_i)
    assert np.abs(corrections.sum(axis=0)).max() < 1e-12


def test_controls_whose_squares_overflow_are_checked_too(recwarn):
    A, b = random_quadratics(N=3, d=2)
    run = cv.simulate(cv.feddyn(0.1, alpha=1e308), cv.quadratics(A, b), rounds=1)
    assert np.abs(run.server.h).max() > 1e200
    assert not recwarn.list
    state = SimpleNamespace(
        server=run.server, control=SimpleNamespace(round=1), accounts=SimpleNamespace(scale=np.abs(run.server.h).max())
    )
    clients = SimpleNamespace(h_i=np.asarray(run.clients.h_i[np.arange(3)]))
    watch = Watch(run.algorithm, np.full(3, 1 / 3), 2)
    assert watch.error(state, clients) < 1e-10 * np.abs(run.server.h).max()
    with pytest.raises(BrokenInvariant):
        watch.error(state, SimpleNamespace(h_i=2 * clients.h_i))
