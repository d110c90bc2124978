"""f and the metrics at a point, over all examples."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from covary._engine.convolutions import fast_on_cpu
from covary._engine.devices import AXIS, Place
from covary._engine.local import in_parts, loss_at
from covary._engine.memory import rows_that_fit, value_of
from covary.model_functions import ModelFunction
from covary.problem import Problem

MOST_AT_ONCE = 16_384  # examples, however small they are
ENOUGH = 5e11  # operations that keep any device busy; kernels are tuned faster for a part that is not larger


@dataclass(frozen=True)
class Evaluation:
    """What to measure on a model."""

    names: tuple[str, ...]  # "loss" and the metrics, or the metrics alone
    loss: ModelFunction  # without its frozen parameters, until it is called
    metrics: ModelFunction | None
    unravel: Callable[[Any], Any]
    at_once: int  # most examples whose loss is measured in one go
    tested_at_once: int  # the same for metrics
    divisible: bool  # the loss over all data is the mean of the losses of its parts
    means: frozenset[str]  # the metrics that return one number per example

    def holding(self, frozen: Any = None, buffers: Any = None) -> Evaluation:
        """The same with frozen parameters and buffers, or with neither."""
        metrics = None if self.metrics is None else self.metrics.holding(frozen, buffers)
        return replace(self, loss=self.loss.holding(frozen, buffers), metrics=metrics)


def evaluation_of(
    problem: Problem, names: tuple[str, ...], unravel: Callable[[Any], Any], copies: int = 1, flops: float = 0.0
) -> Evaluation:
    """What is measured of a problem's model.

    Args:
        problem: the model and its data.
        names: of what is measured.
        unravel: from a vector to the model's params.
        copies: the models that are measured side by side.
        flops: what measuring one example takes, where that is known.
    """
    tested_on = problem.data.examples if problem.test is None else problem.test
    loss, metrics = problem.loss.holding(), None if problem.metrics is None else problem.metrics.holding()
    enough = max(1, int(ENOUGH / max(copies * flops, 1.0)))
    most, n_tested = min(problem.data.n_examples, MOST_AT_ONCE, enough), len(jax.tree.leaves(tested_on)[0])
    at_once, tested_at_once = rows_that_fit(value_of(loss), problem, most, copies), n_tested
    if metrics is not None:
        tested_at_once = rows_that_fit(value_of(metrics), problem, min(n_tested, enough), copies)
    divisible = not problem.mixes_examples
    return Evaluation(names, loss, metrics, unravel, at_once, tested_at_once, divisible, problem.means)


def measure(
    evaluation: Evaluation, place: Place, x: Any, examples: Any, example_weights: Any, tested_on: Any, held: Any
) -> dict[str, Any]:
    """f on `examples`, and the metrics on `tested_on`."""
    values = {}
    evaluation, params = evaluation.holding(*held), evaluation.unravel(x)
    if "loss" in evaluation.names:
        values["loss"] = training_loss(evaluation, place, params, examples, example_weights)
    if evaluation.metrics is not None and tested_on is not None:
        values |= by_first_device(place, lambda: tested(evaluation, params, tested_on))
    return {name: jnp.asarray(value, x.dtype) for name, value in values.items()}


def training_loss(evaluation: Evaluation, place: Place, params: Any, examples: Any, weights: Any) -> Any:
    """f, the loss over all examples, computed in parts that fit into memory and divided among the devices."""

    @fast_on_cpu
    def of(rows: Any, weights: Any) -> Any:
        return loss_at(evaluation.loss, params, rows, weights)

    n, devices = len(jax.tree.leaves(examples)[0]), len(place.devices)
    if not evaluation.divisible:
        return of(examples, weights)
    share = n // devices
    if devices == 1 or share == 0:
        return in_parts(of, examples, weights, evaluation.at_once)
    first = jax.lax.axis_index(AXIS) * share
    whole = jax.lax.psum(in_parts(of, examples, weights, evaluation.at_once, (first, share)), AXIS)
    rest = n - devices * share
    return whole + in_parts(of, examples, weights, evaluation.at_once, (n - rest, rest)) if rest else whole


def tested(evaluation: Evaluation, params: Any, tested_on: Any) -> dict[str, Any]:
    """The metrics: means of one number per example in parts that fit into memory, others on all examples at once."""
    assert evaluation.metrics is not None
    metrics, means = fast_on_cpu(evaluation.metrics), evaluation.means
    n = len(jax.tree.leaves(tested_on)[0])
    if n <= evaluation.tested_at_once or not means:
        return averaged(metrics(params, tested_on))

    def sums(rows: Any, _: Any) -> dict[str, Any]:
        values = metrics(params, rows)
        return {name: jnp.sum(values[name], dtype=_exact(values[name])) for name in means}

    in_sum = in_parts(sums, tested_on, jnp.ones(n, bool), evaluation.tested_at_once)  # parts are added as they are
    others = {name: value for name, value in metrics(params, tested_on).items() if name not in means}
    return {name: total / n for name, total in in_sum.items()} | others


def averaged(values: dict[str, Any]) -> dict[str, Any]:
    """Metrics with the mean of those that have one number per example."""
    return {name: jnp.mean(value, dtype=_exact(value)) if jnp.ndim(value) else value for name, value in values.items()}


def _exact(value: Any) -> Any:
    """The type in which values are added: at least float32."""
    return jnp.promote_types(value.dtype, jnp.float32)


def by_first_device(place: Place, work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Work for one device, which uses all threads and sends the values to the others."""
    if len(place.devices) == 1:
        return work()
    blank = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), jax.eval_shape(work))
    values = jax.lax.cond(jax.lax.axis_index(AXIS) == 0, work, lambda: blank)
    return jax.tree.map(lambda v: jax.lax.psum(v, AXIS), values)
