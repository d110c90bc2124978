"""Every algorithm against its paper's equations, written out again in NumPy, sampled and with every number set.

On the plain server, which test_oracle.py compares with the engine in every mode.
"""

import numpy as np
import pytest
from helpers import plain_server, random_quadratics

import covary as cv

N, d, K, ROUNDS = 5, 3, 4, 6
A, b = random_quadratics(N, d)
X0 = np.array([1.0, -2.0, 0.5])


def g(i, y):
    return A[i] @ y + b[i]


def descend(i, x, eta_l, direction):
    y = x.copy()
    for _ in range(K):
        y = y - eta_l * direction(i, y)
    return y


def sgd(cohorts, eta_l, eta_g):
    x = X0
    for S in cohorts:
        x = x - eta_g * eta_l * np.mean([g(i, x) for i in S], axis=0)
    return x


def fedavg(cohorts, eta_l, eta_g):
    x = X0
    for S in cohorts:
        x = x + eta_g * np.mean([descend(i, x, eta_l, g) - x for i in S], axis=0)
    return x


def fedprox(cohorts, eta_l, mu, eta_g):
    x = X0
    for S in cohorts:
        ends = [descend(i, x, eta_l, lambda i, y, x=x: g(i, y) + mu * (y - x)) for i in S]
        x = x + eta_g * (np.mean(ends, axis=0) - x)
    return x


def dane(cohorts, eta_l, mu, eta):
    x = X0
    for S in cohorts:
        mean = np.mean([g(i, x) for i in S], axis=0)
        ends = [descend(i, x, eta_l, lambda i, y, x=x, m=mean: g(i, y) - (g(i, x) - eta * m) + mu * (y - x)) for i in S]
        x = np.mean(ends, axis=0)
    return x


def mime(cohorts, eta_l, eta_g):
    x = X0
    for S in cohorts:
        c = np.mean([g(i, x) for i in S], axis=0)
        ends = [descend(i, x, eta_l, lambda i, y, x=x, c=c: g(i, y) - g(i, x) + c) for i in S]
        x = x + eta_g * (np.mean(ends, axis=0) - x)
    return x


def feddyn(cohorts, eta_l, alpha):
    x, h, h_i = X0, np.zeros(d), np.zeros((N, d))
    for S in cohorts:
        ends = [descend(i, x, eta_l, lambda i, y, x=x: g(i, y) - h_i[i] + alpha * (y - x)) for i in S]
        for i, y in zip(S, ends, strict=True):
            h_i[i] -= alpha * (y - x)
        h = h - alpha / N * sum(y - x for y in ends)
        x = np.mean(ends, axis=0) - h / alpha
    return x


def vrl_sgd(cohorts, eta_l):
    x, delta, ends = X0, np.zeros((N, d)), None
    for S in cohorts:
        if ends is not None:
            delta = delta + (x - ends) / (K * eta_l)
        ends = np.stack([descend(i, x, eta_l, lambda i, y, delta=delta: g(i, y) - delta[i]) for i in S])
        x = ends.mean(axis=0)
    return x


@pytest.mark.parametrize(
    ("plain", "numbers"),
    [
        (sgd, {"eta_l": 0.1, "eta_g": 0.7}),
        (fedavg, {"eta_l": 0.1, "eta_g": 0.7}),
        (fedprox, {"eta_l": 0.1, "mu": 0.6, "eta_g": 0.7}),
        (dane, {"eta_l": 0.1, "mu": 0.6, "eta": 0.8}),
        (mime, {"eta_l": 0.1, "eta_g": 0.7}),
        (feddyn, {"eta_l": 0.1, "alpha": 0.6}),
        (vrl_sgd, {"eta_l": 0.1}),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_the_algorithm_follows_the_equations(plain, numbers):
    algorithm = getattr(cv, plain.__name__)(**numbers)
    rng = np.random.default_rng(0)
    S = N if algorithm.lockstep else 2
    cohorts = [np.sort(rng.choice(N, S, replace=False)) for _ in range(ROUNDS)]
    grads = [lambda y, i=i: g(i, y) for i in range(N)]
    server, _ = plain_server(algorithm, grads, X0, cohorts, K, equal=True)
    np.testing.assert_allclose(server.x, plain(cohorts, **numbers), rtol=1e-11)


def test_the_network_is_two_layers_with_a_relu_between():
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(6, 4)), np.array([0, 1, 2, 0, 1, 2])
    p = {
        "w1": rng.normal(size=(5, 4)),
        "b1": rng.normal(size=5),
        "w2": rng.normal(size=(3, 5)),
        "b2": rng.normal(size=3),
    }
    logits = np.maximum(x @ p["w1"].T + p["b1"], 0) @ p["w2"].T + p["b2"]
    likelihood = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    model = cv.models.mlp(4, 5, 3)
    np.testing.assert_allclose(model.loss(p, (x, y)), -np.log(likelihood[np.arange(6), y]).mean(), rtol=1e-10)
    np.testing.assert_allclose(model.metrics(p, (x, y))["accuracy"], logits.argmax(axis=1) == y)
