"""Where one algorithm becomes another, as the papers say."""

from dataclasses import replace

import numpy as np
import pytest
from helpers import random_quadratics, small_logistic

import covary as cv
from covary.algorithms.scaffold import Client, Up
from covary.client import client_loop

pytestmark = pytest.mark.usefixtures("every_engine")
A, b = random_quadratics(N=6, d=4)
PROBLEM = cv.quadratics(A, b)


def run(algorithm, problem=PROBLEM, **kwargs):
    kwargs = {"rounds": 15, "local_steps": 5, "x0": None, **kwargs}
    return cv.simulate(algorithm, problem, **kwargs)


def same(first, second):
    np.testing.assert_allclose(first.x, second.x, rtol=1e-11, atol=1e-12)


def test_scaffold_with_controls_held_at_zero_is_fedavg():
    scaffold = cv.scaffold(0.1)
    (trip,) = scaffold.exchanges

    def hold(local, down, client, full_grad, K):
        up, _ = trip.finish(local, down, client, full_grad, K)
        return Up(up.dy, 0 * up.dc), Client(0 * client.c_i)

    held = replace(scaffold, exchanges=(replace(trip, finish=hold),), with_equal_steps=None, recipe=None)
    problem = small_logistic([6, 9, 7, 8])
    settings = {"clients_per_round": 2, "batch_size": 3, "local_steps": 7}
    same(run(held, problem, **settings), run(cv.fedavg(0.1), problem, **settings))


def test_fedprox_without_pull_is_fedavg():
    same(run(cv.fedprox(0.1, mu=0.0), clients_per_round=2), run(cv.fedavg(0.1), clients_per_round=2))


@pytest.mark.parametrize("algorithm", [cv.fedavg(0.2), cv.scaffold(0.2), cv.scaffold(0.2, option="I")], ids=str)
def test_one_full_batch_step_of_all_clients_is_sgd(algorithm):
    same(run(algorithm, local_steps=1), run(cv.sgd(0.2)))


def test_sgd_ignores_the_number_of_local_steps():
    same(run(cv.sgd(0.2), local_steps=9), run(cv.sgd(0.2), local_steps=1))


def test_scaffold_option_1_with_one_step_of_one_client_is_saga():
    ours = run(cv.scaffold(0.1, option="I"), rounds=60, clients_per_round=1, local_steps=1)
    x, table = np.zeros(4), np.zeros((6, 4))
    for i in ours.history["cohort"][:, 0]:
        gradient = A[i] @ x + b[i]
        x = x - 0.1 * (gradient - table[i] + table.mean(axis=0))
        table[i] = gradient
    np.testing.assert_allclose(ours.x, x, rtol=1e-10)
    np.testing.assert_allclose(ours.clients.c_i, table, rtol=1e-10)


def test_vrl_sgd_is_scaffold_option_2_at_full_participation():
    same(run(cv.vrl_sgd(0.1)), run(cv.scaffold(0.1)))
    problem = small_logistic([6, 6, 6])
    same(run(cv.vrl_sgd(0.1), problem, batch_size=2), run(cv.scaffold(0.1), problem, batch_size=2))


def test_option_2_keeps_the_mean_of_the_raw_gradients():
    rng = np.random.default_rng(0)
    seen = []

    def noisy(y):
        seen.append(A[0] @ y + b[0] + rng.normal(size=4))
        return seen[-1]

    algorithm = cv.scaffold(0.03)
    (trip,) = algorithm.exchanges
    server = algorithm.init_server(np.ones(4))._replace(c=rng.normal(size=4))
    _, client, _ = client_loop(trip, trip.broadcast(server), Client(rng.normal(size=4)), noisy, [noisy] * 8)
    np.testing.assert_allclose(client.c_i, np.mean(seen, axis=0), rtol=1e-12)


def test_dane_without_proximal_term_is_mime_on_full_batches():
    same(run(cv.dane(0.1), clients_per_round=3), run(cv.mime(0.1), clients_per_round=3))


def test_only_the_product_of_step_sizes_matters_to_sgd():
    same(run(cv.sgd(0.1, eta_g=2.0)), run(cv.sgd(0.2)))


def test_identical_clients_need_no_correction():
    problem = cv.quadratics(np.repeat(A[:1], 5, axis=0), np.repeat(b[:1], 5, axis=0))
    same(run(cv.scaffold(0.1), problem), run(cv.fedavg(0.1), problem))
