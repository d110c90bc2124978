"""What test_torch_running kills: a run or sweep of a PyTorch module, whose outcome goes to a file when it is done."""

import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
from torch_problems import UNEVEN, both, problem

import covary as cv

EVERY = 2


def outcome(kind: str, folder: str) -> dict[str, np.ndarray]:
    settings: dict[str, Any] = {"clients_per_round": 3, "local_steps": 3, "checkpoint": folder}
    settings["checkpoint_every"] = EVERY
    if kind == "sweep":
        grid = {"eta_l": [0.01, 0.03]}
        swept = cv.sweep(cv.scaffold, problem(), grid, [0, 1], rounds=20, at_once=1, batch_size=4, **settings)
        return {"table": np.frombuffer(repr(swept.table).encode(), np.uint8), **swept.curves}
    store = Path(folder).parent / f"states of {Path(folder).name}" if kind == "folder" else kind
    sizes = [n + n % 2 for n in UNEVEN]
    run = cv.simulate(cv.scaffold(0.05), problem(both(), sizes), 20, store=store, batch_size=4, **settings)
    return {"x": run.x, "c": run.server.c, "c_i": np.asarray(run.clients.c_i), **run.buffers, **run.history}


if __name__ == "__main__":
    kind, folder, out = sys.argv[1:]
    found = outcome(kind, folder)
    assert "jax" not in sys.modules
    with Path(out + ".draft").open("wb") as file:
        np.savez(file, **found)
    os.replace(out + ".draft", out)
