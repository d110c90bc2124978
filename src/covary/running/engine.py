"""What a runtime offers to `simulate` and `sweep`, and how they find it."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol, cast

import numpy as np

from covary.algorithm import Algorithm
from covary.errors import refused
from covary.running.derivatives import Derivatives
from covary.running.history import Log
from covary.running.job import Job
from covary.running.members import Members
from covary.running.simulation import Simulation
from covary.training import Training


class Debugged(NamedTuple):
    """A run by the plain server, at its end."""

    server: Any
    clients: Any
    average: np.ndarray
    history: dict[str, np.ndarray]
    reached: bool
    diverged: bool


class Engine(Protocol):
    """A runtime, as a module with these functions. A problem names it in its attribute `engine`.

    A job is handed back to the runtime that made it.
    """

    def prepare(
        self,
        algorithm: Algorithm,
        problem: Any,
        training: Training,
        *,
        seeds: Sequence[int],
        x0: Any,
        measure_loss: bool = True,
        store: str | Path | None = None,
        resumable: bool = False,
        devices: int | None = None,
        width: int | None = None,
        microbatch: int | None = None,
        members: int = 1,
    ) -> Job:
        """Check a request against its problem, and lay out what the run needs. Nothing is computed yet.

        Args:
            algorithm, problem, training: what to run.
            seeds: a start is made for each.
            x0: where to start instead.
            measure_loss: whether the loss is measured although nothing needs it.
            store, devices, width, microbatch: as in `simulate`.
            resumable: whether the store's folder may be that of the same run.
            members: the points of a sweep.
        """
        ...

    def simulation(self, job: Any, log: Log | None, owner: str | None = None) -> Simulation:
        """The run before its first round. `owner` is the id of a run with checkpoints, which owns its store."""
        ...

    def members(
        self,
        job: Any,
        algorithms: list[Algorithm],
        seeds: Sequence[int],
        race: bool,
        at_once: int | None,
        log: Log | None,
    ) -> Members:
        """The members of a sweep before their first round, so many points at once or as many as fit into memory."""
        ...

    def debugged(self, job: Any, log: Log | None) -> Debugged:
        """The run at its end, by the plain server of `covary.plain`."""
        ...

    def about(self, job: Any, algorithm: Algorithm) -> dict[str, Any]:
        """The runtime's part of a checkpoint's fingerprint: what model and algorithm compute, and its settings."""
        ...

    def derivatives(self, problem: Any, x0: Any, seed: int) -> Derivatives:
        """What `covary.theory` measures of a problem, from `x0` or from the start of the seed."""
        ...

    def hosts(self) -> int:
        """The number of hosts that run together. Checkpoints need one that has all states."""
        ...

    def params(self, job: Any, x: np.ndarray, buffers: np.ndarray | None) -> Any:
        """The model's params at x, in the user's own form, which may include its buffers."""
        ...

    def model(self, job: Any, x: np.ndarray, buffers: np.ndarray | None) -> Any:
        """The trained model, where a model holds its own parameters."""
        ...

    def buffers(self, job: Any, vector: np.ndarray | None) -> Any:
        """The model's buffers in the user's own form; None if it has none."""
        ...


def engine_of(algorithm: Any, problem: Any) -> Engine:
    """The runtime of a problem. A value that is not an algorithm, or not a problem, is rejected."""
    if not isinstance(algorithm, Algorithm):
        raise refused(
            "algorithm", "an Algorithm", type(algorithm).__name__, "Build one, say covary.scaffold(eta_l=0.1)."
        )
    return runtime_of(problem)


def runtime_of(problem: Any) -> Engine:
    """The runtime of a problem. What is no problem is rejected."""
    module = getattr(type(problem), "engine", None)
    if not isinstance(module, str):
        raise refused("problem", "a Problem", type(problem).__name__, "Build one, say covary.supervised(model, data).")
    return cast(Engine, importlib.import_module(module))  # here, so that a runtime is imported when it is used
