"""Nothing lost: runs that were killed, stopped, short of disk or damaged end with the numbers of undisturbed ones."""

import contextlib
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
import warnings

import jax
import numpy as np
import pytest
from helpers import ROOT, wait_until
from killed import EVERY, outcome, problem

import covary as cv
from covary.errors import CheckpointWarning
from covary.running.watch import BrokenInvariant
from covary.runs.files import Damaged, File
from covary.runs.interrupt import Interrupted

SETTINGS = {"clients_per_round": 4, "local_epochs": 1, "batch_size": 5}


def same(found, expected):
    assert set(found) == set(expected)
    for name, values in expected.items():
        np.testing.assert_array_equal(found[name], values, err_msg=name)


def work(kind, checkpoints, out, scratch, saves=None, pause=0.0):
    """A process that does the work. False if it was killed, a moment after it had saved so many times.

    Saves are counted by file names, not by time, so that a slow machine kills as often as a fast one.
    """
    command = [sys.executable, str(ROOT / "tests" / "killed.py"), kind, str(checkpoints), str(out)]
    same_programs = {
        "JAX_ENABLE_X64": "1",
        "JAX_NUM_CPU_DEVICES": str(jax.device_count()),
        "JAX_COMPILATION_CACHE_DIR": str(jax.config.jax_compilation_cache_dir),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    told = out.with_suffix(".told")
    with told.open("wb") as log:
        environment = os.environ | same_programs | {"TMPDIR": str(scratch)}
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
    seen = {str(path) for path in checkpoints.rglob("round-*")}
    new = set()

    def saved():
        new.update({str(path) for path in checkpoints.rglob("round-*")} - seen)
        return process.poll() is not None or (saves is not None and len(new) >= saves)

    try:
        wait_until(saved, f"{kind} ends, or has saved {saves} times")
        if process.poll() is None:
            time.sleep(pause)
    finally:
        process.kill()
        process.wait()
    assert process.returncode in (0, -signal.SIGKILL), told.read_text()
    return process.returncode == 0


def killed_and_resumed(kind, tmp_path, kills):
    """Real processes, real SIGKILLs; the undisturbed run is in this process, with a folder of its own."""
    scratch, chance = tmp_path / "scratch", random.Random(kind)
    scratch.mkdir()
    expected = outcome(kind, str(tmp_path / "undisturbed"))

    def is_right():
        with np.load(tmp_path / "found.npz") as found:
            same(dict(found), expected)

    given = (kind, tmp_path / "checkpoints", tmp_path / "found.npz", scratch)
    done = 0
    for _ in range(kills + 20):
        if done == kills:
            break
        if work(*given, saves=chance.randint(1, 3), pause=chance.uniform(0.0, 0.05)):  # it ended by itself
            is_right()
            shutil.rmtree(tmp_path / "checkpoints")
        else:
            done += 1
    assert done == kills, f"only {done} of {kills} kills came before the end of the work"
    assert work(*given)
    is_right()
    assert not list((tmp_path / "checkpoints").rglob("*.draft"))
    assert len(list((tmp_path / "checkpoints").rglob("round-*"))) <= 2
    assert not list(scratch.iterdir())


KINDS = pytest.mark.parametrize("kind", ["simulate", "disk", "sweep", "compare"])


@pytest.mark.parametrize("kind", ["disk", "sweep", "compare"])
def test_killed_and_resumed(kind, tmp_path):
    killed_and_resumed(kind, tmp_path, kills=1)


@pytest.mark.nightly
@KINDS
def test_killed_again_and_again_and_resumed(kind, tmp_path):
    killed_and_resumed(kind, tmp_path, kills=12)


@pytest.fixture
def signals():
    """Ctrl-C as at a terminal, also where the tests were started in the background, which ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("signals")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_and_says_so(number, tmp_path):
    def log(r, values):
        if r == 8:
            os.kill(os.getpid(), number)

    call = {"rounds": 120, "checkpoint": tmp_path, "checkpoint_every": 50, **SETTINGS}
    with pytest.raises(Interrupted, match="the same call resumes it") as stopped:
        cv.simulate(cv.scaffold(0.05), problem(), log=log, **call)
    assert 8 <= stopped.value.round <= 50
    run = cv.simulate(cv.scaffold(0.05), problem(), **call)
    same(run.history, cv.simulate(cv.scaffold(0.05), problem(), 120, **SETTINGS).history)


@pytest.mark.usefixtures("signals")
def test_a_second_signal_stops_at_once_and_the_checkpoint_is_good(tmp_path):
    def log(r, values):
        if r >= 8:
            os.kill(os.getpid(), signal.SIGINT)

    call = {"rounds": 60, "checkpoint": tmp_path, "checkpoint_every": 5, **SETTINGS}
    with pytest.raises(KeyboardInterrupt):
        cv.simulate(cv.scaffold(0.05), problem(), log=log, **call)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    run = cv.simulate(cv.scaffold(0.05), problem(), **call)
    same(run.history, cv.simulate(cv.scaffold(0.05), problem(), 60, **SETTINGS).history)


@pytest.mark.usefixtures("signals")
def test_a_signal_in_the_last_rounds_stops_what_comes_after(tmp_path):
    """A comparison is a chain of short sweeps: a signal must not be lost with the one that just ended."""

    def log(r, values):
        if r == 10:
            os.kill(os.getpid(), signal.SIGINT)

    call = {"grid": {"eta_l": [0.05]}, "rounds": 10, "checkpoint": tmp_path, **SETTINGS}
    with pytest.raises(Interrupted):
        cv.sweep(cv.scaffold, problem(), log=log, **call)
    assert cv.sweep(cv.scaffold, problem(), **call).table[0]["rounds"] == 10


def test_shrinking_controls_do_not_violate_the_invariant(tmp_path):
    """If all clients have the same optimum, rounding errors of the first rounds outlast the control variates."""
    A = np.stack([(1 + i) * np.eye(5, dtype=np.float32) for i in range(10)])
    call = {"rounds": 300, "clients_per_round": 2, "local_steps": 5, "x0": 1000 * np.ones(5), "eval_every": 50}
    with jax.enable_x64(False):
        shared = cv.quadratics(A, np.zeros((10, 5), np.float32))
        for store in ("device", "host"):
            for _ in range(2):
                run = cv.simulate(cv.scaffold(0.02), shared, store=store, checkpoint=tmp_path / store, **call)
            assert np.abs(run.clients.c_i).max() < 1e-3


def test_files_of_others_are_left_alone(tmp_path):
    mine = ["thesis.draft", "clients-list.safetensors", "round-robin.safetensors", "clients-1.safetensors.draft"]
    for name in mine:
        (tmp_path / name).write_text("precious")
    resumed(tmp_path)
    resumed(tmp_path)
    assert all((tmp_path / name).read_text() == "precious" for name in mine)


def test_checkpoints_do_not_take_more_and_more_memory(tmp_path):
    """Every checkpoint has another number of changed clients here."""
    A, b = np.stack([np.eye(2)] * 500), np.ones((500, 2))
    compiled = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, seconds, **more: compiled.append(event) if event.endswith("backend_compile_duration") else None
    )
    call = {"clients_per_round": 7, "local_steps": 1, "checkpoint": tmp_path, "checkpoint_every": 5}
    counts = []
    cv.simulate(cv.scaffold(0.1), cv.quadratics(A, b), 300, log=lambda r, values: counts.append(len(compiled)), **call)
    assert counts[-1] - counts[149] <= 4


@pytest.mark.parametrize("what", ["metrics", "made by hand", "precision of JAX"])
def test_changes_inside_are_noticed(what, tmp_path):
    from dataclasses import replace

    algorithm, changed, data = cv.scaffold(0.05), problem(), problem().data
    context = contextlib.nullcontext()
    stopped_run(tmp_path)
    if what == "metrics":
        plain = cv.models.logistic_regression(6, 3)
        model = replace(plain, metrics=lambda params, batch: {"accuracy": 1 - plain.metrics(params, batch)["accuracy"]})
        changed, says = cv.supervised(model, data), "model was"
    elif what == "made by hand":
        algorithm, says = replace(cv.scaffold(0.05, option="I"), recipe=algorithm.recipe), "code was"
    else:
        context, says = jax.default_matmul_precision("bfloat16"), "jax was"
    with context, pytest.raises(cv.CovaryError, match=says):
        cv.simulate(algorithm, changed, 30, checkpoint=tmp_path, checkpoint_every=EVERY, **SETTINGS)


def test_a_finished_run_keeps_the_users_store(tmp_path):
    call = {"rounds": 10, "store": tmp_path / "states", "checkpoint": tmp_path / "saved", **SETTINGS}
    run = cv.simulate(cv.scaffold(0.05), problem(), **call)
    again = cv.simulate(cv.scaffold(0.05), problem(), **call)
    np.testing.assert_array_equal(np.asarray(again.clients.c_i), np.asarray(run.clients.c_i))
    assert {path.name for path in (tmp_path / "states").iterdir()} == {"c_i.rows", "places.npy", "run", "lock"}


def test_two_runs_do_not_share_a_store(tmp_path):
    call = {"rounds": 10, "store": tmp_path / "states", **SETTINGS}

    def log(r, values):
        if r == 3:
            cv.simulate(cv.scaffold(0.05), problem(), checkpoint=tmp_path / "second", **call)

    with pytest.raises(cv.CovaryError, match="states is in use by process"):
        cv.simulate(cv.scaffold(0.05), problem(), log=log, checkpoint=tmp_path / "first", **call)


def stopped_run(folder, rounds=30):
    """A run stopped by its own log after some checkpoints."""

    def log(r, values):
        if r > 20:
            raise InterruptedError

    with pytest.raises(InterruptedError):
        cv.simulate(
            cv.scaffold(0.05), problem(), rounds, log=log, checkpoint=folder, checkpoint_every=EVERY, **SETTINGS
        )


def resumed(folder, rounds=30):
    return cv.simulate(cv.scaffold(0.05), problem(), rounds, checkpoint=folder, checkpoint_every=EVERY, **SETTINGS)


def test_a_finished_run_returns_at_once(tmp_path):
    first = resumed(tmp_path)
    rounds = []
    again = cv.simulate(
        cv.scaffold(0.05),
        problem(),
        30,
        checkpoint=tmp_path,
        checkpoint_every=EVERY,
        log=lambda r, values: rounds.append(r),
        **SETTINGS,
    )
    assert not rounds
    same(again.history, first.history)
    np.testing.assert_array_equal(again.clients.c_i, first.clients.c_i)


def test_only_clients_that_took_part_are_written(tmp_path):
    A, b = np.stack([np.eye(4)] * 400), np.ones((400, 4))
    cv.simulate(
        cv.scaffold(0.05),
        cv.quadratics(A, b),
        12,
        clients_per_round=2,
        local_steps=1,
        checkpoint=tmp_path,
        checkpoint_every=3,
    )
    sizes = [path.stat().st_size for path in tmp_path.glob("clients-*")]
    assert len(sizes) == 4
    assert max(sizes) < 2000  # of 400 clients, all of which would take 12,800 bytes


@pytest.mark.parametrize("harm", ["cut", "flip"])
@pytest.mark.parametrize("kind", ["round", "clients"])
def test_a_damaged_checkpoint_is_reported_and_the_previous_one_used(harm, kind, tmp_path):
    stopped_run(tmp_path / "run")
    expected = cv.simulate(cv.scaffold(0.05), problem(), 30, **SETTINGS)
    newest = max((tmp_path / "run").glob(f"{kind}-*.safetensors"))
    content = newest.read_bytes()
    chance = random.Random(0)
    for at in [0, 7, 8, 9, len(content) // 2, len(content) - 1, *(chance.randrange(len(content)) for _ in range(4))]:
        copy = tmp_path / str(at)
        subprocess.run(["cp", "-r", str(tmp_path / "run"), str(copy)], check=True)
        flipped = content[:at] + bytes([content[at] ^ (1 << chance.randrange(8))]) + content[at + 1 :]
        (copy / newest.name).write_bytes(content[:at] if harm == "cut" else flipped)
        with pytest.warns(CheckpointWarning, match="damaged"):
            run = resumed(copy)
        same(run.history, expected.history)
        np.testing.assert_array_equal(run.clients.c_i, expected.clients.c_i)


def test_every_truncation_and_every_flipped_bit_is_detected(tmp_path):
    file = File(tmp_path / "state")
    file.write({"x": np.arange(5.0), "c": np.ones((2, 3), np.float32)}, {"round": 7, "about": {"eta_l": 0.1}})
    content = file.path.read_bytes()
    harmed = [content[:at] for at in range(len(content))]
    for at in range(len(content)):
        harmed += [content[:at] + bytes([content[at] ^ (1 << bit)]) + content[at + 1 :] for bit in range(8)]
    for bad in harmed:
        file.path.write_bytes(bad)
        with pytest.raises(Damaged, match="is damaged"):
            file.read()


def test_a_folder_with_only_damaged_checkpoints_is_rejected(tmp_path):
    stopped_run(tmp_path)
    for path in tmp_path.glob("round-*"):
        path.write_bytes(b"")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CheckpointWarning)
        with pytest.raises(cv.CovaryError, match=r"Every checkpoint in .* is damaged"):
            resumed(tmp_path)


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"rounds": 31}, "rounds was 30 and is 31"),
        ({"algorithm": cv.scaffold(0.06)}, r"algorithm was scaffold\(eta_l=0.05.* and is scaffold\(eta_l=0.06"),
        ({"seed": 1}, "seed was 0 and is 1"),
        ({"batch_size": 4}, "batch_size was 5 and is 4"),
        ({"weights": "examples"}, "weights was uniform and is examples"),
    ],
)
def test_another_configuration_is_rejected_with_the_difference(other, said, tmp_path):
    stopped_run(tmp_path)
    call = {"algorithm": cv.scaffold(0.05), "problem": problem(), "rounds": 30, **SETTINGS, **other}
    with pytest.raises(cv.CovaryError, match=said):
        cv.simulate(checkpoint=tmp_path, checkpoint_every=EVERY, **call)


def test_other_data_or_another_model_is_rejected(tmp_path):
    stopped_run(tmp_path)
    data = problem().data
    x, y = data.examples
    other = cv.supervised(cv.models.logistic_regression(6, 3), cv.FederatedData((x + 1e-3, y), data.sizes))
    with pytest.raises(cv.CovaryError, match=r"holds checkpoints of another run: data was \w+ and is \w+"):
        cv.simulate(cv.scaffold(0.05), other, 30, checkpoint=tmp_path, **SETTINGS)
    with pytest.raises(cv.CovaryError, match="model was"):
        cv.simulate(cv.scaffold(0.05), cv.supervised(cv.models.mlp(6, 2, 3), data), 30, checkpoint=tmp_path, **SETTINGS)


def test_a_folder_in_use_is_rejected(tmp_path):
    def log(r, values):
        if r == 3:
            resumed(tmp_path)

    with pytest.raises(cv.CovaryError, match="in use by process"):
        cv.simulate(cv.scaffold(0.05), problem(), 30, log=log, checkpoint=tmp_path, checkpoint_every=EVERY, **SETTINGS)


def test_a_full_disk_is_reported_and_the_run_resumed_elsewhere(tmp_path):
    stopped_run(tmp_path / "small")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (512, hard))
        with pytest.raises(cv.CovaryError, match="could not be written"):
            resumed(tmp_path / "small")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)
    assert not list((tmp_path / "small").glob("*.draft"))
    subprocess.run(["cp", "-r", str(tmp_path / "small"), str(tmp_path / "large")], check=True)
    same(resumed(tmp_path / "large").history, cv.simulate(cv.scaffold(0.05), problem(), 30, **SETTINGS).history)


def test_a_corrupted_control_stops_the_run(tmp_path, monkeypatch):
    """The check fires: one client's c_i is changed between two calls."""
    from covary._engine.resident import Resident

    honest = Resident.restore

    def restore(self, small, clients):
        honest(self, small, clients)
        c_i = np.array(self.state.clients.c_i)
        c_i[3] += 0.1
        self.state = self.state._replace(clients=self.state.clients._replace(c_i=c_i))

    stopped_run(tmp_path)
    monkeypatch.setattr(Resident, "restore", restore)
    with pytest.raises(BrokenInvariant, match="away from the mean of the clients' c_i"):
        resumed(tmp_path)


def test_sweeps_are_resumed_bit_for_bit(tmp_path):
    stops = []

    def log(r, values):
        stops.append(r)
        if len(stops) % 10 == 0:
            raise InterruptedError

    grid, call = {"eta_l": [0.01, 0.03, 0.1]}, {"rounds": 40, "at_once": 2, **SETTINGS}
    expected = cv.sweep(cv.scaffold, problem(), grid, [0, 1], **call)
    for _ in range(50):
        try:
            found = cv.sweep(
                cv.scaffold, problem(), grid, [0, 1], log=log, checkpoint=tmp_path, checkpoint_every=EVERY, **call
            )
            break
        except InterruptedError:
            continue
    assert repr(found.table) == repr(expected.table)
    same(found.curves, expected.curves)
    with pytest.raises(cv.CovaryError, match="points was"):
        cv.sweep(cv.scaffold, problem(), {"eta_l": [0.01, 0.02, 0.1]}, [0, 1], checkpoint=tmp_path, **call)


def test_the_outcome_does_not_depend_on_checkpoints(tmp_path):
    same(outcome("simulate", str(tmp_path)), outcome("simulate", None))


def test_a_diverged_run_keeps_its_last_good_state(tmp_path):
    """It ends in the round it happened; called again, it says the same at once."""
    steep = cv.quadratics(np.stack([8 * np.eye(2), 12 * np.eye(2)]), np.ones((2, 2)))
    call = {"problem": steep, "rounds": 400, "local_steps": 5, "checkpoint": tmp_path, "checkpoint_every": 50}
    with pytest.warns(cv.DivergenceWarning, match=r"diverged in round \d+.* try eta_l"):
        run = cv.simulate(cv.scaffold(1.0), **call)
    assert run.diverged == run.rounds + 1 < 400
    assert np.isfinite(run.x).all()
    with pytest.warns(cv.DivergenceWarning, match=f"diverged in round {run.diverged}"):
        again = cv.simulate(cv.scaffold(1.0), log=lambda r, values: pytest.fail("ran"), **call)
    same(again.history, run.history)
    np.testing.assert_array_equal(again.x, run.x)


def test_a_store_of_the_users_is_used_again_by_the_same_run_alone(tmp_path):
    call = {"rounds": 30, "store": tmp_path / "states", "checkpoint_every": 5, **SETTINGS}

    def log(r, values):
        if r == 12:
            raise InterruptedError

    with pytest.raises(InterruptedError):
        cv.simulate(cv.scaffold(0.05), problem(), log=log, checkpoint=tmp_path / "saved", **call)
    with pytest.raises(cv.CovaryError, match="store must be"):
        cv.simulate(cv.scaffold(0.06), problem(), checkpoint=tmp_path / "other", **call)
    with pytest.raises(cv.CovaryError, match="store must be"):
        cv.simulate(cv.scaffold(0.05), problem(), **call)
    run = cv.simulate(cv.scaffold(0.05), problem(), checkpoint=tmp_path / "saved", **call)
    expected = cv.simulate(cv.scaffold(0.05), problem(), 30, store="disk", **SETTINGS)
    same(run.history, expected.history)
    np.testing.assert_array_equal(np.asarray(run.clients.c_i), np.asarray(expected.clients.c_i))


@pytest.mark.usefixtures("signals")
@pytest.mark.parametrize("store", ["host", "disk"])
def test_a_signal_also_stops_a_run_with_a_store(store, tmp_path):
    def log(r, values):
        if r == 8:
            os.kill(os.getpid(), signal.SIGINT)

    call = {"rounds": 60, "store": store, "checkpoint": tmp_path, "checkpoint_every": 50, **SETTINGS}
    with pytest.raises(Interrupted) as stopped:
        cv.simulate(cv.scaffold(0.05), problem(), log=log, **call)
    assert 8 <= stopped.value.round <= 10
    run = cv.simulate(cv.scaffold(0.05), problem(), **call)
    expected = cv.simulate(cv.scaffold(0.05), problem(), 60, store=store, **SETTINGS)
    same(run.history, expected.history)
    np.testing.assert_array_equal(np.asarray(run.clients.c_i), np.asarray(expected.clients.c_i))


def test_a_corrupted_control_stops_a_sweep(monkeypatch):
    from covary.sweep import Members

    honest = Members._keep

    def keep(self, *given):
        honest(self, *given)
        c_i = np.array(self.states.clients.c_i)
        c_i[1, 0, 3] += 0.1
        self.states = self.states._replace(clients=self.states.clients._replace(c_i=c_i))

    monkeypatch.setattr(Members, "_keep", keep)
    with pytest.raises(BrokenInvariant, match="away from the mean of the clients' c_i"):
        cv.sweep(cv.scaffold, problem(), {"eta_l": [0.01, 0.03]}, [0, 1], rounds=10, **SETTINGS)


def test_nothing_is_pickled():
    for path in (ROOT / "src").rglob("*.py"):
        text = path.read_text().replace("allow_pickle=False", "")
        assert "pickle" not in text, path


def test_memory_does_not_grow_with_rounds():
    run = cv.simulate(cv.scaffold(0.01), cv.lower_bound(1.0), 200, local_steps=1, x0=1.0)  # compiled now
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    run = cv.simulate(cv.scaffold(0.01), cv.lower_bound(1.0), 10_000, local_steps=1, x0=1.0)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    history = sum(column.nbytes for column in run.history.values())
    assert grown < 10 * history + 2**25
