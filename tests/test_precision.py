"""precision="bfloat16": what is rounded, what is not, and what is rejected.

It is offered on accelerators only. Here a CPU computes it, with the same roundings and no gain.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import covary as cv
from covary.errors import DivergenceWarning, InvalidInput

LOW = {"precision": "bfloat16"}


@pytest.fixture(autouse=True)
def on_any_device(monkeypatch):
    monkeypatch.setattr("covary._engine.prepare._supported", lambda precision: precision)


class Network:
    """A small network in float32, on real features and whole labels."""

    def init(self, key):
        w, v = (
            jax.random.normal(k, shape, jnp.float32)
            for k, shape in zip(jax.random.split(key), [(5, 8), (8, 3)], strict=True)
        )
        return {"w": w, "v": v}

    def scores(self, params, x):
        return jnp.tanh(x @ params["w"]) @ params["v"]

    def loss(self, params, batch):
        scores = self.scores(params, batch[0]).astype(jnp.float32)
        return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(scores), batch[1][:, None], axis=1))


def problem(model=None, sizes=(12, 12, 12), **more):
    rng = np.random.default_rng(0)
    clients = [(rng.normal(size=(n, 5)).astype(np.float32), rng.integers(0, 3, n)) for n in sizes]
    return cv.supervised(model or Network(), cv.FederatedData.from_clients(clients), **more)


def rounded(tree):
    return jax.tree.map(lambda a: a.astype(jnp.bfloat16) if a.dtype.kind == "f" else a, tree)


def test_local_steps_see_rounded_params_and_examples_and_evaluation_does_not():
    seen = []

    class Looking(Network):
        def loss(self, params, batch):
            seen.append((params["w"].dtype.name, batch[0].dtype.name, batch[1].dtype.kind))
            return super().loss(params, batch)

    run = cv.simulate(cv.fedavg(0.1), problem(Looking()), 1, local_steps=2, **LOW)
    assert set(seen) == {("bfloat16", "bfloat16", "i"), ("float32", "float32", "i")}
    exact = cv.simulate(cv.fedavg(0.1), problem(), 1, local_steps=2)
    assert 1e-6 < np.abs(run.x - exact.x).max() < 1e-2 * np.abs(exact.x).max()


def test_states_and_evaluation_are_not_rounded():
    run = cv.simulate(cv.scaffold(0.1), problem(), 5, clients_per_round=2, local_steps=3, batch_size=4, **LOW)
    assert {run.x.dtype, run.server.c.dtype, run.clients.c_i.dtype} == {np.dtype(np.float32)}
    assert run.history["control_error"].max() < 1e-6
    (x, y), params = problem().data.examples, jax.tree.map(jnp.asarray, run.params)
    np.testing.assert_allclose(run.history["loss"][-1], Network().loss(params, (x, y)), rtol=1e-6)


def test_it_reaches_the_optimum_up_to_its_own_rounding():
    exact, low = (cv.simulate(cv.scaffold(0.3), problem(), 60, local_steps=5, **how) for how in ({}, LOW))
    assert low.history["loss"][-1] == pytest.approx(exact.history["loss"][-1], rel=0.05)


def test_a_loss_that_takes_the_precision_rounds_itself():
    seen = []

    class Own(Network):
        def loss(self, params, batch, *, precision):
            seen.append((precision, params["w"].dtype.name, batch[0].dtype.name))
            return super().loss(rounded(params) if precision else params, batch)

    cv.simulate(cv.scaffold(0.1), problem(Own()), 2, **LOW)
    assert {(precision, w, x) for precision, w, x in seen} == {
        ("bfloat16", "float32", "float32"),
        (None, "float32", "float32"),
    }
    seen.clear()
    cv.simulate(cv.scaffold(0.1), problem(Own()), 2)
    assert {precision for precision, *_ in seen} == {None}


def test_buffers_keys_and_frozen_parameters_are_not_rounded():
    class Everything(Network):
        def init_buffers(self, key):
            return {"mean": jnp.full(5, 1.001, jnp.float32)}

        def loss(self, params, batch, *, buffers, key):
            assert buffers["mean"].dtype == jnp.float32
            assert key is None or jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
            return super().loss(params, batch), {"mean": buffers["mean"]}

    model = Everything()
    of = problem(model, trainable=lambda path: path == "v")
    run = cv.simulate(cv.scaffold(0.1), of, 3, local_steps=2, **LOW)
    np.testing.assert_array_equal(run.buffers["mean"], np.full(5, 1.001, np.float32))
    np.testing.assert_array_equal(run.params["w"], of.frozen["w"])
    assert run.x.size == 24


def test_a_sweep_has_it_too():
    settings = {"rounds": 3, "local_steps": 2, "batch_size": 4, "seeds": [0], "measure_loss": True}
    low, exact = (cv.sweep(cv.fedavg, problem(), {"eta_l": [0.3]}, **settings, **how) for how in (LOW, {}))
    assert low.curves["loss"][0, 0, -1] == pytest.approx(exact.curves["loss"][0, 0, -1], rel=0.02)
    assert low.curves["loss"][0, 0, -1] != exact.curves["loss"][0, 0, -1]


class NearlyOne(Network):
    """A logarithm of a small difference, which is zero in bfloat16."""

    def loss(self, params, batch):
        one = params["w"][0, 0] * 0 + 1 + 1e-3
        return super().loss(params, batch) + jnp.log(one.astype(params["w"].dtype) - 1)


def test_a_loss_that_needs_more_digits_is_rejected():
    with pytest.raises(InvalidInput, match=r"is -inf near the starting point with precision='bfloat16', and -[0-9.]+"):
        cv.simulate(cv.fedavg(0.1), problem(NearlyOne()), 1, **LOW)
    assert np.isfinite(cv.simulate(cv.fedavg(0.1), problem(NearlyOne()), 1).history["loss"][-1])


def test_a_loss_for_one_type_only_gets_a_hint():
    class Fixed(Network):
        def scores(self, params, x):
            start = jnp.zeros((len(x), 8), jnp.float32)
            h, _ = jax.lax.scan(lambda h, _: (jnp.tanh(x @ params["w"]), None), start, None, length=2)
            return h @ params["v"]

    with pytest.raises(TypeError, match="carry") as error:
        cv.simulate(cv.fedavg(0.1), problem(Fixed()), 1, **LOW)
    assert "takes `precision` as a keyword argument" in " ".join(error.value.__notes__)


def test_divergence_names_the_precision():
    with pytest.warns(DivergenceWarning, match="without precision='bfloat16'"):
        cv.simulate(cv.fedavg(1e38), problem(), 5, local_steps=5, **LOW)
