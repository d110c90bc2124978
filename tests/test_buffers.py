"""A model's buffers: changed by local steps, averaged over the cohort, read by the metrics, never corrected."""

from dataclasses import replace
from types import SimpleNamespace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import covary as cv
from covary._engine import memory
from covary._engine.local import key_of_step
from covary.draws import order_of_epoch
from covary.errors import InvalidInput

N, n = 5, 12


class Network:
    """A layer with BatchNorm and dropout."""

    def init(self, key):
        return {"w": 0.3 * jax.random.normal(key, (3, 4)), "v": jnp.ones(4)}

    def init_buffers(self, key):
        return {"mean": jnp.zeros(4), "var": jnp.ones(4)}

    def loss(self, params, batch, *, key, buffers):
        x, y = batch
        h = x @ params["w"]
        mean, var = h.mean(axis=0), h.var(axis=0)
        h = jnp.tanh((h - mean) / jnp.sqrt(var + 1e-5))
        if key is not None:
            h = jnp.where(jax.random.bernoulli(key, 0.8, h.shape), h / 0.8, 0)
        new = {"mean": 0.9 * buffers["mean"] + 0.1 * mean, "var": 0.9 * buffers["var"] + 0.1 * var}
        return jnp.mean((h @ params["v"] - y) ** 2), new

    def metrics(self, params, batch, *, buffers):
        h = (batch[0] @ params["w"] - buffers["mean"]) / jnp.sqrt(buffers["var"] + 1e-5)
        return {"error": jnp.mean((jnp.tanh(h) @ params["v"] - batch[1]) ** 2)}


def problem(model=None, **options):
    rng = np.random.default_rng(0)
    clients = [(rng.normal(i, 1, (n, 3)), rng.normal(size=n)) for i in range(N)]
    return cv.supervised(model or Network(), cv.FederatedData.from_clients(clients), **options)


def by_hand(run, eta_l, K, size, seed):
    """SCAFFOLD, option II, with the run's cohorts and the engine's draws, in plain loops."""
    model, data = Network(), problem().data
    x = model.init(jax.random.fold_in(jax.random.key(seed), 0))
    buffers = model.init_buffers(None)
    zero = jax.tree.map(jnp.zeros_like, x)
    c, c_i = zero, [zero] * N
    slope = jax.jit(jax.grad(lambda y, batch, key, b: model.loss(y, batch, key=key, buffers=b), has_aux=True))

    def mean(trees):
        return jax.tree.map(lambda *leaves: sum(leaves) / len(leaves), *trees)

    for r, cohort in enumerate(run.history["cohort"], start=1):
        ys, bs, news = [], [], []
        for i in cohort:
            y, b = x, buffers
            for k in range(K):
                parts = n // size
                order = order_of_epoch(seed, r, 1, i, k // parts, n)
                rows = order[k % parts * size : (k % parts + 1) * size]
                batch = jax.tree.map(lambda a, i=i, rows=rows: a[rows], data.client(i))
                g, b = slope(y, batch, key_of_step(seed, r, 1, i, k + 1), b)
                y = jax.tree.map(lambda y, g, ci, c: y - eta_l * (g - ci + c), y, g, c_i[i], c)
            new = jax.tree.map(lambda ci, c, x, y: ci - c + (x - y) / (K * eta_l), c_i[i], c, x, y)
            ys, bs, news = [*ys, y], [*bs, b], [*news, new]
        change = mean([jax.tree.map(jnp.subtract, new, c_i[i]) for i, new in zip(cohort, news, strict=True)])
        for i, new in zip(cohort, news, strict=True):
            c_i[i] = new
        x, buffers = mean(ys), mean(bs)
        c = jax.tree.map(lambda c, d: c + d * 3 / N, c, change)
    return x, buffers


def test_a_run_is_a_plain_loop_of_the_same_draws_in_every_mode(tmp_path):
    settings = {"rounds": 4, "clients_per_round": 3, "local_steps": 4, "batch_size": 4, "seed": 2}
    run = cv.simulate(cv.scaffold(0.05), problem(), **settings)
    x, buffers = by_hand(run, 0.05, 4, 4, 2)
    for own, other in zip(jax.tree.leaves((run.params, run.buffers)), jax.tree.leaves((x, buffers)), strict=True):
        np.testing.assert_allclose(own, other, rtol=1e-9, atol=1e-12)
    for mode in ({"devices": 1}, {"width": 1}, {"store": "host"}, {"store": "disk"}, {"checkpoint": tmp_path / "run"}):
        other = cv.simulate(cv.scaffold(0.05), problem(), **settings, **mode)
        np.testing.assert_allclose(other.x, run.x, rtol=1e-10, err_msg=str(mode))
        np.testing.assert_allclose(other.buffers["var"], run.buffers["var"], rtol=1e-10, err_msg=str(mode))
    again = cv.simulate(cv.scaffold(0.05), problem(), **settings, checkpoint=tmp_path / "run")
    np.testing.assert_array_equal(again.buffers["mean"], other.buffers["mean"])
    del settings["seed"]
    swept = cv.sweep(cv.scaffold, problem(), {"eta_l": [0.05, 0.1]}, seeds=[1, 2], **settings)
    np.testing.assert_allclose(swept.curves["error"][0, 1], run.history["error"], rtol=1e-9)


@pytest.mark.parametrize(
    "algorithm", [cv.scaffold(0.05, option="I"), cv.mime(0.05), cv.dane(0.05), cv.feddyn(0.05, 1.0)]
)
def test_metrics_read_the_buffers_and_the_state_is_the_algorithms_own(algorithm):
    run = cv.simulate(algorithm, problem(), 3, local_steps=2, batch_size=4, average="uniform")
    batch = problem().data.examples
    error = Network().metrics(run.params, batch, buffers=run.buffers)["error"]
    assert run.history["error"][-1] == pytest.approx(float(error), rel=1e-9)
    assert run.server._fields == algorithm.init_server(run.x)._fields
    assert run.algorithm == algorithm
    if algorithm.invariant is not None:
        c, c_i = algorithm.invariant
        np.testing.assert_allclose(getattr(run.server, c), getattr(run.clients, c_i).mean(axis=0), atol=1e-12)


class Counting(Network):
    """Its buffer counts how often it was changed."""

    def init_buffers(self, key):
        return {"count": jnp.zeros((), jnp.float32)}

    def loss(self, params, batch, *, buffers):
        value = jnp.mean((batch[0] @ params["w"] @ params["v"] - batch[1]) ** 2) + 0 * buffers["count"]
        return value, {"count": buffers["count"] + 1}

    metrics = None


@pytest.mark.parametrize(("algorithm", "changes"), [(cv.fedavg(0.01), 3), (cv.mime(0.01), 3), (cv.sgd(0.01), 1)])
def test_every_step_changes_buffers_once(algorithm, changes):
    run = cv.simulate(algorithm, problem(Counting()), 2, local_steps=3, batch_size=4)
    assert run.buffers["count"] == 2 * changes
    assert run.buffers["count"].dtype == np.float32


def test_the_loss_is_measured_on_all_examples_at_once_however_many(monkeypatch):
    losses = []
    for available in (2**40, 2**12):
        monkeypatch.setattr(memory, "device_memory", lambda available=available: available)
        losses.append(cv.simulate(cv.fedavg(0.05), problem(), 2, local_steps=2, batch_size=4).history["loss"])
    np.testing.assert_array_equal(losses[0], losses[1])


def test_an_algorithms_own_names_do_not_matter():
    class Server(NamedTuple):
        x: object
        own: object
        buffers: object

    plain = cv.fedavg(0.05)
    (exchange,) = plain.exchanges

    def aggregate(server, mean, fraction):
        return server._replace(x=exchange.aggregate(server, mean, fraction).x)

    own = (replace(exchange, aggregate=aggregate),)
    named = replace(plain, init_server=lambda x: Server(x, 0 * x, 0 * x), exchanges=own, recipe=None)
    for model in (Network(), Fixed()):
        runs = [cv.simulate(algorithm, problem(model), 2, local_steps=2) for algorithm in (plain, named)]
        np.testing.assert_allclose(runs[1].x, runs[0].x, rtol=1e-12)
        assert runs[1].server._fields == ("x", "own", "buffers")


def test_buffers_travel_and_count():
    sizes = [cv.simulate(cv.fedavg(0.05), problem(model), 1).history["bytes_up"][0] for model in (Network(), Fixed())]
    assert sizes[0] - sizes[1] == N * 8 * 8  # clients, numbers, bytes of a float64


class Fixed(Network):
    """The same without buffers."""

    init_buffers = property()

    def loss(self, params, batch):
        return Network().loss(params, batch, key=None, buffers=Network().init_buffers(None))[0]

    metrics = None


def test_with_frozen_parameters_and_buffers():
    run = cv.simulate(cv.scaffold(0.05), problem(trainable=lambda path: path == "v"), 2, local_steps=2, batch_size=4)
    assert run.x.shape == (4,)
    assert np.abs(run.buffers["mean"]).max() > 0


def test_buffers_as_long_as_the_model():
    class Short(Network):
        def init_buffers(self, key):
            return {"mean": jnp.zeros(4)}

        def loss(self, params, batch, *, key, buffers):
            value, new = super().loss(params, batch, key=key, buffers={**buffers, "var": jnp.ones(4)})
            return value, {"mean": new["mean"]}

        metrics = None

    runs = [
        cv.simulate(
            cv.scaffold(0.05), problem(model, trainable=lambda path: path == "v"), 2, local_steps=2, batch_size=4
        )
        for model in (Network(), Short())
    ]
    assert runs[1].x.size == runs[1].buffers["mean"].size
    np.testing.assert_allclose(runs[1].x, runs[0].x, rtol=1e-10)
    np.testing.assert_allclose(runs[1].buffers["mean"], runs[0].buffers["mean"], rtol=1e-10)


def test_streamed_data_and_the_diagnosis(tmp_path):
    own = problem()
    cv.FederatedData.write(tmp_path / "data", [own.data.client(i) for i in range(N)])
    data = cv.FederatedData.open(tmp_path / "data", stream=True)
    settings = {"rounds": 3, "clients_per_round": 2, "local_steps": 3, "batch_size": 4}
    streamed = cv.simulate(cv.scaffold(0.05), cv.supervised(Network(), data, own.data.examples), **settings)
    run = cv.simulate(cv.scaffold(0.05), own, **settings)
    np.testing.assert_allclose(streamed.buffers["var"], run.buffers["var"], rtol=1e-10)
    two = ("fedavg", "scaffold")
    found = cv.diagnose(own, 10, local_steps=3, batch_size=4, trial_rounds=4, trial_seeds=1, algorithms=two)
    assert set(two) <= set(found.trials)


def as_model(**functions):
    parts = {name: getattr(Network(), name) for name in ("init", "init_buffers", "loss")} | functions
    return SimpleNamespace(**{name: part for name, part in parts.items() if part is not None})


@pytest.mark.parametrize(
    ("functions", "says"),
    [
        ({"init_buffers": None}, "both init_buffers and a loss that takes buffers, or neither; got loss"),
        ({"loss": lambda params, batch: 0.0}, "got init_buffers alone"),
        ({"init_buffers": lambda key: {"count": jnp.zeros(1, int)}}, r"buffers\['count'\] must be real numbers"),
        ({"init_buffers": lambda key: {"mean": jnp.full(4, jnp.nan), "var": jnp.ones(4)}}, "must be finite"),
        ({"init_buffers": lambda key: {}}, "a tree with at least one array"),
        (
            {"init": lambda key: {"w": jnp.zeros((3, 4), "bfloat16"), "v": jnp.ones(4, "bfloat16")}},
            "of a type no wider than the params'",
        ),
        (
            {"init_buffers": lambda key: {"mean": jnp.zeros(4, "bfloat16")}},
            "float32 or float64; got dtype bfloat16",
        ),
        ({"loss": lambda params, batch, *, buffers: jnp.zeros(())}, "must be .value, buffers."),
        ({"loss": lambda params, batch, *, buffers: (0.0 * params["v"].sum(), buffers["mean"])}, "in the form of"),
        (
            {"loss": lambda p, b, *, buffers: (0.0 * p["v"].sum(), {**buffers, "var": jnp.ones(3)})},
            r"buffers\['var'\] of the loss must be real numbers of shape \(4,\); got float64 \(3,\)",
        ),
    ],
)
def test_models_that_break_the_contract_are_rejected(functions, says):
    with pytest.raises(InvalidInput, match=says):
        problem(as_model(**functions))


def test_where_buffers_are_not_carried_they_are_rejected_by_name():
    with pytest.raises(InvalidInput, match="debug=True does not carry a model's buffers"):
        cv.simulate(cv.fedavg(0.1), problem(), 1, debug=True)
    with pytest.raises(InvalidInput, match="microbatch must be None"):
        cv.simulate(cv.fedavg(0.1), problem(), 1, microbatch=2)
    with pytest.raises(InvalidInput, match="batches of one size"):
        cv.simulate(cv.fedavg(0.1), problem(), 1, batch_size=5)
