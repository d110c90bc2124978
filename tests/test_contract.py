"""The one table that every algorithm must pass, on all three runtimes: JAX, PyTorch and plain Python."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from helpers import optimum, plain_server, quadratic_gradients, random_quadratics, small_logistic
from torch_problems import problem as torch_logistic

import covary as cv
import covary.torch as cvt
from covary import algorithms
from covary.client import client_loop, client_work
from covary.draws import cohort

A, b = random_quadratics(N=6, d=4, G=2.0)
K = 5


def drifted(eta_l, mu=0.0):
    """The limit of FedAvg and FedProx: K local steps move client i by -Q_i (A_i x + b_i), and the moves cancel."""
    Q = [eta_l * sum(np.linalg.matrix_power(np.eye(4) - eta_l * (a + mu * np.eye(4)), k) for k in range(K)) for a in A]
    QA = sum(q @ a for q, a in zip(Q, A, strict=True))
    return -np.linalg.solve(QA, sum(q @ v for q, v in zip(Q, b, strict=True)))


# algorithm, and the point it must converge to on heterogeneous quadratics
ROUNDS_TO_LIMIT = {"sgd": 400}
TABLE = [
    (cv.sgd(0.3), optimum(A, b)),
    (cv.fedavg(0.1), drifted(0.1)),
    (cv.fedprox(0.1, mu=1.0), drifted(0.1, mu=1.0)),
    (cv.scaffold(0.1), optimum(A, b)),
    (cv.scaffold(0.1, option="I"), optimum(A, b)),
    (cv.dane(0.1, mu=0.1), optimum(A, b)),
    (cv.vrl_sgd(0.1), optimum(A, b)),
    (cv.feddyn(0.1, alpha=1.0), optimum(A, b)),
    (cv.mime(0.1), optimum(A, b)),
]
ALGORITHMS = pytest.mark.parametrize("algorithm", [row[0] for row in TABLE], ids=str)


# The runtimes, on the same quadratics

ORIGIN = np.zeros(4)


class Point(torch.nn.Module):
    def __init__(self, start, dtype=torch.float64):
        super().__init__()
        self.x = torch.nn.Parameter(torch.tensor(start, dtype=dtype))

    def quadratic(self, batch):
        A, b = batch
        return 0.5 * torch.einsum("i,nij,j->n", self.x, A, self.x).mean() + (b @ self.x).mean()


def in_jax(algorithm, rounds, S=None, steps=K, x0=ORIGIN):
    run = cv.simulate(algorithm, cv.quadratics(A, b), rounds, S, steps, x0=x0)
    return run.server, run.clients, run.history["cohort"]


def in_pytorch(algorithm, rounds, S=None, steps=K, x0=ORIGIN):
    clients = [(torch.tensor(A[i : i + 1]), torch.tensor(b[i : i + 1])) for i in range(len(A))]
    problem = cvt.supervised(Point(np.ones(4)), Point.quadratic, clients)
    run = cv.simulate(algorithm, problem, rounds, S, steps, x0=x0, eval_every=rounds)
    return run.server, run.clients, run.history["cohort"]


def in_plain_python(algorithm, rounds, S=None, steps=K, x0=ORIGIN):
    cohorts = np.array([cohort(0, r, len(A), S or len(A)) for r in range(1, rounds + 1)])
    server, states = plain_server(algorithm, quadratic_gradients(A, b), x0, cohorts, steps, equal=True)
    return server, type(states[0])(*map(np.stack, zip(*states, strict=True))), cohorts


RUNTIMES = pytest.mark.parametrize("runtime", [in_jax, in_pytorch, in_plain_python])


def test_every_algorithm_is_in_the_table():
    assert {row[0].name for row in TABLE} == set(algorithms.__all__)


def test_the_defaults_are_as_documented():
    defaults = {
        "sgd": {"eta_g": 1.0},
        "fedavg": {"eta_g": 1.0},
        "fedprox": {"mu": 1.0, "eta_g": 1.0},
        "scaffold": {"eta_g": 1.0},
        "dane": {"mu": 0.0, "eta": 1.0},
        "vrl_sgd": {},
        "feddyn": {"alpha": 0.1},
        "mime": {"eta_g": 1.0},
    }
    for name in algorithms.__all__:
        assert getattr(cv, name)(0.3).numbers == {"eta_l": 0.3, **defaults[name]}
    assert cv.scaffold(0.3).recipe == cv.scaffold(0.3, option="II").recipe


@RUNTIMES
@pytest.mark.parametrize(("algorithm", "limit"), TABLE, ids=[str(row[0]) for row in TABLE])
def test_converges_to_where_theory_says(algorithm, limit, runtime):
    x = runtime(algorithm, ROUNDS_TO_LIMIT.get(algorithm.name, 200))[0].x
    np.testing.assert_allclose(x, limit, atol=1e-8)
    if limit is not TABLE[0][1] and algorithm.name in ("fedavg", "fedprox"):
        assert np.linalg.norm(x - optimum(A, b)) > 1e-2


@ALGORITHMS
def test_all_runtimes_give_the_same_numbers(algorithm):
    call = {"rounds": 8, "S": None if algorithm.lockstep else 3, "steps": 3, "x0": np.arange(4.0)}
    expected = in_plain_python(algorithm, **call)
    for runtime in (in_jax, in_pytorch):
        for found, own in zip(runtime(algorithm, **call), expected, strict=True):
            jax.tree.map(
                lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-12), tuple(found), tuple(own)
            )


@ALGORITHMS
def test_works_at_the_edges_with_odd_pytrees_and_keeps_their_dtype(algorithm):
    class Odd:
        def init(self, key):
            return {"scalar": jnp.float32(1), "rows": [jnp.ones((2, 3), jnp.float32), jnp.ones((1,), jnp.float32)]}

        def loss(self, params, batch):
            return sum(jnp.mean((leaf - batch.mean()) ** 2) for leaf in jax.tree.leaves(params))

    one_client = cv.supervised(Odd(), cv.FederatedData(np.float32([3.0, 5.0]), [2]))
    run = cv.simulate(algorithm, one_client, rounds=3, clients_per_round=1, local_steps=1)
    assert jax.tree.map(np.shape, run.params) == {"scalar": (), "rows": [(2, 3), (1,)]}
    works_in_float32(run)


def works_in_float32(run):
    for leaf in jax.tree.leaves((run.server, run.clients)):
        assert leaf.dtype == np.float32
        assert np.isfinite(leaf).all()
    assert run.history["loss"][-1] < run.history["loss"][0]


@ALGORITHMS
def test_works_at_the_edges_with_odd_modules_and_keeps_their_dtype(algorithm):
    shapes = {"scalar": (), "rows": (2, 3), "nothing": (0,)}
    module = torch.nn.ParameterDict({name: torch.nn.Parameter(torch.ones(shape)) for name, shape in shapes.items()})

    def loss(module, batch):
        return sum(((module[name] - batch.mean()) ** 2).mean() for name in ("scalar", "rows"))

    one_client = cvt.supervised(module, loss, [torch.tensor([3.0, 5.0])])
    run = cv.simulate(algorithm, one_client, rounds=3, clients_per_round=1, local_steps=1)
    assert {name: tuple(value.shape) for name, value in run.params.items()} == shapes
    works_in_float32(run)


@ALGORITHMS
def test_a_model_of_one_parameter(algorithm):
    run = cv.simulate(algorithm, cv.lower_bound(G=1.0), rounds=40, local_steps=1, x0=1.0)
    assert run.x.shape == (1,)
    assert run.history["loss"][-1] < 0.1


@ALGORITHMS
@pytest.mark.parametrize("make", [lambda: small_logistic([5, 7, 6]), lambda: torch_logistic(sizes=[5, 7, 6])])
def test_same_seed_same_bits_and_another_step_size_needs_no_compilation(algorithm, make, compilations):
    problem = make()

    def run(algorithm, seed):
        return cv.simulate(
            algorithm,
            problem,
            6,
            clients_per_round=None if algorithm.lockstep else 2,
            local_steps=4,
            batch_size=2,
            seed=seed,
        )

    first = run(algorithm, seed=3)
    compilations.clear()
    second = run(algorithm, seed=3)
    other = run(
        getattr(cv, algorithm.name)(**{**algorithm.numbers, "eta_l": 0.01}, **dict(algorithm.recipe[1])), seed=4
    )
    assert compilations == []
    for a, b in zip(
        jax.tree.leaves((first.server, first.clients)), jax.tree.leaves((second.server, second.clients)), strict=True
    ):
        np.testing.assert_array_equal(a, b)
    for name in first.history:
        np.testing.assert_array_equal(first.history[name], second.history[name])
    assert not np.array_equal(first.x, other.x)


@ALGORITHMS
def test_a_clients_work_is_the_same_in_the_engine_and_in_a_plain_loop(algorithm):
    """With one step and with some, where K is known and where it is not; what a guard changes, changes as it says."""
    rng, x = np.random.default_rng(0), np.ones(4)
    server, client = (
        type(s)(*rng.normal(size=(len(s), 4))) for s in (algorithm.init_server(x), algorithm.init_client(x))
    )
    full_grad = lambda y: A[0] @ y + b[0]  # noqa: E731

    def grad_of_step(k):
        return lambda y: A[1] @ y + k

    for exchange in (*algorithm.exchanges, *algorithm.trips(3), *filter(None, [algorithm.warm_start])):
        given = exchange, exchange.broadcast(server), client, full_grad
        one = client_loop(*given, [grad_of_step(0)])
        some = client_loop(*given, [grad_of_step(k) for k in range(3)])
        if hasattr(some[0], "dc"):  # what is sent is the change of what is kept
            np.testing.assert_allclose(some[0].dc, some[1].c_i - client.c_i, rtol=1e-12)
        guarded = client_loop(*given, [grad_of_step(0)], lambda vector, which: (0.5 + which) * vector)
        for name, factor in (("dy", 0.5), ("g", 1.5)):
            if hasattr(one[0], name):
                np.testing.assert_allclose(getattr(guarded[0], name), factor * getattr(one[0], name), rtol=1e-12)
        with jax.disable_jit():
            same = [
                (client_work(*given, grad_of_step, 1, 1), one),
                (client_work(*given, grad_of_step, jnp.asarray(3), 5), some),
                (client_work(*given, grad_of_step, 3, 3, measured=False), (*some[:2], 0.0)),
            ]
        for ours, theirs in same:
            jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12), ours, theirs)
