"""Every script of examples/ runs, shows what it says, and is short enough to read."""

import functools
import runpy

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from flax.errors import TraceContextError
from helpers import ROOT

import covary as cv

SCRIPTS = {path.name: path for path in (ROOT / "examples").glob("*.py") if path.name != "deploy_demo.py"}


def last(runs, name, metric):
    return runs[name].history[metric][-1]


PROPERTIES = {
    "flax_nnx.py": lambda runs: last(runs, "scaffold", "accuracy") > 0.9,
    "flax_batch_norm.py": lambda runs: last(runs, "scaffold", "accuracy") > 0.92,
    "equinox_model.py": lambda runs: last(runs, "scaffold", "accuracy") > 0.9,
    "lora.py": lambda runs: last(runs, "scaffold", "accuracy") > max(0.6, last(runs, "fedavg", "accuracy")),
    "plain_functions.py": lambda runs: last(runs, "scaffold", "rmse") < min(0.2, last(runs, "fedavg", "rmse")),
    "table_with_clients.py": lambda runs: (
        last(runs, "scaffold", "loss") < 0.64 < runs["fedavg"].history["loss"][0] < last(runs, "fedavg", "loss")
    ),
    "dict_batch.py": lambda runs: last(runs, "scaffold", "accuracy") > 0.85,
    "custom_metric.py": lambda runs: (
        runs["scaffold"].reached == runs["scaffold"].rounds > 1
        and (runs["scaffold"].history["balanced_accuracy"][:-1] < 0.86).all()
        and last(runs, "scaffold", "balanced_accuracy") >= 0.86
    ),
    "custom_partition.py": lambda runs: last(runs, "scaffold", "accuracy") > max(0.8, last(runs, "fedavg", "accuracy")),
}


def test_every_script_is_tested():
    assert set(SCRIPTS) == {*PROPERTIES, "scaffold_one_file.py"}


@pytest.mark.parametrize("name", PROPERTIES)
def test_the_example_trains(name, capsys, monkeypatch):
    monkeypatch.setattr(
        cv, "simulate", functools.partial(cv.simulate, devices=1, width=1000)
    )  # without trials of others
    runs = runpy.run_path(str(SCRIPTS[name]))["main"]()
    printed = capsys.readouterr().out
    assert printed
    assert PROPERTIES[name](runs), printed
    assert runs["scaffold"].history["loss"][-1] < runs["scaffold"].history["loss"][0]


@pytest.mark.parametrize("name", PROPERTIES)
def test_the_example_is_short(name):
    text = SCRIPTS[name].read_text()
    assert len(text.splitlines()) < 60
    assert f"python examples/{name}" in text


def test_the_one_file_example_runs(capsys):
    runpy.run_path(str(SCRIPTS["scaffold_one_file.py"]), run_name="__main__")
    assert "SCAFFOLD at x" in capsys.readouterr().out


class Layered(nnx.Module):
    def __init__(self, layer, rngs):
        self.linear = nnx.Linear(3, 1, rngs=rngs)
        self.layer = layer(rngs)


class Regression:
    """Networks with a state beside their parameters, which the docstring of flax_nnx.py describes."""

    def __init__(self, layer, state, evaluate=False):
        network = Layered(layer, nnx.Rngs(0))
        if evaluate:
            network.eval()
        self.graph, _, self.rest = nnx.split(network, nnx.Param, ...)
        self.layer, self.state = layer, state

    def init(self, key):
        return nnx.state(Layered(self.layer, nnx.Rngs(key)), self.state)

    def loss(self, params, batch):
        network = nnx.merge(self.graph, params, self.rest)
        return jnp.mean((network.linear(network.layer(batch[0])) - batch[1][:, None]) ** 2)


def dropout(rngs):
    return nnx.Dropout(0.5, rngs=rngs)


def batch_norm(rngs):
    return nnx.BatchNorm(3, rngs=rngs)


def data():
    x = np.random.default_rng(0).normal(size=(12, 3)).astype(np.float32)
    return cv.FederatedData((x, x @ np.array([1, -2, 0.5], np.float32)), [6, 6])


def test_counters_of_dropout_are_rejected_as_parameters():
    with pytest.raises(cv.CovaryError, match=r"params\['layer'\].*must be real numbers; got dtype uint32"):
        cv.supervised(Regression(dropout, nnx.Variable), data())


@pytest.mark.parametrize("layer", [dropout, batch_norm])
def test_a_layer_that_changes_its_state_is_rejected_by_flax(layer):
    with pytest.raises(TraceContextError, match="Cannot mutate"):
        cv.supervised(Regression(layer, nnx.Param), data())


def test_dropout_that_is_turned_off_trains():
    problem = cv.supervised(Regression(dropout, nnx.Param, evaluate=True), data())
    run = cv.simulate(cv.scaffold(eta_l=0.1), problem, rounds=100, local_steps=5)
    assert run.history["loss"][-1] < 1e-6
    assert isinstance(run.params, nnx.State)
    assert all(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(run.params))
