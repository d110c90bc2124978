"""The engine: sampling, batches, weights, warm start, averages, targets, divergence, the history."""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import pytest
from helpers import client_gradients, random_quadratics, small_logistic

import covary as cv
from covary.client import client_loop

A, b = random_quadratics(N=6, d=4)
PROBLEM = cv.quadratics(A, b)


class Coordinates:
    """Every example is a unit vector e_j and its loss is x_j: a gradient shows which examples were in the batch."""

    def __init__(self, dimension):
        self.dimension = dimension

    def init(self, key):
        return jnp.zeros(self.dimension)

    def loss(self, params, batch):
        return jnp.mean(batch @ params)


def touched(sizes, seed=0, **kwargs):
    """How far each example's coordinate was moved, in units of eta_l, per client."""
    problem = cv.supervised(Coordinates(sum(sizes)), cv.FederatedData(np.eye(sum(sizes)), sizes))
    run = cv.simulate(cv.fedavg(1.0), problem, rounds=1, seed=seed, **kwargs)
    return np.split(-run.x * len(sizes), np.cumsum(sizes)[:-1])


def test_an_epoch_uses_every_example_once():
    for moved in touched([6, 6, 6], batch_size=2, local_epochs=1):
        np.testing.assert_allclose(moved, 1 / 2)
    for moved in touched([6, 9, 12], batch_size=3, local_epochs=2):
        np.testing.assert_allclose(moved, 2 / 3)


def test_the_last_batch_of_an_epoch_may_be_smaller():
    seven, eight = touched([7, 8], batch_size=3, local_epochs=1)
    np.testing.assert_allclose(np.sort(seven), [1 / 3] * 6 + [1])
    np.testing.assert_allclose(np.sort(eight), [1 / 3] * 6 + [1 / 2] * 2)


def test_a_fraction_cuts_an_epoch_into_equal_batches():
    """0.2 of the local data means 5 steps per epoch, also if 5 does not divide its size."""
    ten, thirteen = touched([10, 13], batch_size=0.2, local_epochs=1)
    np.testing.assert_allclose(ten, 1 / 2)
    np.testing.assert_allclose(np.sort(thirteen), [1 / 3] * 9 + [1 / 2] * 4)
    assert all((moved > 0).sum() == 2 for moved in touched([10, 10], batch_size=0.2, local_steps=1))


def test_each_epoch_and_each_client_has_its_own_order():
    first, second = touched([30, 30], batch_size=3, local_steps=1)
    assert not np.array_equal(first > 0, second > 0)
    three_epochs = touched([4], batch_size=2, local_steps=5)[0]  # two whole epochs and one batch more
    np.testing.assert_allclose(np.sort(three_epochs), [1, 1, 1.5, 1.5])


def test_each_epoch_and_round_has_a_new_order():
    def batch_at(step):  # which examples the step with this number used
        before = touched([30], batch_size=3, local_steps=step)[0] if step else 0
        return (touched([30], batch_size=3, local_steps=step + 1)[0] - before) > 1e-12

    assert batch_at(0).sum() == batch_at(10).sum() == 3
    assert not np.array_equal(batch_at(0), batch_at(10))  # the first batches of two epochs
    problem = cv.supervised(Coordinates(30), cv.FederatedData(np.eye(30), [30]))
    one, two = (cv.simulate(cv.fedavg(1.0), problem, r, batch_size=3, local_steps=1).x for r in (1, 2))
    assert not np.array_equal(one, two - one)


def test_option_2_keeps_each_clients_own_mean_gradient_where_K_differs():
    problem = cv.supervised(Coordinates(8), cv.FederatedData(np.eye(8), [2, 6]))
    run = cv.simulate(cv.scaffold(0.7), problem, rounds=1, batch_size=2, local_epochs=1)  # K_i = 1 and 3
    np.testing.assert_allclose(run.clients.c_i[0], [1 / 2] * 2 + [0] * 6)
    np.testing.assert_allclose(run.clients.c_i[1], [0] * 2 + [1 / 2 / 3] * 6)
    np.testing.assert_allclose(run.server.c, run.clients.c_i.mean(axis=0))


def test_a_clients_batches_do_not_depend_on_the_other_clients():
    """So that a deployed client, which knows only its own data, draws the batches of the simulation."""
    np.testing.assert_array_equal(
        touched([9, 9], batch_size=2, local_steps=3, seed=5)[0],
        touched([9, 30], batch_size=2, local_steps=3, seed=5)[0],
    )


def test_cohorts_are_uniform_without_replacement():
    cohorts = cv.simulate(cv.sgd(0.01), PROBLEM, rounds=2000, clients_per_round=2).history["cohort"]
    assert (np.diff(cohorts, axis=1) > 0).all()
    counts = np.bincount(cohorts.ravel(), minlength=6)
    assert np.abs(counts - 2000 / 3).max() < 5 * np.sqrt(2000 * (1 / 3) * (2 / 3))
    pairs = np.unique(cohorts, axis=0, return_counts=True)[1]
    assert len(pairs) == 15
    assert np.abs(pairs - 2000 / 15).max() < 5 * np.sqrt(2000 / 15)


def test_clients_per_round_as_a_fraction_and_all():
    assert cv.simulate(cv.sgd(0.1), PROBLEM, 1, clients_per_round=0.5).history["cohort"].shape == (1, 3)
    assert cv.simulate(cv.sgd(0.1), PROBLEM, 1).history["cohort"].tolist() == [list(range(6))]


def test_weights_by_examples_minimise_the_pooled_loss():
    problem = small_logistic([4, 12, 8])
    grads = client_gradients(problem)
    p = np.array([4, 12, 8]) / 24
    run = cv.simulate(cv.sgd(0.3), problem, rounds=4, weights="examples")
    x = np.zeros(12)
    for _ in range(4):
        x = x - 0.3 * sum(w * g(x) for w, g in zip(p, grads, strict=True))
    np.testing.assert_allclose(run.x, x, rtol=1e-12)
    pooled = problem.loss(run.params, problem.data.examples)
    np.testing.assert_allclose(run.history["loss"][-1], pooled, rtol=1e-12)
    uniform = cv.simulate(cv.sgd(0.3), problem, rounds=4)
    each = [problem.loss(uniform.params, problem.data.client(i)) for i in range(3)]
    np.testing.assert_allclose(uniform.history["loss"][-1], np.mean(each), rtol=1e-12)


def test_weighted_scaffold_reaches_the_weighted_optimum():
    A, b = random_quadratics(N=3, d=2)
    sizes = [1, 2, 5]
    rows = np.repeat(np.arange(3), sizes)
    problem = cv.quadratics(A, b)
    ragged = cv.Problem(problem.init, problem.loss, None, cv.FederatedData((A[rows], b[rows]), sizes))
    settings = {"clients_per_round": 2, "local_steps": 4}
    run = cv.simulate(cv.scaffold(0.05), ragged, 600, weights="examples", **settings)
    p = np.array(sizes) / 8
    np.testing.assert_allclose(run.x, -np.linalg.solve(np.tensordot(p, A, 1), p @ b), atol=1e-6)


@pytest.mark.parametrize("algorithm", [cv.sgd(0.01), cv.fedavg(0.01), cv.mime(0.01), cv.dane(0.01)], ids=str)
def test_weights_mean_the_same_objective_however_few_clients_are_sampled(algorithm):
    """f = 0.1 f_1 + 0.9 f_2 has its optimum at 9; an average that forgets the weights under sampling finds 5."""
    A, b = np.ones((10, 1, 1)), np.array([[0.0]] + [[-10.0]] * 9)
    quadratic = cv.quadratics(A, b)
    problem = cv.Problem(quadratic.init, quadratic.loss, None, cv.FederatedData((A, b), [1, 9]))
    run = cv.simulate(algorithm, problem, 8000, clients_per_round=1, local_steps=1, weights="examples", average=0.001)
    assert abs(run.average[0] - 9) < 0.5


@pytest.mark.parametrize("algorithm", [cv.fedavg(0.1), cv.mime(0.1), cv.dane(0.1)], ids=str)
def test_weights_of_few_clients_sum_to_one_where_they_follow_one_direction(algorithm):
    A, b = random_quadratics(N=3, d=2)
    sizes = np.array([1, 2, 5])
    rows, quadratic = np.repeat(np.arange(3), sizes), cv.quadratics(A, b)
    problem = cv.Problem(quadratic.init, quadratic.loss, None, cv.FederatedData((A[rows], b[rows]), sizes.tolist()))
    run = cv.simulate(algorithm, problem, 3, clients_per_round=2, local_steps=2, weights="examples")
    server, client = algorithm.init_server(np.zeros(2)), algorithm.init_client(np.zeros(2))
    for cohort in run.history["cohort"]:
        w = sizes[cohort] / 8 * 3 / 2  # N / |S| times p_i
        for number, exchange in enumerate(algorithm.exchanges):
            grads = [lambda y, i=i: A[i] @ y + b[i] for i in cohort]
            ups = [client_loop(exchange, exchange.broadcast(server), client, grad, [grad] * 2)[0] for grad in grads]
            v = w / w.sum() if number == 1 else w
            (field,) = zip(*ups, strict=True)
            server = exchange.aggregate(server, type(ups[0])(v @ np.array(field)), 2 / 3)
    np.testing.assert_allclose(run.x, server.x, rtol=1e-11)


def test_metrics_are_measured_on_the_test_set():
    x, y = np.eye(3), np.array([0, 1, 2])
    problem = cv.supervised(
        cv.models.logistic_regression(3, 3), cv.FederatedData((x, y), [3]), (x, np.array([1, 1, 2]))
    )
    run = cv.simulate(cv.sgd(1.0), problem, 5)
    assert run.history["accuracy"][-1] == pytest.approx(2 / 3)


def test_the_seed_decides_the_initial_model():
    data = cv.FederatedData((np.eye(3), np.array([0, 1, 2])), [3])
    problem = cv.supervised(cv.models.mlp(3, 4, 3), data)
    first, second = (cv.simulate(cv.sgd(1e-9), problem, 1, seed=s).params["w1"] for s in (0, 1))
    assert np.abs(first - second).max() > 0.1


def test_warm_start_visits_every_client_once_and_sets_its_control():
    N, S = 7, 3
    problem = small_logistic([4] * N)
    x0 = np.linspace(-1, 1, 12)
    run = cv.simulate(cv.scaffold(0.1), problem, rounds=4, clients_per_round=S, local_steps=2, x0=x0, warm_start=True)
    history = run.history
    assert history["cohort"][:3].tolist() == [[0, 1, 2], [3, 4, 5], [6, -1, -1]]
    assert history["round"].tolist() == [1, 2, 3, 4]
    assert len(set(history["loss"][:3])) == 1  # the model has not moved
    assert history["drift"][:3].tolist() == [0.0, 0.0, 0.0]  # nor any client's
    assert history["bytes_up"].tolist() == [3 * 96, 3 * 96, 96, 3 * 96]
    idle = np.setdiff1d(np.arange(N), history["cohort"][3])
    gradients = np.stack([g(x0) for g in client_gradients(problem)])
    np.testing.assert_allclose(run.clients.c_i[idle], gradients[idle], rtol=1e-12)


def test_warm_start_spares_scaffold_the_first_drift():
    problem = cv.lower_bound(G=100.0)
    cold, warm = (
        cv.simulate(cv.scaffold(0.1), problem, 6, local_steps=10, x0=1.0, warm_start=w).history["loss"]
        for w in (False, True)
    )
    assert warm[-1] < cold[-1] / 100


@pytest.mark.parametrize(("average", "q"), [("uniform", 0.0), (0.3, 0.3)])
def test_the_average_is_the_papers_weighted_output(average, q):
    def iterate(r):
        return cv.simulate(cv.scaffold(0.05), PROBLEM, r, clients_per_round=2, local_steps=3, x0=np.ones(4)).x

    run = cv.simulate(cv.scaffold(0.05), PROBLEM, 6, clients_per_round=2, local_steps=3, x0=np.ones(4), average=average)
    iterates = np.stack([np.ones(4), *(iterate(r) for r in range(1, 7))])  # x^0 .. x^R
    w = (1 - q) ** (1.0 - np.arange(1, 8))  # w_1 .. w_{R+1}
    np.testing.assert_allclose(run.average, w @ iterates / w.sum(), rtol=1e-12)
    np.testing.assert_array_equal(run.x, iterates[-1])
    expected = 0.5 * run.average @ A.mean(axis=0) @ run.average + b.mean(axis=0) @ run.average
    np.testing.assert_allclose(run.history["average_loss"][-1], expected, rtol=1e-12)


def test_averaging_tames_the_noise_of_sampling():
    star = -np.linalg.solve(A.mean(axis=0), b.mean(axis=0))
    run = cv.simulate(cv.fedavg(0.02), PROBLEM, 4000, clients_per_round=1, local_steps=1, x0=star, average="uniform")
    assert np.linalg.norm(run.average - star) < 0.5 * np.linalg.norm(run.x - star)


def test_drift_is_the_papers_E_r():
    run = cv.simulate(cv.fedavg(0.1), PROBLEM, 1, clients_per_round=2, local_steps=3, x0=np.ones(4))
    total = 0.0
    for i in run.history["cohort"][0]:
        y = np.ones(4)
        for _ in range(3):
            y = y - 0.1 * (A[i] @ y + b[i])
            total += np.sum((y - 1) ** 2)
    np.testing.assert_allclose(run.history["drift"], [total / (3 * 2)], rtol=1e-12)


def test_drift_of_clients_with_different_K():
    sizes = [2, 6]
    problem = cv.supervised(Coordinates(8), cv.FederatedData(np.eye(8), sizes))
    run = cv.simulate(cv.fedavg(1.0), problem, rounds=1, batch_size=2, local_epochs=1)
    one_step, three_steps = 2 * 0.25, (1 + 2 + 3) * 2 * 0.25 / 3
    np.testing.assert_allclose(run.history["drift"], [(one_step + three_steps) / 2], rtol=1e-12)


def test_bytes_on_the_wire():
    def bytes_of(algorithm, **kwargs):
        h = cv.simulate(algorithm, small_logistic([4, 6, 6]), 2, clients_per_round=2, **kwargs).history
        assert len(set(h["bytes_up"])) == len(set(h["bytes_down"])) == 1
        return h["bytes_up"][0] / (2 * 12 * 8), h["bytes_down"][0] / (2 * 12 * 8)  # vectors of 12 float64 per client

    assert bytes_of(cv.sgd(0.1)) == (1, 1)
    assert bytes_of(cv.fedavg(0.1), local_steps=2) == (1, 1)
    assert bytes_of(cv.scaffold(0.1), local_steps=2) == (1, 2)  # option II sends only dy
    assert bytes_of(cv.scaffold(0.1), local_epochs=1, batch_size=2) == (2, 2)  # K differs: dc too
    assert bytes_of(cv.scaffold(0.1, option="I"), local_steps=2) == (2, 2)
    assert bytes_of(cv.dane(0.1), local_steps=2) == (2, 3)
    assert bytes_of(cv.mime(0.1), local_steps=2) == (2, 3)


def test_a_target_ends_the_run_at_the_round_that_met_it():
    settings = {"local_steps": 5, "x0": 1.0}
    whole = cv.simulate(cv.scaffold(0.1), cv.lower_bound(1), 60, **settings)
    run = cv.simulate(cv.scaffold(0.1), cv.lower_bound(1), 60, target=("loss", 1e-6), **settings)
    assert run.reached == run.rounds == whole.rounds_to("loss", 1e-6)
    assert run.history["loss"][-1] <= 1e-6 < run.history["loss"][-2]
    np.testing.assert_array_equal(run.x, cv.simulate(cv.scaffold(0.1), cv.lower_bound(1), run.rounds, **settings).x)
    assert whole.reached is None


def test_metrics_rise_to_their_target():
    problem = small_logistic([20, 20, 20])
    whole = cv.simulate(cv.sgd(0.5), problem, 50).history["accuracy"]
    run = cv.simulate(cv.sgd(0.5), problem, 50, target=("accuracy", whole.max()))
    assert run.reached == whole.argmax() + 1
    assert run.history["accuracy"].tolist() == whole[: run.reached].tolist()
    seldom = cv.simulate(cv.sgd(0.5), problem, 50, target=("accuracy", whole[11]), eval_every=4)
    assert seldom.reached == 4 * (1 + np.flatnonzero(whole[3::4] >= whole[11])[0])


def test_a_run_does_not_depend_on_how_many_rounds_follow():
    long = cv.simulate(cv.scaffold(0.05), PROBLEM, 60, clients_per_round=2, local_steps=3)
    short = cv.simulate(cv.scaffold(0.05), PROBLEM, 40, clients_per_round=2, local_steps=3)
    for name, column in short.history.items():
        np.testing.assert_array_equal(column, long.history[name][:40])


def test_eval_every_leaves_the_rounds_between_unmeasured():
    often = cv.simulate(cv.scaffold(0.05), PROBLEM, 10, clients_per_round=2)
    seldom = cv.simulate(cv.scaffold(0.05), PROBLEM, 10, clients_per_round=2, eval_every=4)
    measured = np.isfinite(seldom.history["loss"])
    assert seldom.history["round"][measured].tolist() == [4, 8, 10]
    np.testing.assert_allclose(seldom.history["loss"][measured], often.history["loss"][measured], rtol=1e-12)
    np.testing.assert_allclose(seldom.x, often.x, rtol=1e-12)


def test_log_is_called_for_every_round_in_order():
    heard = []
    run = cv.simulate(cv.sgd(0.1), PROBLEM, 30, log=lambda number, values: heard.append((number, values["loss"])))
    assert heard == list(zip(range(1, 31), run.history["loss"].tolist(), strict=True))


def test_divergence_is_reported_and_nothing_returned_is_nan():
    with pytest.warns(cv.DivergenceWarning, match=r"diverged in round \d+.*eta_l=1000.*smaller") as told:
        run = cv.simulate(cv.scaffold(1000.0), PROBLEM, 400, local_steps=5)
    assert f"round {run.diverged}:" in str(told[0].message)
    assert run.rounds == run.diverged - 1
    for values in (run.x, run.server.c, run.clients.c_i, *run.history.values()):
        assert np.isfinite(values).all()
    with pytest.warns(cv.DivergenceWarning, match="is diverging"):
        again = cv.simulate(cv.scaffold(1000.0), PROBLEM, run.rounds, local_steps=5)
    np.testing.assert_array_equal(run.x, again.x)  # the last good state
    np.testing.assert_array_equal(run.clients.c_i, again.clients.c_i)


def test_divergence_in_the_first_round_leaves_an_empty_history():
    with pytest.warns(cv.DivergenceWarning, match="round 1:"):
        run = cv.simulate(cv.fedavg(1e300), PROBLEM, 10, local_steps=5)
    assert run.diverged == 1
    assert run.rounds == 0


def test_a_state_that_overflows_beside_a_finite_model_is_divergence_too():
    class Server(NamedTuple):
        x: Any
        m: Any

    def aggregate(server, mean, fraction):
        return Server(server.x + mean.dy, 1e200 * server.m)

    exchange = replace(cv.fedavg(0.1).exchanges[0], aggregate=aggregate)
    growing = replace(cv.fedavg(0.1), exchanges=(exchange,), init_server=lambda x: Server(x, 0 * x + 1), recipe=None)
    with pytest.warns(cv.DivergenceWarning, match="round 2:"):
        run = cv.simulate(growing, PROBLEM, 5, local_steps=1)
    assert np.isfinite(run.server.m).all()


def test_an_exploding_loss_is_reported_before_it_overflows():
    with pytest.warns(cv.DivergenceWarning, match=r"is diverging: its loss grew from .*eta_l=5.* smaller"):
        cv.simulate(cv.fedavg(5.0), PROBLEM, 8, local_steps=3)


def test_the_direction_of_a_metric():
    class Mean:
        def init(self, key):
            return jnp.zeros(1)

        def loss(self, params, batch):
            return jnp.mean((params - batch) ** 2)

        def metrics(self, params, batch):
            return {"rmse": jnp.sqrt(self.loss(params, batch)), "distance": jnp.abs(params[0] - 3)}

    problem = cv.supervised(Mean(), cv.FederatedData(np.full((4, 1), 3.0), [2, 2]))
    assert cv.simulate(cv.sgd(0.1), problem, 50, target=("rmse", 0.1)).reached == 16
    assert cv.simulate(cv.sgd(0.1), problem, 50, target=("distance", "<=", 0.1)).reached == 16
    tried = cv.sweep(cv.sgd, problem, {"eta_l": [0.1, 0.4]}, rounds=50, target=("distance", "<=", 0.1))
    assert tried.best() == 1


def test_a_model_object_that_holds_arrays():
    @dataclass
    class Holder:  # unhashable, as dataclasses are
        offset: np.ndarray

        def init(self, key):
            return jnp.zeros(2)

        def loss(self, params, batch):
            return jnp.mean((params - self.offset - batch) ** 2)

    problem = cv.supervised(Holder(np.ones(2)), cv.FederatedData(np.ones((4, 2)), [2, 2]))
    np.testing.assert_allclose(cv.simulate(cv.sgd(0.5), problem, 60).x, [2, 2], atol=1e-6)


def test_x0_as_params_as_a_vector_and_from_another_run():
    problem = small_logistic([5, 5])
    params = {"w": np.ones((3, 3)), "b": np.zeros(3)}
    by_params = cv.simulate(cv.sgd(0.1), problem, 2, x0=params)
    by_vector = cv.simulate(cv.sgd(0.1), problem, 2, x0=np.concatenate([np.zeros(3), np.ones(9)]))
    np.testing.assert_array_equal(by_params.x, by_vector.x)
    first = cv.simulate(cv.sgd(0.1), problem, 3)
    np.testing.assert_allclose(
        cv.simulate(cv.sgd(0.1), problem, 2, x0=first.params).x, cv.simulate(cv.sgd(0.1), problem, 5).x
    )


def test_everything_returned_is_numpy():
    run = cv.simulate(cv.scaffold(0.1), small_logistic([4, 4]), 2)
    for leaf in (run.x, run.params["w"], run.server.c, run.clients.c_i, *run.history.values()):
        assert type(leaf) is np.ndarray


def test_minibatch_noise_is_averaged_over_the_same_data_as_full_batches():
    """Unbiasedness: over many seeds one minibatch step is a full-batch step."""
    problem = small_logistic([7, 9, 8])
    mean = np.mean(
        [cv.simulate(cv.fedavg(0.1), problem, 1, local_steps=1, batch_size=2, seed=s).x for s in range(400)], axis=0
    )
    full = cv.simulate(cv.fedavg(0.1), problem, 1, local_steps=1).x
    assert np.abs(mean - full).max() < 0.01


def test_a_model_that_changes_between_problems_is_seen_as_it_is():
    class Network:
        width, start, target = 2, 1.0, 0.0

        def init(self, key):
            return jnp.full(self.width, self.start)

        def loss(self, w, batch):
            return jnp.mean((w.sum() - self.target) ** 2 + 0 * batch)

        def metrics(self, w, batch):
            return {"width": self.width + 0 * w.sum()}

    network, data = Network(), cv.FederatedData.from_clients([np.zeros(3), np.ones(3)])

    def run():
        return cv.simulate(cv.fedavg(0.1), cv.supervised(network, data), 1)

    first = run()
    network.width, network.target = 3, 5.0
    second = run()
    network.start = 2.0
    third = run()
    assert [result.x.size for result in (first, second, third)] == [2, 3, 3]
    assert [result.history["width"][0] for result in (first, second)] == [2, 3]
    np.testing.assert_allclose([first.x[0], second.x[0], third.x[0]], [1 - 0.4, 1 + 0.4, 2 - 0.2])
