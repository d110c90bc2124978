"""Runs of PyTorch modules, and what is around them: stores, checkpoints, sweeps, memory, threads, logs and reports."""

import gc
import os
import signal
import subprocess
import sys
import threading
from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers import ROOT, wait_until
from torch_killed import outcome
from torch_problems import (
    EVEN,
    LINEAR,
    UNEVEN,
    Crash,
    D,
    batch_norm,
    both,
    crash_at,
    cross_entropy,
    dropout,
    hits,
    linear,
    network,
    problem,
    same,
    tensors,
)

import covary as cv
from covary.errors import DivergenceWarning, InvalidInput
from covary.runs.interrupt import Interrupted

CALL = {"rounds": 8, "clients_per_round": 3, "local_steps": 2, "batch_size": 4}


def run(ours=None, algorithm=None, **more):
    return cv.simulate(algorithm or cv.scaffold(0.1), ours or problem(), **CALL | more)


# Stores and checkpoints


@pytest.mark.parametrize("build", [linear, both])
@pytest.mark.parametrize("algorithm", [cv.scaffold(0.1), cv.feddyn(0.1)], ids=str)
def test_the_numbers_do_not_depend_on_the_store(build, algorithm, tmp_path):
    runs = [run(problem(build()), algorithm, store=s) for s in (None, "device", "host", "disk", tmp_path / "states")]
    for other in runs[1:]:
        same(other, runs[0])
    field = runs[0].clients._fields[0]
    assert sorted(path.name for path in (tmp_path / "states").iterdir()) == sorted([f"{field}.rows", "places.npy"])
    with pytest.raises(InvalidInput, match="does not overwrite"):
        run(problem(build()), algorithm, store=tmp_path / "states")


CRASHES = [
    (linear, EVEN, cv.scaffold(0.1), {"average": "uniform"}),
    (linear, UNEVEN, cv.scaffold(0.1, option="I"), {"warm_start": True, "weights": "examples"}),
    (both, EVEN, cv.mime(0.1), {"store": "disk"}),
    (dropout, EVEN, cv.feddyn(0.1), {"average": 0.2, "eval_every": 3}),
    (linear, EVEN, cv.vrl_sgd(0.1), {"clients_per_round": None}),
    (batch_norm, EVEN, cv.dane(0.1), {"store": "host"}),
]


@pytest.mark.parametrize(("build", "sizes", "algorithm", "more"), CRASHES)
@pytest.mark.parametrize("r", [1, 5])
def test_a_crash_in_any_round_is_resumed_bit_for_bit(build, sizes, algorithm, more, r, tmp_path):
    ours, expected = problem(build(), sizes), run(problem(build(), sizes), algorithm, **more)
    call = {"checkpoint": tmp_path, "checkpoint_every": 2, **more}
    with pytest.raises(Crash):
        run(ours, algorithm, **call, log=crash_at(r))
    seen = []
    resumed = run(ours, algorithm, **call, log=lambda number, values: seen.append(number))
    assert seen[0] == r - r % 2 + 1 if r > 1 else seen[0] == 1
    same(resumed, expected)
    if expected.average is not None:
        for name, values in expected.average.items():
            assert torch.equal(resumed.average[name], values), name
    seen.clear()
    same(run(ours, algorithm, **call, log=lambda number, values: seen.append(number)), expected)
    assert seen == []


def process(kind, folder, out, saves=None):
    """A process that does the work; it is killed when it has saved so many times. Whether it came to its end."""
    command = [sys.executable, str(ROOT / "tests" / "torch_killed.py"), kind, str(folder), str(out)]
    with out.with_suffix(".told").open("wb") as log:
        started = subprocess.Popen(command, stdout=log, stderr=log)
    seen = set()

    def saved():
        seen.update(str(path) for path in folder.rglob("round-*"))
        return started.poll() is not None or (saves is not None and len(seen) >= saves)

    try:
        wait_until(saved, f"{kind} ends, or has saved {saves} times")
    finally:
        started.kill()
        started.wait()
    assert started.returncode in (0, -signal.SIGKILL), out.with_suffix(".told").read_text()
    return started.returncode == 0


@pytest.mark.parametrize("kind", ["folder", "sweep"])
def test_a_killed_process_is_resumed_bit_for_bit(kind, tmp_path):
    expected = outcome(kind, str(tmp_path / "undisturbed"))
    given = kind, tmp_path / "checkpoints", tmp_path / "found.npz"
    assert not process(*given, saves=5)
    assert process(*given)
    with np.load(tmp_path / "found.npz") as found:
        assert set(found) == set(expected)
        for name, values in expected.items():
            if name != "control_error":  # a rounding error
                np.testing.assert_array_equal(found[name], values, err_msg=name)


def test_the_checkpoint_of_another_run_is_rejected(tmp_path):
    run(checkpoint=tmp_path)
    clients = tensors()
    clients[3][1][0] = (clients[3][1][0] + 1) % 3
    wider = torch.nn.Sequential(torch.nn.Linear(D, 4), torch.nn.Linear(4, 3)).double()
    softer = lambda module, batch: cross_entropy(module, batch) / 2  # noqa: E731
    for ours in (
        problem(loss=softer),
        problem(wider),
        problem(network()),
        problem(data=clients),
        problem(sizes=UNEVEN),
        problem(test=tensors()[0], metrics=hits),
        problem(network(torch.nn.Linear(D, D).requires_grad_(False))),
    ):
        with pytest.raises(InvalidInput, match="holds checkpoints of another run"):
            run(ours, checkpoint=tmp_path)
    for more in ({"seed": 1}, {"batch_size": 3}, {"algorithm": cv.scaffold(0.2)}, {"clients_per_round": 2}):
        with pytest.raises(InvalidInput, match="holds checkpoints of another run"):
            run(checkpoint=tmp_path, **more)
    same(run(checkpoint=tmp_path, width=1), run(checkpoint=tmp_path))  # a finished run returns at once


def test_frozen_parameters_and_buffers_are_part_of_what_a_checkpoint_is_of(tmp_path):
    def built(change):
        module = both()
        with torch.no_grad():
            change(module)
        return problem(module)

    run(built(lambda module: None), checkpoint=tmp_path)
    for change in (lambda m: m[1].bias.add_(1), lambda m: m[0].running_var.add_(1), lambda m: setattr(m[2], "p", 0.9)):
        with pytest.raises(InvalidInput, match="holds checkpoints of another run"):
            run(built(change), checkpoint=tmp_path)


# Ctrl-C


@pytest.fixture
def signals():
    """Ctrl-C as at a terminal, also where the tests were started in the background, which ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("signals")
@pytest.mark.parametrize("way", [{}, {"width": 1}])
def test_ctrl_c_saves_and_the_same_call_resumes(way, tmp_path):
    def log(r, values):
        if r == 3:
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(Interrupted, match="the same call resumes it") as stopped:
        run(checkpoint=tmp_path, log=log, **way)
    assert stopped.value.round == 3
    same(run(checkpoint=tmp_path, **way), run(**way))


@pytest.mark.usefixtures("signals")
def test_ctrl_c_without_a_checkpoint_stops_at_once():
    def loss(module, batch):
        if threading.current_thread() is threading.main_thread() and len(batch[0]) == 4 and armed:
            os.kill(os.getpid(), signal.SIGINT)
        return cross_entropy(module, batch)

    armed: list[int] = []
    ours = problem(loss=loss)
    armed.append(1)
    with pytest.raises(KeyboardInterrupt):
        run(ours, width=1, devices=1)
    armed.clear()
    same(run(ours, width=1, devices=1), run(width=1, devices=1))


# Sweeps

GRID = {"eta_l": [0.03, 0.1]}
TARGET = ("loss", 1.06)
SWEEP = {"rounds": 8, "clients_per_round": 3, "local_steps": 2, "batch_size": 4}


def build():
    return torch.nn.Linear(**LINEAR)


@pytest.mark.parametrize(
    ("make", "more"),
    [
        (lambda: problem(test=tensors()[0], metrics=hits), {"warm_start": True, "measure_loss": True}),
        (lambda: problem(both()), {"eval_every": 3}),
        (lambda: problem(build), {"at_once": 1}),
    ],
)
def test_members_of_a_sweep_are_single_runs(make, more):
    swept = cv.sweep(cv.scaffold, make(), GRID, [0, 3], **SWEEP, **more)
    more = {name: value for name, value in more.items() if name not in ("measure_loss", "at_once")}
    for p, eta_l in enumerate(GRID["eta_l"]):
        for s, seed in enumerate((0, 3)):
            alone = cv.simulate(cv.scaffold(eta_l), make(), **SWEEP, **more, seed=seed)
            for name, curve in swept.curves.items():
                np.testing.assert_array_equal(curve[p, s], alone.history[name], name)
    assert [row["outcome"] for row in swept.table] == ["finished"] * 4
    assert not np.array_equal(swept.curves["loss"][0, 0], swept.curves["loss"][0, 1])


@pytest.mark.parametrize("more", [{}, {"at_once": 1}, {"warm_start": True}, {"target": ("loss", 1.0), "race": True}])
def test_a_sweep_is_resumed_with_the_same_numbers(more, tmp_path):
    call = {"grid": {"eta_l": [0.03, 0.1, 0.2]}, "seeds": [0, 1], **SWEEP, **more}
    expected = cv.sweep(cv.scaffold, problem(dropout()), **call)
    call |= {"checkpoint": tmp_path, "checkpoint_every": 2}
    with pytest.raises(Crash):
        cv.sweep(cv.scaffold, problem(dropout()), **call, log=crash_at(5))
    for _ in range(2):
        swept = cv.sweep(cv.scaffold, problem(dropout()), **call)
        assert swept.table == expected.table
        assert set(swept.curves) == set(expected.curves)
        for name, curve in expected.curves.items():
            np.testing.assert_array_equal(swept.curves[name], curve, name)
    with pytest.raises(InvalidInput, match="holds checkpoints of another run"):
        cv.sweep(cv.scaffold, problem(dropout()), **call | {"seeds": [0, 2]})


def test_a_target_ends_members_and_a_race_the_others():
    def raced(race):
        ours = problem(test=tensors()[0], metrics=hits)
        grid = {"eta_l": [1e-4, 0.01, 0.1]}
        return cv.sweep(cv.scaffold, ours, grid, [0, 1], rounds=50, local_steps=5, target=TARGET, race=race, at_once=1)

    whole, race = raced(False), raced(True)
    assert whole.best() == race.best() == 2
    np.testing.assert_array_equal(whole.mean_rounds()[2], race.mean_rounds()[2])
    assert {row["outcome"] for row in whole.table[:2]} == {"finished"}
    ended = int(whole.table[-1]["rounds"])
    assert ended < 50
    alone = cv.simulate(cv.scaffold(0.1), problem(), 50, local_steps=5, target=TARGET, seed=1)
    assert alone.reached == alone.rounds == ended
    for name, curve in whole.curves.items():  # the traffic of a member that has ended is not counted further
        np.testing.assert_allclose(curve[2, 1, :ended], alone.history.get(name, curve[2, 1, :ended]), rtol=1e-12)
        assert np.isnan(curve[2, 1, ended:]).all()


def test_traffic_is_counted_where_only_some_members_have_ended():
    ours, grid = problem(), {"eta_l": [1e-4, 0.1]}
    swept = cv.sweep(cv.sgd, ours, grid, rounds=80, clients_per_round=3, target=("loss", 1.05))
    lengths = [row["rounds"] for row in swept.table]
    assert lengths[0] == 80 > lengths[1] > 1
    np.testing.assert_array_equal(swept.curves["bytes_up"][0, 0], 3 * 8 * 18)


# Memory and threads


def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize(("build", "way"), [(linear, {}), (linear, {"width": 1}), (dropout, {})])
def test_memory_does_not_grow_over_1000_rounds(build, way):
    seen, objects = [], []

    def log(r, values):
        if r % 200 == 0:
            gc.collect()
            seen.append(resident())
            objects.append(sum(type(each) is torch.Tensor for each in gc.get_objects()))

    run(problem(build()), rounds=1000, clients_per_round=2, local_steps=1, eval_every=50, log=log, **way)
    assert min(np.diff(seen)) < 2 * 2**20  # what leaks grows all the time; an arena of the allocator, now and then
    assert objects[-1] <= objects[0]


def test_threads_end_with_their_runs():
    ours, before = problem(), threading.active_count()
    for _ in range(6):
        run(ours, rounds=1, width=1, devices=2)
    gc.collect()
    assert threading.active_count() <= before + 2


def test_a_sweep_of_many_members_has_few_threads():
    most = []
    cv.sweep(
        cv.sgd,
        problem(),
        {"eta_l": np.linspace(0.01, 0.1, 12).tolist()},
        rounds=2,
        width=1,
        devices=2,
        log=lambda r, values: most.append(threading.active_count()),
    )
    assert max(most) <= threading.active_count() + 4


@pytest.mark.parametrize("way", [{}, {"width": 1}, {"width": 1, "devices": 1}, {"width": 1, "devices": 2}])
def test_pytorch_has_as_many_threads_as_before(way):
    before = torch.get_num_threads()
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            run(rounds=1, **way)
            assert torch.get_num_threads() == count
            with pytest.raises(Crash):
                run(**way, log=crash_at(2))
            assert torch.get_num_threads() == count
            with pytest.raises(ZeroDivisionError):
                run(problem(loss=fails_later()), **way)
            assert torch.get_num_threads() == count
    finally:
        torch.set_num_threads(before)


def fails_later():
    calls = []

    def loss(module, batch):
        calls.append(len(batch[0]))
        return cross_entropy(module, batch) * (1 // (len(calls) < 20))

    return loss


def test_an_error_in_one_client_is_the_users_and_the_next_run_is_right():
    broken = []

    def loss(module, batch):
        if broken:
            raise RuntimeError("mine")
        return cross_entropy(module, batch)

    ours = problem(loss=loss)
    for way in ({"width": 1}, {"width": 1, "devices": 1}):
        broken.append(1)
        with pytest.raises(RuntimeError, match="mine"):
            run(ours, **way)
        broken.clear()
        same(run(ours, **way), run(**way))


# What is told


def test_a_log_gets_every_round_and_a_target_ends_the_run():
    ours, told = problem(test=tensors()[0], metrics=hits), []
    found = run(ours, rounds=60, eval_every=3, target=("loss", 1.06), log=lambda r, values: told.append((r, values)))
    assert found.reached == found.rounds == len(told) < 60
    assert found.rounds % 3 == 0
    assert found.rounds_to("loss", 1.06) == found.reached
    assert found.rounds_to("accuracy", 2.0) is None
    for r, values in told:
        assert set(values) == set(found.history) - {"round", "cohort"}
        for name, value in values.items():
            np.testing.assert_equal(value, float(found.history[name][r - 1]))
            assert np.isnan(value) == (r % 3 != 0 and name not in ("bytes_up", "bytes_down"))


def test_trackers_and_reports_take_the_runs_of_modules(tmp_path):
    sent = []

    def keep(r, values):
        sent.append((r, values))

    tracker = cv.trackers.Tracker("fake", keep, lambda failed: sent.append(failed))
    with tracker as log:
        found = run(problem(both(), test=tensors()[0], metrics=hits), log=log, eval_every=2)
    assert sent.pop() is False
    assert [r for r, _ in sent] == list(range(1, 9))
    assert sent[1][1]["accuracy"] == pytest.approx(float(found.history["accuracy"][1]))
    cv.write_report(tmp_path / "report.html", {"mine": found, "other": run()})
    assert "accuracy" in (tmp_path / "report.html").read_text()


@pytest.mark.parametrize("way", [{}, {"width": 1}])
@pytest.mark.parametrize("eta_l", [1e80, 1e160])  # the second one has a finite model with an infinite loss
def test_a_diverging_run_ends_with_its_last_good_state(eta_l, way):
    with pytest.warns(DivergenceWarning, match="diverged in round"):
        found = run(problem(loss=lambda m, b: (m(b[0]) ** 2).mean()), cv.scaffold(eta_l), rounds=30, **way)
    assert found.diverged == found.rounds + 1 <= 30
    assert np.isfinite(found.x).all()
    assert np.isfinite(found.history["loss"]).all()
    assert np.isfinite(found.clients.c_i).all()
    good = replace(found, diverged=None)
    assert all(torch.isfinite(value).all() for value in good.params.values())


def test_batches_in_parts_give_the_same_numbers():
    for algorithm in (cv.scaffold(0.1), cv.mime(0.1)):
        found, expected = (run(algorithm=algorithm, microbatch=m) for m in (3, None))
        np.testing.assert_allclose(found.x, expected.x, rtol=0, atol=1e-12)
