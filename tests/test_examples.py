"""Every script of examples/ runs, shows what it says, and is short enough to read."""

import functools
import json
import runpy

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from flax.errors import TraceContextError
from flwr.app import Context, RecordDict
from helpers import HANGS, ROOT
from loopback import LoopbackGrid

import covary as cv
import covary.torch as cvt
from covary.flower import audit, load_model

SCRIPTS = {path.name: path for path in (ROOT / "examples").glob("*.py") if path.name != "deploy_demo.py"}


@pytest.fixture(autouse=True)
def one_thread():
    """PyTorch's threads wait for each other, which takes long where other tests use the cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


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
    "torch_module.py": lambda runs: last(runs, "scaffold", "accuracy") > max(0.8, last(runs, "fedavg", "accuracy")),
    "torch_batch_norm.py": lambda runs: (
        last(runs, "scaffold", "accuracy") > 0.9
        and np.array_equal(runs["scaffold"].x, runs["again"].x)
        and set(runs["scaffold"].buffers) == {"1.running_mean", "1.running_var"}
    ),
    "transformers_lora.py": lambda runs: last(runs, "scaffold", "loss") < 2.5,
}
LONGEST = {"transformers_lora.py": 80}  # lines; the others have fewer than 60
IN_TORCH = {name for name in PROPERTIES if "torch" in SCRIPTS[name].read_text()}
PEFT_ASKS = "ignore:.is_gradient_checkpointing.:FutureWarning"  # peft 0.21 asks transformers 5.23 for an old name


def test_every_script_is_tested():
    assert set(SCRIPTS) == {*PROPERTIES, "scaffold_one_file.py"}


@pytest.mark.filterwarnings(PEFT_ASKS)
@pytest.mark.parametrize("name", PROPERTIES)
def test_the_example_trains(name, capsys, monkeypatch):
    if name not in IN_TORCH:  # without trials of others
        monkeypatch.setattr(cv, "simulate", functools.partial(cv.simulate, devices=1, width=1000))
    runs = runpy.run_path(str(SCRIPTS[name]))["main"]()
    printed = capsys.readouterr().out
    assert printed
    assert PROPERTIES[name](runs), printed
    assert runs["scaffold"].history["loss"][-1] < runs["scaffold"].history["loss"][0]


@pytest.mark.parametrize("name", PROPERTIES)
def test_the_example_is_short(name):
    text = SCRIPTS[name].read_text()
    assert len(text.splitlines()) < LONGEST.get(name, 60)
    assert f"python examples/{name}" in text


def test_the_one_file_example_runs(capsys):
    runpy.run_path(str(SCRIPTS["scaffold_one_file.py"]), run_name="__main__")
    assert "SCAFFOLD at x" in capsys.readouterr().out


@pytest.mark.filterwarnings(PEFT_ASKS)
def test_the_adapters_deployed_from_the_same_file_are_those_simulated(tmp_path):
    """Only they are trained and sent."""
    names = runpy.run_path(str(SCRIPTS["transformers_lora.py"]))
    count = len(names["AUTHORS"])
    apps = {i: (names["client"], {"partition-id": i, "state": str(tmp_path / f"state{i}")}) for i in range(count)}
    settings = {"rounds": 2, "eval-every": 2, "patience": HANGS, "checkpoint": str(tmp_path / "server")}
    names["server"](LoopbackGrid(apps), Context(1, 0, {}, RecordDict(), settings))

    clients = [names["texts"](author) for author in names["AUTHORS"]]
    problem = cvt.supervised(names["network"](), names["loss"], clients)
    run = cv.simulate(names["ALGORITHM"], problem, **{**names["SETTINGS"], "rounds": 2})
    deployed = load_model(names["network"](), tmp_path / "server").state_dict()
    built = names["network"]().state_dict()
    assert {name for name, value in deployed.items() if not torch.equal(value, built[name])} == {
        name for name in built if ".lora_" in name
    }
    for name, value in run.params.items():
        torch.testing.assert_close(deployed[name], value, rtol=0, atol=1e-6)
    assert run.x.size == sum(value.numel() for name, value in built.items() if ".lora_" in name)
    last_round = json.loads((tmp_path / "server" / "results.jsonl").read_text().splitlines()[-1])
    assert run.history["bytes_up"][-1] <= last_round["bytes_up"] < 1.05 * run.history["bytes_up"][-1]
    assert audit(tmp_path / "server", sorted(tmp_path.glob("state*"))).holds


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
