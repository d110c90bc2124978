"""f and the metrics at a point, over all examples."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from covary._engine.devices import AXIS, Place
from covary._engine.local import in_parts, loss_at
from covary._engine.memory import rows_that_fit
from covary.problem import ModelFunction, Problem

MOST_AT_ONCE = 16_384  # examples, however small they are


@dataclass(frozen=True)
class Evaluation:
    """What to measure on a model."""

    names: tuple[str, ...]  # "loss" and the metrics, or the metrics alone
    loss: ModelFunction  # without its frozen parameters, until it is called
    metrics: ModelFunction | None
    unravel: Callable[[Any], Any]
    at_once: int  # most examples that are measured in one go, where parts give the same
    divisible: bool  # the loss over all data is the mean of the losses of its parts
    means: frozenset[str]  # the metrics of which the same is true

    def holding(self, frozen: Any = None, buffers: Any = None) -> Evaluation:
        """The same with frozen parameters and buffers, or with neither."""
        metrics = None if self.metrics is None else self.metrics.holding(frozen, buffers)
        return replace(self, loss=self.loss.holding(frozen, buffers), metrics=metrics)


def evaluation_of(
    problem: Problem, names: tuple[str, ...], unravel: Callable[[Any], Any], copies: int = 1
) -> Evaluation:
    """What is measured of a problem's model; `copies` models are measured side by side."""
    measured = (problem.loss, problem.metrics) if problem.metrics is not None else (problem.loss,)
    at_once = min(MOST_AT_ONCE, *(rows_that_fit(function, *problem.shapes, copies) for function in measured))
    tested_on = problem.data.examples if problem.test is None else problem.test
    many = any(name != "loss" for name in names) and len(jax.tree.leaves(tested_on)[0]) > at_once
    means = problem.mean_metrics(at_once) if many else frozenset()
    complete = Evaluation(names, problem.loss, problem.metrics, unravel, at_once, not problem.mixes_examples, means)
    return complete.holding()


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

    def of(rows: Any, weights: Any) -> Any:
        return loss_at(evaluation.loss, params, rows, weights)

    n, devices = len(jax.tree.leaves(examples)[0]), len(place.devices)
    if not evaluation.divisible and n <= evaluation.at_once:
        return of(examples, weights)
    share = n // devices
    if devices == 1 or share == 0:
        return in_parts(of, examples, weights, evaluation.at_once)

    def some(first: Any, count: int) -> Any:
        rows = jax.tree.map(lambda leaf: jax.lax.dynamic_slice_in_dim(leaf, first, count), (examples, weights))
        value = in_parts(of, rows[0], rows[1], evaluation.at_once)
        return value if weights is not None else value * (count / n)

    whole = jax.lax.psum(some(jax.lax.axis_index(AXIS) * share, share), AXIS)
    rest = n - devices * share
    return whole + some(n - rest, rest) if rest else whole


def tested(evaluation: Evaluation, params: Any, tested_on: Any) -> dict[str, Any]:
    """The metrics: those that are means in parts that fit into memory, the others on all examples at once."""
    metrics, means = evaluation.metrics, evaluation.means
    assert metrics is not None
    if len(jax.tree.leaves(tested_on)[0]) <= evaluation.at_once:
        return metrics(params, tested_on)

    def of(rows: Any, chosen: Callable[[str], bool]) -> dict[str, Any]:
        return {name: jnp.asarray(value) for name, value in metrics(params, rows).items() if chosen(name)}

    in_part = in_parts(lambda rows, _: of(rows, means.__contains__), tested_on, None, evaluation.at_once)
    return in_part | of(tested_on, lambda name: name not in means)


def by_first_device(place: Place, work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Work for one device, which uses all threads and sends the values to the others."""
    if len(place.devices) == 1:
        return work()
    blank = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), jax.eval_shape(work))
    values = jax.lax.cond(jax.lax.axis_index(AXIS) == 0, work, lambda: blank)
    return jax.tree.map(lambda v: jax.lax.psum(v, AXIS), values)
