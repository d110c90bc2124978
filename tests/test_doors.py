"""Attacks on a deployment: a curious server, a lying node, a careless app, a machine that is gone."""

from __future__ import annotations

import contextlib
import itertools
import os
import stat
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Message
from helpers import HANGS
from loopback import LoopbackGrid
from typer.testing import CliRunner

import covary as cv
from covary.cli import app as cli
from covary.draws import order_of_epoch
from covary.errors import CovaryError
from covary.flower import Limits, Settings, audit, client_app, outcome, serve, torch_client_app
from covary.flower.journal import Order
from covary.flower.model import start_of
from covary.flower.refusals import refusal
from covary.flower.start import spec_of
from covary.flower.wire import facts_of, pack

D, CLASSES = 5, 3
MODEL = cv.models.logistic_regression(D, CLASSES)
OPEN = Limits(smallest_batch=1, whole_passes=False, private_batches=False)


def parts(sizes=(40, 40, 40, 40), shift=1.0):
    rng = np.random.default_rng(0)
    return [(rng.normal(size=(n, D)) + shift * i, rng.integers(0, CLASSES, n)) for i, n in enumerate(sizes)]


def grid_of(folder: Path, data: Any, fault: Any = None, **options: Any) -> LoopbackGrid:
    apps = {}
    for i, part in enumerate(data):
        own = cv.supervised(MODEL, cv.FederatedData.from_clients([part]))
        options = {"limits": Limits(private_batches=False), **options}  # the same numbers every time
        apps[i] = (client_app(own, state=folder / f"state{i}", **options), {"partition-id": i})
    return LoopbackGrid(apps, fault)


def deploy(folder: Path, grid: Any, algorithm: Any, rounds: int = 4, model: Any = MODEL, **settings: Any) -> Any:
    defaults = {"checkpoint": folder / "server", "min_clients": len(grid.apps), "local_epochs": 1, "batch_size": 8}
    if "local_steps" in settings:
        del defaults["local_epochs"]
    return serve(grid, algorithm, model, Settings(rounds, **{**defaults, "eval_every": 0, **settings}))


def upload(change: Callable[[dict[str, np.ndarray]], dict[str, np.ndarray]]) -> Callable[[Message], Message]:
    """A reply with another upload."""

    def fault(reply: Message) -> Message:
        record = reply.content.array_records.get("up", {})
        if record:
            up = change({name: array.numpy().copy() for name, array in record.items()})
            reply.content = pack(facts_of(reply), up=up, buffers={})
        return reply

    return fault


# Seeds: a loader's order and dropout


class Seen:
    """A module, a loss and a loader that record the rows and dropout masks they see."""

    def __init__(self, rows: int, own_generator: str = ""):
        x = torch.arange(rows, dtype=torch.float64)[:, None].repeat(1, D)
        self.data, self.own_generator = (
            torch.utils.data.TensorDataset(x, torch.zeros(rows, dtype=torch.long)),
            own_generator,
        )
        self.rows: list[int] = []
        self.masks: list[tuple[float, ...]] = []

    def module(self, context: Any) -> torch.nn.Module:
        torch.manual_seed(0)  # as in many scripts
        return torch.nn.Linear(D, CLASSES, dtype=torch.float64)

    def loader(self, context: Any) -> Any:
        torch.manual_seed(0)
        own = torch.Generator().manual_seed(0) if self.own_generator else None
        if self.own_generator == "batch sampler":
            shuffled = torch.utils.data.RandomSampler(self.data, generator=own)
            return torch.utils.data.DataLoader(
                self.data, batch_sampler=torch.utils.data.BatchSampler(shuffled, 10, False)
            )
        return torch.utils.data.DataLoader(self.data, batch_size=10, shuffle=True, generator=own)

    def loss(self, module: Any, batch: Any) -> Any:
        x, y = batch
        self.rows += x[:, 0].int().tolist()
        self.masks.append(tuple(torch.nn.functional.dropout(torch.ones(16)).tolist()))
        return torch.nn.functional.cross_entropy(module(0 * x), y)

    def run(self, folder: Path, seed: int = 0) -> Seen:
        free = Limits(whole_passes=False, private_batches=False)
        apps = {
            i: (torch_client_app(self.module, self.loss, self.loader, state=folder / f"state{i}", limits=free), {})
            for i in range(2)
        }
        start = torch.nn.Linear(D, CLASSES, dtype=torch.float64)
        deploy(folder, LoopbackGrid(apps), cv.scaffold(0.1), 30, start, local_steps=1, batch_size=None, seed=seed)
        return self


@pytest.mark.parametrize("own_generator", ["", "loader", "batch sampler"])
def test_a_shuffled_loader_sees_all_its_rows_though_the_app_seeds_itself(own_generator, tmp_path):
    """Thirty rounds of ten rows of 300: the same order every time reaches 10 rows, chance about 190 at each node."""
    seen = Seen(300, own_generator).run(tmp_path)
    assert len(set(seen.rows)) > 200
    assert len(set(seen.masks)) == len(seen.masks) == 60  # another dropout mask for each node and round


def test_orders_and_dropout_come_again_with_the_seed_and_leave_the_process_alone(tmp_path):
    torch.manual_seed(7)
    before = torch.get_rng_state(), np.random.get_state()[1].tolist()
    first, again, other = (Seen(300).run(tmp_path / str(k), seed) for k, seed in enumerate((1, 1, 2)))
    assert (first.rows, first.masks) == (again.rows, again.masks)
    assert first.rows != other.rows
    assert np.random.get_state()[1].tolist() == before[1]


def test_a_function_that_builds_the_model_is_seeded_by_the_run(tmp_path):
    def network():
        return torch.nn.Linear(D, CLASSES, dtype=torch.float64)

    def start(seed: int, folder: str) -> Any:
        data = tuple(map(torch.tensor, parts()[0]))
        apps = {0: (torch_client_app(network(), lambda m, b: m(b[0]).sum(), data, state=tmp_path / folder), {})}
        return deploy(tmp_path / folder, LoopbackGrid(apps), cv.fedavg(1e-9), 1, network, seed=seed).x

    first = start(1, "a")
    np.testing.assert_allclose(first, start(1, "b"), rtol=1e-12)
    assert np.abs(first - start(2, "c")).max() > 0.01


# Errors stay on the node


SECRET = "patient Ada Lovelace, HIV positive"


@pytest.mark.parametrize("where", ["problem", "loss", "exit", "state"])
def test_no_text_of_an_error_leaves_a_node(where, tmp_path, capsys, caplog):
    (x, y), *others = parts()
    replies = []

    def keep(node: int, message: Message) -> Any:
        return lambda reply: replies.append(reply) or reply

    def problem(context: Any) -> Any:
        if where == "problem":
            raise ValueError(f"could not convert string to float: {SECRET!r}")
        if where == "exit":
            raise SystemExit(SECRET)
        return cv.supervised(Model, cv.FederatedData.from_clients([(x, y)]))

    class Model:
        init = staticmethod(MODEL.init)
        metrics = staticmethod(MODEL.metrics)

        @staticmethod
        def loss(params: Any, batch: Any) -> Any:
            if where == "loss":
                raise KeyError(SECRET)
            return MODEL.loss(params, batch)

    state = tmp_path / SECRET if where == "state" else tmp_path / "state0"
    if where == "state":
        state.write_text("a file, not a folder")
    grid = grid_of(tmp_path, [(x, y), *others], keep)
    grid.apps[0] = (client_app(problem, state=state), {})
    run = deploy(tmp_path, grid, cv.scaffold(0.3), 2, min_clients=3)
    assert run.rounds == 2
    everything = "".join(str(reply.content) + str(reply) for reply in replies) + capsys.readouterr().out
    assert "Ada" not in everything
    assert str(tmp_path / "state0") not in everything
    assert "See reference" in everything
    assert SECRET in caplog.text  # in the node's own log, under the reference that the server has
    reference = next(f["reference"] for r in replies if "refused" in (f := facts_of(r)))
    assert reference in caplog.text


# Limits of a node


def rebuilt(gradients: np.ndarray, rows: np.ndarray) -> int:
    """How many rows of the table are among x = dW / db of these gradients, to 1e-4."""
    b, W = gradients[:, :CLASSES], gradients[:, CLASSES:].reshape(len(gradients), CLASSES, D)  # b before w
    strongest = np.abs(b).argmax(1)
    found = np.stack(
        [W[k, s] / b[k, s] for k, s in enumerate(strongest) if abs(b[k, s]) > 1e-12] or [np.full(D, np.inf)]
    )
    return sum(bool((np.abs(found - row).max(1) < 1e-4).any()) for row in rows)


def attack(folder: Path, batch: int, steps: int, limits: Limits) -> int:
    """A server that takes 120 uploads at nearly one x and computes the gradient of each single row from them."""
    eta, uploads, orders = 1e-6, [], []
    ((x, y),) = parts(sizes=(40,))

    def keep(node: int, message: Message) -> Any:
        def look(reply: Message) -> Message:
            if "up" in reply.content.array_records:
                task = facts_of(message)["task"]
                orders.append(order_of_epoch(task["seed"], task["round"], 1, task["number"], 0, 40))
                uploads.append(reply.content.array_records["up"]["dy"].numpy())
            return reply

        return look

    grid = grid_of(folder, [(x, y)], keep, limits=limits)
    with contextlib.suppress(CovaryError):  # the node does not take part
        deploy(folder, grid, cv.fedavg(eta), 120, local_steps=steps, batch_size=batch, patience=0.1)
    if not uploads:
        return 0
    seen = np.zeros((len(uploads), 40))
    for k, order in enumerate(orders):
        for step in range(steps):
            chosen = order[step * batch : min((step + 1) * batch, 40)]
            seen[k, chosen] += 1 / len(chosen)
    gradients, *_ = np.linalg.lstsq(seen, -np.stack(uploads) / eta, rcond=None)
    return rebuilt(gradients, x)


def test_rows_cannot_be_rebuilt_from_the_uploads_that_the_default_limits_allow(tmp_path):
    assert attack(tmp_path / "open 1", 1, 1, OPEN) >= 32  # the attack works without limits
    assert attack(tmp_path / "open 8", 8, 1, OPEN) >= 32  # and with larger batches too
    assert attack(tmp_path / "rows", 1, 1, Limits()) == 0
    assert attack(tmp_path / "one pass of rows", 1, 40, Limits()) == 0
    assert attack(tmp_path / "a part of a pass", 8, 1, Limits()) == 0
    assert attack(tmp_path / "whole passes", 8, 5, Limits()) == 0


def test_what_the_defaults_stop_beyond_that_is_private_batches(tmp_path):
    known = Limits(private_batches=False)
    assert attack(tmp_path / "known", 16, 3, known) >= 10  # 16, 16 and 8 rows weigh differently
    assert attack(tmp_path / "private", 16, 3, Limits()) == 0
    assert saturated(tmp_path / "known and saturated", known) >= 32
    assert saturated(tmp_path / "private and saturated", Limits()) == 0


def saturated(folder: Path, limits: Limits) -> int:
    """A hostile server: its c carries y from where class 0 is certain to where class 1 is, before the step it chooses.

    Two such orders differ in one batch alone, by the mean of its rows.
    """
    ((x, y),) = parts(sizes=(40,))
    problem = cv.supervised(MODEL, cv.FederatedData.from_clients([(x, y)]))
    grid = LoopbackGrid({0: (client_app(problem, state=folder, limits=limits), {})})
    scaffold = cv.scaffold(1.0)
    start, _, form, *_ = start_of(MODEL, 0)
    training = {"local_steps": None, "local_epochs": 1, "batch_size": 8}
    task = {"algorithm": spec_of(scaffold), "training": training, "round": 1, "trip": 1, "warm": False}
    orders = itertools.count()

    def upload_of(seed: int, step: int) -> np.ndarray:
        down, c = np.zeros(len(start)), np.zeros(len(start))
        down[1], down[2], c[1] = 2000 * (0.5 - step), -1e6, -2000  # b comes first
        facts = {"form": form, "about": "", "task": {**task, "seed": seed, "steps": None, "number": 0, "cohort": 1}}
        facts["order"] = Order("0" * 32, 0, next(orders), "token", "", "member")._asdict()
        (sent,) = grid.push_messages([Message(pack(facts, down={"x": down, "c": c}, buffers={}), 0, "train")])
        return grid.replies[sent].content.array_records["up"]["dy"].numpy()

    means, batches = [], []
    for seed in range(12):
        uploads = [upload_of(seed, step) for step in range(6)]
        order = order_of_epoch(seed, 1, 1, 0, 0, 40)
        for step in range(5):
            moved = (uploads[step + 1] - uploads[step])[CLASSES:].reshape(CLASSES, D)
            means.append(moved[1])
            batches.append(np.isin(np.arange(40), order[8 * step : 8 * step + 8]) / 8)
    rows, *_ = np.linalg.lstsq(np.stack(batches), np.stack(means), rcond=None)
    return int((np.abs(rows - x).max(1) < 1e-4).sum())


@pytest.mark.parametrize(
    ("limit", "limits", "settings"),
    [
        ("algorithms", Limits(algorithms=("fedavg",)), {}),
        ("smallest_batch", Limits(), {"batch_size": 4}),
        ("smallest_batch", Limits(), {"batch_size": 13}),  # the last batch of a pass has one row
        ("smallest_batch", Limits(smallest_batch=41), {"batch_size": None}),
        ("whole_passes", Limits(), {"local_steps": 7}),
        ("most_steps", Limits(), {"local_steps": 10_000_000}),
        ("fewest_steps", Limits(fewest_steps=10), {}),
        ("smallest_cohort", Limits(smallest_cohort=3), {"clients_per_round": 2}),
        ("largest_message", Limits(largest_message=10), {}),
    ],
)
def test_an_order_beyond_a_limit_is_rejected_by_name_before_any_work(limit, limits, settings, tmp_path, capsys):
    with pytest.raises(CovaryError):
        deploy(tmp_path, grid_of(tmp_path, parts(), limits=limits), cv.scaffold(0.3), 1, patience=0.1, **settings)
    assert f"BeyondLimit ({limit}): its owner does not allow it." in capsys.readouterr().out
    assert not list(tmp_path.glob("state*/*/journal"))


def test_limits_on_orders_and_jobs_hold_across_jobs_and_restarts(tmp_path, capsys):
    limits = Limits(most_orders=5, most_jobs=2)
    for job in range(2):
        deploy(tmp_path / str(job), grid_of(tmp_path, parts(), limits=limits), cv.scaffold(0.3), 2)
    deploy(tmp_path / "0", grid_of(tmp_path, parts(), limits=limits), cv.scaffold(0.3), 3, resume=True)
    with pytest.raises(CovaryError):
        deploy(
            tmp_path / "1", grid_of(tmp_path, parts(), limits=limits), cv.scaffold(0.3), 3, resume=True, patience=0.1
        )
    assert "BeyondLimit (most_orders)" in capsys.readouterr().out
    more = Limits(most_orders=50, most_jobs=2)
    with pytest.raises(CovaryError):
        deploy(tmp_path / "2", grid_of(tmp_path, parts(), limits=more), cv.scaffold(0.3), 1, patience=0.1)
    assert "BeyondLimit (most_jobs)" in capsys.readouterr().out


def test_a_mistyped_limit_is_rejected_and_an_apps_own_error_name_stays_on_the_node(tmp_path, capsys, caplog):
    with pytest.raises(CovaryError, match="spelled smallest-batch"):
        Limits().overridden({"smallest_batch": 33})
    assert refusal(type(SECRET, (Exception,), {})())["refused"] == "Exception"


def test_the_nodes_own_configuration_overrides_the_limits_of_its_app(tmp_path, capsys):
    grid = grid_of(tmp_path, parts())
    for i, (app, config) in grid.apps.items():
        grid.apps[i] = (app, {**config, "smallest-batch": 20})
    with pytest.raises(CovaryError):
        deploy(tmp_path, grid, cv.scaffold(0.3), 1, patience=0.1)
    assert "BeyondLimit (smallest_batch)" in capsys.readouterr().out


def test_a_states_folder_is_private_and_old_jobs_leave_it(tmp_path):
    state = tmp_path / "state0"
    state.mkdir(mode=0o755)
    deploy(tmp_path / "old", grid_of(tmp_path, parts()), cv.scaffold(0.3), 2)
    deploy(tmp_path / "older", grid_of(tmp_path, parts()), cv.scaffold(0.3), 2)
    for path in [state, *state.rglob("*")]:
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path
    first, second = sorted(state.glob("*/journal"), key=lambda path: path.stat().st_mtime)
    os.utime(first, (0, 0))
    deploy(tmp_path / "new", grid_of(tmp_path, parts()), cv.scaffold(0.3), 2)
    assert not first.parent.exists()
    assert second.is_file()


def test_two_nodes_on_one_state_folder_are_detected_and_named(tmp_path, capsys):
    grid = grid_of(tmp_path, parts())
    grid.apps[1] = (
        client_app(cv.supervised(MODEL, cv.FederatedData.from_clients([parts()[1]])), state=tmp_path / "state0"),
        {},
    )
    run = deploy(tmp_path, grid, cv.scaffold(0.3), 6)
    assert run.history["epoch"].tolist() == [0] * 6  # it starts no epoch
    assert "SharedState: its state folder belongs to another node" in capsys.readouterr().out
    assert audit(tmp_path / "server", sorted(tmp_path.glob("state*"))).holds


# Uploads that are too large


def test_a_poisoned_upload_is_seen_and_not_counted(tmp_path, capsys):
    """One upload in four times -10: loss 76 instead of 1.0, before uploads were screened."""
    data = parts(shift=0.3)

    def poison(node: int, message: Message) -> Any:
        return upload(lambda up: {name: -10 * v for name, v in up.items()}) if node == 1 else None

    runs = {
        name: deploy(
            tmp_path / name, grid_of(tmp_path / name, data, fault), cv.scaffold(0.3), 20, eval_every=20, **rest
        )
        for name, fault, rest in (
            ("honest", None, {}),
            ("poisoned", poison, {}),
            ("unscreened", poison, {"screen": None}),
        )
    }
    loss = {name: run.history["loss"][-1] for name, run in runs.items()}
    assert loss["poisoned"] < 1.05 * loss["honest"]
    assert loss["unscreened"] > 5 * loss["honest"]
    assert runs["poisoned"].history["left_out"].tolist() == [1] * 20
    assert runs["honest"].history["left_out"].tolist() == [0] * 20
    first = runs["poisoned"].history["uploads"][0][0]
    assert (first["field"], first["members"], first["left_out"]) == ("dy", [0, 1, 2, 3], [1])
    assert first["norm"][1] > 5 * np.median(first["norm"])
    assert first["cosine"][1] == min(first["cosine"]) < 0
    assert "its upload has" in capsys.readouterr().out
    assert "in 20 of 20 rounds" in outcome(tmp_path / "poisoned" / "server").why
    cv.write_report(tmp_path / "report.html", runs)  # the report of a deployed run
    rest = [tmp_path / "poisoned" / f"state{i}" for i in (0, 2, 3)]
    assert audit(tmp_path / "poisoned" / "server", rest).holds  # c is the mean, and the liar's c_i is zero in it


@pytest.mark.parametrize("option", ["I", "II"])
def test_large_numbers_in_any_field_are_not_counted(option, tmp_path):
    def poison(node: int, message: Message) -> Any:
        return (
            upload(lambda up: up | {list(up)[-1]: np.full_like(list(up.values())[-1], 9.99e5)}) if node == 1 else None
        )

    run = deploy(tmp_path, grid_of(tmp_path, parts(), poison), cv.scaffold(0.3, option=option), 5)
    assert np.linalg.norm(run.x) < 100
    assert np.linalg.norm(run.server.c) < 100
    assert audit(tmp_path / "server", [tmp_path / f"state{i}" for i in (0, 2, 3)]).holds


def test_buffers_are_screened_too_and_no_variance_is_negative(tmp_path, capsys):
    def network() -> torch.nn.Module:
        norm = torch.nn.BatchNorm1d(D, dtype=torch.float64)
        return torch.nn.Sequential(norm, torch.nn.Linear(D, CLASSES, dtype=torch.float64))

    def spoil(node: int, message: Message) -> Any:
        def change(reply: Message) -> Message:
            vectors = {
                group: {name: array.numpy().copy() for name, array in record.items()}
                for group, record in reply.content.array_records.items()
            }
            if vectors.get("buffers"):
                vectors["buffers"]["0.running_var"] += 9e5 if node == 1 else -50
                reply.content = pack(facts_of(reply), **vectors)
            return reply

        return change if node < 2 else None

    apps = {}
    for i, part in enumerate(parts(shift=0, sizes=(40,) * 5)):
        loss = lambda module, batch: torch.nn.functional.cross_entropy(module(batch[0]), batch[1])  # noqa: E731
        own = tuple(map(torch.tensor, part))
        apps[i] = (torch_client_app(network(), loss, own, state=tmp_path / f"state{i}"), {"partition-id": i})
    run = deploy(tmp_path, LoopbackGrid(apps, spoil), cv.scaffold(0.1), 3, network)
    assert run.history["cohort"].tolist() == [[2, 3, 4]] * 3
    assert "its upload has a variance below zero" in capsys.readouterr().out


def test_drift_is_no_target():
    with pytest.raises(CovaryError, match="A single node can claim any drift"):
        Settings(3, target="drift <= 1e-6")


def test_a_claim_to_take_many_steps_does_not_pass_the_screen(tmp_path):
    def lie(node: int, message: Message) -> Any:
        def claim(reply: Message) -> Message:
            if message.metadata.message_type == "query":
                reply.content = pack(facts_of(reply) | {"steps": 2**31 - 1})
                return reply
            return upload(lambda up: {name: 1000 * v for name, v in up.items()})(reply)

        return claim if node == 1 else None

    run = deploy(tmp_path, grid_of(tmp_path, parts(), lie), cv.fedavg(0.3), 3)
    assert run.history["left_out"].tolist() == [1, 1, 1]


def test_a_node_that_joins_late_or_takes_more_steps_is_no_outlier(tmp_path):
    """The newcomer's first upload has 19 times the median norm of the others, whose c_i have settled."""
    grid = grid_of(tmp_path, parts(sizes=(40, 40, 40, 40, 400, 40), shift=0.3))
    late = grid.apps.pop(5)
    settings = {"batch_size": 20, "local_epochs": 5}
    deploy(tmp_path, grid, cv.scaffold(0.1), 40, **settings)
    grid.apps[5] = late
    run = deploy(tmp_path, grid, cv.scaffold(0.1), 44, resume=True, **settings)
    first = run.history["uploads"][40][0]
    assert first["norm"][5] > 10 * np.median(first["norm"])
    assert run.history["left_out"].sum() == 0
    assert run.history["cohort"][40].tolist() == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("algorithm", [cv.dane(0.3, mu=0.1), cv.mime(0.3), cv.feddyn(0.3), cv.fedavg(0.3)], ids=str)
def test_honest_nodes_pass_the_screen_and_both_exchanges_are_in_the_history(algorithm, tmp_path):
    run = deploy(tmp_path, grid_of(tmp_path, parts()), algorithm, 6)
    assert run.history["left_out"].sum() == 0
    trips = {record["trip"] for record in run.history["uploads"][-1]}
    assert trips == set(range(1, len(algorithm.exchanges) + 1))


def test_a_reply_with_a_huge_unexpected_record_is_not_decoded_nor_counted(tmp_path, capsys):
    def fat(node: int, message: Message) -> Any:
        def grow(reply: Message) -> Message:
            arrays = {name: array.numpy() for name, array in reply.content.array_records.get("up", {}).items()}
            if arrays:
                reply.content = pack(facts_of(reply), up=arrays, buffers={}, more={"zeros": np.zeros(10**6)})
            return reply

        return grow if node == 1 else None

    run = deploy(tmp_path, grid_of(tmp_path, parts(), fat), cv.scaffold(0.3), 2)
    assert run.history["cohort"].tolist() == [[0, 2, 3]] * 2
    assert "1 records that were not asked for" in capsys.readouterr().out


def test_one_nodes_claim_does_not_end_a_run(tmp_path, capsys):
    def boast(node: int, message: Message) -> Any:
        def lie(reply: Message) -> Message:
            reply.content = pack({"values": {"accuracy": 1.0, "loss": 0.0}, "tested": 2**31 - 1})
            return reply

        return lie if node == 1 and message.metadata.message_type == "evaluate" else None

    grid = grid_of(tmp_path, parts(shift=0), boast)
    run = deploy(tmp_path, grid, cv.scaffold(0.1), 3, eval_every=1, target="accuracy >= 0.99")
    assert run.reached is None
    assert run.history["accuracy"][-1] > 0.99  # the mean believes it
    assert "but only 1 of the 4 nodes meet it" in capsys.readouterr().out
    assert [value for _, value in run.history["by_node"][-1]["accuracy"]].count(1.0) == 1


# How a run ends


def test_the_outcome_of_a_run_and_the_exit_code_of_status(tmp_path, capsys):
    shell = CliRunner()
    deploy(tmp_path / "a", grid_of(tmp_path / "a", parts()), cv.scaffold(0.3), 3)
    assert outcome(tmp_path / "a" / "server").reached
    assert "covary: reached: 3 of 3 rounds are done" in capsys.readouterr().out
    done = shell.invoke(cli, ["status", str(tmp_path / "a" / "server")])
    assert (done.exit_code, "3 of 3 rounds" in done.stdout) == (0, True)

    with pytest.raises(CovaryError, match="seed"):
        deploy(tmp_path / "a", grid_of(tmp_path / "a", parts()), cv.scaffold(0.3), 3, resume=True, seed=1)
    assert shell.invoke(cli, ["status", str(tmp_path / "a" / "server")]).exit_code == 1  # of the last attempt

    class Died(BaseException):
        pass

    def die(node: int, message: Message) -> None:
        if message.metadata.group_id == "2":
            raise Died

    with pytest.raises(Died) as died:
        deploy(tmp_path / "b", grid_of(tmp_path / "b", parts(), die), cv.scaffold(0.3), 3)
    assert died.value.__notes__ == ["covary: stopped: 1 of 3 rounds are done."]
    found = outcome(tmp_path / "b" / "server")
    assert (found.state, found.rounds_done, found.rounds, found.reached) == ("stopped", 1, 3, False)
    assert shell.invoke(cli, ["status", str(tmp_path / "b" / "server")]).exit_code == 1

    (tmp_path / "b" / "server" / "outcome.json").write_text(
        '{"state": "running", "rounds": 3, "why": "", "when": "now"}'
    )
    assert outcome(tmp_path / "b" / "server").state == "killed"
    killed = shell.invoke(cli, ["status", str(tmp_path / "b" / "server"), "--json"])
    assert (killed.exit_code, '"state": "killed"' in killed.stdout) == (1, True)

    states = []
    grid = grid_of(tmp_path / "c", parts(), lambda *_: states.append(outcome(tmp_path / "c" / "server").state))
    deploy(tmp_path / "c", grid, cv.scaffold(0.3), 1)
    assert set(states) == {"running"}


def test_a_superlink_that_is_gone_ends_the_run_after_patience_and_frees_the_checkpoint(tmp_path, monkeypatch):
    monkeypatch.setattr("covary.flower.watch.LEAST", 0.2)
    gone = threading.Event()

    class Gone(LoopbackGrid):
        def get_nodes(self) -> Any:
            gone.wait(HANGS)  # as Flower's grid, which tries again without limit
            return []

    with pytest.raises(CovaryError, match=r"The SuperLink has not answered for 0\.2 s.*resume=true"):
        deploy(tmp_path, Gone({}), cv.scaffold(0.3), 2, min_clients=1, patience=0.1)
    gone.set()
    assert outcome(tmp_path / "server").state == "stopped"
    deploy(tmp_path, grid_of(tmp_path, parts()), cv.scaffold(0.3), 2, resume=True, patience=HANGS)
    assert outcome(tmp_path / "server").reached
