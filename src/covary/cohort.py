"""A round's cohort: drawn, brought to the devices, at work, and its uploads summed."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from covary.algorithm import Exchange
from covary.blocks import Form
from covary.client import Guard, client_work
from covary.devices import AXIS
from covary.plan import aggregation_weights, batch_bounds
from covary.program import Program, World


def sample(key: Any, N: int, S: int) -> Any:
    """S of N clients: uniform, without replacement, in ascending order, in time that depends on S alone for large N.

    Of many clients, by R. Floyd's method: the k-th draw is from the first N - S + k; one that was drawn before is
    replaced by the last of these, which cannot have been.
    """
    if N == S:
        return jnp.arange(N)
    if N <= 4096 or S * S > N:
        return jnp.sort(jax.random.choice(key, N, (S,), replace=False))

    def draw(k: Any, chosen: Any) -> Any:
        last = N - S + k
        one = jax.random.randint(jax.random.fold_in(key, k), (), 0, last + 1)
        return chosen.at[k].set(jnp.where(jnp.any(chosen == one), last, one))

    return jnp.sort(jax.lax.fori_loop(0, S, draw, jnp.full(S, -1, jnp.arange(1).dtype)))


def take(program: Program, clients: Any, cohort: Any) -> Any:
    """The states of this device's part of the cohort."""
    if not program.resident:
        return clients
    if len(program.place.devices) == 1:
        return jax.tree.map(lambda leaf: leaf[cohort], clients)

    def from_owners(leaf: Any) -> Any:
        at, mine = owned(program, cohort, len(leaf))
        rows = where(mine, leaf[jnp.clip(at, 0, len(leaf) - 1)], 0)
        return jax.lax.psum_scatter(rows, AXIS, tiled=True)

    return jax.tree.map(from_owners, clients)


def put(program: Program, clients: Any, cohort: Any, rows: Any) -> Any:
    """The clients' states with those of the cohort replaced."""
    if not program.resident:
        return rows
    if len(program.place.devices) == 1:
        return jax.tree.map(lambda leaf, row: leaf.at[cohort].set(row), clients, rows)

    def to_owners(leaf: Any, row: Any) -> Any:
        at, mine = owned(program, cohort, len(leaf))
        everyones = jax.lax.all_gather(row, AXIS, tiled=True)
        return leaf.at[jnp.where(mine, at, len(leaf))].set(everyones, mode="drop")

    return jax.tree.map(to_owners, clients, rows)


def owned(program: Program, cohort: Any, share: int) -> tuple[Any, Any]:
    """Where the cohort's clients are among the `share` clients whose states this device keeps, and which are at all."""
    at = padded(program, cohort, -1) - jax.lax.axis_index(AXIS) * share
    return at, (at >= 0) & (at < share)


def padded(program: Program, cohort: Any, filler: int) -> Any:
    """The cohort, lengthened so that every device has as many clients."""
    return jnp.pad(cohort, (0, -len(cohort) % len(program.place.devices)), constant_values=filler)


def exchange_all(
    program: Program,
    trips: tuple[Exchange, ...],
    server: Any,
    rows: Any,
    cohort: Any,
    key: Any,
    world: World,
    measured: bool = True,
) -> tuple[Any, Any, Any]:
    """All trips of one round: the new server state, this device's new client states, and the drift over the cohort."""
    fraction = len(cohort) / program.plan.n_clients
    at = cohort if program.resident else jnp.arange(len(cohort))  # rows of the layout
    p = world.layout.p[at]
    ids, own_at, _, real = share(program, cohort, at, p)

    def own(w: Any) -> Any:
        return share(program, cohort, at, w)[2]

    drift = jnp.zeros((), server[0].dtype)
    for number, trip in enumerate(trips, start=1):
        weights = aggregation_weights(p, fraction, trip.together, server[0].dtype, own)
        down = trip.broadcast(server)
        trip_key = jax.random.fold_in(key, number)
        work = functools.partial(work_of_client, program, trip, down, trip_key, world, measured)
        up, rows, drifts = each_client(program, work, ids, own_at, rows)
        mean = jax.tree.map(functools.partial(total, program, weights, real=real), up)
        server = like(trip.aggregate(server, mean, fraction), server)
        drift += total(program, jnp.full(len(ids), 1 / len(cohort), drift.dtype), drifts, real)
    if not measured:
        drift = jnp.full_like(drift, jnp.nan)
    return server, rows, drift


def share(program: Program, cohort: Any, at: Any, w: Any) -> tuple[Any, Any, Any, Any]:
    """This device's part of the cohort: clients, rows of the layout, weights, and which of them are no padding."""
    devices = len(program.place.devices)
    if devices == 1:
        return cohort, at, w, None
    each = -(-len(cohort) // devices)
    first = jax.lax.axis_index(AXIS) * each
    ids, at, w = (jax.lax.dynamic_slice_in_dim(padded(program, v, 0), first, each) for v in (cohort, at, w))
    return ids, at, w, None if len(cohort) % devices == 0 else first + jnp.arange(each) < len(cohort)


def each_client(program: Program, work: Callable[..., Any], ids: Any, at: Any, rows: Any) -> Any:
    """The clients' work, `width` of them at a time: all at once, one by one, or in between."""
    slots = jnp.arange(len(ids))  # where streamed data lies on this device
    width = program.place.width
    if width >= len(ids):
        return jax.vmap(work)(ids, at, slots, rows)
    return jax.lax.map(lambda one: work(*one), (ids, at, slots, rows), batch_size=None if width == 1 else width)


def total(program: Program, weights: Any, values: Any, real: Any) -> Any:
    """The weighted sum over the cohort, wherever its clients are."""
    if real is not None:
        values = where(real, values, 0)
    here = jnp.tensordot(weights, values, 1)
    return here if len(program.place.devices) == 1 else jax.lax.psum(here, AXIS)


def where(chosen: Any, rows: Any, other: Any) -> Any:
    """The rows that are chosen, and the other in place of the rest."""
    return jnp.where(chosen.reshape(-1, *[1] * (rows.ndim - 1)), rows, other)


def work_of_client(
    program: Program,
    trip: Exchange,
    down: Any,
    trip_key: Any,
    world: World,
    measured: bool,
    i: Any,
    at: Any,
    slot: Any,
    client: Any,
    guard: Guard | None = None,
) -> tuple[Any, Any, Any]:
    """Client i's part of a trip, with its gradients bound to its data."""
    plan = program.plan
    offset, size, batch, per_epoch, steps, _ = jax.tree.map(lambda leaf: leaf[at], world.layout)

    def fetch(positions: Any) -> Any:
        where = (slot, positions) if program.streamed else offset + positions
        return jax.tree.map(lambda leaf: leaf.at[where].get(mode="promise_in_bounds"), world.examples)

    everything = jnp.arange(plan.max_size)
    own = fetch(jnp.minimum(everything, size - 1))
    client_key = jax.random.fold_in(trip_key, i)
    order = jax.vmap(lambda e: shuffle(jax.random.fold_in(client_key, e), plan.max_size, size))(jnp.arange(plan.epochs))

    def work(form: Form) -> tuple[Any, Any, Any]:
        full_grad = gradient(program, form, own, everything < size if plan.ragged_sizes else None)

        def grad_of_step(k: Any) -> Callable[[Any], Any]:
            if plan.batching == "full":
                return full_grad
            low, high = batch_bounds(plan.batching, batch, per_epoch, size, k)
            places = low + jnp.arange(plan.max_batch)
            inside = places < high
            rows = fetch(order[k // per_epoch, jnp.minimum(places, size - 1)])
            return gradient(program, form, rows, inside if plan.ragged_batches else None)

        K = plan.max_steps if plan.steps is not None else steps
        up, new, drift = client_work(
            trip, form.split(down), form.split(client), full_grad, grad_of_step, K, plan.max_steps, measured, guard
        )
        return form.join(up), like(form.join(new), client), drift

    form = Form(program.unravel, down.x)
    if guard is not None:
        return work(form.as_one())
    try:
        return work(form)
    except (TypeError, AttributeError):  # an algorithm that asks for more than arithmetic gets vectors
        return work(form.as_one())


def shuffle(key: Any, length: int, size: Any) -> Any:
    """A random order of a client's examples, the first `size` of `length` places. It depends on the client's own size
    only, so that deployment draws the same."""
    draws = jax.random.uniform(key, (length,), jnp.float32)
    return jnp.argsort(jnp.where(jnp.arange(length) < size, draws, 2.0))


def order_of_epoch(seed: int, r: int, trip: int, i: int, epoch: int, size: int) -> np.ndarray:
    """The order in which client i goes through its examples, as the engine draws it."""
    key = np.asarray(jax.random.key_data(jax.random.key(seed)))
    return np.array(_order(key, np.array([r, trip, i, epoch]), size))


@functools.partial(jax.jit, static_argnums=2)
def _order(key: Any, numbers: Any, size: int) -> Any:
    key = jax.random.wrap_key_data(key)
    for k in range(len(numbers)):
        key = jax.random.fold_in(key, numbers[k])
    return shuffle(key, size, size)


def gradient(program: Program, form: Form, batch: Any, inside: Any) -> Callable[[Any], Any]:
    """y -> the gradient of the mean loss over the batch, or over those of its rows that are inside."""
    weights = None if inside is None else inside / inside.sum()

    def slope(y: Any) -> Any:
        products = contextlib.nullcontext()
        if program.precision is not None:
            products = jax.default_matmul_precision("BF16_BF16_F32")
        with products:
            return jax.grad(lambda y: loss_at(program.loss, form.params(y), batch, weights))(y)

    return slope


def loss_at(loss: Callable[[Any, Any], Any], params: Any, batch: Any, weights: Any) -> Any:
    """The loss of a batch, or the weighted sum of its examples' losses."""
    if weights is None:
        return loss(params, batch)
    each = jax.vmap(lambda example: loss(params, jax.tree.map(lambda leaf: leaf[None], example)))(batch)
    return weights.astype(each.dtype) @ each


def like(new: Any, old: Any) -> Any:
    """The new state in the old one's precision."""
    return jax.tree.map(lambda n, o: jnp.asarray(n, o.dtype), new, old)
