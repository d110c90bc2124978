"""Frozen parameters are not in x, c and c_i, do not travel, do not change, and leave the others' gradients right."""

from types import SimpleNamespace

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import small_logistic

import covary as cv
from covary.errors import InvalidInput

SIZES = [12, 8, 9, 15, 7]


class Adapted:
    """A regression through a frozen matrix with a low-rank adapter beside it."""

    def init(self, key):
        return {
            "base": [jax.random.normal(key, (6, 4)), jnp.arange(4)],  # whole numbers may be frozen, too
            "adapter": {"a": 0.1 * jax.random.normal(key, (6, 1)), "b": jnp.zeros((1, 4))},
            "head": jnp.ones(4),
        }

    def output(self, params, x):
        w = params["base"][0] + params["adapter"]["a"] @ params["adapter"]["b"]
        return jnp.tanh(x @ w + params["base"][1]) @ params["head"]

    def loss(self, params, batch):
        return jnp.mean((self.output(params, batch[0]) - batch[1]) ** 2)

    def metrics(self, params, batch):
        return {"error": jnp.mean(jnp.abs(self.output(params, batch[0]) - batch[1]))}


def problem(trainable, model=None, stream=None):
    rng = np.random.default_rng(0)
    clients = [(rng.normal(i, 1, (n, 6)), rng.normal(i, 1, n)) for i, n in enumerate(SIZES)]
    data = cv.FederatedData.from_clients(clients)
    if stream is not None:
        cv.FederatedData.write(stream, clients)
        data = cv.FederatedData.open(stream, stream=True)
    return cv.supervised(model or Adapted(), data, trainable=trainable)


def adapter(path):
    return path.startswith("adapter/")


class Alone:
    """The same model with the adapter as all its parameters: what freezing must equal."""

    def __init__(self):
        self.params = problem(adapter).complete(problem(adapter).init(jax.random.key(0)))

    def init(self, key):
        own = Adapted().init(key)["adapter"]
        return {"adapter/a": own["a"], "adapter/b": own["b"]}

    def loss(self, own, batch):
        params = {**self.params, "adapter": {"a": own["adapter/a"], "b": own["adapter/b"]}}
        return Adapted().loss(params, batch)


@pytest.mark.parametrize("algorithm", [cv.scaffold(0.01), cv.scaffold(0.01, option="I"), cv.mime(0.01)], ids=str)
def test_training_a_part_is_training_a_model_of_that_part(algorithm, tmp_path):
    settings = {"rounds": 4, "clients_per_round": 2, "local_steps": 3, "batch_size": 4, "seed": 3}
    alone = cv.simulate(algorithm, problem(None, Alone()), **settings)
    modes = ({}, {"debug": True}, {"microbatch": 2}, {"store": "host"}, {"devices": 1, "width": 1})
    for mode in modes:
        run = cv.simulate(algorithm, problem(adapter), **settings, **mode)
        np.testing.assert_allclose(run.x, alone.x, rtol=1e-10, atol=1e-13, err_msg=str(mode))
        np.testing.assert_allclose(run.history["loss"], alone.history["loss"], rtol=1e-10)
    start = problem(adapter).complete(problem(adapter).init(jax.random.key(3)))
    for name in ("base", "head"):
        np.testing.assert_array_equal(jax.tree.leaves(run.params[name])[0], jax.tree.leaves(start[name])[0])
    assert run.params["base"][1].dtype.kind == "i"
    np.testing.assert_array_equal(run.params["adapter"]["b"].ravel(), run.x[-4:])


def test_an_adapter_costs_what_the_adapter_costs():
    run = cv.simulate(cv.scaffold(0.01), problem(adapter), 2, local_steps=2)
    size = 6 + 4
    assert run.x.size == run.server.c.size == size
    assert run.clients.c_i.shape == (5, size)
    assert run.history["bytes_up"][0] == 5 * size * run.x.itemsize
    assert run.history["bytes_down"][0] == 2 * 5 * size * run.x.itemsize


def test_booleans_nested_like_the_params_select_too():
    masks = [
        {"base": False, "adapter": {"a": True, "b": True}, "head": False},
        {"base": [False, False], "adapter": True, "head": np.bool_(False)},
    ]
    runs = [cv.simulate(cv.scaffold(0.01), problem(mask), 2, local_steps=2).x for mask in (adapter, *masks)]
    np.testing.assert_array_equal(runs[1], runs[0])
    np.testing.assert_array_equal(runs[2], runs[0])


def test_two_problems_with_different_frozen_values_do_not_share_them():
    def loss(params, batch):
        return Adapted().loss(params, batch)

    def model(head):
        def init(key):
            return {**Adapted().init(key), "head": jnp.full(4, head)}

        return SimpleNamespace(init=init, loss=loss)

    losses = [cv.simulate(cv.scaffold(0.01), problem(adapter, model(head)), 1).history["loss"][0] for head in (1.0, 2)]
    assert abs(losses[0] - losses[1]) > 1e-3


def test_sweeps_checkpoints_streams_and_the_diagnosis_know_frozen_parameters(tmp_path):
    settings = {"rounds": 4, "clients_per_round": 2, "local_steps": 2, "batch_size": 4}
    run = cv.simulate(cv.scaffold(0.01), problem(adapter), **settings)
    swept = cv.sweep(cv.scaffold, problem(adapter), {"eta_l": [0.01, 0.02]}, seeds=[0], measure_loss=True, **settings)
    np.testing.assert_allclose(swept.curves["loss"][0, 0], run.history["loss"], rtol=1e-10)

    class Other(Adapted):
        def init(self, key):
            return {**super().init(key), "head": 2 * jnp.ones(4)}

    kept = {**settings, "checkpoint": tmp_path / "run"}
    np.testing.assert_array_equal(cv.simulate(cv.scaffold(0.01), problem(adapter), **kept).x, run.x)
    np.testing.assert_array_equal(cv.simulate(cv.scaffold(0.01), problem(adapter), **kept).x, run.x)
    with pytest.raises(ValueError, match="frozen was"):
        cv.simulate(cv.scaffold(0.01), problem(adapter, Other()), **kept)

    streamed = cv.simulate(cv.scaffold(0.01), problem(adapter, stream=tmp_path / "data"), **settings)
    np.testing.assert_allclose(streamed.x, run.x, rtol=1e-10, atol=1e-13)
    np.testing.assert_allclose(streamed.history["loss"], run.history["loss"], rtol=1e-10)
    gradients = [float(cv.theory.gradient_dissimilarity(p).G) for p in (problem(adapter), problem(None, Alone()))]
    assert gradients[0] == pytest.approx(gradients[1], rel=1e-10)


def test_a_start_has_the_frozen_values():
    frozen = problem(adapter)
    run = cv.simulate(cv.scaffold(0.01), frozen, 2, local_steps=2)
    again = cv.simulate(cv.scaffold(0.01), frozen, 1, local_steps=2, x0=run.params)
    flat = cv.simulate(cv.scaffold(0.01), frozen, 1, local_steps=2, x0=run.x)
    np.testing.assert_array_equal(again.x, flat.x)
    with pytest.raises(InvalidInput, match=r"x0\['head'\] must be the model's own"):
        cv.simulate(cv.scaffold(0.01), frozen, 1, x0={**run.params, "head": np.zeros(4)})


@pytest.mark.parametrize(
    ("trainable", "says"),
    [
        (lambda path: False, r"true for at least one parameter; got none selected. Paths: 'adapter/a', 'adapter/b'"),
        (lambda path: None, "returns a bool.*got None for 'adapter/a'"),
        ({"base": True}, "bools nested like the params"),
        ({"base": True, "adapter": 0, "head": True}, "bools nested like the params; got 0 for 'adapter/a'"),
        (lambda path: path.startswith("base"), r"params\['base/1'\] must be real numbers"),
    ],
)
def test_what_selects_nothing_or_nonsense_is_rejected(trainable, says):
    with pytest.raises(InvalidInput, match=says):
        problem(trainable)


def test_all_trainable_is_the_model_itself():
    run = cv.simulate(cv.scaffold(0.1), small_logistic(SIZES), 2)
    model = cv.models.logistic_regression(3, 3)
    data = small_logistic(SIZES).data
    split = cv.simulate(cv.scaffold(0.1), cv.supervised(model, data, trainable=lambda path: True), 2)
    np.testing.assert_array_equal(split.x, run.x)
    assert split.params.keys() == run.params.keys()


def test_an_equinox_mask_selects_though_it_can_be_called():
    network = eqx.nn.MLP(2, "scalar", 3, 1, key=jax.random.key(0))

    class Model:
        static = eqx.partition(network, eqx.is_inexact_array)[1]

        def init(self, key):
            return eqx.filter(network, eqx.is_inexact_array)

        def loss(self, params, batch):
            return jnp.mean((jax.vmap(eqx.combine(params, self.static))(batch[0]) - batch[1]) ** 2)

    mask = eqx.tree_at(lambda net: net.layers[0].weight, jax.tree.map(lambda _: False, network), True)
    data = cv.FederatedData.from_clients([(np.ones((4, 2)), np.ones(4))])
    run = cv.simulate(cv.fedavg(0.1), cv.supervised(Model(), data, trainable=mask), 1)
    assert run.x.shape == (6,)


def test_paths_that_collide_are_rejected():
    class Colliding:
        def init(self, key):
            return {"a": {"b": jnp.zeros(3)}, "a/b": jnp.ones(3)}

        def loss(self, params, batch):
            return jnp.mean(params["a"]["b"] * params["a/b"]) + 0 * batch.mean()

    data = cv.FederatedData.from_clients([np.ones(3)])
    with pytest.raises(InvalidInput, match="'a/b' twice"):
        cv.supervised(Colliding(), data, trainable=lambda path: True)


def test_random_keys_among_the_params_are_rejected():
    class Keyed(Adapted):
        def init(self, key):
            return {**super().init(key), "rng": key}

    with pytest.raises(InvalidInput, match=r"params\['rng'\] must be an array of numbers; got dtype key"):
        problem(adapter, Keyed())


def test_a_frozen_number_may_be_a_python_scalar():
    class Scaled(Adapted):
        def init(self, key):
            return {**super().init(key), "scale": 2.0}

    run = cv.simulate(cv.fedavg(0.01), problem(adapter, Scaled()), 1)
    assert run.params["scale"] == 2.0
