"""What test_checkpoint kills: a run, a sweep or a comparison, whose outcome goes to a file when it is done."""

import json
import os
import sys
from pathlib import Path
from unittest import mock

import numpy as np
from typer.testing import CliRunner

import covary as cv
from covary.cli import app
from covary.experiments import digits
from covary.experiments.common import Case

EVERY = 3


def problem() -> cv.Problem:
    rng = np.random.default_rng(0)
    clients = [(rng.normal(i, 1, (20, 6)), rng.integers(0, 3, 20)) for i in range(12)]
    return cv.supervised(cv.models.logistic_regression(6, 3), cv.FederatedData.from_clients(clients))


def outcome(kind: str, folder: str | None) -> dict[str, np.ndarray]:
    if kind == "compare":
        return {"table": np.frombuffer(compared(str(folder)).encode(), np.uint8)}
    settings = {"clients_per_round": 4, "local_epochs": 1, "batch_size": 5, "checkpoint": folder}
    settings["checkpoint_every"] = EVERY
    if kind == "sweep":
        grid = {"eta_l": [0.01, 0.03, 0.1]}
        swept = cv.sweep(cv.scaffold, problem(), grid, [0, 1], rounds=60, at_once=2, **settings)
        table = np.frombuffer(repr(swept.table).encode(), np.uint8)
        return {"table": table, **swept.curves}
    store = {"simulate": "device"}.get(kind, kind)
    run = cv.simulate(cv.scaffold(0.05), problem(), 120, store=store, average="uniform", **settings)
    return {"x": run.x, "c": run.server.c, "c_i": np.asarray(run.clients.c_i), "mean": run.average["w"], **run.history}


def compared(folder: str) -> str:
    """The command as a user gives it, with two cells of its table; all it finds, but for the seconds it took."""
    compared = ("sgd", "scaffold")
    cells = [Case(algorithm, 0.0) for algorithm in compared]
    with mock.patch.multiple(digits, SIMILARITIES=(0.0,), COMPARED=compared, CASES=cells):
        done = CliRunner().invoke(app, ["compare", "--rounds", "10", "--seeds", "2", "--checkpoint", folder])
    assert done.exit_code == 0, (done.output, done.exception)
    lines = [json.loads(line) for line in (Path(folder) / "results.jsonl").read_text().splitlines()]
    picture = (Path(folder) / "curves.png").read_bytes()
    return repr([{k: v for k, v in line.items() if k != "seconds"} for line in lines]) + picture.hex()


if __name__ == "__main__":
    kind, folder, out = sys.argv[1:]
    found = outcome(kind, folder)
    with Path(out + ".draft").open("wb") as file:
        np.savez(file, **found)
    os.replace(out + ".draft", out)
