"""Deployment without processes: apps on a loopback grid give simulation's numbers, and invalid replies are rejected."""

from __future__ import annotations

import shutil
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flwr.app import Message
from flwr.common.constant import ErrorCode
from helpers import HANGS
from loopback import LoopbackGrid
from typer.testing import CliRunner

import covary as cv
from covary.cli import app as cli
from covary.errors import CovaryError
from covary.flower import (
    Limits,
    Settings,
    audit,
    client_app,
    load_model,
    load_parameters,
    serve,
    server_app,
    torch_client_app,
)
from covary.flower.exchange import checked
from covary.flower.messages import FAILURES, failure
from covary.flower.wire import facts_of, pack
from covary.torch.examples import Loaders

N, D = 4, 5
MODEL = cv.models.logistic_regression(D, 3)
ALGORITHMS = {
    "sgd": cv.sgd(0.5),
    "fedavg": cv.fedavg(0.3, eta_g=0.9),
    "fedprox": cv.fedprox(0.3, mu=0.5),
    "scaffold": cv.scaffold(0.3, eta_g=0.9),
    "scaffold-I": cv.scaffold(0.3, option="I"),
    "dane": cv.dane(0.3, mu=0.1),
    "mime": cv.mime(0.3),
    "feddyn": cv.feddyn(0.3, alpha=0.5),
    "vrl_sgd": cv.vrl_sgd(0.3),
}
ROUND = {"local_steps": 3, "batch_size": 4}
# Small clients, any number of steps, and the batches of a simulation:
OPEN = Limits(smallest_batch=1, whole_passes=False, private_batches=False)


def parts(sizes=(12,) * N, seed=0):
    rng = np.random.default_rng(seed)
    return [(rng.normal(size=(n, D)) + i, rng.integers(0, 3, n)) for i, n in enumerate(sizes)]


def jax_apps(folder, data, model=MODEL, **options):
    apps = {}
    for i, part in enumerate(data):
        own = cv.supervised(model, cv.FederatedData.from_clients([part]))
        apps[i] = (client_app(own, state=folder / f"state{i}", **{"limits": OPEN, **options}), {"partition-id": i})
    return apps


def deploy(folder, grid, algorithm, rounds=4, model: Any = MODEL, **settings):
    settings = {"checkpoint": folder / "server", "min_clients": len(grid.apps), "patience": HANGS, **ROUND, **settings}
    return serve(grid, algorithm, model, Settings(rounds, **settings))


def audited(folder):
    found = audit(folder / "server", sorted(folder.glob("state*")))
    assert found.holds, found
    return found


def simulated(algorithm, data, rounds=4, model=MODEL, **options):
    problem = cv.supervised(model, cv.FederatedData.from_clients(data))
    return cv.simulate(algorithm, problem, rounds, **{**ROUND, **options})


# Deployment is simulation


@pytest.mark.parametrize(("name", "S"), [("scaffold", None), *[(n, None if n == "vrl_sgd" else 2) for n in ALGORITHMS]])
def test_a_deployed_run_is_the_simulated_one(name, S, tmp_path):
    algorithm, data = ALGORITHMS[name], parts()
    deployed = deploy(tmp_path, LoopbackGrid(jax_apps(tmp_path, data)), algorithm, clients_per_round=S)
    run = simulated(algorithm, data, clients_per_round=S)
    np.testing.assert_allclose(deployed.x, run.x, rtol=0, atol=1e-12)
    np.testing.assert_allclose(deployed.history["accuracy"], run.history["accuracy"], atol=1e-6)
    for column in ("loss", "drift", "round", "cohort"):
        np.testing.assert_allclose(deployed.history[column], run.history[column], rtol=1e-10, atol=1e-12)
    if algorithm.invariant is not None:
        assert audited(tmp_path).gap < 1e-12


@pytest.mark.parametrize(
    "options",
    [
        {"weights": "examples", "local_steps": None, "local_epochs": 2, "clients_per_round": 3},
        {"warm_start": True, "clients_per_round": 2, "batch_size": 0.25},
        {"batch_size": None},
    ],
)
def test_unequal_clients_weights_and_a_warm_start_too(options, tmp_path):
    data = parts(sizes=(12, 9, 17, 5))
    deployed = deploy(tmp_path, LoopbackGrid(jax_apps(tmp_path, data)), ALGORITHMS["scaffold"], **options)
    run = simulated(ALGORITHMS["scaffold"], data, **options)
    np.testing.assert_allclose(deployed.x, run.x, rtol=0, atol=1e-12)
    np.testing.assert_allclose(deployed.server.c, run.server.c, rtol=0, atol=1e-12)
    assert audited(tmp_path).gap < 1e-12


def test_dropout_and_an_adapter_on_a_frozen_model_too(tmp_path):
    class Noisy:
        def init(self, key):
            return {"frozen": {"w": jnp.ones((3, D))}, "adapter": jnp.zeros((3, D))}

        def loss(self, params, batch, *, key):
            x, y = batch
            if key is not None:
                x = jnp.where(jax.random.bernoulli(key, 0.5, x.shape), 2 * x, 0)
            return MODEL.loss({"w": params["frozen"]["w"] + params["adapter"], "b": jnp.zeros(3)}, (x, y))

    def problem(clients):
        return cv.supervised(Noisy(), cv.FederatedData.from_clients(clients), trainable=lambda path: path == "adapter")

    data, algorithm = parts(sizes=(12, 9, 17, 5)), ALGORITHMS["scaffold-I"]
    apps = {
        i: (client_app(problem([part]), state=tmp_path / f"state{i}", limits=OPEN), {"partition-id": i})
        for i, part in enumerate(data)
    }
    deployed = deploy(tmp_path, LoopbackGrid(apps), algorithm, model=problem(data[:1]), clients_per_round=2)
    run = cv.simulate(algorithm, problem(data), 4, clients_per_round=2, **ROUND)
    np.testing.assert_allclose(deployed.x, run.x, rtol=0, atol=1e-12)
    np.testing.assert_allclose(deployed.history["loss"], run.history["loss"], rtol=1e-10)
    trained = load_model(problem(data[:1]), tmp_path / "server")
    np.testing.assert_array_equal(problem(data).complete(trained)["adapter"].ravel(), deployed.x)
    assert audited(tmp_path).gap < 1e-12


def test_a_node_with_other_frozen_parameters_is_left_out(tmp_path, capsys):
    def problem(scale, clients):
        model = SimpleNamespace(
            init=lambda key: {"base": scale * jnp.ones(D), "adapter": jnp.zeros(D)},
            loss=lambda params, batch: jnp.mean((batch[0] @ (params["base"] + params["adapter"]) - batch[1]) ** 2),
        )
        data = cv.FederatedData.from_clients(clients)
        return cv.supervised(model, data, trainable=lambda path: path == "adapter")

    data = parts()
    apps = {
        i: (client_app(problem(1 + (i == 2), [part]), state=tmp_path / f"state{i}", limits=OPEN), {"partition-id": i})
        for i, part in enumerate(data)
    }
    run = deploy(tmp_path, LoopbackGrid(apps), cv.scaffold(0.01), model=problem(1, data[:1]), min_clients=3)
    assert run.history["cohort"].max() < 3
    assert "frozen parameters" in capsys.readouterr().out


def test_batch_norm_in_jax_too(tmp_path):
    class Normed:
        def init(self, key):
            return {"w": 0.1 * jax.random.normal(key, (D, 3))}

        def init_buffers(self, key):
            return {"var": jnp.ones(D), "mean": [jnp.zeros(D)]}

        def loss(self, params, batch, *, key, buffers):
            x, y = batch
            mean, var = x.mean(axis=0), x.var(axis=0)
            h = (x - mean) / jnp.sqrt(var + 1e-5)
            if key is not None:
                h = jnp.where(jax.random.bernoulli(key, 0.5, h.shape), 2 * h, 0)
            value = MODEL.loss({"w": params["w"].T, "b": jnp.zeros(3)}, (h, y))
            return value, {"var": buffers["var"] + 0.1 * var, "mean": [0.9 * buffers["mean"][0] + 0.1 * mean]}

        def metrics(self, params, batch, *, buffers):
            return {"norm": jnp.sum(buffers["mean"][0] ** 2)}

    data, algorithm, model = parts(), ALGORITHMS["scaffold"], Normed()
    deployed = deploy(tmp_path, LoopbackGrid(jax_apps(tmp_path, data, model)), algorithm, model=model)
    run = simulated(algorithm, data, model=model)
    np.testing.assert_allclose(deployed.x, run.x, rtol=0, atol=1e-12)
    np.testing.assert_allclose(deployed.history["norm"], run.history["norm"], rtol=1e-10)
    params, buffers = load_model(model, tmp_path / "server")
    for own, other in zip(jax.tree.leaves((params, buffers)), jax.tree.leaves((run.params, run.buffers)), strict=True):
        np.testing.assert_allclose(own, other, rtol=0, atol=1e-12)
    np.testing.assert_array_equal(deployed.buffers["mean"][0], buffers["mean"][0])
    assert audited(tmp_path).gap < 1e-12


def test_in_float32_to_its_own_precision(tmp_path):
    class Single:
        init = staticmethod(lambda key: {"w": jnp.zeros((3, D), jnp.float32)})

        @staticmethod
        def loss(params, batch):
            x, y = batch
            logits = x.astype(jnp.float32) @ params["w"].T
            return jnp.mean(jnp.log(jnp.exp(logits).sum(1)) - jnp.take_along_axis(logits, y[:, None], 1)[:, 0])

    data, algorithm = parts(), cv.scaffold(0.1)
    deployed = deploy(tmp_path, LoopbackGrid(jax_apps(tmp_path, data, Single)), algorithm, model=Single)
    assert deployed.x.dtype == np.float32
    np.testing.assert_allclose(deployed.x, simulated(algorithm, data, model=Single).x, rtol=0, atol=1e-6)
    assert audited(tmp_path).gap < 1e-6


def test_option_ii_sends_d_numbers_up_not_2d(tmp_path):
    sent = {}
    for option in ("I", "II"):
        run = deploy(
            tmp_path / option, LoopbackGrid(jax_apps(tmp_path / option, parts())), cv.scaffold(0.1, 1.0, option)
        )
        sent[option] = run.history["bytes_up"][-1] / N
    d = 8 * len(run.x)
    assert d < sent["II"] < d + 300  # facts and headers
    assert 2 * d < sent["I"] < 2 * d + 500


# PyTorch


def torch_linear():
    module = torch.nn.Linear(D, 3, dtype=torch.float64)
    return load_parameters(module, np.zeros(3 * D + 3))


def torch_loss(module, batch):
    x, y = batch
    return torch.nn.functional.cross_entropy(module(x), y)


def torch_apps(folder, data, build=torch_linear, loader=lambda part: tuple(map(torch.tensor, part)), **options):
    return {
        i: (
            torch_client_app(
                build(), torch_loss, loader(part), state=folder / f"state{i}", **{"limits": OPEN, **options}
            ),
            {"partition-id": i},
        )
        for i, part in enumerate(data)
    }


@pytest.mark.parametrize("name", ALGORITHMS)
def test_pytorch_clients_are_jax_clients(name, tmp_path):
    algorithm, data = ALGORITHMS[name], parts(sizes=(12, 9, 17, 5))
    deployed = deploy(tmp_path, LoopbackGrid(torch_apps(tmp_path, data)), algorithm, model=torch_linear())
    run = simulated(algorithm, data)
    theirs = np.concatenate([run.params["w"].reshape(-1), run.params["b"]])  # PyTorch's order
    np.testing.assert_allclose(deployed.x, theirs, rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(deployed.history["loss"], run.history["loss"], rtol=1e-10)
    if algorithm.invariant is not None:
        assert audited(tmp_path).gap < 1e-12


def test_a_dataloader_brings_its_own_batches(tmp_path):
    def loader(part):
        return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*map(torch.tensor, part)), batch_size=5)

    apps = torch_apps(tmp_path, parts(sizes=(12, 9, 17, 5)), loader=loader)
    run = deploy(tmp_path, LoopbackGrid(apps), cv.scaffold(0.1), 20, torch_linear(), local_steps=None, local_epochs=2)
    assert run.history["loss"][-1] < run.history["loss"][0]
    assert audited(tmp_path).gap < 1e-12


def batch_norm_network():
    torch.manual_seed(0)
    norm = torch.nn.BatchNorm1d(D, dtype=torch.float64)
    frozen = torch.nn.Linear(D, D, dtype=torch.float64).requires_grad_(False)
    return torch.nn.Sequential(norm, frozen, torch.nn.Linear(D, 3, dtype=torch.float64))


def test_buffers_are_averaged_and_frozen_parameters_are_not_sent(tmp_path):
    data = parts()
    start = batch_norm_network()
    run = deploy(tmp_path, LoopbackGrid(torch_apps(tmp_path, data, batch_norm_network)), cv.scaffold(0.1), 1, start)
    assert len(run.x) == 2 * D + 3 * D + 3  # the norm's scale and shift, and the last layer
    from covary.runs.files import File

    arrays, _ = File(tmp_path / "server" / "ledger").read()
    assert sorted(n for n in arrays if n.startswith("buffers.")) == ["buffers.0.running_mean", "buffers.0.running_var"]
    own = []
    for i, (x, _) in enumerate(data):  # by hand: three batches of four, in the order that covary draws
        from covary.draws import order_of_epoch

        norm, order = batch_norm_network()[0], order_of_epoch(0, 1, 1, i, 0, 12)
        for k in range(3):
            norm(torch.tensor(x[order[4 * k : 4 * k + 4]]))
        own.append(norm.running_mean.numpy())
    np.testing.assert_allclose(arrays["buffers.0.running_mean"], np.mean(own, axis=0), rtol=1e-12)
    assert audited(tmp_path).gap < 1e-12
    trained = load_model(batch_norm_network(), tmp_path / "server")
    np.testing.assert_array_equal(trained[0].running_mean, arrays["buffers.0.running_mean"])
    np.testing.assert_array_equal(trained[2].bias.detach(), run.x[-3:])


def test_evaluation_leaves_a_module_in_training(tmp_path):
    module, seen = torch_linear(), []

    def loss(module, batch):
        seen.append(module.training)
        return torch_loss(module, batch)

    data = tuple(map(torch.tensor, parts()[0]))
    grid = LoopbackGrid({0: (torch_client_app(module, loss, data, state=tmp_path / "state0", limits=OPEN), {})})
    deploy(tmp_path, grid, cv.scaffold(0.1), 2, torch_linear())
    assert seen == [True] * 3 + [False] + [True] * 3 + [False]


def test_layers_set_to_eval_masks_and_single_numbers_are_left_alone(tmp_path):
    def build():
        network = batch_norm_network()
        network[0].eval()
        network.register_buffer("mask", torch.tensor([-torch.inf, 0.0]))
        network.register_buffer("scale", torch.tensor(1.5, dtype=torch.float64))
        return network

    grid = LoopbackGrid(torch_apps(tmp_path, parts(), build))
    deploy(tmp_path, grid, cv.scaffold(0.1), 1, build())
    deploy(tmp_path, grid, cv.scaffold(0.1), 2, build(), resume=True)
    trained = load_model(build(), tmp_path / "server")
    assert trained[0].running_mean.abs().max() == 0
    assert trained.scale == 1.5


def test_batches_of_dicts_and_dropped_rows_are_weighed_by_what_was_seen(tmp_path):
    class Loader:
        dataset = range(12)  # of which the last two are dropped

        def __init__(self, part):
            x, y = map(torch.tensor, part)
            self.batches = [{"id": ["a"] * 5, "x": x[k : k + 5], "y": y[k : k + 5]} for k in (0, 5)]

        def __iter__(self):
            return iter(self.batches)

        def __len__(self):
            return 2

    def loss(module, batch):
        return torch_loss(module, (batch["x"], batch["y"]))

    data = parts()
    apps = {
        i: (
            torch_client_app(torch_linear(), loss, Loader(part), state=tmp_path / f"state{i}", limits=OPEN),
            {"partition-id": i},
        )
        for i, part in enumerate(data)
    }
    run = deploy(tmp_path, LoopbackGrid(apps), cv.sgd(0.5), 2, torch_linear())
    seen = simulated(cv.sgd(0.5), [(x[:10], y[:10]) for x, y in data], 2)
    np.testing.assert_allclose(run.history["loss"], seen.history["loss"], rtol=1e-10)


@pytest.mark.parametrize(
    ("loader", "why"),
    [
        (torch.utils.data.DataLoader(range(3), batch_size=5, drop_last=True), "at least one batch"),
        ((torch.zeros(3, D), torch.zeros(2)), "tensors of one length"),
        (7, "tensors, or batches with a length"),
    ],
)
def test_loaders_that_cannot_be_trained_on_are_rejected(loader, why, tmp_path, capsys, caplog):
    apps = torch_apps(tmp_path, parts()[:2])
    apps[2] = (torch_client_app(torch_linear(), torch_loss, loader, state=tmp_path / "other"), {})
    deploy(tmp_path, LoopbackGrid(apps), cv.scaffold(0.1), 1, torch_linear(), min_clients=2)
    assert why in caplog.text  # the node's own log
    assert "is left out: InvalidInput" in capsys.readouterr().out


def test_a_type_error_inside_a_loader_is_raised_as_it_is():
    class Broken:
        def __len__(self):
            return 2

        def __iter__(self):
            raise TypeError("the loader's own")

    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter(())

    with pytest.raises(TypeError, match="the loader's own"):
        Loaders([Broken()])
    with pytest.raises(CovaryError, match="a stream without a length"):
        Loaders([torch.utils.data.DataLoader(Stream())])


def test_a_jax_server_does_not_take_torch_clients_though_sizes_agree(tmp_path):
    grid = LoopbackGrid(torch_apps(tmp_path, parts()))
    with pytest.raises(CovaryError, match="0 nodes are online"):
        deploy(tmp_path, grid, cv.scaffold(0.1), 1, MODEL, patience=0.5)


# Invalid replies are rejected


def tampered(change):
    """A reply whose upload or facts were changed on a node that is not honest."""

    def fault(reply: Message) -> Message:
        up = {name: array.numpy().copy() for name, array in reply.content.array_records["up"].items()}
        facts, up = change(facts_of(reply), up)
        reply.content = pack(facts, up=up, buffers={})
        return reply

    return fault


LIES = {
    "NaN": lambda facts, up: (facts, {n: a * np.nan for n, a in up.items()}),
    "huge": lambda facts, up: (facts, {n: a * 0 + 1e9 for n, a in up.items()}),
    "shape": lambda facts, up: (facts, {n: a[:-1] for n, a in up.items()}),
    "type": lambda facts, up: (facts, {n: a.astype(np.float32) for n, a in up.items()}),
    "fields": lambda facts, up: (facts, {"dc": next(iter(up.values()))}),
    "token": lambda facts, up: (facts | {"token": "0123456789abcdef"}, up),
    "no token": lambda facts, up: ({}, up),
    "big drift": lambda facts, up: (facts | {"drift": 10**400, "token": ""}, up),
    "control characters": lambda facts, up: ({"refused": "\ud800\x1b[2J\n[/x]"}, up),
    "lost what was never counted": lambda facts, up: ({"refused": "StateLost", "epoch": -1}, up),
    "an extra record": lambda facts, up: (facts, up | {"more": np.zeros(10)}),
    "objects": lambda facts, up: (facts, {n: np.array(["a"] * len(a)) for n, a in up.items()}),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_lie_is_rejected_and_named_and_the_round_continues(lie, tmp_path, capsys):
    def liar(node, message):
        return tampered(LIES[lie]) if node == 1 and message.metadata.message_type == "train" else None

    def absent(node, message):
        return "dropped" if node == 1 and message.metadata.message_type == "train" else None

    runs = {}
    for name, fault in (("lying", liar), ("absent", absent)):
        grid = LoopbackGrid(jax_apps(tmp_path / name, parts()), fault)
        runs[name] = deploy(tmp_path / name, grid, cv.scaffold(0.3), 3, round_timeout=0.2)
        assert audited(tmp_path / name).gap < 1e-12
    np.testing.assert_array_equal(runs["lying"].x, runs["absent"].x)
    np.testing.assert_array_equal(runs["lying"].server.c, runs["absent"].server.c)
    out = capsys.readouterr().out
    assert "is left out: " in out
    assert "Traceback" not in out


def test_a_bug_in_covary_shows_its_traceback_and_the_round_continues(tmp_path, monkeypatch, capsys):
    calls = []

    def broken(*arguments):
        calls.append(arguments)
        if len(calls) == 1:
            raise TypeError("what a node sent: \x1b[2J")
        return checked(*arguments)

    monkeypatch.setattr("covary.flower.exchange.checked", broken)
    run = deploy(tmp_path, LoopbackGrid(jax_apps(tmp_path, parts())), cv.scaffold(0.3), 2)
    out = capsys.readouterr().out
    assert (run.history["cohort"] >= 0).sum(axis=1).tolist() == [N - 1, N]
    assert "ERROR: covary failed to read the reply of" in out
    assert "in broken" in out
    assert r"TypeError: what a node sent: \x1b[2J" in out
    assert "is left out" not in out
    assert audited(tmp_path).gap < 1e-12


def test_the_log_has_levels(tmp_path, caplog):
    def fault(node, message):
        return tampered(LIES["NaN"]) if node == 1 and message.metadata.message_type == "train" else None

    grid = LoopbackGrid(jax_apps(tmp_path, parts()), fault)
    with caplog.at_level("INFO", "covary.flower"), pytest.raises(CovaryError, match="No round could be finished"):
        deploy(tmp_path, grid, cv.scaffold(0.3), 1, min_replies=N, patience=0.1)
    levels = {}
    for text in ("joined", "is left out", "covary: stopped: 0 of 1 rounds are done."):
        levels[text] = {record.levelname for record in caplog.records if text in record.getMessage()}
    assert list(levels.values()) == [{"INFO"}, {"WARNING"}, {"ERROR"}]


def test_each_error_of_flowers_is_explained_and_one_may_mean_an_app_that_is_not_approved():
    codes = {code for name, code in vars(ErrorCode).items() if name.isupper()}
    assert codes == {ErrorCode.UNKNOWN, *FAILURES}
    unapproved = {code for code in codes if "has not approved" in failure(code)}
    assert unapproved == {ErrorCode.CLIENT_APP_RAISED_EXCEPTION}


def test_a_replayed_reply_is_rejected(tmp_path, capsys):
    old = []

    def fault(node, message):
        if node != 1 or message.metadata.message_type != "train":
            return None

        def replay(reply):
            old.append(reply)
            reply.content = old[0].content
            return reply

        return replay

    deploy(tmp_path, LoopbackGrid(jax_apps(tmp_path, parts()), fault), cv.scaffold(0.3), 3)
    assert "is not the one in its order" in capsys.readouterr().out
    assert audited(tmp_path).gap < 1e-12


def test_a_node_with_another_model_is_not_admitted(tmp_path, capsys):
    apps = jax_apps(tmp_path, parts())
    x, y = parts()[0]
    other = cv.supervised(cv.models.mlp(D, 2, 3), cv.FederatedData.from_clients([(x, y)]))
    apps[9] = (client_app(other, state=tmp_path / "other"), {})
    run = deploy(tmp_path, LoopbackGrid(apps), cv.scaffold(0.3), 2, min_clients=N)
    assert run.history["cohort"].shape == (2, N)
    assert "Use one model" in capsys.readouterr().out.replace("\n", " ")


@pytest.mark.parametrize(
    "values", [{"cohort": 1.5}, {"[/x]": 1.0}, {"round": 7.0}, {"loss": "low"}, {f"m{k}": 1.0 for k in range(200)}, 3]
)
def test_what_a_node_measures_cannot_rewrite_the_history(values, tmp_path):
    def fault(node, message):
        def lie(reply):
            reply.content = pack({"values": values, "tested": 3})
            return reply

        return lie if node == 1 and message.metadata.message_type == "evaluate" else None

    run = deploy(tmp_path, LoopbackGrid(jax_apps(tmp_path, parts()), fault), cv.scaffold(0.3), 2)
    assert {"loss", "accuracy", "cohort"} <= set(run.history)
    assert run.history["cohort"].shape == (2, N)
    assert len(run.history) < 15


def test_a_node_that_keeps_losing_its_state_is_not_asked_again(tmp_path, capsys):
    def fault(node, message):
        if node == 1 and message.metadata.message_type == "train":
            shutil.rmtree(tmp_path / "state1", ignore_errors=True)
        return None

    deploy(tmp_path, LoopbackGrid(jax_apps(tmp_path, parts()), fault), cv.scaffold(0.3), 14, eval_every=0)
    found = audited(tmp_path)
    assert (found.members, found.epoch) == (3, 4)
    assert "is not asked again" in capsys.readouterr().out


def test_a_node_that_missed_the_first_question_is_asked_again(tmp_path, monkeypatch):
    asked = []

    def fault(node, message):
        if node == 1 and message.metadata.message_type == "query":
            asked.append(node)
            return "lost" if len(asked) == 1 else None
        return None

    now = [0.0]  # every call of the clock adds an hour
    for room in ("membership", "messages"):
        monkeypatch.setattr(f"covary.flower.{room}.time", FastClock(now))
    deploy(tmp_path, LoopbackGrid(jax_apps(tmp_path, parts()), fault), cv.scaffold(0.3), 1, patience=1e9)
    assert len(asked) == 2


class FastClock:
    def __init__(self, now):
        self.now = now

    def monotonic(self):
        self.now[0] += 40.0
        return self.now[0]

    def sleep(self, seconds):
        self.now[0] += seconds


# Machines fail


def test_lost_messages_leave_the_rest_right(tmp_path):
    rng = np.random.default_rng(0)

    def fault(node, message):
        return rng.choice(["lost", "dropped", None, None]) if message.metadata.message_type == "train" else None

    deploy(tmp_path, LoopbackGrid(jax_apps(tmp_path, parts()), fault), cv.scaffold(0.3), 12, round_timeout=0.05)
    found = audited(tmp_path)
    assert found.epoch == 0
    assert found.gap < 1e-12


class Died(Exception):
    pass


@pytest.mark.parametrize("name", ["scaffold", "dane"])
def test_a_killed_server_resumes_with_the_same_numbers(name, tmp_path):
    algorithm, data = ALGORITHMS[name], parts()
    calls, deadly = 0, {9, 17, 26, 38}

    def fault(node, message):
        nonlocal calls
        calls += 1
        if calls in deadly:
            raise Died
        return None

    grid, resume = LoopbackGrid(jax_apps(tmp_path, data), fault), False
    for _ in range(10):
        try:
            run = deploy(tmp_path, grid, algorithm, 6, resume=resume, clients_per_round=2)
            break
        except Died:
            resume = (tmp_path / "server" / "ledger").exists()
    np.testing.assert_allclose(run.x, simulated(algorithm, data, 6, clients_per_round=2).x, rtol=0, atol=1e-12)
    assert run.history["round"].tolist() == [1, 2, 3, 4, 5, 6]
    assert not np.isnan(run.history["loss"]).any()


def test_a_deleted_disk_starts_an_epoch_and_c_is_the_mean_again(tmp_path, capsys):
    trained = 0

    def fault(node, message):
        nonlocal trained
        trained += node == 0 and message.metadata.message_type == "train"
        if trained == 3 and node == 2:
            shutil.rmtree(tmp_path / "state2", ignore_errors=True)
        return None

    run = deploy(tmp_path, LoopbackGrid(jax_apps(tmp_path, parts()), fault), cv.scaffold(0.3), 8)
    found = audited(tmp_path)
    assert (found.epoch, found.gap < 1e-12) == (1, True)
    assert run.history["epoch"].tolist() == [0, 0, 0, 1, 1, 1, 1, 1]
    assert "Epoch 1 begins" in capsys.readouterr().out


def test_nodes_that_join_late_and_that_leave_for_good(tmp_path, capsys):
    data = parts()
    grid = LoopbackGrid(jax_apps(tmp_path, data[:3]))
    deploy(tmp_path, grid, cv.scaffold(0.3), 3)
    grid.apps |= {3: jax_apps(tmp_path, data)[3]}
    deploy(tmp_path, grid, cv.scaffold(0.3), 4, resume=True)
    joined = audited(tmp_path)
    assert (joined.members, joined.epoch, joined.gap < 1e-12) == (4, 0, True)
    grid.offline = {1}
    deploy(tmp_path, grid, cv.scaffold(0.3), 8, resume=True, forget_after=2)
    left = audited(tmp_path)
    assert (left.members, left.epoch, left.gap < 1e-12) == (3, 1, True)
    assert "left for good" in capsys.readouterr().out


def test_too_few_replies_abandon_a_round_and_count_nothing(tmp_path, capsys):
    lost = set(range(8, 14))
    calls = 0

    def fault(node, message):
        nonlocal calls
        calls += 1
        return "dropped" if calls in lost else None

    grid = LoopbackGrid(jax_apps(tmp_path, parts()), fault)
    run = deploy(tmp_path, grid, cv.scaffold(0.3), 3, min_replies=N, round_timeout=0.2, eval_every=0)
    np.testing.assert_allclose(run.x, simulated(cv.scaffold(0.3), parts(), 3).x, rtol=0, atol=1e-12)
    assert "too few" in capsys.readouterr().out


def test_a_server_that_waits_in_vain_reports_the_reason(tmp_path):
    grid = LoopbackGrid(jax_apps(tmp_path, parts()))
    with pytest.raises(CovaryError, match=r"4 nodes are online .* 5 are needed"):
        deploy(tmp_path, grid, cv.scaffold(0.3), 3, min_clients=5, patience=0.5)


def test_a_warm_start_survives_a_lost_message(tmp_path):
    lost = set()

    def fault(node, message):
        first = message.metadata.message_type == "train" and node not in lost
        lost.update({node} if first else ())
        return "lost" if first else None

    options = {"warm_start": True, "round_timeout": 0.2, "eval_every": 0}
    run = deploy(tmp_path, LoopbackGrid(jax_apps(tmp_path, parts()), fault), cv.scaffold(0.3), 3, **options)
    np.testing.assert_allclose(run.x, simulated(cv.scaffold(0.3), parts(), 3, warm_start=True).x, atol=1e-12)


def test_a_warm_start_does_not_wait_for_silent_nodes(tmp_path):
    def fault(node, message):
        return "dropped" if node == 2 and message.metadata.message_type == "train" else None

    options = {"warm_start": True, "clients_per_round": 2, "min_replies": 2, "round_timeout": 0.2, "eval_every": 0}
    run = deploy(tmp_path, LoopbackGrid(jax_apps(tmp_path, parts()[:3])), cv.scaffold(0.3), 4, **options)
    assert run.rounds == 4
    options |= {"checkpoint": tmp_path / "again", "min_replies": 1, "clients_per_round": 1}
    mute = deploy(tmp_path, LoopbackGrid(jax_apps(tmp_path, parts()[:3]), fault), cv.scaffold(0.3), 6, **options)
    assert mute.rounds == 6
    assert np.linalg.norm(mute.x) > 0


def test_fewer_members_than_clients_per_round_do_not_end_a_run(tmp_path):
    grid = LoopbackGrid(jax_apps(tmp_path, parts()))
    deploy(tmp_path, grid, cv.scaffold(0.3), 2, clients_per_round=4)
    grid.offline = {1}
    options = {"clients_per_round": 4, "forget_after": 1, "resume": True}
    assert deploy(tmp_path, grid, cv.scaffold(0.3), 5, **options).history["cohort"][-1].tolist() == [0, 1, 2, -1]


def test_a_table_that_grew_changes_the_steps_not_the_membership(tmp_path):
    data, options = parts(), {"local_steps": None, "local_epochs": 1}
    grid = LoopbackGrid(jax_apps(tmp_path, data))
    deploy(tmp_path, grid, cv.scaffold(0.3), 2, **options)
    data[1] = tuple(np.concatenate([a, a]) for a in data[1])
    grid.apps = jax_apps(tmp_path, data)
    run = deploy(tmp_path, grid, cv.scaffold(0.3), 5, resume=True, **options)
    assert run.history["cohort"][-1].tolist() == [0, 1, 2, 3]
    assert audited(tmp_path).gap < 1e-12


def test_a_damaged_journal_is_a_lost_one(tmp_path):
    grid = LoopbackGrid(jax_apps(tmp_path, parts()))
    deploy(tmp_path, grid, cv.scaffold(0.3), 2)
    (journal,) = (tmp_path / "state1").glob("*/journal")
    content = bytearray(journal.read_bytes())
    content[-1] ^= 1
    journal.write_bytes(content)
    deploy(tmp_path, grid, cv.scaffold(0.3), 5, resume=True)
    assert audited(tmp_path).epoch == 1


def test_an_old_copy_of_a_checkpoint_takes_over_in_a_new_epoch(tmp_path):
    grid = LoopbackGrid(jax_apps(tmp_path, parts()))
    deploy(tmp_path, grid, cv.scaffold(0.3), 2)
    shutil.copytree(tmp_path / "server", tmp_path / "copy")
    shutil.rmtree(tmp_path / "state0")
    deploy(tmp_path, grid, cv.scaffold(0.3), 5, resume=True)
    assert audited(tmp_path).epoch == 1
    shutil.rmtree(tmp_path / "server")
    shutil.move(tmp_path / "copy", tmp_path / "server")  # the newer one is lost
    deploy(tmp_path, grid, cv.scaffold(0.3), 7, resume=True)
    assert audited(tmp_path).epoch == 2


def test_a_checkpoint_older_than_every_upload_takes_over_too(tmp_path):
    saved = []

    def fault(node, message):
        if message.metadata.message_type == "train" and not saved:
            saved.append(shutil.copytree(tmp_path / "server", tmp_path / "copy"))
        return None

    grid = LoopbackGrid(jax_apps(tmp_path, parts()), fault)
    deploy(tmp_path, grid, cv.scaffold(0.3), 3)
    shutil.rmtree(tmp_path / "server")
    shutil.move(tmp_path / "copy", tmp_path / "server")
    assert deploy(tmp_path, grid, cv.scaffold(0.3), 4, resume=True).history["round"].tolist() == [1, 2, 3, 4]
    assert audited(tmp_path).epoch == 1


def test_the_older_of_two_servers_is_fenced_off(tmp_path):
    started = []

    def fault(node, message):
        if message.metadata.group_id == "3" and not started:
            started.append(True)
            shutil.copytree(tmp_path / "server", tmp_path / "copy", ignore=shutil.ignore_patterns("lock"))
            deploy(tmp_path, grid, cv.scaffold(0.3), 5, resume=True, checkpoint=tmp_path / "copy")
        return None

    grid = LoopbackGrid(jax_apps(tmp_path, parts()), fault)
    with pytest.raises(CovaryError, match="another server is running"):
        deploy(tmp_path, grid, cv.scaffold(0.3), 9)


def test_a_torn_first_line_of_the_history_is_written_again(tmp_path):
    grid = LoopbackGrid(jax_apps(tmp_path, parts()))
    deploy(tmp_path, grid, cv.scaffold(0.3), 1)
    (tmp_path / "server" / "results.jsonl").write_text('{"round": 1, "epo')
    run = deploy(tmp_path, grid, cv.scaffold(0.3), 2, resume=True)
    assert run.history["round"].tolist() == [1, 2]
    assert not np.isnan(run.history["loss"]).any()


def test_lockstep_rejects_unequal_steps(tmp_path):
    grid = LoopbackGrid(jax_apps(tmp_path, parts(sizes=(8, 12, 20))))
    with pytest.raises(CovaryError, match="from 2 to 5"):
        deploy(tmp_path, grid, cv.vrl_sgd(0.1), 1, local_steps=None, local_epochs=1)


# What leaves a node


@pytest.mark.parametrize("apps", [jax_apps, torch_apps])
@pytest.mark.parametrize("option", ["I", "II"])
def test_clipped_and_noised_before_it_is_kept_or_sent(apps, option, tmp_path):
    norms = []

    def fault(node, message):
        def look(reply):
            if "up" in reply.content.array_records:
                norms.append(np.linalg.norm(reply.content.array_records["up"]["dy"].numpy()))
            return reply

        return look

    model = MODEL if apps is jax_apps else torch_linear()
    grid = LoopbackGrid(apps(tmp_path / "clip", parts(), clip=0.01), fault)
    deploy(tmp_path / "clip", grid, cv.scaffold(0.3, 1.0, option), 3, model)
    np.testing.assert_allclose(norms, 0.01, rtol=1e-9)  # each would have moved further
    assert audited(tmp_path / "clip").gap < 1e-12
    noisy = deploy(
        tmp_path, LoopbackGrid(apps(tmp_path, parts(), clip=0.01, noise=1.0)), cv.scaffold(0.3, 1.0, option), 3, model
    )
    assert audited(tmp_path).gap < 1e-10
    assert np.isnan(noisy.history["drift"]).all()  # a number that was not clipped is not sent


def test_a_node_that_clips_reports_no_loss_by_default(tmp_path):
    for said, seen in ((None, False), (True, True)):
        apps = jax_apps(tmp_path / str(said), parts(), clip=0.1, evaluate=said)
        run = deploy(tmp_path / str(said), LoopbackGrid(apps), cv.scaffold(0.3), 1)
        assert ("loss" in run.history) is seen


def test_noise_without_a_clip_is_rejected():
    with pytest.raises(CovaryError, match="clip must be set if noise is; got None"):
        client_app(cv.lower_bound(G=1), noise=1.0)


# Checkpoints and settings


def test_a_checkpoint_is_not_overwritten_nor_resumed_with_another_run(tmp_path):
    grid = LoopbackGrid(jax_apps(tmp_path, parts()))
    done = deploy(tmp_path, grid, cv.scaffold(0.3), 2)
    with pytest.raises(CovaryError, match="resume=true"):
        deploy(tmp_path, grid, cv.scaffold(0.3), 2)
    with pytest.raises(CovaryError, match=r"algorithm = scaffold\(eta_l=0.3.*eta_l=0.1"):
        deploy(tmp_path, grid, cv.scaffold(0.1), 4, resume=True)
    with pytest.raises(CovaryError, match="no checkpoint to resume"):
        deploy(tmp_path / "empty", grid, cv.scaffold(0.1), 4, resume=True)
    again = deploy(tmp_path, grid, cv.scaffold(0.3), 2, resume=True)
    np.testing.assert_array_equal(again.x, done.x)


def test_two_servers_on_one_checkpoint_are_rejected(tmp_path):
    def fault(node, message):
        with pytest.raises(CovaryError, match="in use by process"):
            deploy(tmp_path, grid, cv.scaffold(0.3), 2, resume=True)
        return None

    grid = LoopbackGrid(jax_apps(tmp_path, parts()), fault)
    deploy(tmp_path, grid, cv.scaffold(0.3), 1)


def test_a_damaged_server_checkpoint_is_reported(tmp_path):
    grid = LoopbackGrid(jax_apps(tmp_path, parts()))
    deploy(tmp_path, grid, cv.scaffold(0.3), 1)
    ledger = tmp_path / "server" / "ledger"
    content = bytearray(ledger.read_bytes())
    content[-3] ^= 1
    ledger.write_bytes(content)
    with pytest.raises(CovaryError, match="is damaged"):
        deploy(tmp_path, grid, cv.scaffold(0.3), 2, resume=True)


def test_a_target_ends_the_run(tmp_path):
    run = deploy(tmp_path, LoopbackGrid(jax_apps(tmp_path, parts())), cv.scaffold(0.3), 50, target="loss <= 1.1")
    assert run.reached == run.rounds < 50
    assert run.history["loss"][-1] <= 1.1 < run.history["loss"][-2]


@pytest.mark.parametrize(
    "wrong",
    [
        {"weights": "mine"},
        {"resume": "false"},
        {"clients_per_round": 1.5},
        {"target": "soon"},
        {"rounds": 0},
        {"eval_every": -1},
        {"spelling": 1},
        {"patience": 0},
    ],
)
def test_settings_are_checked_before_the_run(wrong):
    with pytest.raises(CovaryError):
        server_app(cv.scaffold(0.1), MODEL, **{"rounds": 3, **wrong})


def test_an_app_is_written_and_audited_from_the_command_line(tmp_path):
    shell = CliRunner()
    assert shell.invoke(cli, ["new-app", str(tmp_path / "my-hospital"), "--torch"]).exit_code == 0
    assert (tmp_path / "my-hospital" / "my_hospital" / "client.py").is_file()
    deploy(tmp_path, LoopbackGrid(jax_apps(tmp_path, parts())), cv.scaffold(0.3), 2)
    states = [str(path) for path in sorted(tmp_path.glob("state*"))]
    good = shell.invoke(cli, ["audit", str(tmp_path / "server"), *states])
    assert good.exit_code == 0
    assert "c = mean(c_i)" in good.stdout
    bad = shell.invoke(cli, ["audit", str(tmp_path / "server"), *states[1:], "--json"])
    assert bad.exit_code == 1
    assert '"holds": false' in bad.stdout
