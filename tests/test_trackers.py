"""What a tracker keeps is what the run's history says, read back with the tracker's own tools."""

import json
import logging
import math
import struct
import subprocess
import sys

import numpy as np
import pytest
from helpers import HANGS, small_logistic
from typer.testing import CliRunner

import covary as cv
from covary.cli import app

PARAMS = {"algorithm": "scaffold", "eta_l": 0.3}


def tracked(log, **options):
    return cv.simulate(cv.scaffold(eta_l=0.3), small_logistic([6, 8, 10]), rounds=7, log=log, eval_every=3, **options)


def told(run):
    """{metric: [(round, value), ...]} of a history, without what was not measured."""
    columns = {name: column for name, column in run.history.items() if column.ndim == 1 and name != "round"}
    assert {"loss", "accuracy", "drift", "control_error", "bytes_up", "bytes_down"} <= set(columns)
    return {
        name: [(int(r), float(v)) for r, v in zip(run.history["round"], column, strict=True) if not math.isnan(v)]
        for name, column in columns.items()
    }


def test_tensorboard_event_files_hold_the_history(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with cv.trackers.tensorboard(tmp_path / "logs") as log:
        run = tracked(log)
    files = EventAccumulator(str(tmp_path / "logs"))
    files.Reload()
    kept = {name: [(e.step, e.value) for e in files.Scalars(name)] for name in files.Tags()["scalars"]}
    expected = {name: [(r, float(np.float32(v))) for r, v in rows] for name, rows in told(run).items()}
    assert kept == expected  # event files hold float32
    assert [r for r, _ in kept["loss"]] == [3, 6, 7]
    assert len(kept["bytes_up"]) == 7


def test_two_runs_in_one_folder_keep_both(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for round in (1, 2):
        with cv.trackers.tensorboard(tmp_path) as log:
            log(round, {"loss": 1.0})
    files = EventAccumulator(str(tmp_path))
    files.Reload()
    assert sorted(event.step for event in files.Scalars("loss")) == [1, 2]


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """An MLflow store: making its tables takes seconds, so the tests share one."""
    return f"sqlite:///{tmp_path_factory.mktemp('mlflow') / 'runs.db'}"


def mlflow_runs(store, experiment):
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=store)
    return client, client.search_runs([client.get_experiment_by_name(experiment).experiment_id])


def test_mlflow_keeps_the_history_and_the_parameters(store, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    level = logging.getLogger("mlflow.store.db.utils").level
    with cv.trackers.mlflow("trial", PARAMS, name="first", uri=store) as log:
        run = tracked(log)
    assert capfd.readouterr() == ("", "")
    assert logging.getLogger("mlflow.store.db.utils").level == level
    assert not list(tmp_path.iterdir())
    client, (kept,) = mlflow_runs(store, "trial")
    history = {name: client.get_metric_history(kept.info.run_id, name) for name in kept.data.metrics}
    rows = {name: sorted((m.step, m.value) for m in metrics) for name, metrics in history.items()}
    assert rows == told(run)
    assert kept.data.params == {"algorithm": "scaffold", "eta_l": "0.3"}
    assert (kept.info.run_name, kept.info.status) == ("first", "FINISHED")


def test_mlflow_says_which_run_failed(store):
    log = cv.trackers.mlflow("failing", uri=store)
    with pytest.raises(ZeroDivisionError), log:
        log(1, {"loss": 1 / 0})
    with cv.trackers.mlflow("failing", uri=store):
        pass  # in the same experiment
    _, kept = mlflow_runs(store, "failing")
    assert sorted(run.info.status for run in kept) == ["FAILED", "FINISHED"]


def wandb_records(folder):
    """The records of an offline run: a LevelDB log of 32 KiB blocks, whose parts have checksum, length and kind."""
    import wandb
    from wandb.proto import wandb_internal_pb2

    wandb.teardown()  # its process ends, and with it what it still writes
    (file,) = folder.glob("wandb/offline-run-*/*.wandb")
    content, at, record = file.read_bytes(), 7, b""
    while at < len(content):
        if (left := 32768 - at % 32768) < 7:
            at += left
            continue
        _, length, kind = struct.unpack("<IHB", content[at : at + 7])
        record += content[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # the whole of a record, or its last part
            yield wandb_internal_pb2.Record.FromString(record)
            record = b""


@pytest.fixture
def wandb_here(tmp_path, monkeypatch):
    """wandb, restarted with all its files in the test's folder."""
    import wandb

    wandb.teardown()
    for name in ("WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "WANDB_DATA_DIR"):
        monkeypatch.setenv(name, str(tmp_path / "other"))
    return wandb


def test_wandb_keeps_the_history_and_the_parameters(wandb_here, tmp_path, capfd):
    with cv.trackers.wandb("trial", PARAMS, mode="offline", dir=tmp_path) as log:
        run = tracked(log)
    assert capfd.readouterr() == ("", "")
    assert wandb_here.run is None
    rows, config = {}, {}
    for record in wandb_records(tmp_path):
        if record.WhichOneof("record_type") == "run":
            assert record.run.project == "trial"
            config = {item.key: json.loads(item.value_json) for item in record.run.config.update}
        elif record.WhichOneof("record_type") == "history":
            for item in record.history.item:
                name = item.key or item.nested_key[0]
                if not name.startswith("_"):
                    rows.setdefault(name, []).append((record.history.step.num, json.loads(item.value_json)))
    assert rows == told(run)
    assert config.items() >= PARAMS.items()


def test_wandb_says_which_run_failed(wandb_here, tmp_path):
    log = cv.trackers.wandb(mode="offline", dir=tmp_path)
    with pytest.raises(ZeroDivisionError), log:
        log(1, {"loss": 1 / 0})
    codes = [r.exit.exit_code for r in wandb_records(tmp_path) if r.WhichOneof("record_type") == "exit"]
    assert codes == [1]


def test_a_tracker_takes_one_run_and_nothing_after_its_end(tmp_path):
    log = cv.trackers.tensorboard(tmp_path)
    tracked(log)
    with pytest.raises(cv.CovaryError, match=r"round must be above 7, .* got 1. .* Open another"):
        tracked(log)
    log.close()
    log.close()
    with pytest.raises(cv.CovaryError, match="closed"):
        log(8, {"loss": 1.0})


def test_training_continues_without_a_tracker_that_fails():
    ended = []

    def send(round, metrics):
        if round == 3:
            raise ConnectionError("the server is gone\nand more of it")
        assert round < 3  # it gets no more rounds

    tracker = cv.trackers.Tracker("The tracker", send, ended.append)
    with pytest.warns(cv.trackers.TrackerWarning, match=r"failed in round 3 .*: the server is gone\.$"), tracker:
        run = cv.simulate(cv.sgd(0.1), small_logistic([6, 8]), rounds=5, log=tracker)
    assert run.rounds == 5
    assert ended == [True]


def test_an_error_inside_is_not_replaced_by_one_of_the_tracker():
    def end(failed):
        raise OSError("no space")

    tracker = cv.trackers.Tracker("The tracker", lambda round, metrics: None, end)
    with pytest.warns(cv.trackers.TrackerWarning, match="be closed: no space"), pytest.raises(KeyError), tracker:
        raise KeyError("the user's own")


def test_a_name_that_mlflow_forbids_marks_the_run_as_failed(store):
    with pytest.warns(cv.trackers.TrackerWarning), cv.trackers.mlflow("forbidden", uri=store) as log:
        log(1, {"top@1": 1.0})
    _, runs = mlflow_runs(store, "forbidden")
    assert [run.info.status for run in runs] == ["FAILED"]


def test_invalid_trackers_are_rejected(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    with pytest.raises(cv.CovaryError, match=r"trackers.wandb cannot start a run: .* Run `wandb login`"):
        cv.trackers.wandb(mode="ofline")
    with pytest.raises(cv.CovaryError, match="Pass params instead"):
        cv.trackers.wandb(config={"a": 1})
    with pytest.raises(cv.CovaryError, match="a sweep is many"), cv.trackers.tensorboard(tmp_path) as log:
        cv.sweep(cv.sgd, small_logistic([6, 8]), {"eta_l": [0.1]}, rounds=2, log=log)


def test_the_command_line_tracks(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = ["run", "sgd", "--rounds", "3", "--clients", "4", "--out", str(tmp_path), "--quiet"]
    done = CliRunner().invoke(app, [*run, "--track", "tensorboard"])
    assert done.exit_code == 0, done.output
    (folder,) = tmp_path.iterdir()
    files = EventAccumulator(str(folder / "tensorboard"))
    files.Reload()
    records = [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]
    kept = [event.value for event in files.Scalars("accuracy")]
    np.testing.assert_allclose(kept, [record["accuracy"] for record in records], rtol=1e-6)
    refused = CliRunner().invoke(app, [*run, "--track", "paper"])
    assert "--track must be tensorboard, mlflow or wandb" in str(refused.exception)


@pytest.mark.parametrize("name", ["tensorboard", "mlflow", "wandb"])
def test_a_missing_package_is_reported_with_the_command_that_installs_it(name, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, {"tensorboard": "tensorboardX"}.get(name, name), None)
    with pytest.raises(cv.CovaryError, match=rf"pip install 'covary\[{name}\]'"):
        getattr(cv.trackers, name)(str(tmp_path))


def test_an_invalid_folder_and_invalid_params_are_rejected(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(
        cv.CovaryError, match=r"trackers.tensorboard cannot start a run: .* Choose a folder that can be written to"
    ):
        cv.trackers.tensorboard(tmp_path / "file")
    for function in (cv.trackers.mlflow, cv.trackers.wandb):
        with pytest.raises(cv.CovaryError, match="params must be a dict"):
            function(params=[("eta_l", 0.1)])


def test_mlflow_without_a_database_library_says_what_is_missing(tmp_path):
    code = (
        "import sys; sys.modules['sqlalchemy'] = None\nimport covary as cv; cv.trackers.mlflow(uri='sqlite:///runs.db')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=HANGS, cwd=tmp_path)
    assert "InvalidInput: MLflow cannot open its store" in done.stderr
    assert "pip install 'covary[mlflow]'" in done.stderr


def test_importing_covary_imports_no_tracker():
    code = "import sys, covary; print({'tensorboardX', 'mlflow', 'wandb'} & set(sys.modules) or 'none')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=HANGS)
    assert done.stdout.strip() == "none", done.stderr
