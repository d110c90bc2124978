"""The engine against independent code: the one-file NumPy SCAFFOLD, and a plain-Python server for every algorithm."""

import numpy as np
import pytest
from helpers import (
    client_gradients,
    one_file_example,
    plain_server,
    quadratic_gradients,
    random_quadratics,
    small_logistic,
)

import covary as cv

pytestmark = pytest.mark.usefixtures("every_engine")
N, S, K, ROUNDS = 7, 3, 4, 30


def close(a, b):
    np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-10 * max(1.0, np.abs(b).max()))


@pytest.mark.parametrize("option", ["I", "II"])
@pytest.mark.parametrize("kind", ["quadratics", "logistic"])
def test_scaffold_equals_algorithm_1_line_by_line(kind, option):
    if kind == "quadratics":
        A, b = random_quadratics(N)
        problem = cv.quadratics(A, b)
        grads = quadratic_gradients(A, b)
        x0 = np.arange(5.0)
    else:
        problem = small_logistic([4, 6, 5, 9, 4, 7, 8])  # ragged
        grads = client_gradients(problem)
        x0 = np.linspace(-1, 1, 12)
    run = cv.simulate(
        cv.scaffold(eta_l=0.05, eta_g=0.8, option=option), problem, ROUNDS, clients_per_round=S, local_steps=K, x0=x0
    )
    oracle = one_file_example().scaffold(grads, x0, run.history["cohort"], K, 0.05, 0.8, option)
    for ours, theirs in zip((run.x, run.server.c, run.clients.c_i), oracle, strict=True):
        close(ours, theirs)


@pytest.mark.parametrize(
    "algorithm",
    [
        cv.sgd(0.1),
        cv.fedavg(0.1, eta_g=1.5),
        cv.fedprox(0.1, mu=0.5),
        cv.scaffold(0.1),
        cv.scaffold(0.1, option="I"),
        cv.dane(0.1, mu=0.3, eta=0.9),
        cv.vrl_sgd(0.1),
        cv.feddyn(0.1, alpha=0.5),
        cv.mime(0.1),
    ],
    ids=str,
)
def test_the_same_functions_in_plain_numpy_give_the_same_run(algorithm):
    A, b = random_quadratics(N)
    grads = quadratic_gradients(A, b)
    cohort = None if algorithm.lockstep else S
    run = cv.simulate(algorithm, cv.quadratics(A, b), 12, clients_per_round=cohort, local_steps=K, x0=np.ones(5))
    server, clients = plain_server(algorithm, grads, np.ones(5), run.history["cohort"], K, equal=True)
    for ours, theirs in zip(run.server, server, strict=True):
        close(ours, theirs)
    for name in run.clients._fields:
        close(getattr(run.clients, name), np.stack([getattr(client, name) for client in clients]))


def test_sending_only_dy_changes_nothing_but_the_traffic():
    A, b = random_quadratics(N)
    grads = quadratic_gradients(A, b)
    cohorts = np.array([[0, 2, 5], [1, 2, 3], [4, 5, 6]])
    short, _ = plain_server(cv.scaffold(0.1), grads, np.ones(5), cohorts, K, equal=True)
    long, _ = plain_server(cv.scaffold(0.1), grads, np.ones(5), cohorts, K, equal=False)
    close(short.x, long.x)
    close(short.c, long.c)
