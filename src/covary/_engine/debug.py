"""The plain server with a JAX model: its loss is called with plain numbers, and compiled only for its gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from covary import plain
from covary._engine.evaluate import averaged
from covary._engine.local import key_of_step, keys_of_examples, loss_at
from covary._engine.prepare import Job
from covary.algorithm import Gradient
from covary.running.engine import Debugged
from covary.running.history import Log


def debugged(job: Job, log: Log | None) -> Debugged:
    """The job's rounds, one client and one step after the other.

    The loss is called with plain numbers before each of its gradients is taken, so that a breakpoint in it sees them.
    """
    with jax.disable_jit(), np.errstate(over="ignore", invalid="ignore"):
        return plain.run(job, log, gradient_of(job), measure_of(job))


def gradient_of(job: Job) -> plain.Slope:
    """(batch, numbers of the step) -> y -> the gradient of the loss on the batch."""
    loss, unravel = job.problem.loss, job.program.local.unravel

    def at(y: Any, batch: Any, key: Any) -> Any:
        numbers = np.arange(len(jax.tree.leaves(batch)[0]))
        return loss_at(loss, unravel(y), batch, None, keys_of_examples(key, numbers) if loss.draws else None)

    compiled: Callable[..., Any] = jax.jit(jax.grad(at))

    def on(batch: Any, step: tuple[int, int, int, int]) -> Gradient:
        with jax.disable_jit(False):
            key = key_of_step(job.training.seed, *step)

        def slope(y: np.ndarray) -> np.ndarray:
            loss(unravel(y), batch)
            with jax.disable_jit(False):
                return np.asarray(compiled(y, batch, key))

        return slope

    return on


def measure_of(job: Job) -> plain.Measure:
    """x -> f and the metrics at x."""
    problem, evaluation = job.problem, job.program.evaluation

    def at(x: np.ndarray) -> dict[str, Any]:
        params, values = evaluation.unravel(x), {}
        if "loss" in evaluation.names:
            losses = [problem.loss(params, problem.data.client(i)) for i in range(problem.n_clients)]
            values["loss"] = np.asarray(job.p @ np.asarray(losses), x.dtype)
        if problem.metrics is not None:
            tested_on = problem.data.examples if problem.test is None else problem.test
            found = averaged(problem.metrics(params, tested_on))
            values |= {name: np.asarray(value, x.dtype) for name, value in found.items()}
        return values

    return at
