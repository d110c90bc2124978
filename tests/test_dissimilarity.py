"""The measured constants against brute force, and the paper's statements about them as measured facts."""

import gc
import itertools
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import optimum, random_quadratics, small_logistic
from hypothesis import given, settings
from hypothesis import strategies as st

import covary as cv
from covary import theory
from covary.theory import hessians
from covary.theory.oracle import Oracle


def exact(A):
    H = A.mean(axis=0)
    beta = max(np.linalg.norm(a, 2) for a in A)
    return beta, np.linalg.eigvalsh(H)[0], max(np.linalg.norm(a - H, 2) for a in A)


def similar_quadratics(delta, beta=1.0, mu=0.003, d=6, pairs=2, seed=0):
    """∇²f has its spectrum in [mu, beta], and every client's Hessian is at distance delta from it."""
    rng = np.random.default_rng(seed)
    A = np.diag(np.linspace(mu, beta, d))
    apart = []
    for _ in range(pairs):
        Q = np.linalg.qr(rng.normal(size=(d, d)))[0]
        apart.append(delta * Q @ np.diag(rng.choice([-1.0, 1.0], d)) @ Q.T)
    b = rng.normal(size=(2 * pairs, d))
    return np.stack([A + sign * E for E in apart for sign in (1, -1)]), b - b.mean(axis=0)


@settings(max_examples=5, deadline=None)
@given(shape=st.sampled_from([(2, 1), (7, 30), (20, 100)]), seed=st.integers(0, 1000))
def test_constants_of_random_quadratics(shape, seed):
    N, d = shape
    rng = np.random.default_rng(seed)
    root = rng.normal(size=(N, d, d)) / np.sqrt(d)
    A, b, x = 0.5 * root @ root.swapaxes(1, 2) + 0.02 * np.eye(d), rng.normal(size=(N, d)), rng.normal(size=d)
    problem = cv.quadratics(A, b)
    found = theory.curvature(problem, x, clients=N)
    measured = [found.beta.value, found.mu.value, found.delta.value]
    np.testing.assert_allclose(measured, exact(A), rtol=0.02)
    slopes = A @ x + b
    at_x = theory.gradient_dissimilarity(problem, x)
    assert at_x.G.value == pytest.approx(
        np.sqrt(np.mean(np.sum((slopes - slopes.mean(axis=0)) ** 2, axis=1))), rel=1e-9
    )
    assert at_x.norm == pytest.approx(np.linalg.norm(slopes.mean(axis=0)), rel=1e-9)


def brute_force(problem, x, p):
    _, unravel = problem.start(None, 0)
    hessian, gradient = (
        jax.jit(of(lambda y, batch: problem.loss(unravel(y), batch))) for of in (jax.hessian, jax.grad)
    )
    batches = [problem.data.client(i) for i in range(problem.n_clients)]
    H = np.stack([hessian(jnp.asarray(x), batch) for batch in batches])
    g = np.stack([gradient(jnp.asarray(x), batch) for batch in batches])
    mean = np.tensordot(p, H, 1)
    lowest = min(np.linalg.eigvalsh(h)[0] for h in H)
    G = np.sqrt(p @ np.sum((g - p @ g) ** 2, axis=1))
    norm = np.linalg.norm
    return (
        max(norm(h, 2) for h in H),
        np.linalg.eigvalsh(mean)[0],
        max(norm(h - mean, 2) for h in H),
        max(0, -lowest),
        G,
    )


@pytest.mark.parametrize(("network", "weights"), [(False, "examples"), (True, "uniform")])
def test_constants_of_models_equal_brute_force(network, weights):
    problem = small_logistic([5, 5, 5, 14], features=4)
    if network:
        problem = cv.supervised(cv.models.mlp(4, 6, 3), problem.data)
    x = problem.start(None, 3)[0] + 0.3 * np.random.default_rng(0).normal(size=problem.start(None, 0)[0].size)
    sizes = problem.data.sizes
    p = np.full(4, 0.25) if weights == "uniform" else sizes / sizes.sum()
    found = theory.curvature(problem, x, weights=weights)
    at_x = theory.gradient_dissimilarity(problem, x, weights=weights)
    beta, mu, delta, weak, G = brute_force(problem, x, p)
    assert found.beta.value == pytest.approx(beta, rel=0.05)
    assert found.mu.value == pytest.approx(mu, rel=0.05, abs=1e-6)
    assert found.delta.value == pytest.approx(delta, rel=0.05)
    assert found.weak_convexity.value == pytest.approx(weak, rel=0.05, abs=1e-6)
    assert found.convex == (not network)
    assert at_x.G.value == pytest.approx(G, rel=1e-6)


def test_the_hessian_of_a_sample_leads_to_that_of_all(monkeypatch):
    """More examples than the search for the client uses, and clients in several parts."""
    rng = np.random.default_rng(0)
    clients = [(rng.normal(0, 1 + i, (700, 3)) * [1, 2, 3], rng.integers(0, 3, 700)) for i in range(5)]
    problem = cv.supervised(cv.models.logistic_regression(3, 3), cv.FederatedData.from_clients(clients))
    all_of_them = theory.curvature(problem)
    monkeypatch.setattr(hessians, "CHEAP", 0.0)
    monkeypatch.setattr(hessians, "AFFORDABLE", 1e6)
    some = theory.curvature(problem, clients=3)
    assert len(some.clients) == 3
    for name in ("beta", "delta"):
        value, exact = getattr(some, name), getattr(all_of_them, name).value
        assert value.value == pytest.approx(exact, rel=0.05), name
        assert value.value + 2 * value.se >= 0.99 * exact
    assert all_of_them.mu.value - 1e-6 <= some.mu.value <= all_of_them.mu.value + 2 * some.mu.se + 1e-6


def test_of_a_sample_of_clients_the_error_bar_is_honest():
    A, b = random_quadratics(N=300, d=8)
    problem = cv.quadratics(A, b)
    G = theory.gradient_dissimilarity(problem).G
    assert G.se == 0
    sampled = [theory.gradient_dissimilarity(problem, clients=30, seed=seed).G for seed in range(20)]
    apart = np.array([(s.value - G.value) / s.se for s in sampled])
    assert abs(apart.mean()) < 1
    assert 0.4 < apart.std() < 2
    beta, _, delta = exact(A)
    found = [theory.curvature(problem, clients=12, seed=seed) for seed in range(5)]
    for name, truth in (("beta", beta), ("delta", delta)):
        estimates = [getattr(f, name) for f in found]
        assert all(0 < e.value <= truth * 1.001 for e in estimates)
        assert sum(e.value + 2 * e.se >= truth for e in estimates) >= 4, (name, truth, estimates)


def test_one_odd_client_among_many_is_found():
    A = np.stack([np.eye(6) * (1 + 0.01 * k / 200) for k in range(200)])
    A[7] *= 100
    problem = cv.quadratics(A, np.zeros((200, 6)))
    for seed in range(3):
        found = theory.curvature(problem, clients=8, seed=seed)
        assert 7 in found.clients
        assert found.beta.value == pytest.approx(exact(A)[0], rel=0.01)
        assert found.delta.value == pytest.approx(exact(A)[2], rel=0.01)


def test_an_unmeasured_client_that_is_not_convex_is_within_the_error():
    A = np.stack([np.diag([10.0 + i % 3, 1.0]) for i in range(20)])
    A[7] = np.diag([9.0, -5.0])
    weak = theory.curvature(cv.quadratics(A, np.zeros((20, 2))), clients=2).weak_convexity
    assert weak.value + 2 * weak.se >= 5


def test_every_one_of_many_small_clients_is_measured():
    A = np.ones((4400, 1, 1))
    A[4399] = 100
    found = theory.curvature(cv.quadratics(A, np.zeros((4400, 1))))
    assert len(found.clients) == 4400
    assert found.beta.value == pytest.approx(100)


def test_sigma_is_the_variance_over_all_batches():
    problem = small_logistic([4, 5, 6])
    x = problem.start(None, 0)[0] + 0.1
    _, unravel = problem.start(None, 0)
    noise = theory.gradient_noise(problem, x)
    for size in (1, 2, 3):  # 5 examples in batches of 2 and 3 leave a smaller one, with its own share of the noise
        squares = []
        for i in range(3):
            batch = problem.data.client(i)
            each = np.stack(
                [
                    jax.grad(
                        lambda y, j=j, batch=batch: problem.loss(
                            unravel(y), jax.tree.map(lambda a: a[j : j + 1], batch)
                        )
                    )(jnp.asarray(x))
                    for j in range(len(batch[1]))
                ]
            )
            of_batches = []
            for low in range(0, len(each), size):
                b = min(size, len(each) - low)
                means = [each[list(rows)].mean(axis=0) for rows in itertools.combinations(range(len(each)), b)]
                of_batches.append(np.mean(np.sum((np.array(means) - each.mean(axis=0)) ** 2, axis=1)))
            squares.append(np.mean(of_batches))
        assert noise.sigma(size).value ** 2 == pytest.approx(np.mean(squares), rel=1e-9)
    assert noise.sigma(None).value == 0
    assert noise.sigma(2).se == 0  # every example was measured


def test_sigma_of_sampled_examples_has_an_honest_error():
    problem = small_logistic([400] * 4)
    truth = theory.gradient_noise(problem, examples=400).sigma(1)
    some = [theory.gradient_noise(problem, examples=40, seed=seed).sigma(1) for seed in range(12)]
    apart = np.array([(s.value - truth.value) / s.se for s in some])
    assert abs(apart.mean()) < 1.2
    assert apart.std() < 2


def test_gradients_and_hessians_differ_independently():
    """Section 2: G can be 0 with the largest delta (beta, for two clients), and delta 0 with any G."""
    alike_at_zero = cv.quadratics(A=[[[2.0, 0], [0, 0]], [[0.0, 0], [0, 2]]], b=np.zeros((2, 2)))
    assert theory.gradient_dissimilarity(alike_at_zero, np.zeros(2)).G.value == 0
    assert theory.curvature(alike_at_zero).delta.value == pytest.approx(1.0)
    opposed = cv.quadratics(A=[[[1.0]], [[-1.0]]], b=np.zeros((2, 1)))
    assert theory.gradient_dissimilarity(opposed, np.zeros(1)).G.value == 0
    assert theory.curvature(opposed).delta.value == pytest.approx(theory.curvature(opposed).beta.value)
    parallel = cv.quadratics(A=np.repeat(np.eye(2)[None], 2, axis=0), b=[[1e6, 0], [-1e6, 0]])
    assert theory.curvature(parallel).delta.value < 1e-12
    assert theory.gradient_dissimilarity(parallel).G.value == pytest.approx(1e6)


def test_objective_perturbation_makes_G_explode_and_scaffold_does_not_notice():
    """A random linear term per client, as for privacy: delta stays 0."""
    A, _ = random_quadratics(N=1, d=5)
    rounds, G = [], []
    for size in (0.0, 1.0, 1e3):
        b = size * np.random.default_rng(1).normal(size=(6, 5))
        problem = cv.quadratics(np.repeat(A, 6, axis=0), b - b.mean(axis=0))
        assert theory.curvature(problem).delta.value < 1e-9
        G.append(theory.gradient_dissimilarity(problem).G.value)
        run = cv.simulate(
            cv.scaffold(0.2), problem, 200, local_steps=8, x0=np.ones(5), warm_start=True, target=("loss", 1e-8)
        )
        rounds.append(run.reached)
    assert G[0] == 0
    assert G[2] == pytest.approx(1e3 * G[1])
    assert len(set(rounds)) == 1


@pytest.mark.parametrize("delta", [0.3, 0.1, 0.03])
def test_theorem_4_local_steps_pay_up_to_beta_over_delta(delta):
    problem = cv.quadratics(*similar_quadratics(delta))
    constants = theory.curvature(problem)
    assert constants.delta.value == pytest.approx(delta, rel=0.02)
    useful = theory.rates.useful_local_steps(constants.beta.value, constants.delta.value)
    ladder = [1, 2, 4, 8, 16, 32, 64, 128]
    rounds = []
    for K in ladder:
        tried = cv.sweep(
            cv.scaffold,
            problem,
            {"eta_l": np.geomspace(0.005, 2.0, 13)},
            rounds=2500,
            local_steps=K,
            x0=np.ones(6),
            target=("loss", 3e-5),
            warm_start=True,
            race=True,
        )
        rounds.append(tried.mean_rounds().min())
    few = [r * K for r, K in zip(rounds, ladder, strict=True) if useful / 4 >= K]
    assert max(few, default=1) <= 1.5 * min(few, default=1)  # delta K << beta: K times fewer rounds
    enough = next(K for r, K in zip(rounds, ladder, strict=True) if r <= 2 * min(rounds))
    assert 0.5 <= enough / useful <= 2  # where twice the least rounds are needed, as (beta + delta K)/(mu K) says


def test_envelope_holds_at_every_point_in_both_forms():
    A, b = random_quadratics(N=9, d=4)
    problem, star = cv.quadratics(A, b), optimum(A, b)
    rng = np.random.default_rng(0)
    points = [theory.gradient_dissimilarity(problem, star + s * rng.normal(size=4)) for s in (0.0, 0.1, 1.0, 10.0)]
    G, B = theory.envelope(points)
    assert pytest.approx(points[0].G.value) == G  # at the optimum G is what it is for every B
    assert all(p.mean_square <= (G**2 + B**2 * p.norm**2) * (1 + 1e-9) for p in points)
    f_star = points[0].loss
    G, B = theory.envelope(points, beta=exact(A)[0], f_star=f_star)
    assert B**2 <= 2  # the paper's bound for convex functions, with G² twice the mean square at the optimum
    assert all(p.mean_square <= (2 * G**2 + 4 * exact(A)[0] * (p.loss - f_star)) * (1 + 1e-9) for p in points)


def test_the_historys_control_change_is_that_of_the_cohort(every_engine):
    """With option I, full batches and all clients, the gradient that replaces c_i is the one at x."""
    problem = cv.quadratics(*random_quadratics())
    settings = {"local_steps": 3, "x0": np.ones(5)}
    lag = cv.simulate(cv.scaffold(eta_l=0.05, option="I"), problem, 6, **settings).history["control_change"]
    before = [cv.simulate(cv.scaffold(eta_l=0.05, option="I"), problem, r, **settings) for r in (1, 4)]
    for run, r in zip(before, (1, 4), strict=True):
        assert lag[r] == pytest.approx(cv.theory.control_lag(problem, np.asarray(run.clients.c_i), run.x))
    sampled = {"clients_per_round": 3, "warm_start": True, **settings}  # the warm start's last cohort has one client
    runs = [cv.simulate(cv.scaffold(eta_l=0.05), problem, r, **sampled) for r in (4, 5, 6)]
    for one, two in itertools.pairwise(runs):
        before, after = (np.asarray(run.clients.c_i)[two.history["cohort"][-1]] for run in (one, two))
        assert two.history["control_change"][-1] == pytest.approx(((after - before) ** 2).sum(axis=1).mean())
    A, b = random_quadratics()
    lonely = runs[0].history["cohort"][2].max()
    assert runs[0].history["control_change"][2] == pytest.approx(((A[lonely].sum(axis=1) + b[lonely]) ** 2).sum())
    assert "control_change" not in cv.simulate(cv.fedavg(0.05), problem, 2, **settings).history


def test_optimum_is_found_and_the_control_lag_vanishes_there():
    A, b = random_quadratics(N=6, d=4)
    problem, star = cv.quadratics(A, b), optimum(A, b)
    x, small = theory.optimum(problem)
    np.testing.assert_allclose(x, star, atol=1e-5)
    assert small < 1e-5
    found = theory.lag_along(cv.scaffold(0.05), problem, [1, 20, 150], star, local_steps=4, clients_per_round=2)
    assert found["round"].tolist() == [1, 20, 150]
    assert found["lag_at_optimum"][2] < 1e-3 * found["lag_at_optimum"][0]
    assert found["drift"][2] < 1e-3 * found["drift"][0]
    c_i = A @ star + b
    assert theory.control_lag(problem, c_i, star) < 1e-20
    assert theory.control_lag(problem, c_i + 1, star) == pytest.approx(4)


def test_curvature_does_not_need_a_matrix():
    """40,000 parameters: a Hessian would take 12.8 GB."""
    rng = np.random.default_rng(0)
    clients = [(rng.normal(i, 1, (6, 20_000)), rng.integers(0, 2, 6)) for i in range(3)]
    problem = cv.supervised(cv.models.logistic_regression(20_000, 2), cv.FederatedData.from_clients(clients))
    assert theory.curvature(problem).beta.value > 0


class Linear:
    """y ≈ w·x with a user's own loss."""

    def __init__(self, loss, start=0.0):
        self.of, self.start = loss, start

    def init(self, key):
        return jnp.full(3, self.start)

    def loss(self, w, batch):
        x, y = batch
        return jnp.mean(self.of(x @ w - y))


class Normed:
    """A loss in which examples depend on each other, as under BatchNorm."""

    def init(self, key):
        return jnp.ones(3)

    def loss(self, w, batch):
        z = batch[0] @ w
        return jnp.mean(((z - z.mean()) / (z.std() + 0.1) - batch[1]) ** 2)


def clients_of(sizes, seed=0):
    rng = np.random.default_rng(seed)
    return cv.FederatedData.from_clients([(rng.normal(size=(n, 3)), rng.normal(size=n)) for n in sizes])


@pytest.mark.parametrize("kinked", [jnp.abs, lambda z: jnp.maximum(0, 1 - z), lambda z: jnp.abs(z) + 1e-3 * z**2])
def test_a_loss_with_kinks_is_rejected(kinked):
    with pytest.raises(cv.CovaryError, match=r"twice differentiable.*kinks"):
        theory.curvature(cv.supervised(Linear(kinked), clients_of([200, 200])))


def test_a_loss_that_jax_cannot_differentiate_twice_is_rejected():
    @jax.custom_vjp
    def odd(z):
        return z**2

    def backwards(z, slope):
        shape = jax.ShapeDtypeStruct(z.shape, z.dtype)
        return (slope * jax.pure_callback(lambda v: np.asarray(2 * v), shape, z, vmap_method="expand_dims"),)

    odd.defvjp(lambda z: (z**2, z), backwards)
    with pytest.raises(cv.CovaryError, match="must be twice differentiable"):
        theory.curvature(cv.supervised(Linear(odd), clients_of([5, 5])))


def test_a_custom_derivative_that_is_differentiable_will_do():
    @jax.custom_vjp
    def square(z):
        return z**2

    square.defvjp(lambda z: (z**2, z), lambda z, slope: (slope * 2 * z,))
    data = clients_of([30, 30])
    own, plain = (theory.curvature(cv.supervised(Linear(f), data)) for f in (square, lambda z: z**2))
    assert own.beta.value == pytest.approx(plain.beta.value, rel=0.02)


def test_no_curvature_at_all_is_reported():
    with pytest.raises(cv.CovaryError, match="no curvature at all"):
        theory.curvature(cv.supervised(Linear(lambda z: z), clients_of([5, 5])))


@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e4])
def test_smooth_losses_of_any_scale_are_not_taken_for_kinked(scale):
    rng = np.random.default_rng(0)
    clients = [(scale * rng.normal(size=(60, 3)), rng.integers(0, 4, 60).astype(float)) for _ in range(3)]
    data = cv.FederatedData.from_clients(clients)
    for smooth in (lambda z: z**2, lambda z: jnp.exp(z / scale / 4), lambda z: jnp.logaddexp(0, z / scale)):
        assert theory.curvature(cv.supervised(Linear(smooth), data)).beta.value > 0


def test_a_support_vector_machine_is_rejected_at_its_start():
    class Machine(Linear):
        def loss(self, w, batch):
            return jnp.mean(jnp.maximum(0, 1 - jnp.sign(batch[1]) * (batch[0] @ w))) + 0.005 * jnp.sum(w**2)

    with pytest.raises(cv.CovaryError, match="kinks"):
        theory.curvature(cv.supervised(Machine(None), clients_of([100, 100])))


def test_eigenvalues_in_single_precision():
    rng = np.random.default_rng(2)
    X = rng.normal(size=(4, 200, 5)).astype(np.float32)

    class Squares:
        def init(self, key):
            return jnp.ones(5, jnp.float32)

        def loss(self, w, batch):
            return 0.5 * jnp.mean((batch[0] @ w) ** 2)

    problem = cv.supervised(Squares(), cv.FederatedData.from_clients([(x, np.zeros(200, np.float32)) for x in X]))
    A = np.einsum("nij,nik->njk", X, X) / 200
    for seed in range(5):
        found = theory.curvature(problem, seed=seed)
        np.testing.assert_allclose([found.beta.value, found.mu.value, found.delta.value], exact(A), rtol=1e-3)
    half = cv.supervised(
        type("Half", (Squares,), {"init": lambda self, key: jnp.ones(5, jnp.bfloat16)})(), problem.data
    )
    with pytest.raises(cv.CovaryError, match="float32 or float64"):
        theory.curvature(half)


def test_a_slightly_negative_eigenvalue_is_not_called_convex():
    """A trained network: its lowest curvature is small against its largest, but negative."""
    A = np.stack([np.diag([2.0, 1.0, -0.004])] * 3)
    assert not theory.curvature(cv.quadratics(A, np.zeros((3, 3)))).convex
    A[:, 2, 2] = 0.0
    assert theory.curvature(cv.quadratics(A, np.zeros((3, 3)))).convex


def test_an_oracle_does_not_outlive_its_use():
    oracle = Oracle(small_logistic([4, 6]))
    theory.gradient_dissimilarity(oracle)
    gone = weakref.ref(oracle)
    del oracle
    gc.collect()
    assert gone() is None


def test_one_large_client_does_not_blow_up_the_others():
    sizes = np.array([10] * 300 + [50_000])
    data = cv.FederatedData((np.zeros((sizes.sum(), 1)), np.zeros(sizes.sum())), sizes)
    parts = Oracle(cv.supervised(Linear1(), data)).clients(np.arange(301))
    assert parts.rows.size < 3 * sizes.sum()
    np.testing.assert_allclose(np.add.reduceat(parts.share.sum(axis=1), parts.first[:-1]), 1)


class Linear1:
    def init(self, key):
        return jnp.zeros(1)

    def loss(self, w, batch):
        return jnp.mean((batch[0] @ w - batch[1]) ** 2)


def test_nan_curvature_is_reported():
    data = cv.FederatedData.from_clients([(np.eye(3), np.zeros(3)), (np.eye(3), np.ones(3))])
    with pytest.raises(cv.CovaryError, match=r"(gradient|Hessian) of client 0 .* NaN or infinite"):
        theory.curvature(cv.supervised(Linear(lambda z: jnp.abs(z) ** 1.5), data))


def test_one_client_is_rejected():
    with pytest.raises(cv.CovaryError, match="at least 2 clients"):
        theory.gradient_dissimilarity(cv.quadratics(np.ones((1, 1, 1)), np.ones((1, 1))))


def test_clients_with_one_example_have_no_noise():
    problem = cv.supervised(Linear(lambda z: z**2), clients_of([1, 1, 1]))
    assert theory.gradient_noise(problem).sigma(None).value == 0
    assert np.isfinite(theory.curvature(problem).delta.value)


def test_a_loss_that_mixes_examples_has_curvature_but_no_sigma():
    problem = cv.supervised(Normed(), clients_of([8, 8, 8]))
    found = theory.curvature(problem)
    beta, mu, delta, _, G = brute_force(problem, np.ones(3), np.full(3, 1 / 3))
    np.testing.assert_allclose([found.beta.value, found.mu.value, found.delta.value], [beta, mu, delta], rtol=0.02)
    assert theory.gradient_dissimilarity(problem).G.value == pytest.approx(G)
    with pytest.raises(cv.CovaryError, match="BatchNorm"):
        theory.gradient_noise(problem)


def test_costs_count_gradients_of_examples():
    problem = small_logistic([4, 6])
    oracle = Oracle(problem)
    found = theory.gradient_dissimilarity(oracle)
    assert found.G.cost == 2 * 10  # once for the mean, once for the distance from it
    assert oracle.cost == found.G.cost
