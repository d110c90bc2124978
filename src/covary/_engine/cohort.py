"""A round's cohort: its draw, its states, its clients' work, and the sum of its uploads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from covary._engine.devices import AXIS, Place
from covary._engine.local import folded, like, work_of_client
from covary._engine.program import Program, World
from covary.algorithm import Exchange
from covary.running.plan import aggregation_weights


def cohort_key(key: Any, r: Any) -> Any:
    """What the cohort of round r is drawn with. Exchanges are numbered from 1, so that 0 is the cohort's."""
    return folded(key, r, 0)


def sample(key: Any, N: int, S: int) -> Any:
    """S of N clients: uniform, without replacement, in ascending order, in time that depends on S alone for large N.

    For many clients this is R. Floyd's method: the k-th draw is from the first N - S + k. A client that was drawn
    before is replaced by the last of these, which cannot have been drawn yet. `covary.draws.sample` draws the same.
    """
    if N == S:
        return jnp.arange(N)
    if N <= 4096 or S * S > N:
        return jnp.sort(jax.random.choice(key, N, (S,), replace=False))

    def draw(k: Any, chosen: Any) -> Any:
        last = N - S + k
        one = jax.random.randint(jax.random.fold_in(key, k), (), 0, last + 1, jnp.int32)  # whatever JAX's default is
        return chosen.at[k].set(jnp.where(jnp.any(chosen == one), last, one))

    return jnp.sort(jax.lax.fori_loop(0, S, draw, jnp.full(S, -1, jnp.arange(1).dtype)))


class Cohort(NamedTuple):
    """The clients of a round."""

    ids: Any  # (S,)
    at: Any  # (S,): their rows of the roster
    p: Any  # (S,): their weights among all N
    fraction: float  # |S| / N


Bind = Callable[[int, Exchange, Any], Callable[[Any, Any, Any, Any], Any]]
"""(number of the exchange, exchange, down) -> work(client, row of the roster, slot, state): one client's part, on its
own data. The slot is where streamed data lies on the client's device."""


def exchange_all(
    place: Place,
    exchanges: tuple[Exchange, ...],
    server: Any,
    rows: Any,
    cohort: Cohort,
    bind: Bind,
    *,
    measured: bool,
) -> tuple[Any, Any, Any]:
    """All exchanges of one round: the new server state, this device's new client states, the drift over the cohort."""
    S = len(cohort.ids)
    ids, at, real = share(place, cohort.ids), share(place, cohort.at), real_share(place, S)
    drift = jnp.zeros((), server[0].dtype)
    for number, exchange in enumerate(exchanges, start=1):
        down = exchange.broadcast(server)
        # up and rows: fields (S / devices, d); drifts: (S / devices,)
        up, rows, drifts = each_client(place.width, bind(number, exchange, down), ids, at, rows)
        weights = aggregation_weights(cohort.p, cohort.fraction, exchange.together, server[0].dtype)  # (S,)
        own = share(place, weights)  # (S / devices,)
        mean = jax.tree.map(lambda leaf, own=own: total(place, own, leaf, real), up)
        server = like(exchange.aggregate(server, mean, cohort.fraction), server)
        drift += total(place, jnp.full(len(ids), 1 / S, drift.dtype), drifts, real)
    return server, rows, drift


def bound_to_data(program: Program, world: World, key: Any, measured: bool) -> Bind:
    """The cohort's work on the clients' data; the round's key decides the batches."""
    local = program.local.holding(world.frozen)

    def bind(number: int, exchange: Exchange, down: Any) -> Callable[..., Any]:
        exchange_key = jax.random.fold_in(key, number)

        def work(i: Any, at: Any, slot: Any, client: Any) -> Any:
            offset, _, layout = jax.tree.map(lambda leaf: leaf[at], world.roster)

            def fetch(positions: Any) -> Any:
                where = (slot, positions) if program.streamed else offset + positions
                return jax.tree.map(lambda leaf: leaf.at[where].get(mode="promise_in_bounds"), world.examples)

            client_key = jax.random.fold_in(exchange_key, i)
            return work_of_client(local, exchange, down, client, fetch, layout, client_key, measured=measured)

        return work

    return bind


def each_client(width: int, work: Callable[..., Any], ids: Any, at: Any, rows: Any) -> Any:
    """The clients' work, `width` of them at a time: all at once, one by one, or in between."""
    slots = jnp.arange(len(ids))  # where streamed data lies on this device
    if width >= len(ids):
        return jax.vmap(work)(ids, at, slots, rows)
    at_once = None if width == 1 else width
    return jax.lax.map(lambda one: work(*one), (ids, at, slots, rows), batch_size=at_once)


# The cohort over several devices


def take(program: Program, clients: Any, cohort: Any) -> Any:
    """The states of this device's part of the cohort."""
    place = program.place
    if not program.resident:
        return clients
    if len(place.devices) == 1:
        return jax.tree.map(lambda leaf: leaf[cohort], clients)

    def from_owners(leaf: Any) -> Any:
        at, mine = owned(place, cohort, len(leaf))
        # (S + spare, d): this device's rows, and zeros for those that others keep
        rows = where(mine, leaf[jnp.clip(at, 0, len(leaf) - 1)], 0)
        return jax.lax.psum_scatter(rows, AXIS, tiled=True)

    return jax.tree.map(from_owners, clients)


def put(program: Program, clients: Any, cohort: Any, rows: Any) -> Any:
    """The clients' states with those of the cohort replaced."""
    place = program.place
    if not program.resident:
        return rows
    if len(place.devices) == 1:
        return jax.tree.map(lambda leaf, row: leaf.at[cohort].set(row), clients, rows)

    def to_owners(leaf: Any, row: Any) -> Any:
        at, mine = owned(place, cohort, len(leaf))
        everyones = jax.lax.all_gather(row, AXIS, tiled=True)  # (S + spare, d)
        return leaf.at[jnp.where(mine, at, len(leaf))].set(everyones, mode="drop")

    return jax.tree.map(to_owners, clients, rows)


def owned(place: Place, cohort: Any, n_kept: int) -> tuple[Any, Any]:
    """The cohort's positions among the `n_kept` clients whose states this device keeps, and whether each is there."""
    at = padded(place, cohort, -1) - jax.lax.axis_index(AXIS) * n_kept
    return at, (at >= 0) & (at < n_kept)


def padded(place: Place, values: Any, filler: int) -> Any:
    """One value per client of the cohort, padded so that every device has the same number."""
    return jnp.pad(values, (0, -len(values) % len(place.devices)), constant_values=filler)


def share(place: Place, values: Any) -> Any:
    """This device's part of one value per client of the cohort."""
    devices = len(place.devices)
    if devices == 1:
        return values
    each = -(-len(values) // devices)
    first = jax.lax.axis_index(AXIS) * each
    return jax.lax.dynamic_slice_in_dim(padded(place, values, 0), first, each)


def real_share(place: Place, S: int) -> Any:
    """Which entries of this device's part are clients, not padding; None if all are."""
    devices = len(place.devices)
    if S % devices == 0:
        return None
    each = -(-S // devices)
    return jax.lax.axis_index(AXIS) * each + jnp.arange(each) < S


def total(place: Place, weights: Any, values: Any, real: Any) -> Any:
    """The weighted sum over the cohort, on all devices."""
    if real is not None:
        values = where(real, values, 0)
    here = jnp.tensordot(weights, values, 1)
    return here if len(place.devices) == 1 else jax.lax.psum(here, AXIS)


def where(chosen: Any, rows: Any, other: Any) -> Any:
    """The chosen rows, with `other` in place of the rest."""
    return jnp.where(chosen.reshape(-1, *[1] * (rows.ndim - 1)), rows, other)
