"""c = mean(c_i), as compiled rounds measure it; `covary.running.watch` has the check by the host."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from covary._engine.cohort import real_share, share, total
from covary._engine.devices import AXIS
from covary._engine.program import Program, World
from covary.algorithm import Algorithm
from covary.running.state import State


def control_error(program: Program, algorithm: Algorithm, state: State, world: World) -> dict[str, Any]:
    """How far the server's control variate is from the mean of its clients', for algorithms that have one.

    Reading all N control variates must not cost more than the round. If N is large compared with S K, the error is
    measured only at the end.
    """
    if algorithm.invariant is None:
        return {}
    c = getattr(state.server, algorithm.invariant[0])
    plan, place = program.plan, program.place
    if not program.resident or plan.n_clients > 4 * plan.cohort * plan.local.max_steps:
        return {"control_error": jnp.full((), jnp.nan, c.dtype)}
    c_i, p = getattr(state.clients, algorithm.invariant[1]), world.roster.p.astype(c.dtype)  # (N / devices, d), (N,)
    if len(place.devices) > 1:
        p = jnp.pad(p, (0, len(c_i) * len(place.devices) - len(p)))
        p = jax.lax.dynamic_slice_in_dim(p, jax.lax.axis_index(AXIS) * len(c_i), len(c_i))
    return {"control_error": jnp.linalg.norm(c - total(place, p, c_i, None))}


def control_change(program: Program, algorithm: Algorithm, cohort: Any, old: Any, new: Any) -> dict[str, Any]:
    """The mean over the cohort of ‖c_i+ - c_i‖²."""
    if algorithm.invariant is None:
        return {}
    before, after = (getattr(rows, algorithm.invariant[1]) for rows in (old, new))
    weights = share(program.place, jnp.full(len(cohort), 1 / len(cohort), after.dtype))
    real = real_share(program.place, len(cohort))
    return {"control_change": total(program.place, weights, jnp.sum((after - before) ** 2, axis=1), real)}


def largest_control(program: Program, algorithm: Algorithm, before: Any, server: Any, new: Any) -> Any:
    """The largest number in any control variate so far, including this round's."""
    if algorithm.invariant is None:
        return before
    server_field, client_field = algorithm.invariant
    largest = jnp.max(jnp.abs(getattr(new, client_field)))
    if len(program.place.devices) > 1:
        largest = jax.lax.pmax(largest, AXIS)
    return jnp.maximum(jnp.maximum(before, largest), jnp.max(jnp.abs(getattr(server, server_field))))
