"""Where a round runs changes nothing but the time: widths, devices, hosts, stores, streamed data."""

import collections
import dataclasses
import gc
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import HANGS, ROOT, random_quadratics, small_logistic

import covary as cv
from conftest import MODES
from covary._engine import place
from covary._engine.cohort import sample
from covary._engine.local import LocalProgram, _arithmetic_only
from covary._engine.prepare import initial, prepare
from covary._engine.rounds import compiled, compiled_sample
from covary._engine.vectors import Form
from covary.running import store
from covary.running.plan import plan_rounds
from covary.runs import machine
from covary.training import Training

SIZES = [12, 8, 9, 15, 7, 11, 10]
TRAINING = {"clients_per_round": 5, "local_steps": 4, "batch_size": 4}
ALGORITHMS = [cv.scaffold(eta_l=0.1), cv.dane(eta_l=0.1)]


def arrays(run):
    return [
        run.x,
        *run.server,
        *(np.asarray(field) for field in run.clients),
        run.history["loss"],
        run.history["drift"],
    ]


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=str)
def test_every_mode_gives_the_same_numbers(algorithm):
    """Bit for bit on one device, where sums are taken in one order; to rounding on several.

    Before JAX 0.10, XLA compiled one expression in two programs to numbers one unit in the last place apart.
    """
    problem = small_logistic(SIZES)
    reference = cv.simulate(algorithm, problem, 12, **TRAINING, **MODES["all at once"])
    for name, mode in MODES.items():
        run = cv.simulate(algorithm, problem, 12, **TRAINING, **mode)
        np.testing.assert_array_equal(run.history["cohort"], reference.history["cohort"], name)
        for ours, theirs in zip(arrays(run), arrays(reference), strict=True):
            if mode.get("devices", 1) == 1 and jax.__version_info__ >= (0, 10):
                np.testing.assert_array_equal(ours, theirs, name)
            else:
                np.testing.assert_allclose(ours, theirs, rtol=1e-11, atol=1e-13, err_msg=name)


@pytest.mark.parametrize("mode", ["eight devices", "disk store on three devices"])
def test_a_warm_start_a_target_and_a_divergence_end_alike_in_every_mode(mode):
    problem = small_logistic(SIZES)
    for settings in ({"warm_start": True}, {"target": ("loss", 0.8)}, {"weights": "examples", "eval_every": 5}):
        runs = [cv.simulate(cv.scaffold(0.1), problem, 12, **TRAINING, **settings, **how) for how in (MODES[mode], {})]
        assert runs[0].rounds == runs[1].rounds
        assert runs[0].reached == runs[1].reached
        for ours, theirs in zip(arrays(runs[0]), arrays(runs[1]), strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-11, atol=1e-13)
    A, b = random_quadratics(6)
    with pytest.warns(cv.DivergenceWarning):
        blown_up = cv.simulate(cv.scaffold(1e3), cv.quadratics(A, b), 300, clients_per_round=4, **MODES[mode])
    assert blown_up.diverged == blown_up.rounds + 1
    assert np.isfinite(blown_up.x).all()
    assert np.isfinite(np.asarray(blown_up.clients.c_i)).all()
    scale = np.abs(np.asarray(blown_up.clients.c_i)).max()
    np.testing.assert_allclose(np.asarray(blown_up.clients.c_i).mean(axis=0), blown_up.server.c, atol=1e-9 * scale)


def test_a_sweep_on_eight_devices_is_the_sweep_on_one():
    problem = small_logistic(SIZES)
    how = {"grid": {"eta_l": [0.03, 0.1]}, "seeds": [0, 1], "rounds": 8, **TRAINING}
    one, eight = (cv.sweep(cv.scaffold, problem, devices=count, **how) for count in (1, 8))
    np.testing.assert_allclose(eight.curves["drift"], one.curves["drift"], rtol=1e-11)
    warm = [cv.sweep(cv.scaffold, problem, devices=count, warm_start=True, **how) for count in (1, 3)]
    np.testing.assert_allclose(warm[1].curves["drift"], warm[0].curves["drift"], rtol=1e-11)


def test_two_processes_on_loopback_give_the_numbers_of_one(tmp_path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    command = [sys.executable, str(ROOT / "tests" / "two_hosts.py"), address, "2"]
    environment = {**os.environ, "JAX_NUM_CPU_DEVICES": "2", "JAX_PLATFORMS": "cpu"}
    processes = [
        subprocess.Popen([*command, str(i), str(tmp_path / f"{i}.npz")], env=environment, stderr=subprocess.PIPE)
        for i in range(2)
    ]
    try:
        for process in processes:
            _, errors = process.communicate(timeout=HANGS)
            assert process.returncode == 0, errors.decode()[-2000:]
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    alone = cv.simulate(cv.scaffold(eta_l=0.1), small_logistic(SIZES), 12, **TRAINING, devices=1)
    for i in range(2):
        with np.load(tmp_path / f"{i}.npz") as host:
            np.testing.assert_array_equal(host["cohort"], alone.history["cohort"])
            np.testing.assert_allclose(host["x"], alone.x, rtol=1e-11)
            np.testing.assert_allclose(host["c"], alone.server.c, rtol=1e-10, atol=1e-13)
            np.testing.assert_allclose(host["c_i"], alone.clients.c_i, rtol=1e-10, atol=1e-13)
            np.testing.assert_allclose(host["loss"], alone.history["loss"], rtol=1e-11)


def test_the_loss_in_parts_is_the_loss(monkeypatch):
    problem = small_logistic(SIZES)
    for weights, parts in (("examples", ((10, 3),)), ("uniform", ((10, 1), (10, 3)))):
        losses = []
        for at_once, count in ((10**6, 1), *parts):
            monkeypatch.setattr("covary._engine.evaluate.MOST_AT_ONCE", at_once)
            run = cv.simulate(cv.fedavg(0.1), problem, 3, **TRAINING, devices=count, weights=weights)
            losses.append(run.history["loss"])
        for cut in losses[1:]:
            np.testing.assert_allclose(cut, losses[0], rtol=1e-11)


@pytest.mark.parametrize(("N", "S"), [(50, 10), (5000, 20), (5000, 200)])
def test_cohorts_are_uniform_and_without_repetition(N, S):
    key = np.asarray(jax.random.key_data(jax.random.key(3)))
    cohorts = np.asarray(compiled_sample(N, S)(key, np.arange(500)))
    assert (np.diff(cohorts, axis=1) > 0).all()
    assert cohorts.min() >= 0
    assert cohorts.max() < N
    tenths = np.histogram(cohorts, bins=10, range=(0, N))[0] / cohorts.size
    np.testing.assert_allclose(tenths, 0.1, atol=5 * np.sqrt(0.09 / cohorts.size))
    # The spread of a cohort's mean is that of sampling without replacement.
    expected = (N**2 - 1) / 12 / S * (N - S) / (N - 1)
    np.testing.assert_allclose(cohorts.mean(axis=1).var(), expected, rtol=0.3)


@pytest.mark.parametrize(("N", "S", "seed"), [(4097, 64, 91), (5041, 71, 3)])  # client 1 is drawn with seed 91
def test_few_of_many_clients_are_drawn_by_floyds_method(N, S, seed):
    key, drawn = jax.random.key(seed), set()
    for k in range(S):
        last = N - S + k
        one = int(jax.random.randint(jax.random.fold_in(key, k), (), 0, last + 1, jnp.int32))
        drawn.add(last if one in drawn else one)
    assert sample(key, N, S).tolist() == sorted(drawn)


@pytest.mark.parametrize(("N", "S"), [(4096, 9), (5041, 72)])
def test_other_cohorts_are_jaxs_own_choice(N, S):
    key = jax.random.key(3)
    np.testing.assert_array_equal(sample(key, N, S), np.sort(jax.random.choice(key, N, (S,), replace=False)))


def test_the_disk_holds_only_clients_ever_sampled(tmp_path):
    N, d = 20_000, 500
    rng = np.random.default_rng(0)
    data = cv.FederatedData((rng.normal(size=(N, d)), rng.normal(size=N)), np.ones(N, int))
    model = SquaredError(d)
    run = cv.simulate(
        cv.scaffold(eta_l=1e-3),
        cv.supervised(model, data),
        10,
        clients_per_round=5,
        eval_every=10,
        store=tmp_path / "s",
    )
    file = tmp_path / "s" / "c_i.rows"
    seen = np.unique(run.history["cohort"])
    assert file.stat().st_size == len(seen) * d * 8
    c_i = run.clients.c_i
    assert c_i.shape == (N, d)
    assert (np.abs(c_i[seen]).max(axis=1) > 0).all()
    unseen = np.setdiff1d(np.arange(N), seen)[:100]
    assert not c_i[unseen].any()
    np.testing.assert_allclose(c_i[seen].sum(axis=0) / N, run.server.c, atol=1e-12)
    np.testing.assert_array_equal(c_i[int(seen[0])], c_i[seen][0])
    np.testing.assert_array_equal(c_i[seen[0], 2], c_i[seen][0, 2])
    np.testing.assert_array_equal(c_i[seen[0] - N], c_i[seen[0]])
    np.testing.assert_array_equal(c_i[np.isin(np.arange(N), seen)], c_i[seen])
    np.testing.assert_array_equal(c_i[seen[:2], [0, 1]], c_i[seen[:2]][[0, 1], [0, 1]])
    np.testing.assert_array_equal(c_i[:9, np.array([0, 4])], c_i[:9][:, [0, 4]])
    for wrong in (N, None, np.zeros((2, 2), int)):
        with pytest.raises(IndexError):
            c_i[wrong]
    # Too many clients to read in every round: the error is measured at the end.
    assert np.isnan(run.history["control_error"][:-1]).all()
    assert run.history["control_error"][-1] < 1e-12


class SquaredError:
    def __init__(self, d):
        self.d = d

    def init(self, key):
        return jax.numpy.zeros(self.d)

    def loss(self, params, batch):
        x, y = batch
        return jax.numpy.mean((x @ params - y) ** 2)


def test_a_temporary_store_leaves_nothing_behind(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    run = cv.simulate(cv.scaffold(0.1), small_logistic(SIZES), 3, **TRAINING, store="disk")
    assert not list(tmp_path.iterdir())  # not even now, so nothing is left however the process ends
    assert np.abs(run.clients.c_i[:]).max() > 0


def test_states_of_another_run_are_not_overwritten(tmp_path):
    problem = small_logistic(SIZES)
    cv.simulate(cv.scaffold(0.1), problem, 2, **TRAINING, store=tmp_path)
    with pytest.raises(cv.CovaryError, match="new folder"):
        cv.simulate(cv.scaffold(0.1), problem, 2, **TRAINING, store=tmp_path)
    assert (np.load(tmp_path / "places.npy") >= 0).any()


def test_a_full_disk_is_reported(tmp_path):
    """A limit on the size of files stands in for the disk."""
    code = (
        "import resource, sys; sys.path.insert(0, 'tests')\n"
        "import covary as cv; from helpers import small_logistic\n"
        "how = dict(clients_per_round=5, store='disk')\n"
        "cv.simulate(cv.scaffold(0.1), small_logistic([5] * 50), 3, **how)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))\n"
        "cv.simulate(cv.scaffold(0.1), small_logistic([5] * 50), 3, **how)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=HANGS)
    assert "covary.errors.CovaryError: The disk is full" in done.stderr


@pytest.fixture
def folder(tmp_path):
    """SIZES as a folder, and the same in memory."""
    memory = small_logistic(SIZES).data
    cv.FederatedData.write(tmp_path / "data", (memory.client(i) for i in range(len(SIZES))))
    return tmp_path / "data", memory


@pytest.mark.parametrize("mode", [{"devices": 3}, {"store": "disk", "weights": "examples"}])
def test_streamed_data_gives_the_same_run(folder, mode):
    path, memory = folder
    model = cv.models.logistic_regression(3, 3)
    test = memory.client(0)
    streamed = cv.supervised(model, cv.FederatedData.open(path, stream=True), test)
    inside = cv.supervised(model, memory, test)
    a = cv.simulate(cv.scaffold(0.1), streamed, 8, **TRAINING, **mode)
    b = cv.simulate(cv.scaffold(0.1), inside, 8, **TRAINING, **({"devices": 1} | mode))
    np.testing.assert_allclose(a.x, b.x, rtol=1e-12)
    np.testing.assert_allclose(np.asarray(a.clients.c_i), np.asarray(b.clients.c_i), rtol=1e-11, atol=1e-14)
    np.testing.assert_array_equal(a.history["accuracy"], b.history["accuracy"])
    assert "loss" not in a.history


def test_the_loss_of_streamed_data_is_a_pass_over_it(folder, monkeypatch):
    path, memory = folder
    monkeypatch.setattr("covary.data.federated.PASS", 10)
    model = cv.models.logistic_regression(3, 3)
    streamed, inside = (cv.supervised(model, data) for data in (cv.FederatedData.open(path, stream=True), memory))
    for settings in ({"eval_every": 3}, {"target": ("loss", 0.8)}, {"target": ("loss", 0.8), "eval_every": 4}):
        a, b = (cv.simulate(cv.scaffold(0.1), p, 12, **TRAINING, **settings) for p in (streamed, inside))
        np.testing.assert_allclose(a.history["loss"], b.history["loss"], rtol=1e-11)
        assert a.reached == b.reached
        np.testing.assert_allclose(a.clients.c_i, b.clients.c_i, rtol=1e-11, atol=1e-14)


def test_streamed_data_that_diverges_returns_the_state_before(tmp_path):
    clients = [(np.full((4, 2), 1.0 + i), np.zeros(4)) for i in range(4)]
    cv.FederatedData.write(tmp_path / "d", clients)
    model = SquaredError(2)
    model.init = lambda key: jax.numpy.ones(2)
    for eta_l, rounds in ((1e100, 1), (1e300, 0)):
        endings = []
        for data in (cv.FederatedData.open(tmp_path / "d", stream=True), cv.FederatedData.from_clients(clients)):
            with pytest.warns(cv.DivergenceWarning):
                run = cv.simulate(cv.scaffold(eta_l), cv.supervised(model, data), 9, clients_per_round=2, local_steps=1)
            assert run.rounds == run.diverged - 1 == rounds
            endings.append(run)
        np.testing.assert_allclose(endings[0].clients.c_i, endings[1].clients.c_i)
        np.testing.assert_allclose(endings[0].x, endings[1].x)


def test_the_warm_start_of_streamed_data_is_finished_before_a_target_counts(folder):
    path, memory = folder
    model = cv.models.logistic_regression(3, 3)
    how = {"target": ("loss", 1e6), "warm_start": True, "average": "uniform", **TRAINING}
    runs = [
        cv.simulate(cv.scaffold(0.1), cv.supervised(model, data), 9, **how)
        for data in (cv.FederatedData.open(path, stream=True), memory)
    ]
    assert runs[0].reached == runs[1].reached == 3
    np.testing.assert_allclose(runs[0].history["average_loss"], runs[1].history["average_loss"], rtol=1e-11)


@pytest.mark.parametrize("failing", range(6))
def test_no_failed_write_is_lost(monkeypatch, failing):
    calls = []

    def write(self, ids, rows, real=store.DiskStore.write):
        calls.append(ids)
        if len(calls) == failing + 1:
            raise cv.CovaryError("The disk is full")
        real(self, ids, rows)

    monkeypatch.setattr(store.DiskStore, "write", write)
    with pytest.raises(cv.CovaryError, match="The disk is full"):
        cv.simulate(cv.scaffold(0.1), small_logistic(SIZES), 6, **TRAINING, store="disk")


def test_an_interruption_leaves_no_thread_and_no_folder(monkeypatch, tmp_path):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    def interrupt(r, values):
        if r == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cv.simulate(cv.scaffold(0.1), small_logistic(SIZES), 9, **TRAINING, store="disk", log=interrupt)
    assert not [thread for thread in threading.enumerate() if "covary" in thread.name]
    gc.collect()
    assert not list(tmp_path.iterdir())


def test_a_loss_that_mixes_examples_is_not_cut_into_parts():
    class Normalised(SquaredError):
        def loss(self, params, batch):
            x, y = batch
            z = x @ (params + 1)
            return jax.numpy.mean(((z - z.mean()) / (z.std() + 0.1) - y) ** 2)

    rng = np.random.default_rng(0)
    data = cv.FederatedData((rng.normal(size=(32, 4)), rng.normal(size=32)), [8] * 4)
    losses = [
        cv.simulate(cv.fedavg(0.01), cv.supervised(Normalised(4), data), 3, devices=count).history["loss"]
        for count in (1, 2)
    ]
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-11)


@pytest.mark.parametrize(
    "change",
    [
        lambda g: (g @ g) * g**2 + abs(g) - 1 / (2 + g * g) + +g,
        lambda g: jax.numpy.sign(g) * g.sum(),
        lambda g: np.linspace(1, 2, 12) * g,
    ],
)
def test_an_algorithm_may_use_every_operator_and_even_more(change):
    """Models are kept as blocks or as one vector; an algorithm works on both."""
    plain = cv.fedavg(0.1).exchanges[0]

    def step(local, down, client, grad):
        return local._replace(y=local.y - 0.01 * change(grad(local.y)))

    algorithm = cv.Algorithm("custom", *[getattr(cv.fedavg(0.1), f) for f in ("init_server", "init_client")], (plain,))
    algorithm = dataclasses.replace(algorithm, exchanges=(dataclasses.replace(plain, step=step),))
    blocks = cv.simulate(algorithm, small_logistic(SIZES), 3, **TRAINING)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("covary._engine.local._arithmetic_only", lambda *_: False)
        compiled.cache_clear()
        whole = cv.simulate(algorithm, small_logistic(SIZES), 3, **TRAINING)
        compiled.cache_clear()
    np.testing.assert_allclose(blocks.x, whole.x, rtol=1e-12)


@pytest.mark.parametrize("name", ["sgd", "fedavg", "fedprox", "scaffold", "dane", "vrl_sgd", "feddyn", "mime"])
def test_covarys_own_algorithms_work_on_blocks(name):
    """One vector would give the same numbers, only slower."""
    x, unravel = jax.flatten_util.ravel_pytree({"w": np.ones((200, 200)), "b": np.ones(3)})
    algorithm, form = getattr(cv, name)(0.1), Form(unravel, x)
    server, client = algorithm.init_server(x), algorithm.init_client(x)
    assert not form.whole
    for exchange in (*algorithm.trips(2), *algorithm.exchanges):
        assert _arithmetic_only(exchange, form, exchange.broadcast(server), client)


def test_a_folder_that_fits_is_loaded(folder):
    path, memory = folder
    data = cv.FederatedData.open(path)
    assert not data.streamed
    np.testing.assert_array_equal(data.client(3)[0], memory.client(3)[0])


def test_a_dict_of_examples_keeps_its_form(tmp_path):
    clients = [{"image": np.ones((2, 3, 3)), "label": np.array([0, 1])}] * 2
    cv.FederatedData.write(tmp_path / "d", clients)
    assert cv.FederatedData.open(tmp_path / "d").client(1)["image"].shape == (2, 3, 3)


def test_bad_folders_are_rejected(tmp_path, folder):
    path, _ = folder
    with pytest.raises(cv.CovaryError, match="folder must be a new folder"):
        cv.FederatedData.write(path, [])
    with pytest.raises(cv.CovaryError, match="at least one client"):
        cv.FederatedData.write(tmp_path / "none", [])
    with pytest.raises(cv.CovaryError, match=r"clients\[1\] must be like client 0"):
        cv.FederatedData.write(tmp_path / "mixed", [np.ones((2, 3)), np.ones((2, 4))])
    with pytest.raises(cv.CovaryError, match="NaN"):
        cv.FederatedData.write(tmp_path / "nan", [np.full((2, 3), np.nan)])
    pair = collections.namedtuple("pair", "x y")
    for odd in (pair(np.ones((2, 3)), np.ones(2)), {0: np.ones((2, 3))}, (np.ones((2, 3)), None)):
        with pytest.raises(cv.CovaryError, match="examples must be arrays nested"):
            cv.FederatedData.write(tmp_path / "odd", [odd])
    with pytest.raises(cv.CovaryError, match="clients must be"):
        cv.FederatedData.write(tmp_path / "five", 5)
    assert [p.name for p in tmp_path.iterdir()] == ["data"]
    with pytest.raises(cv.CovaryError, match="not a covary data set"):
        cv.FederatedData.open(tmp_path)
    (path / "sizes.npy").write_bytes((path / "sizes.npy").read_bytes()[:-8])
    with pytest.raises(cv.CovaryError, match="not a covary data set"):
        cv.FederatedData.open(path)


def test_bad_engine_options_are_rejected():
    problem = small_logistic(SIZES)
    wrong = {
        "store": ("./cloud\0", "folder you can write to"),
        "devices": (9, "at most 8"),
        "width": (0, "width must be"),
        "precision": ("bfloat16", "None on a CPU"),
    }
    for name, (value, told) in wrong.items():
        with pytest.raises(cv.CovaryError, match=told):
            cv.simulate(cv.scaffold(0.1), problem, 1, **{name: value})
    for typo in ("dsk", ""):
        with pytest.raises(cv.CovaryError, match="store must be"):
            cv.simulate(cv.scaffold(0.1), problem, 1, store=typo)
    with pytest.raises(cv.CovaryError, match="precision must be"):
        cv.simulate(cv.scaffold(0.1), problem, 1, precision="float8")


def test_many_small_arrays_beside_a_large_one_are_the_model_that_they_are():
    class Layers:
        def init(self, key):
            keys = jax.random.split(key, 12)
            small = {f"layer{k}": {"w": jax.random.normal(keys[k], (3, 3)), "b": jnp.ones(3)} for k in range(11)}
            return small | {"wide": jax.random.normal(keys[11], (3, 6_000)) / 100}

        def loss(self, params, batch):
            x, y = batch
            for name in sorted(params.keys() - {"wide"}):
                x = jnp.tanh(x @ params[name]["w"] + params[name]["b"])
            return jnp.mean((jnp.tanh(x @ params["wide"]).sum(axis=1) - y) ** 2)

    rng = np.random.default_rng(0)
    data = cv.FederatedData.from_clients([(rng.normal(size=(n, 3)), rng.normal(size=n)) for n in (6, 9, 7)])
    problem, settings = cv.supervised(Layers(), data), {"clients_per_round": 2, "local_steps": 3, "batch_size": 4}
    run, plain = (cv.simulate(cv.scaffold(0.001), problem, 3, **settings, debug=debug) for debug in (False, True))
    np.testing.assert_allclose(run.x, plain.x, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(run.clients.c_i, plain.clients.c_i, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize(
    "how", [{}, {"devices": 3}, {"store": "host"}, {"average": 0.5}, {"warm_start": True}], ids=str
)
def test_measured_and_unmeasured_rounds_of_deep_models_are_one_program(monkeypatch, how):
    settings = {"rounds": 8, **TRAINING, "eval_every": 3, **how}
    apart = cv.simulate(cv.scaffold(0.1), small_logistic(SIZES), **settings)
    monkeypatch.setattr("covary._engine.prepare.DEEP_STEP", 0)
    together = cv.simulate(cv.scaffold(0.1), small_logistic(SIZES), **settings)
    np.testing.assert_allclose(together.x, apart.x, rtol=1e-12)
    assert together.history.keys() == apart.history.keys()
    for name, column in apart.history.items():
        np.testing.assert_allclose(together.history[name], column, rtol=1e-9, atol=1e-15, err_msg=name)


def test_a_deep_model_is_compiled_once(monkeypatch):
    class Marked:
        def init(self, key):
            return jnp.ones(3)

        def loss(self, w, batch):
            return jnp.mean(jnp.atan2(batch[0] @ w, 1.0))

    rng = np.random.default_rng(0)
    test = (rng.normal(size=(4, 3)),)
    problem = cv.supervised(Marked(), cv.FederatedData.from_clients([test] * 2), test)

    def copies(deep_step, every):
        monkeypatch.setattr("covary._engine.prepare.DEEP_STEP", deep_step)
        training = Training(9, local_steps=2, eval_every=every)
        job = prepare(cv.scaffold(0.1), problem, training, seeds=[0], x0=None)
        key = jax.random.key_data(jax.random.key(0))
        given = (dict(job.algorithm.numbers), initial(job.algorithm, job), key, 9, 9, job.world)
        return compiled(job.program).lower(*given).as_text().count("atan2")

    assert copies(0, every=3) == copies(0, every=1) < copies(np.inf, every=3)


class Convolution:
    """A convolution, then a mean over places."""

    def init(self, key):
        return {"kernel": jax.random.normal(key, (4, 1, 3)), "head": jnp.zeros(4)}

    def loss(self, params, batch):
        x, y = batch
        hidden = jax.nn.relu(jax.lax.conv(x[:, None], params["kernel"], (1,), "SAME"))
        return jnp.mean((hidden.mean(axis=2) @ params["head"] - y) ** 2)


def test_an_accelerator_takes_the_clients_that_fit_and_convolutions_one_by_one(monkeypatch):
    rng = np.random.default_rng(0)
    data = cv.FederatedData.from_clients([(rng.normal(size=(6, 5)), rng.normal(size=6)) for _ in range(8)])
    dense, convolved = small_logistic([6] * 8), cv.supervised(Convolution(), data)
    frozen = cv.supervised(Convolution(), data, trainable=lambda path: path == "head")
    plan, *_ = plan_rounds(Training(1, local_steps=2, batch_size=3), cv.scaffold(0.1), data.sizes)

    def width(problem, memory=2**40):
        monkeypatch.setattr("covary._engine.memory.device_memory", lambda: memory)
        x, unravel = problem.start(None, 0)
        local = LocalProgram(plan.local, problem.loss.holding(), unravel)
        return place.choose_place(plan, 1e12, local, x, problem, 1, None).width

    class Accelerator:
        platform = "gpu"

    monkeypatch.setattr(place, "available", lambda count: (Accelerator(),))
    assert width(dense) == 8
    assert 1 < width(dense, memory=2**16) < 8
    assert width(dense, memory=1) == 1
    assert width(convolved) == 1
    assert width(frozen) == 8  # the same kernel for all clients


@pytest.mark.parametrize(
    ("environment", "code", "count"),
    [
        ({}, "import covary", None),
        ({"JAX_NUM_CPU_DEVICES": "3"}, "import covary", 3),
        ({"XLA_FLAGS": "--xla_force_host_platform_device_count=2"}, "import covary", 2),
        ({}, "import jax; jax.numpy.ones(1); import covary", 1),
        ({"XDG_CACHE_HOME": "/dev/null"}, "import covary", None),
    ],
)
def test_a_users_own_settings_of_jax_take_precedence(environment, code, count):
    code += (
        "; import jax, covary as cv; run = cv.simulate(cv.sgd(0.1), cv.lower_bound(1.0), 2)"
        "; print(len(jax.devices()), jax.config.jax_compilation_cache_dir)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **environment}, capture_output=True, text=True, timeout=HANGS
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[0]) == (count or machine.cores())
    if environment.get("XDG_CACHE_HOME") == "/dev/null":
        assert done.stdout.split()[1] == "None"
    else:
        assert Path(done.stdout.split()[1]).is_dir()
