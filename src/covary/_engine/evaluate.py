"""f and the metrics at a point, over all examples."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from covary._engine.devices import AXIS, Place
from covary._engine.local import loss_at

EVALUATED_AT_ONCE = 16_384  # training examples whose loss is computed at once


@dataclass(frozen=True)
class Evaluation:
    """What to measure on a model."""

    names: tuple[str, ...]  # "loss" and the metrics, or the metrics alone
    loss: Callable[[Any, Any], Any]
    metrics: Callable[[Any, Any], dict[str, Any]] | None
    unravel: Callable[[Any], Any]
    divisible: bool  # the loss over all data is the mean of the losses of its parts


def measure(
    evaluation: Evaluation, place: Place, x: Any, examples: Any, example_weights: Any, tested_on: Any
) -> dict[str, Any]:
    """f on `examples`, and the metrics on `tested_on`."""
    values = {}
    params = evaluation.unravel(x)
    if "loss" in evaluation.names:
        values["loss"] = training_loss(evaluation, place, params, examples, example_weights)
    metrics = evaluation.metrics
    if metrics is not None and tested_on is not None:
        values |= by_first_device(place, lambda: metrics(params, tested_on))
    return {name: jnp.asarray(value, x.dtype) for name, value in values.items()}


def training_loss(evaluation: Evaluation, place: Place, params: Any, examples: Any, weights: Any) -> Any:
    """f, the loss over all examples, computed in parts that fit into memory and divided among the devices."""
    devices = len(place.devices)
    n = len(jax.tree.leaves(examples)[0])
    parts = -(-n // (devices * EVALUATED_AT_ONCE))  # of each device
    size = n // (devices * parts)

    def part(first: Any, count: int) -> Any:
        rows = jax.tree.map(lambda leaf: jax.lax.dynamic_slice_in_dim(leaf, first, count), (examples, weights))
        value = loss_at(evaluation.loss, params, *rows)
        return value * (count / n) if weights is None else value

    if devices == parts == 1 or size == 0 or not evaluation.divisible:
        return loss_at(evaluation.loss, params, examples, weights)
    mine = jax.lax.axis_index(AXIS) * parts if devices > 1 else 0
    here = jnp.sum(jax.lax.map(lambda k: part((mine + k) * size, size), jnp.arange(parts)))
    whole = here if devices == 1 else jax.lax.psum(here, AXIS)
    rest = n - devices * parts * size
    return whole + part(n - rest, rest) if rest else whole


def by_first_device(place: Place, work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Work for one device, which uses all threads and sends the values to the others."""
    if len(place.devices) == 1:
        return work()
    blank = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), jax.eval_shape(work))
    values = jax.lax.cond(jax.lax.axis_index(AXIS) == 0, work, lambda: blank)
    return jax.tree.map(lambda v: jax.lax.psum(v, AXIS), values)
