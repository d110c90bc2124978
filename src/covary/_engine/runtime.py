"""JAX as a runtime of `simulate` and `sweep`: the functions that `covary.running.engine.Engine` describes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from covary._engine.debug import debugged
from covary._engine.derivatives import CompiledDerivatives
from covary._engine.members import CompiledMembers
from covary._engine.prepare import Job, prepare
from covary._engine.resident import Resident
from covary._engine.streamed import Streamed
from covary.algorithm import Algorithm, Exchange
from covary.client import dry_run
from covary.errors import CovaryError
from covary.problem import Problem
from covary.running.checkpoint import hash_of_text
from covary.running.history import Log
from covary.running.members import Members
from covary.running.simulation import Simulation

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

SETTINGS = ("jax_default_prng_impl", "jax_threefry_partitionable", "jax_default_matmul_precision", "jax_enable_x64")


def simulation(job: Job, log: Log | None, owner: str | None = None) -> Simulation:
    """The run before its first round."""
    return Resident(job, log) if job.program.resident else Streamed(job, log, owner)


def members(
    job: Job, algorithms: list[Algorithm], seeds: Sequence[int], race: bool, at_once: int | None, log: Log | None
) -> Members:
    """The members of a sweep before their first round."""
    return CompiledMembers(job, algorithms, seeds, race, at_once, log)


def derivatives(problem: Problem, x0: Any, seed: int) -> CompiledDerivatives:
    """What `covary.theory` measures of a problem."""
    return CompiledDerivatives(problem, x0, seed)


def about(job: Job, algorithm: Algorithm) -> dict[str, Any]:
    """What the model and the algorithm compute, as XLA text, and JAX's settings."""
    exchanges = job.algorithm.trips(job.plan.steps_on_wire)
    return {
        "code": hash_of_text(_code(algorithm, exchanges, job.starts[0])),
        "model": hash_of_text(job.problem.lowered()),
        "jax": [str(getattr(jax.config, name, None)) for name in SETTINGS],
    }


def hosts() -> int:
    """The number of processes that compute together."""
    return jax.process_count()


def params(job: Job, x: np.ndarray, buffers: np.ndarray | None) -> Any:
    """The model's params at x, in the user's own form. JAX's models have their buffers apart."""
    return job.problem.complete(jax.tree.map(np.asarray, job.program.local.unravel(x)))


def model(job: Job, x: np.ndarray, buffers: np.ndarray | None) -> Any:
    """A JAX model does not hold its parameters."""
    raise CovaryError("run.model() is for PyTorch modules. A JAX model takes its parameters: run.params.")


def buffers(job: Job, vector: np.ndarray | None) -> Any:
    """The model's buffers in the user's own form."""
    return job.problem.buffers_of(vector)


def _code(algorithm: Algorithm, exchanges: tuple[Exchange, ...], x: np.ndarray) -> str:
    """What an algorithm computes, as XLA text: it shows whether a user's own algorithm has changed."""

    def round_of_one(server: Any, client: Any) -> Any:
        for exchange in (*exchanges, *([algorithm.warm_start] if algorithm.warm_start else [])):
            _, up, client = dry_run(exchange, server, client)
            server = exchange.aggregate(server, up, 0.5)
        return server, client

    states = jax.tree.map(lambda leaf: np.asarray(leaf, x.dtype), (algorithm.init_server(x), algorithm.init_client(x)))
    return jax.jit(round_of_one).lower(*states).as_text()


if TYPE_CHECKING:
    from covary._engine import runtime
    from covary.running.engine import Engine

    _: Engine = runtime  # this module is one
