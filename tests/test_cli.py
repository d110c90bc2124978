"""The command line as a user meets it: in this process, and where a behaviour is the process's own, in a fresh one."""

import json
import shlex
import signal
import subprocess
import sys
from dataclasses import replace

import jax
import numpy as np
import pytest
import torch
from helpers import HANGS, covary, covary_process, wait_until

from covary.bench import deep_torch, measure, torch_rivals
from covary.bench.deep import GPT, DeepWorkload, ResNet


def test_compare_makes_a_table_a_picture_and_raw_results(tmp_path):
    result = covary("compare", "--rounds", "12", "--seeds", "1", "--target", "0.8", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    for name in ("sgd", "fedavg", "fedprox", "scaffold", "0 % similarity", "100 % similarity"):
        assert name in result.stdout
    (folder,) = (tmp_path / "runs").iterdir()
    assert (folder / "curves.png").read_bytes()[:4] == b"\x89PNG"
    assert f"Report: {(folder / 'report.html').relative_to(tmp_path)}" in result.stdout
    records = [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]
    cells = [r for r in records if r["kind"] == "cell"]
    assert len(cells) == 12
    assert all(len(r["curves"]["accuracy"][0]) == 12 for r in cells)
    assert all(len(r["tried"]) >= 7 for r in cells)


def test_run_in_a_fresh_process(tmp_path):
    result = covary_process("run", "scaffold", "--eta-l", "1", "--rounds", "5", "--similarity", "0.1", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "5 rounds" in result.stdout
    assert "Warning" not in result.stderr
    (results,) = tmp_path.glob("runs/*/results.jsonl")
    assert [json.loads(line)["round"] for line in results.read_text().splitlines()] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["run", "adam"], "ALGORITHM must be one of"),
        (["run", "[/bold]"], "ALGORITHM must be one of"),
        (["run", "sgd", "--mu", "1"], "--mu is not an option of sgd"),
        (["run", "scaffold", "--clients-per-round", "50"], "clients_per_round must be between 1 and 20; got 50"),
    ],
)
def test_errors_are_one_line_and_exit_code_2(args, says, tmp_path):
    result = covary(*args, cwd=tmp_path)
    assert result.returncode == 2
    assert says in result.stderr
    assert "Traceback" not in result.stderr
    assert not (tmp_path / "runs").exists()


def test_a_diverging_run_says_so_and_fails(tmp_path):
    result = covary("run", "fedavg", "--eta-l", "1e38", "--rounds", "5", cwd=tmp_path)
    assert result.returncode == 1
    assert "diverged in round" in result.stderr


def test_a_torn_line_and_repeated_rounds_are_removed_when_a_run_is_resumed(tmp_path):
    args = ("run", "scaffold", "--rounds", "7", "--clients", "5", "--checkpoint", "saved", "--checkpoint-every", "3")
    assert covary(*args, cwd=tmp_path).returncode == 0
    results, whole = tmp_path / "saved" / "results.jsonl", (tmp_path / "saved" / "results.jsonl").read_text()
    for path in (tmp_path / "saved" / "checkpoint").glob("*-000000007*"):
        path.unlink()  # as if it had been killed after round 6 was saved, with round 7 cut off in the middle
    results.write_text(whole[:-30])
    again = covary(*args, "--resume", cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    assert results.read_text() == whole


def test_ctrl_c_prints_how_to_resume(tmp_path):
    command = [sys.executable, "-m", "covary", "run", "scaffold", "--rounds", "20000", "--similarity", "0.1"]
    process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    wait_until(lambda: list(tmp_path.glob("runs/*/checkpoint/round-*")), "the run has a checkpoint", process)
    process.send_signal(signal.SIGTERM)
    _, told = process.communicate(timeout=HANGS)
    assert process.returncode == 130, told
    again = shlex.split(told.splitlines()[-1])
    assert again[:6] == ["covary", "run", "scaffold", "--rounds", "20000", "--similarity"]
    assert "--resume" in again
    refused = covary(*again[1:], "--eta-l", "0.5", cwd=tmp_path)
    assert refused.returncode == 2
    assert "eta_l was 0.3 and is 0.5" in refused.stderr


@pytest.mark.parametrize("run", [covary, pytest.param(covary_process, marks=pytest.mark.nightly)])
def test_bench_works(run, tmp_path, monkeypatch):
    if run is covary:  # in small, where programs are compiled but not made fast
        training = measure._training
        monkeypatch.setattr(measure, "_training", lambda workload, seconds: training(workload, seconds) | {"rounds": 8})
        monkeypatch.setattr(measure, "SWEEP", {"eta_l": [0.01, 0.1]})
        batched = torch_rivals._products_in_batches
        monkeypatch.setattr(torch_rivals, "_products_by_processes", lambda w, n: batched(w, n, "cpu"))
        for name in ("W1", "W2"):
            small = replace(getattr(measure, name), batch=10, features=20, hidden=8, classes=4)
            monkeypatch.setattr(measure, name, small)
    done = run("bench", "rounds", "sweep", "--quick", "--no-peers", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "One round of W1" in done.stdout
    assert "Sweep of 24" in done.stdout
    (folder,) = (tmp_path / "runs").iterdir()
    records = [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]
    assert records[0]["jax"]
    assert all(r["seconds"] > 0 for r in records[1:] if r["what"] in ("round", "sweep"))
    assert (folder / "speed.png").stat().st_size > 10_000


@pytest.mark.parametrize("model", [ResNet((8, 16)), GPT(2, 16, 2, 50, 8), GPT(2, 16, 2, 50, 8, looped=True)], ids=str)
def test_the_deep_networks_are_the_same_in_both_libraries(model):
    workload = DeepWorkload("tiny", model, n_clients=3, cohort=2, steps=2, batch=4, size=8)
    rival = (deep_torch.TorchGPT if isinstance(model, GPT) else deep_torch.TorchResNet)(model)
    params = model.init(jax.random.key(0))
    assert sum(p.numel() for p in rival.parameters()) == sum(leaf.size for leaf in jax.tree.leaves(params))
    few = tuple(a[:4] for a in workload.examples)
    theirs = rival.loss([torch.from_numpy(a) for a in few]).item()
    choices = model.vocabulary if isinstance(model, GPT) else model.classes
    assert theirs == pytest.approx(np.log(choices), rel=0.5)
    assert model.loss(params, few) == pytest.approx(np.log(choices), rel=0.5)


def test_both_loops_of_deep_networks_take_their_rounds():
    workload = DeepWorkload("tiny", GPT(1, 16, 2, 50, 8), n_clients=3, cohort=2, steps=2, batch=4, size=8)
    ours, theirs = measure.deep_round(workload, 3), deep_torch.time_loop(workload, "eager", None, 3)
    assert min(ours["first"], ours["seconds"], theirs["first"], theirs["seconds"]) > 0


@pytest.mark.nightly
def test_bench_deep_works(tmp_path):
    done = covary_process("bench", "deep", "--quick", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    records = {record["who"]: record for record in json.loads(done.stdout)["records"]}
    assert records["covary"]["seconds"] > 0
    assert records["covary, in a second process"]["first"] < records["covary"]["first"]
    assert records["PyTorch, eager"]["seconds"] > 0


def test_bench_rejects_unknown_parts(tmp_path):
    done = covary("bench", "speed", cwd=tmp_path)
    assert done.returncode == 2
    assert "PARTS must be any of rounds, sweep, cnn, torch, deep, first, growth" in done.stderr


def test_help_and_reports_load_no_jax(tmp_path):
    """They are fast because only commands that train import JAX."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.json").write_text('{"command": "run", "algorithm": "sgd"}')
    (tmp_path / "run" / "results.jsonl").write_text('{"round": 1, "loss": 0.5}\n')
    code = (
        "import sys; from covary.cli import app; app(sys.argv[1:], standalone_mode=False); print('jax' in sys.modules)"
    )
    for words in (["run", "--help"], ["report", "run"]):
        done = subprocess.run([sys.executable, "-c", code, *words], cwd=tmp_path, capture_output=True, text=True)
        assert done.stdout.endswith("False\n"), done.stderr
