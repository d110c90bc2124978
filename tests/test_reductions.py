"""Where one algorithm becomes another, as the papers say.

On full batches with the plain server, which test_oracle.py compares with the engine in every mode; with batches, and
where the recipe counts, on the engine.
"""

from dataclasses import replace

import numpy as np
import pytest
from helpers import plain_server, random_quadratics, small_logistic

import covary as cv
from covary.algorithms.scaffold import Client, Up
from covary.client import client_loop

N, d, K, ROUNDS = 6, 4, 5, 15
A, b = random_quadratics(N, d)


def cohorts(S, rounds=ROUNDS):
    rng = np.random.default_rng(0)
    return [rng.choice(N, S, replace=False) for _ in range(rounds)]


def server_of(algorithm, S=N, steps=K, A=A, b=b):
    grads = [lambda y, A=A, b=b: A @ y + b for A, b in zip(A, b, strict=True)]
    server, _ = plain_server(algorithm, grads, np.linspace(1, 2, d), cohorts(S), steps, equal=True)
    return server


def run(algorithm, problem, **settings):
    return cv.simulate(algorithm, problem, rounds=ROUNDS, devices=1, **settings)


def same(first, second):
    np.testing.assert_allclose(first.x, second.x, rtol=1e-11, atol=1e-12)


def test_scaffold_with_controls_held_at_zero_is_fedavg():
    scaffold = cv.scaffold(0.1)
    (exchange,) = scaffold.exchanges

    def hold(local, down, client, full_grad, K):
        up, _ = exchange.finish(local, down, client, full_grad, K)
        return Up(up.dy, 0 * up.dc), Client(0 * client.c_i)

    held = replace(scaffold, exchanges=(replace(exchange, finish=hold),), with_equal_steps=None, recipe=None)
    problem = small_logistic([6, 9, 7, 8])
    settings = {"clients_per_round": 2, "batch_size": 3, "local_steps": 7}
    same(run(held, problem, **settings), run(cv.fedavg(0.1), problem, **settings))


def test_fedprox_without_pull_is_fedavg():
    same(server_of(cv.fedprox(0.1, mu=0.0), S=2), server_of(cv.fedavg(0.1), S=2))


@pytest.mark.parametrize("algorithm", [cv.fedavg(0.2), cv.scaffold(0.2), cv.scaffold(0.2, option="I")], ids=str)
def test_one_full_batch_step_of_all_clients_is_sgd(algorithm):
    same(server_of(algorithm, steps=1), server_of(cv.sgd(0.2)))


def test_sgd_ignores_the_number_of_local_steps():
    same(server_of(cv.sgd(0.2), steps=9), server_of(cv.sgd(0.2), steps=1))
    problem = cv.quadratics(A, b)
    same(run(cv.sgd(0.2), problem, local_steps=9), run(cv.sgd(0.2), problem, local_steps=1))


def test_scaffold_option_1_with_one_step_of_one_client_is_saga():
    grads = [lambda y, A=A, b=b: A @ y + b for A, b in zip(A, b, strict=True)]
    chosen = cohorts(S=1, rounds=60)
    server, clients = plain_server(cv.scaffold(0.1, option="I"), grads, np.zeros(d), chosen, K=1, equal=True)
    x, table = np.zeros(d), np.zeros((N, d))
    for (i,) in chosen:
        gradient = A[i] @ x + b[i]
        x = x - 0.1 * (gradient - table[i] + table.mean(axis=0))
        table[i] = gradient
    np.testing.assert_allclose(server.x, x, rtol=1e-10)
    np.testing.assert_allclose([client.c_i for client in clients], table, rtol=1e-10)


def test_vrl_sgd_is_scaffold_option_2_at_full_participation():
    same(server_of(cv.vrl_sgd(0.1)), server_of(cv.scaffold(0.1)))
    problem, settings = small_logistic([6, 6, 6]), {"batch_size": 2, "local_steps": K}
    same(run(cv.vrl_sgd(0.1), problem, **settings), run(cv.scaffold(0.1), problem, **settings))


def test_option_2_keeps_the_mean_of_the_raw_gradients():
    rng = np.random.default_rng(0)
    seen = []

    def noisy(y):
        seen.append(A[0] @ y + b[0] + rng.normal(size=4))
        return seen[-1]

    algorithm = cv.scaffold(0.03)
    (exchange,) = algorithm.exchanges
    server = algorithm.init_server(np.ones(4))._replace(c=rng.normal(size=4))
    _, client, _ = client_loop(exchange, exchange.broadcast(server), Client(rng.normal(size=4)), noisy, [noisy] * 8)
    np.testing.assert_allclose(client.c_i, np.mean(seen, axis=0), rtol=1e-12)


def test_dane_without_proximal_term_is_mime_on_full_batches():
    same(server_of(cv.dane(0.1), S=3), server_of(cv.mime(0.1), S=3))


def test_only_the_product_of_step_sizes_matters_to_sgd():
    same(server_of(cv.sgd(0.1, eta_g=2.0)), server_of(cv.sgd(0.2)))


def test_identical_clients_need_no_correction():
    alike = {"A": np.repeat(A[:1], N, axis=0), "b": np.repeat(b[:1], N, axis=0)}
    same(server_of(cv.scaffold(0.1), **alike), server_of(cv.fedavg(0.1), **alike))
