"""Malicious files are rejected with a message, in little memory and time, and no other file is touched."""

import contextlib
import gzip
import io
import json
import os
import signal
import struct
import tracemalloc
import warnings
import zipfile

import numpy as np
import pytest
from helpers import HANGS
from killed import problem
from typer.testing import CliRunner

import covary as cv
from covary.cli import app
from covary.data.idx import read_idx
from covary.experiments import digits
from covary.running.checkpoint import CheckpointWarning
from covary.runs.files import File
from covary.runs.folder import RunFolder

SETTINGS = {"clients_per_round": 4, "local_epochs": 1, "batch_size": 5, "checkpoint_every": 3}
MUCH = 2**26  # bytes


@contextlib.contextmanager
def harmless(says):
    """Rejected with this message, within a minute, and without much memory."""

    def stop(number, frame):
        raise AssertionError(f"still busy after {HANGS} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(HANGS)
    tracemalloc.start()
    try:
        with pytest.raises(cv.CovaryError, match=says):
            yield
        assert tracemalloc.get_traced_memory()[1] < MUCH
    finally:
        tracemalloc.stop()
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def sparse(path, size=2**42):
    """A file that declares four tebibytes and takes none."""
    with path.open("wb") as file:
        file.truncate(size)


@pytest.fixture
def saved(tmp_path):
    """A run stopped in its tenth round, with its checkpoints."""

    def log(r, values):
        if r == 10:
            raise InterruptedError

    with pytest.raises(InterruptedError):
        cv.simulate(cv.scaffold(0.05), problem(), 30, log=log, checkpoint=tmp_path / "saved", **SETTINGS)
    return tmp_path / "saved"


def go_on(folder):
    return cv.simulate(cv.scaffold(0.05), problem(), 30, checkpoint=folder, **SETTINGS)


@pytest.fixture
def victim(tmp_path):
    """Someone else's file, which must stay as it is."""
    path = tmp_path / "victim"
    path.write_text("precious")
    yield path
    assert path.read_text() == "precious"


@pytest.mark.parametrize("name", ["lock", "round-000000012.safetensors", "round-000000012.safetensors.draft", "x"])
def test_links_in_a_checkpoint_are_rejected(name, saved, victim):
    (saved / name).unlink(missing_ok=True)
    (saved / name).symlink_to(victim)
    with harmless("is a link"):
        go_on(saved)


def test_folders_in_place_of_files(saved):
    """They cannot be removed as files are, and take no whole checkpoint's place."""
    for name in ("round-000000098", "round-000000099", "clients-000000099-0", "x.draft"):
        (saved / f"{name}.safetensors").mkdir()
    for _ in range(2):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", CheckpointWarning)
            assert go_on(saved).rounds == 30


def test_a_pipe_is_not_waited_for(saved):
    os.mkfifo(saved / "round-000000012.safetensors")
    with harmless("neither a file nor a folder"):
        go_on(saved)


@pytest.mark.parametrize("kind", ["round", "clients"])
def test_a_file_of_a_huge_size_is_not_read(kind, saved):
    for path in saved.glob(f"{kind}-*"):
        sparse(path)
    with damage("at most .* are allowed"):
        go_on(saved)


@contextlib.contextmanager
def damage(says):
    """Every checkpoint is reported as damaged, for this reason, until none is left."""
    with pytest.warns(CheckpointWarning, match=says), harmless("Every checkpoint in .* is damaged"):
        yield


def rewritten(saved, change):
    """One checkpoint with something changed, and a checksum that fits; the others are gone."""
    newest, *others = sorted(saved.glob("round-*"), reverse=True)
    for path in others:
        path.unlink()
    arrays, facts = File(newest).read() or ({}, {})
    change(arrays, facts)
    File(newest).write(arrays, facts)


def put(key, value):
    return lambda arrays, facts: facts.__setitem__(key, value)


def array(name, value):
    """Of the history, in place of the column of that name."""

    def change(arrays, facts):
        column = name.removeprefix("history.")
        numbered = next((key for key in arrays if key.endswith(f".{column}") and "history." in key), "history.999.trap")
        arrays[name if name == column else numbered] = value

    return change


@pytest.mark.parametrize(
    "change",
    [
        put("segments", ["../../etc/passwd"]),
        put("segments", ["clients-000000009-0"] * 10_000),
        put("segments", "clients-000000009-0"),
        put("segments", [{}]),
        put("round", "nine"),
        put("round", 10**30),
        put("about", [1]),
    ],
)
def test_a_checkpoint_with_facts_that_cannot_be(change, saved):
    """With a checksum that fits: whoever can write files can compute one."""
    rewritten(saved, change)
    with damage("has unexpected contents"):
        go_on(saved)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (put("format", 2), "checkpoint must be of format 1"),
        (array("server.c", np.zeros(3)), "has no server.c of shape"),
        (array("state.round", np.asarray(2**40)), "round number does not match its history"),
        (array("state.round", np.asarray([9, 9])), "has no state.round"),
        (array("history.round", np.arange(5)), "not have one row per round"),
        (array("history.round", np.arange(9)), "are not 1, 2, 3"),
        (array("history.cohort", np.zeros((9, 2))), "not have one row per round"),
        (array("history.trap", np.zeros(9)), "other columns"),
        (array("history.cohort", np.zeros((9, 7), int)), "not have one row per round"),
        (
            lambda arrays, facts: arrays.pop(next(key for key in arrays if key.endswith(".control_error"))),
            "has no control_error",
        ),
    ],
)
def test_a_checkpoint_with_arrays_that_do_not_fit(change, says, saved):
    rewritten(saved, change)
    with harmless(says):
        go_on(saved)


@pytest.mark.parametrize("ids", [[0, 999], [-1, 0], [0.5, 1.5], []])
def test_states_of_clients_that_are_not_there(ids, saved):
    for path in saved.glob("clients-*"):
        File(path).write({"ids": np.array(ids), "0": np.zeros((len(ids), 21))}, {"format": 1})
    with damage("has unexpected contents"):
        go_on(saved)


def test_states_that_do_not_fit(saved):
    for path in saved.glob("clients-*"):
        File(path).write({"ids": np.array([0, 1]), "0": np.zeros((3, 21))}, {"format": 1})
    with harmless("of another form"):
        go_on(saved)


def test_facts_nested_deeper_than_any_parser_goes(saved):
    facts = "[" * 100_000 + "]" * 100_000
    header = json.dumps({"__metadata__": {"facts": facts, "sha256": "0" * 64}}).encode()
    for path in saved.glob("round-*"):
        path.write_bytes(struct.pack("<Q", len(header)) + header)
    with damage("is damaged"):
        go_on(saved)


def command(*args):
    result = CliRunner().invoke(app, [*map(str, args)])
    if result.exception is not None:
        raise result.exception
    return result


@pytest.fixture
def results(tmp_path, monkeypatch):
    """The folder of a finished command."""
    monkeypatch.chdir(tmp_path)
    command("run", "scaffold", "--rounds", 2, "--checkpoint", "results")
    return tmp_path / "results"


def again(folder):
    return command("run", "scaffold", "--rounds", 2, "--checkpoint", folder, "--resume")


@pytest.mark.parametrize("name", ["results.jsonl", "run.json", "lock", "checkpoint/lock", "results.jsonl.draft"])
def test_links_in_a_run_folder_are_rejected(name, results, victim):
    (results / name).unlink(missing_ok=True)
    (results / name).symlink_to(victim)
    with harmless("is a link"):
        again(results)


def test_a_run_folder_whose_checkpoints_are_elsewhere_is_rejected(results, tmp_path):
    os.rename(results / "checkpoint", tmp_path / "elsewhere")
    (results / "checkpoint").symlink_to(tmp_path / "elsewhere")
    with harmless("is a link"):
        again(results)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ("{", "is damaged"),
        ("[1]", "is damaged"),
        ("[" * 100_000, "is damaged"),
        ('{"command": "compare"}', "command was compare and is run"),
        ("x" * 2**21, "at most 1,048,576 are allowed"),
    ],
    ids=["cut", "list", "nested", "another", "huge"],
)
def test_settings_that_are_not_covarys(settings, says, results):
    (results / "run.json").write_text(settings)
    with harmless(says):
        again(results)


CELL = {
    "kind": "cell",
    "setting": {"algorithm": "sgd", "similarity": 0.0},
    "eta_l": 1.0,
    "rounds": [1],
    "accuracy": [1.0],
}


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        (['{"kind": "cell"}'], "is not a cell of a table"),
        (["[1, 2]"], "has unexpected contents"),
        (["[" * 100_000 + "]" * 100_000], "is damaged"),
        (["nonsense"], "is damaged"),
        ([json.dumps(CELL)], "is not a cell of a table"),
        ([json.dumps(CELL | {"tried": [], "seconds": "long"})], "is not a cell of a table"),
        ([json.dumps(CELL | {"tried": [], "seconds": 1.0, "setting": {"algorithm": []}})], "is not a cell of a table"),
    ],
)
def test_results_that_are_not_covarys(lines, says, tmp_path, monkeypatch):
    folder = tmp_path / "results"

    def stopped(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(digits, "compare", stopped)
    with pytest.raises(SystemExit):
        command("compare", "--rounds", 1, "--seeds", 1, "--checkpoint", folder)
    with (folder / "results.jsonl").open("a") as file:
        file.write("\n".join(lines) + "\n")
    with harmless(says):
        command("compare", "--rounds", 1, "--seeds", 1, "--checkpoint", folder, "--resume")


def test_results_of_another_program_are_not_touched(tmp_path):
    (tmp_path / "results.jsonl").write_text("a line\nand half of anoth")
    with harmless("holds results of another program"):
        command("run", "scaffold", "--rounds", 2, "--checkpoint", tmp_path)
    assert (tmp_path / "results.jsonl").read_text() == "a line\nand half of anoth"


def test_results_of_a_huge_size_are_not_read(results):
    sparse(results / "results.jsonl")
    with harmless("at most 1,073,741,824 are allowed"):
        RunFolder(results).read()


@pytest.fixture
def data(tmp_path):
    cv.FederatedData.write(tmp_path / "data", [(np.ones((2, 3)), np.zeros(2, int)), (np.ones((1, 3)), np.ones(1, int))])
    return tmp_path / "data"


def npy(shape, dtype="<f8", content=b""):
    head = repr({"descr": dtype, "fortran_order": False, "shape": shape}).encode()
    head = head.ljust(117) + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(head)) + head + content


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("data.json", b"[" * 100_000),
        ("data.json", b" " * 2**21),
        ("data.json", b'{"format": 1, "form": {"tuple": ["../../etc/passwd", 1]}}'),
        ("data.json", b'{"format": 1, "form": {"tuple": []}}'),
        ("data.json", b'{"format": 1, "form": {"__class__": [0]}}'),
        ("sizes.npy", npy((10**15,), "<i8")),
        ("0.npy", npy((2**40, 0))),
        ("sizes.npy", npy((2,), "<i8", struct.pack("<qq", 2**62, 3 - 2**62))),
        ("sizes.npy", npy((5,), "<i8", struct.pack("<qqqqq", 2**62, 2**62, 2**62, 2**62, 3))),
        ("sizes.npy", npy((1,), "|O", b"cos\nsystem\n(S'touch owned'\ntR.")),
        ("0.npy", npy((10**15, 3))),
        ("0.npy", npy((3,), "|O", b"cos\nsystem\n(S'touch owned'\ntR.")),
        ("0.npy", npy((3,), "|V100000")),
    ],
)
def test_a_malicious_data_folder(name, content, data, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (data / name).write_bytes(content)
    with harmless("is not a covary data set|are allowed"):
        cv.FederatedData.open(data)
    assert not (tmp_path / "owned").exists()


def test_a_data_folder_of_a_huge_size(data):
    (data / "sizes.npy").write_bytes(npy((2**38,), "<i8"))
    with (data / "sizes.npy").open("r+b") as file:
        file.truncate(2**42)
    with harmless("sizes.npy declares 2,199,023,255,552 bytes"):
        cv.FederatedData.open(data)


@pytest.mark.parametrize("name", ["data.json", "sizes.npy", "0.npy"])
def test_a_data_folder_with_pipes_and_devices(name, data):
    for make in (lambda path: os.mkfifo(path), lambda path: path.symlink_to("/dev/zero")):
        (data / name).unlink()
        make(data / name)
        with harmless("is not a covary data set|is a link|is not a regular file"):
            cv.FederatedData.open(data)


def archive(path, arrays):
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as bundle:
        for name, content in arrays.items():
            bundle.writestr(name, content)
    return path


def hospital():
    whole = io.BytesIO()
    np.save(whole, np.zeros(3))
    return whole.getvalue()


@pytest.mark.parametrize(
    "x",
    [npy((2**25,), "<f8", bytes(2**28)), npy((10**15, 13)), npy((3,), "|O", b"cos\nsystem\n(S'touch owned'\ntR.")],
    ids=["bomb", "declared", "pickle"],
)
def test_a_malicious_file_of_hospitals(x, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = archive(tmp_path / "h.npz", {"X.npy": x, "y.npy": hospital(), "site.npy": hospital(), "../evil.npy": b"x"})
    with harmless("cannot be read"):
        cv.datasets.heart_disease(path)
    assert not (tmp_path / "owned").exists()


def test_a_gzip_bomb_that_declares_what_it_is(tmp_path):
    path = tmp_path / "i.gz"
    path.write_bytes(gzip.compress(struct.pack(">IIII", 0x0803, 2**16, 2**8, 2**8) + bytes(2**20)))
    with harmless("declares 4,294,967,296 bytes"):
        read_idx(path, "images", "Fetch it again.")
