"""What is measured of a state: f, the metrics, and the invariant."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from covary._engine.cohort import loss_at, share, total
from covary._engine.devices import AXIS
from covary._engine.program import Program, State, World
from covary.algorithm import Algorithm

EVALUATED_AT_ONCE = 16_384  # examples of the training data whose loss is computed in one go


def evaluate(program: Program, state: State, world: World) -> dict[str, Any]:
    """f and the metrics at x, and at the average where one is kept."""
    values = measure(program, state.server[0], world)
    if program.average:
        values |= {f"average_{name}": value for name, value in measure(program, state.average, world).items()}
    return values


def control_error(program: Program, algorithm: Algorithm, state: State, world: World) -> dict[str, Any]:
    """How far the server's control variate is from the mean of its clients', for algorithms that have one.

    Reading all N controls must not cost more than the round: where N is large against S K, this is left to the end.
    """
    if algorithm.invariant is None:
        return {}
    c = getattr(state.server, algorithm.invariant[0])
    plan = program.plan
    if not program.resident or plan.n_clients > 4 * plan.cohort * plan.max_steps:
        return {"control_error": jnp.full((), jnp.nan, c.dtype)}
    c_i, p = getattr(state.clients, algorithm.invariant[1]), world.layout.p.astype(c.dtype)
    if len(program.place.devices) > 1:
        p = jnp.pad(p, (0, len(c_i) * len(program.place.devices) - len(p)))
        p = jax.lax.dynamic_slice_in_dim(p, jax.lax.axis_index(AXIS) * len(c_i), len(c_i))
    return {"control_error": jnp.linalg.norm(c - total(program, p, c_i, None))}


def control_change(program: Program, algorithm: Algorithm, cohort: Any, old: Any, new: Any) -> dict[str, Any]:
    """The mean over the cohort of ‖c_i+ - c_i‖²: how far its controls were behind those that replace them."""
    if algorithm.invariant is None:
        return {}
    before, after = (getattr(rows, algorithm.invariant[1]) for rows in (old, new))
    _, _, weights, real = share(program, cohort, cohort, jnp.full(len(cohort), 1 / len(cohort), after.dtype))
    return {"control_change": total(program, weights, jnp.sum((after - before) ** 2, axis=1), real)}


def measure(program: Program, x: Any, world: World) -> dict[str, Any]:
    values = {}
    params = program.unravel(x)
    if "loss" in program.evaluated:
        values["loss"] = training_loss(program, params, world)
    metrics = program.metrics
    if metrics is not None and world.evaluated_on is not None:
        values |= by_first_device(program, lambda: metrics(params, world.evaluated_on))
    return {name: jnp.asarray(value, x.dtype) for name, value in values.items()}


def training_loss(program: Program, params: Any, world: World) -> Any:
    """f, the loss over all examples: in parts that fit into memory, shared out over the devices."""
    devices = len(program.place.devices)
    n = len(jax.tree.leaves(world.examples)[0])
    parts = -(-n // (devices * EVALUATED_AT_ONCE))  # of each device
    size = n // (devices * parts)

    def part(first: Any, count: int) -> Any:
        rows = jax.tree.map(lambda leaf: jax.lax.dynamic_slice_in_dim(leaf, first, count), (world.examples, weights))
        value = loss_at(program.loss, params, *rows)
        return value * (count / n) if weights is None else value

    weights = world.example_weights
    if devices == parts == 1 or size == 0 or not program.divisible:
        return loss_at(program.loss, params, world.examples, weights)
    mine = jax.lax.axis_index(AXIS) * parts if devices > 1 else 0
    here = jnp.sum(jax.lax.map(lambda k: part((mine + k) * size, size), jnp.arange(parts)))
    whole = here if devices == 1 else jax.lax.psum(here, AXIS)
    rest = n - devices * parts * size
    return whole + part(n - rest, rest) if rest else whole


def by_first_device(program: Program, work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What need not be done twice: one device works with all threads, and tells the others."""
    if len(program.place.devices) == 1:
        return work()
    blank = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), jax.eval_shape(work))
    values = jax.lax.cond(jax.lax.axis_index(AXIS) == 0, work, lambda: blank)
    return jax.tree.map(lambda v: jax.lax.psum(v, AXIS), values)
