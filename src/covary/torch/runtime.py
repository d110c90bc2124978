"""PyTorch as a runtime of `simulate` and `sweep`: the functions that `covary.running.engine.Engine` describes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from covary.algorithm import Algorithm
from covary.client import dry_run
from covary.running.checkpoint import hash_of_text
from covary.running.history import Log
from covary.running.members import Members
from covary.running.simulation import Simulation
from covary.torch.derivatives import TorchDerivatives
from covary.torch.members import RunsInTurn
from covary.torch.module import form_of_module, uncompiled, unwrapped
from covary.torch.prepare import Job, prepare, reject_debugging
from covary.torch.problem import Problem, evaluating
from covary.torch.rounds import Rounds
from covary.torch.seeds import seeded

__all__ = [
    "about",
    "buffers",
    "debugged",
    "derivatives",
    "hosts",
    "members",
    "model",
    "params",
    "prepare",
    "simulation",
]


def simulation(job: Job, log: Log | None, owner: str | None = None) -> Simulation:
    """The run before its first round."""
    return Rounds(job, log, owner)


def members(
    job: Job, algorithms: list[Algorithm], seeds: Sequence[int], race: bool, at_once: int | None, log: Log | None
) -> Members:
    """The members of a sweep before their first round."""
    return RunsInTurn(job, algorithms, seeds, race, at_once, log)


def debugged(job: Job, log: Log | None) -> Any:
    """PyTorch has no other server for debugging."""
    reject_debugging(job.problem)


def derivatives(problem: Problem, x0: Any, seed: int) -> TorchDerivatives:
    """What `covary.theory` measures of a problem."""
    return TorchDerivatives(problem, x0, seed)


def about(job: Job, algorithm: Algorithm) -> dict[str, Any]:
    """What the algorithm computes on a few numbers, and the module with its loss on a few examples."""
    module = uncompiled(job.problem.module)
    return {
        "code": hash_of_text(_numbers_of(job, algorithm)),
        "model": hash_of_text(f"{form_of_module(module)} {module} {_loss_of_few(job)}"),
    }


def hosts() -> int:
    """PyTorch's runtime is one process."""
    return 1


def params(job: Job, x: np.ndarray, buffers: np.ndarray | None) -> dict[str, torch.Tensor]:
    """The state_dict of the trained module, on the CPU."""
    return {name: value.cpu() for name, value in model(job, x, buffers).state_dict().items()}


def buffers(job: Job, vector: np.ndarray | None) -> dict[str, np.ndarray] | None:
    """The averaged buffers, by name."""
    return None if vector is None else job.problem.network.copied().named_buffers(vector)


def model(job: Job, x: np.ndarray, buffers: np.ndarray | None) -> torch.nn.Module:
    """A copy of the module, trained."""
    return job.problem.trained(x, buffers)


def _numbers_of(job: Job, algorithm: Algorithm) -> str:
    """What an algorithm computes, in short numbers: it shows whether a user's own algorithm has changed."""
    x, said = np.array([1.0, -0.5, 0.25]), []
    server, client = algorithm.init_server(x), algorithm.init_client(x)
    warm = [algorithm.warm_start] if algorithm.warm_start else []
    for exchange in (*job.algorithm.trips(job.plan.steps_on_wire), *warm):
        down, up, client = dry_run(exchange, server, client)
        server = exchange.aggregate(server, up, 0.5)
        said.append(f"{down} {up} {client} {server}")
    with np.printoptions(precision=9):
        return "\n".join(said)


def _loss_of_few(job: Job) -> str:
    """The loss of a few examples, in four digits, which do not depend on the number of threads."""
    problem = job.problem
    with evaluating(problem.network) as module, seeded(0, problem.network.device):
        value = unwrapped(problem.loss)(module, problem.few_on_device())
    return f"{float(value):.4g}"


if TYPE_CHECKING:
    from covary.running.engine import Engine
    from covary.torch import runtime

    _: Engine = runtime  # this module is one
