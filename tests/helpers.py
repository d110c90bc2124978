"""Problems that several tests share, and a server in plain Python to compare the engine with."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import os
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import covary as cv
from covary.cli import main

ROOT = Path(__file__).parent.parent


def one_file_example() -> Any:
    """examples/scaffold_one_file.py as a module."""
    spec = importlib.util.spec_from_file_location("one_file", ROOT / "examples" / "scaffold_one_file.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def random_quadratics(N: int = 7, d: int = 5, G: float = 3.0, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Heterogeneous curvature between about 0.5 and 3, and linear terms of size G that do not cancel."""
    rng = np.random.default_rng(seed)
    root = rng.normal(size=(N, d, d)) / np.sqrt(d)
    return root @ root.swapaxes(1, 2) * 0.5 + 0.5 * np.eye(d), G * rng.normal(size=(N, d))


def optimum(A: np.ndarray, b: np.ndarray) -> np.ndarray:
    return -np.linalg.solve(A.mean(axis=0), b.mean(axis=0))


def small_logistic(sizes: list[int], seed: int = 0, features: int = 3, classes: int = 3) -> cv.Problem:
    """Softmax regression on clients whose labels and features differ."""
    rng = np.random.default_rng(seed)
    clients = [(rng.normal(i, 1, (n, features)), rng.integers(0, 1 + i % classes, n)) for i, n in enumerate(sizes)]
    return cv.supervised(cv.models.logistic_regression(features, classes), cv.FederatedData.from_clients(clients))


def client_gradients(problem: cv.Problem) -> list[Any]:
    """One NumPy function per client of `small_logistic`: its full gradient at a flat vector, written out."""

    def gradient_of(x: np.ndarray, y: np.ndarray) -> Any:
        def gradient(flat: np.ndarray) -> np.ndarray:
            classes = len(flat) // (1 + x.shape[1])
            bias, w = flat[:classes], flat[classes:].reshape(classes, -1)
            p = np.exp(x @ w.T + bias)
            slope = (p / p.sum(axis=1, keepdims=True) - (y[:, None] == np.arange(classes))) / len(y)
            return np.concatenate([slope.sum(axis=0), (slope.T @ x).ravel()])

        return gradient

    return [gradient_of(*problem.data.client(i)) for i in range(problem.n_clients)]


def quadratic_gradients(A: np.ndarray, b: np.ndarray) -> list[Any]:
    """The same for quadratics."""
    return [lambda y, A=A, b=b: A @ y + b for A, b in zip(A, b, strict=True)]


def plain_server(
    algorithm: cv.Algorithm, grads: list[Any], x: np.ndarray, cohorts: np.ndarray, K: int, equal: bool
) -> Any:
    """Full batches on the plain server."""
    clients = [cv.plain.full_batch(grad, K) for grad in grads]
    return cv.plain.train(algorithm, clients, x, cohorts, K=K if equal else None)


HANGS = 1800  # seconds: longer than anything takes, however busy the machine; a test that waits so long says for what


def covary(*args: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """The command line in this process, in float32 as users have it."""
    out, told, status = io.StringIO(), io.StringIO(), 0
    before = signal.getsignal(signal.SIGTERM)
    with (
        pytest.MonkeyPatch.context() as patch,
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(told),
        warnings.catch_warnings(),
        jax.enable_x64(False),
    ):
        patch.chdir(cwd)
        patch.setattr(sys, "argv", ["covary", *args])
        try:
            main()
        except SystemExit as end:
            status = int(end.code or 0)
        finally:
            signal.signal(signal.SIGTERM, before)
    return subprocess.CompletedProcess(args, status, out.getvalue(), told.getvalue())


def covary_process(*args: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """The command line in a fresh process, fully compiled, as users have it."""
    command = [sys.executable, "-m", "covary", *args]
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=HANGS)


def wait_until(happened: Callable[[], Any], what: str, process: subprocess.Popen[Any] | None = None) -> None:
    """Wait for an event, however long a busy machine takes, unless the process that should bring it about has ended."""
    deadline = time.monotonic() + HANGS
    while not happened():
        ended = process is not None and process.poll() is not None and not happened()
        assert not ended, f"the process ended with {process and process.returncode} while waiting until {what}"
        assert time.monotonic() < deadline, f"waited {HANGS} s in vain until {what}"
        time.sleep(0.05)


DATA = Path(os.environ.get("COVARY_DATA", ROOT.parent / "shared" / "data"))
needs_data = pytest.mark.skipif(
    not (DATA / "emnist-byclass-test-images-idx3-ubyte.gz").is_file(),
    reason=f"real data is not in {DATA}; set COVARY_DATA to a folder with EMNIST's official files",
)
