"""One client's work in one exchange, compiled: its gradients bound to its batches, around the one local loop."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from covary._engine.plan import Layout, LocalPlan, batch_bounds
from covary._engine.vectors import Form
from covary.algorithm import Exchange
from covary.client import Guard, client_work, dry_work


@dataclass(frozen=True)
class LocalProgram:
    """All that a client's compiled work depends on besides the exchange and the shapes of its arguments."""

    plan: LocalPlan
    loss: Callable[[Any, Any], Any]
    unravel: Callable[[Any], Any]
    precision: str | None = None  # of the matrix products, where it is not the model's own


def work_of_client(
    program: LocalProgram,
    exchange: Exchange,
    down: Any,
    client: Any,
    fetch: Callable[[Any], Any],
    layout: Layout,
    key: Any,
    *,
    measured: bool = True,
    guard: Guard | None = None,
) -> tuple[Any, Any, Any]:
    """A client's upload, its new state and its drift.

    Args:
        program: the plan and the model.
        exchange: the exchange.
        down: the download.
        client: the client's state.
        fetch: positions in the client's data -> those examples.
        layout: this client's steps and batches.
        key: of this round, exchange and client; it decides the batches.
        measured: whether to measure the drift.
        guard: applied to a change before it leaves the client.
    """
    plan = program.plan
    everything = jnp.arange(plan.max_size)
    own = fetch(jnp.minimum(everything, layout.size - 1))  # (max_size, ...)
    epochs = jnp.arange(plan.epochs)
    # (epochs, max_size)
    order = jax.vmap(lambda e: shuffle(jax.random.fold_in(key, e), plan.max_size, layout.size))(epochs)

    form = Form(program.unravel, down.x)
    if guard is not None or not _arithmetic_only(exchange, form, down, client):
        form = form.as_one()
    full_grad = gradient(program, form, own, everything < layout.size if plan.ragged_sizes else None)

    def grad_of_step(k: Any) -> Callable[[Any], Any]:
        if plan.batching == "full":
            return full_grad
        low, high = batch_bounds(plan.batching, layout.batch, layout.per_epoch, layout.size, k)
        places = low + jnp.arange(plan.max_batch)  # (max_batch,)
        inside = places < high
        rows = fetch(order[k // layout.per_epoch, jnp.minimum(places, layout.size - 1)])  # (max_batch, ...)
        return gradient(program, form, rows, inside if plan.ragged_batches else None)

    K = plan.max_steps if plan.steps is not None else layout.steps
    given = (exchange, form.split(down), form.split(client), full_grad, grad_of_step, K, plan.max_steps)
    up, new, drift = client_work(*given, measured=measured, guard=guard)
    return form.join(up), like(form.join(new), client), drift


def _arithmetic_only(exchange: Exchange, form: Form, down: Any, client: Any) -> bool:
    """Whether the algorithm uses only arithmetic, so that it can work on a vector in blocks."""
    if form.whole:
        return True
    try:  # no loss is called here; an error of the algorithm's own comes again when it works on one vector
        jax.eval_shape(lambda down, client: dry_work(exchange, form.split(down), form.split(client)), down, client)
    except (TypeError, AttributeError):
        return False
    return True


def shuffle(key: Any, length: int, size: Any) -> Any:
    """A random order of a client's examples, the first `size` of `length` places. It depends on the client's own size
    only, so that deployment draws the same."""
    draws = jax.random.uniform(key, (length,), jnp.float32)
    return jnp.argsort(jnp.where(jnp.arange(length) < size, draws, 2.0))


def folded(key: Any, *numbers: Any) -> Any:
    """The key of a round, of one of its exchanges, of a client in that: each number is folded in after the other."""
    for number in numbers:
        key = jax.random.fold_in(key, number)
    return key


def order_of_epoch(seed: int, r: int, exchange: int, i: int, epoch: int, size: int) -> np.ndarray:
    """The order in which client i goes through its examples, as the engine draws it."""
    key = np.asarray(jax.random.key_data(jax.random.key(seed)))
    return np.array(_order(key, np.array([r, exchange, i, epoch]), size))


@functools.partial(jax.jit, static_argnums=2)
def _order(key: Any, numbers: Any, size: int) -> Any:
    each = (numbers[k] for k in range(len(numbers)))
    return shuffle(folded(jax.random.wrap_key_data(key), *each), size, size)


def gradient(program: LocalProgram, form: Form, batch: Any, inside: Any) -> Callable[[Any], Any]:
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
    # (rows of the batch,)
    each = jax.vmap(lambda example: loss(params, jax.tree.map(lambda leaf: leaf[None], example)))(batch)
    return weights.astype(each.dtype) @ each


def like(new: Any, old: Any) -> Any:
    """The new state in the old one's precision."""
    return jax.tree.map(lambda n, o: jnp.asarray(n, o.dtype), new, old)
