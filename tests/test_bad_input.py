"""A wrong value raises an error with the parameter, what is allowed, what it got, and the fix."""

import jax.numpy as jnp
import numpy as np
import pytest
from helpers import small_logistic

import covary as cv

X, Y = np.ones((6, 3)), np.array([0, 1, 2, 0, 1, 2])


@pytest.mark.parametrize(
    "factory", [cv.sgd, cv.fedavg, cv.fedprox, cv.scaffold, cv.dane, cv.vrl_sgd, cv.feddyn, cv.mime]
)
@pytest.mark.parametrize("eta_l", [0, -0.1, float("nan"), float("inf"), "0.1", None, True, [0.1, 0.2]], ids=repr)
def test_step_sizes(factory, eta_l):
    with pytest.raises(cv.CovaryError, match="eta_l must be"):
        factory(eta_l=eta_l)


@pytest.mark.parametrize(
    ("build", "says"),
    [
        (lambda: cv.fedavg(0.1, eta_g=0), "eta_g must be a number above 0; got 0"),
        (lambda: cv.fedprox(0.1, mu=-1), "mu must be a number of 0 or more; got -1"),
        (lambda: cv.feddyn(0.1, alpha=0), "alpha must be a number above 0"),
        (lambda: cv.scaffold(0.1, option="III"), 'option must be "I" or "II"; got \'III\''),
        (lambda: cv.scaffold(0.1, option=2), "option must be"),
        (lambda: cv.lower_bound(G=-1), "G must be"),
        (lambda: cv.lower_bound(G=1, mu=0), "mu must be"),
    ],
)
def test_hyper_parameters(build, says):
    with pytest.raises(cv.CovaryError, match=says):
        build()


def test_local_optimisers_are_rejected_with_the_reason():
    class Adam:
        def update(self, grads, state):
            return grads, state

    for optimiser in (Adam(), lambda step: 0.1 / (1 + step)):
        with pytest.raises(cv.CovaryError, match=r"no local optimisers and no schedules.*\(x - y\)/\(K eta_l\)"):
            cv.scaffold(eta_l=optimiser)


@pytest.mark.parametrize(
    ("kwargs", "says"),
    [
        ({"rounds": 0}, "rounds must be a whole number of at least 1; got 0"),
        ({"rounds": 2.5}, "rounds must be"),
        ({"clients_per_round": 4}, "clients_per_round must be between 1 and 3; got 4"),
        ({"clients_per_round": 0}, "clients_per_round must be a number of clients of at least 1"),
        ({"clients_per_round": 1.5}, "clients_per_round must be"),
        ({"clients_per_round": -0.2}, "clients_per_round must be"),
        ({"clients_per_round": True}, "clients_per_round must be"),
        ({"local_steps": 0}, "local_steps must be"),
        ({"local_epochs": 0}, "local_epochs must be"),
        ({"local_epochs": 1.5}, "local_epochs must be"),
        ({"local_steps": 2, "local_epochs": 2}, "local_steps=2 and local_epochs=2 exclude each other"),
        ({"batch_size": 5}, "batch_size=5 is larger than the data of client 0, which has 4 examples. Use at most 4"),
        ({"batch_size": 0}, "batch_size must be"),
        ({"batch_size": -1}, "batch_size must be"),
        ({"batch_size": 1.5}, "batch_size must be"),
        ({"batch_size": 0.1}, "batch_size=0.1 cuts each client's data into 10 batches, but client 0 has only 4"),
        ({"weights": "size"}, 'weights must be "uniform" or "examples"; got \'size\''),
        ({"seed": -1}, "seed must be"),
        ({"seed": 2**32}, "seed must be at most"),
        ({"rounds": 10**12}, "rounds must be at most"),
        ({"warm_start": "yes"}, "warm_start must be True or False"),
        ({"log": 3}, "log must be a function"),
        ({"eval_every": 0}, "eval_every must be"),
        ({"target": ("f1", 0.5)}, "target must be .* loss, accuracy; got"),
        ({"target": 0.5}, "target must be"),
        ({"target": ("accuracy", float("nan"))}, "target must be"),
        ({"target": ("accuracy", "high")}, "target must be"),
        ({"target": ("accuracy", "<", 0.5)}, "target must be"),
        ({"target": (np.ones(2), 0.5)}, "target must be"),
        ({"weights": np.ones(3) / 3}, "weights must be"),
        ({"average": np.ones(3)}, "average must be"),
        ({"x0": np.zeros((3, 4))}, "x0 must be"),
        ({"x0": np.zeros(12, complex)}, "x0 must be"),
        ({"average": "geometric"}, "average must be"),
        ({"average": 1.0}, "average must be"),
        ({"x0": np.zeros(5)}, "x0 must be the model's params or a vector of 12 numbers; got shape \\(5,\\)"),
        ({"x0": np.full(12, np.nan)}, "x0 must be finite"),
        ({"x0": "zero"}, "x0 must be"),
        ({"x0": {"w": np.zeros((3, 3))}}, "x0 must be"),
        ({"warm_start": True, "rounds": 1}, "rounds=1 leaves no round to train in"),
    ],
    ids=lambda value: repr(value)[:60],
)
def test_simulate(kwargs, says, compilations):
    problem = small_logistic([4, 6, 7])
    problem.start(None, 0)  # the initial parameters, which are computed, not trained
    compilations.clear()
    with pytest.raises(cv.CovaryError, match=says):
        cv.simulate(cv.scaffold(0.1), problem, **{"rounds": 3, **kwargs})
    assert compilations == []


def test_arguments_in_the_wrong_place():
    problem = small_logistic([4, 4])
    with pytest.raises(cv.CovaryError, match="algorithm must be an Algorithm; got function"):
        cv.simulate(cv.scaffold, problem, 3)
    with pytest.raises(cv.CovaryError, match="problem must be a Problem; got FederatedData"):
        cv.simulate(cv.scaffold(0.1), problem.data, 3)


def test_algorithms_reject_what_they_do_not_support():
    problem = small_logistic([4, 8, 6])
    with pytest.raises(cv.CovaryError, match=r"vrl_sgd needs every client in every round.*got 2 of 3 clients"):
        cv.simulate(cv.vrl_sgd(0.1), problem, 3, clients_per_round=2)
    with pytest.raises(cv.CovaryError, match=r"vrl_sgd needs.*from 2 to 4 steps"):
        cv.simulate(cv.vrl_sgd(0.1), problem, 3, batch_size=2, local_epochs=1)
    with pytest.raises(cv.CovaryError, match=r"warm_start=True needs control variates.*fedavg has none"):
        cv.simulate(cv.fedavg(0.1), problem, 3, warm_start=True)


@pytest.mark.parametrize(
    ("build", "says"),
    [
        (lambda: cv.FederatedData((X, Y), [3, 0, 3]), "Client 1 has no examples"),
        (lambda: cv.FederatedData((X, Y), [3, 2]), "sizes must be numbers with the sum 6, .*; got 5"),
        (lambda: cv.FederatedData((X, Y[:4]), [3, 3]), "examples must be arrays of equal length"),
        (lambda: cv.FederatedData((X, Y), [2.5, 3.5]), "sizes must be"),
        (lambda: cv.FederatedData((), []), "examples must be"),
        (lambda: cv.FederatedData.from_clients([]), "clients must be"),
        (lambda: cv.FederatedData((np.array(["a", "b"]),), [1, 1]), r"examples\[0\] must be numbers"),
        (lambda: cv.FederatedData((X, Y), [3, 3]).client(2), "i must be between 0 and 1; got 2"),
        (lambda: cv.partition.by_similarity(X, Y, 7, 0.0), "n_clients must be between 1 and the 6 examples; got 7"),
        (lambda: cv.partition.by_similarity(X, Y, 2, 10), "similarity must be between 0 and 1; got 10"),
        (lambda: cv.partition.by_similarity(X, Y, 2, -0.1), "similarity must be"),
        (lambda: cv.partition.iid(X, np.eye(6), 2), "y must be one label per row"),
        (lambda: cv.partition.dirichlet(X, np.full(6, np.nan), 2, 1.0), "y must be one label per row, without NaN"),
        (lambda: cv.partition.dirichlet(X, Y, 2, 1e9), "alpha must be at most 1e6"),
        (lambda: cv.partition.dirichlet(X, Y, 2, -1), "alpha must be"),
        (lambda: cv.partition.iid(X, Y, 2, seed=-1), "seed must be"),
        (lambda: cv.partition.iid(X, Y, 2, seed=None), "seed must be"),
        (lambda: cv.partition.by_group(X, Y, [1, None, 2, 3, 4, 5]), "groups must be values that can be sorted"),
        (lambda: cv.partition.by_group(X, Y, [1, 2]), "groups must be one value for each of the 6 examples"),
        (lambda: cv.partition.by_similarity(X, Y[:3], 2, 0.1), "x and y must be of equal length; got shapes"),
        (lambda: cv.quadratics(np.ones((2, 3)), np.ones((2, 3))), "A must be of shape"),
        (lambda: cv.quadratics(np.ones((2, 3, 3)), np.ones((3, 3))), "b must be of shape"),
        (lambda: cv.quadratics([[[1.0, 2.0], [0.0, 1.0]]], [[0.0, 0.0]]), r"A must be symmetric.*an asymmetric A\[0\]"),
        (lambda: cv.quadratics([[[np.nan]]], [[0.0]]), "A and b must be finite"),
        (lambda: cv.quadratics("A", "b"), "A and b must be arrays of numbers"),
        (lambda: cv.models.logistic_regression(3, 1), "n_classes must be"),
        (lambda: cv.models.mlp(3, 0, 2), "hidden must be"),
    ],
)
def test_data_and_models(build, says):
    with pytest.raises(cv.CovaryError, match=says):
        build()


def test_nan_in_the_data_is_found_and_named():
    x = X.copy()
    x[4, 1] = np.nan
    with pytest.raises(
        cv.CovaryError, match=r"examples\[0\] has NaN or infinity, first in row 4 \(example 1 of client 1\)"
    ):
        cv.FederatedData((x, Y), [3, 3])


class Model:
    def __init__(self, loss=None, metrics=None, init=None):
        self.init = init or (lambda key: jnp.zeros(3))
        self.loss = loss or (lambda params, batch: jnp.mean(batch[0] @ params))
        if metrics:
            self.metrics = metrics


@pytest.mark.parametrize(
    ("build", "says"),
    [
        (
            lambda d: cv.supervised(Model(lambda p, b: b[0] @ p), d),
            r"loss\(params, batch\) must be one real number; got shape \(2,\)",
        ),
        (lambda d: cv.supervised(Model(lambda p, b: (1.0, 2.0)), d), r"loss\(params, batch\) must be"),
        (
            lambda d: cv.supervised(Model(lambda p, b: jnp.sum(b[1])), d),
            "must be one real number; got shape .* dtype int",
        ),
        (lambda d: cv.supervised(Model(metrics=lambda p, b: 1.0), d), "metrics.* must be a dict of single numbers"),
        (lambda d: cv.supervised(Model(metrics=lambda p, b: {"loss": jnp.sum(p)}), d), "metrics must be named"),
        (
            lambda d: cv.supervised(Model(init=lambda key: jnp.zeros(3, int)), d),
            "params must be real numbers; got dtype int",
        ),
        (lambda d: cv.supervised(Model(init=lambda key: {}), d), r"init\(key\) must be a tree with at least one array"),
        (lambda d: cv.supervised(object(), d), "model must be an object with a method init"),
        (lambda d: cv.supervised(Model(), (X, Y)), "data must be a FederatedData; got tuple"),
        (
            lambda d: cv.supervised(cv.models.logistic_regression(3, 2), d),
            "y must be labels from 0 to 1; got 2 in row 2",
        ),
        (lambda d: cv.supervised(cv.models.logistic_regression(4, 3), d), "x must be examples with 4 features; got 3"),
        (lambda d: cv.supervised(cv.models.logistic_regression(3, 3), d, test=(X, Y + 1)), "y must be labels"),
        (lambda d: cv.supervised(cv.models.logistic_regression(3, 3), d, test=X), "test must be a batch nested like"),
        (lambda d: cv.supervised(Model(), d, test=(X[:, :2], Y)), r"test must be numbers of shape \(rows, 3\)"),
        (lambda d: cv.supervised(Model(), d, test=5), "test must be a batch nested like"),
        (lambda d: cv.supervised(Model(metrics=lambda p, b: {3: jnp.sum(p)}), d), "must be a dict of single numbers"),
        (lambda d: cv.supervised(cv.models.logistic_regression(3, 3), d, test=(X * np.nan, Y)), "has NaN"),
    ],
)
def test_supervised(build, says):
    with pytest.raises(cv.CovaryError, match=says):
        build(cv.FederatedData((X, Y), [3, 3]))


def test_an_error_inside_the_users_loss_is_passed_on_with_how_it_was_called():
    with pytest.raises(TypeError) as error:
        cv.supervised(Model(lambda p, b: jnp.mean(b[0] @ jnp.zeros(7))), cv.FederatedData((X, Y), [3, 3]))
    assert error.value.__notes__[-1] == (
        f"covary called the model's loss with params {jnp.zeros(3).dtype} (3,), "
        f"batch[0] {jnp.ones(3).dtype} (2, 3), batch[1] {jnp.asarray(Y).dtype} (2,)"
    )


def test_the_note_on_a_failing_model_names_at_most_five_arrays():
    def init(key):
        return {f"w{layer}": jnp.zeros((7, 7)) for layer in range(100)}

    with pytest.raises(TypeError) as error:
        cv.supervised(Model(lambda p, b: b[0] @ p["w0"], init=init), cv.FederatedData((X, Y), [3, 3]))
    note = error.value.__notes__[-1]
    assert note.endswith("and 97 more arrays")
    assert len(note) < 300


def test_a_loss_that_is_not_a_mean_is_rejected():
    def total(params, batch):
        return jnp.sum((batch[0] @ params - batch[1]) ** 2)

    def tiny_total(params, batch):
        return 1e-7 * total(params, batch)

    def coupled(params, batch):  # a mean, but of examples that depend on the batch, as with BatchNorm
        x = batch[0] - batch[0].mean(axis=0) + jnp.arange(3.0)
        return jnp.mean((x @ params - batch[1]) ** 2)

    for loss in (total, tiny_total):
        for sizes in ([3, 3], [2, 4]):
            problem = cv.supervised(Model(loss), cv.FederatedData((X, Y), sizes))
            with pytest.raises(cv.CovaryError, match="must be the mean over the batch, but repeating the same"):
                cv.simulate(cv.fedavg(0.01), problem, 2)
    x = np.random.default_rng(0).normal(size=(6, 3))
    cv.simulate(cv.fedavg(0.01), cv.supervised(Model(coupled), cv.FederatedData((x, Y), [3, 3])), 2)
    with pytest.raises(cv.CovaryError, match="must be the mean of its examples' own losses here"):
        cv.simulate(cv.fedavg(0.01), cv.supervised(Model(coupled), cv.FederatedData((x, Y), [2, 4])), 2)


def test_values_that_the_number_type_cannot_hold():
    single = Model(init=lambda key: jnp.zeros(3, jnp.float32))
    problem = cv.supervised(single, cv.FederatedData((X, Y), [3, 3]))
    for eta_l in (1e-46, 1e39):
        with pytest.raises(cv.CovaryError, match="eta_l must be a number that float32 can hold"):
            cv.simulate(cv.scaffold(eta_l), problem, 2)
    broken = Model(init=lambda key: jnp.full(3, jnp.nan))
    with pytest.raises(cv.CovaryError, match=r"init\(key\) must be finite"):
        cv.simulate(cv.sgd(0.1), cv.supervised(broken, cv.FederatedData((X, Y), [3, 3])), 2)
    wild = Model(loss=lambda params, batch: jnp.mean(batch[0] @ params) / 0.0)
    with pytest.raises(cv.CovaryError, match="at the starting point"):
        cv.simulate(cv.sgd(0.1), cv.supervised(wild, cv.FederatedData((X, Y), [3, 3])), 2)


@pytest.mark.parametrize(
    ("clients", "says"),
    [
        (
            [(np.zeros((2, 1)), np.zeros(3)), (np.ones((3, 1)), np.ones(2))],
            r"clients\[0\] must be arrays of equal length",
        ),
        (
            [(np.zeros((2, 1)), np.zeros(2)), (np.zeros((2, 4)), np.zeros(2))],
            r"clients\[1\] must be of shape \(rows, 1\)",
        ),
        ([(np.zeros((2, 1)), np.zeros(2)), {"x": np.zeros(2)}], r"clients\[1\] must be nested like clients\[0\]"),
        ([(1, 2)], r"clients\[0\] must be arrays of equal length"),
        ([()], r"clients\[0\] must be nested like"),
        (iter([]), "clients must be a list"),
    ],
    ids=["lengths", "features", "forms", "scalars", "nothing", "iterator"],
)
def test_from_clients_mixes_nothing_up(clients, says):
    with pytest.raises(cv.CovaryError, match=says):
        cv.FederatedData.from_clients(clients)


def test_what_is_rejected_is_a_value_error(tmp_path):
    problem = small_logistic([3, 4])
    cv.simulate(cv.sgd(0.1), problem, 1, checkpoint=tmp_path / "run")
    with pytest.raises(ValueError, match=r"seed was 0 and is 1.*the covary that wrote them"):
        cv.simulate(cv.sgd(0.1), problem, 1, seed=1, checkpoint=tmp_path / "run")
    with pytest.raises(ValueError, match="checkpoint must be a path; got ''"):
        cv.simulate(cv.sgd(0.1), problem, 1, checkpoint="")
    with pytest.raises(ValueError, match="scaffold, uncalled"):
        cv.sweep(cv.scaffold(0.1), problem, {"eta_l": [0.1]}, rounds=1)
    with pytest.raises(ValueError, match="got an empty list"):
        cv.FederatedData.from_clients([])


def test_metrics_that_are_no_numbers_are_listed_briefly():
    class Many:
        def init(self, key):
            return jnp.zeros(3)

        def loss(self, w, batch):
            return jnp.mean(w * batch[0])

        def metrics(self, w, batch):
            return {f"m{i}": w for i in range(40)}

    with pytest.raises(cv.CovaryError, match=r"m0'\] float\d\d \(3,\).* and 35 more arrays") as error:
        cv.supervised(Many(), cv.FederatedData.from_clients([(X, Y)]))
    assert len(str(error.value)) < 400
