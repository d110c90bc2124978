"""One client's work in one exchange, compiled: its gradients bound to its batches, around the one local loop."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from covary._engine.convolutions import fast_on_cpu
from covary._engine.vectors import Form
from covary.algorithm import Exchange
from covary.client import Guard, client_work, dry_work
from covary.model_functions import ModelFunction
from covary.running.plan import Layout, LocalPlan, batch_bounds

NOISE = np.uint32(2**31)  # for what a loss draws; the numbers of epochs, for their orders, are smaller


@dataclass(frozen=True)
class LocalProgram:
    """All that a client's compiled work depends on besides the exchange and the shapes of its arguments."""

    plan: LocalPlan
    loss: ModelFunction  # without its frozen parameters, until it is called
    unravel: Callable[[Any], Any]
    at_once: int | None = None  # most examples whose gradient is computed in one go; None: any number

    def holding(self, frozen: Any) -> LocalProgram:
        """The same with frozen parameters."""
        return replace(self, loss=self.loss.holding(frozen))


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
        key: of this round, exchange and client; it decides the batches, and what a loss draws at random.
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
    noise = jax.random.fold_in(key, NOISE)

    def grad_of_all(draw: Any) -> Callable[[Any], Any]:
        inside = everything < layout.size if plan.ragged_sizes else None
        return gradient(program, form, own, inside, jax.random.fold_in(noise, draw))

    def grad_of_step(k: Any) -> Callable[[Any], Any]:
        if plan.batching == "full":
            return grad_of_all(k + 1)
        low, high = batch_bounds(plan.batching, layout.batch, layout.per_epoch, layout.size, k)
        places = low + jnp.arange(plan.max_batch)  # (max_batch,)
        inside = places < high
        rows = fetch(order[k // layout.per_epoch, jnp.minimum(places, layout.size - 1)])  # (max_batch, ...)
        return gradient(program, form, rows, inside if plan.ragged_batches else None, jax.random.fold_in(noise, k + 1))

    K = plan.max_steps if plan.steps is not None else layout.steps
    given = (exchange, form.split(down), form.split(client), grad_of_all(0), grad_of_step, K, plan.max_steps)
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
    only, so that deployment draws the same (`covary.draws.order_of_epoch`)."""
    draws = jax.random.uniform(key, (length,), jnp.float32)
    return jnp.argsort(jnp.where(jnp.arange(length) < size, draws, 2.0))


def folded(key: Any, *numbers: Any) -> Any:
    """The key of a round, of one of its exchanges, of a client in that: each number is folded in after the other."""
    for number in numbers:
        key = jax.random.fold_in(key, number)
    return key


def key_of_step(seed: int, r: int, exchange: int, i: int, k: int) -> Any:
    """The key of client i's step k = 1, 2, ...; 0 is that of the gradients over all its data."""
    return folded(jax.random.key(seed), r, exchange, i, NOISE, k)


def gradient(program: LocalProgram, form: Form, batch: Any, inside: Any, key: Any) -> Callable[[Any], Any]:
    """y -> the gradient of the mean loss over the batch, or over those of its rows that are inside.

    The key is for a loss that draws random numbers.
    """
    if program.loss.to_buffers is not None:
        return GradientWithBuffers(program, form, batch, key)
    weights = None if inside is None else inside / inside.sum()
    numbers = jnp.arange(len(jax.tree.leaves(batch)[0]))

    def slope(y: Any) -> Any:
        def of(rows: Any, weights: Any) -> Any:
            rows, numbers = rows
            keys = keys_of_examples(key, numbers) if program.loss.draws else None
            return fast_on_cpu(jax.grad(lambda y: loss_at(program.loss, form.params(y), rows, weights, keys)))(y)

        return in_parts(of, (batch, numbers), weights, program.at_once)

    return slope


class GradientWithBuffers:
    """The same for a model with buffers: `at(buffers)(y)`, after which `buffers` are the new ones.

    Of several calls in one step, the first changes them. A batch is never divided: its examples depend on each other.
    """

    def __init__(self, program: LocalProgram, form: Form, batch: Any, key: Any, old: Any = None):
        self.program, self.form, self.batch, self.key = program, form, batch, key
        self.old = self.buffers = old

    def at(self, buffers: Any) -> GradientWithBuffers:
        return GradientWithBuffers(self.program, self.form, self.batch, self.key, buffers)

    def __call__(self, y: Any) -> Any:
        old = self.form.join(self.old)  # as a vector of the model's length would be in blocks

        def of(y: Any) -> Any:
            return self.program.loss.stepping(self.form.params(y), self.batch, self.key, old)

        slope, new = fast_on_cpu(jax.grad(of, has_aux=True))(y)
        if self.buffers is self.old:
            self.buffers = self.form.split(new)
        return slope


def keys_of_examples(key: Any, numbers: Any) -> Any:
    """A key for each example of a batch, so that what is drawn does not depend on how the batch is divided."""
    return jax.vmap(jax.random.fold_in, (None, 0))(key, numbers)


def in_parts(
    of: Callable[[Any, Any], Any], batch: Any, weights: Any, at_once: int | None, span: tuple[Any, int] | None = None
) -> Any:
    """`of(batch, weights)`, a mean over a batch's examples or their weighted sum, from so many examples at a time.

    With a span (first, count), what these examples contribute to it.

    >>> def mean(batch, weights):
    ...     return jnp.mean(batch) if weights is None else weights @ batch
    >>> float(in_parts(mean, jnp.arange(10.0), None, at_once=4))
    4.5
    >>> float(in_parts(mean, jnp.arange(10.0), None, at_once=4, span=(5, 5)))  # 35 / 10
    3.5
    """
    n = len(jax.tree.leaves(batch)[0])
    begin, length = span or (0, n)
    if span is None and (at_once is None or n <= at_once):
        return of(batch, weights)
    least = -(-length // (at_once or n))
    parts = next((k for k in range(least, 2 * least) if length % k == 0), least)  # equal ones are one program
    size = length // parts

    @functools.partial(jax.jit, static_argnums=1, inline=True)  # so that it is traced once for its shapes and its sum
    def part(first: Any, count: int) -> Any:
        rows = jax.tree.map(lambda leaf: jax.lax.dynamic_slice_in_dim(leaf, first, count), (batch, weights))
        value = of(*rows)
        return value if weights is not None else jax.tree.map(lambda v: v * (count / n), value)

    def add(total: Any, k: Any) -> tuple[Any, None]:
        return jax.tree.map(jnp.add, total, part(begin + k * size, size)), None

    zero = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), jax.eval_shape(lambda: part(jnp.asarray(begin), size)))
    total, _ = jax.lax.scan(add, zero, jnp.arange(parts))
    rest = length - parts * size
    return jax.tree.map(jnp.add, total, part(begin + length - rest, rest)) if rest else total


def loss_at(loss: ModelFunction, params: Any, batch: Any, weights: Any, keys: Any = None) -> Any:
    """The loss of a batch, or the weighted sum of its examples' losses; each example draws with its own key."""
    if weights is None and keys is None:
        return loss(params, batch)

    def of_one(example: Any, key: Any) -> Any:
        return loss(params, jax.tree.map(lambda leaf: leaf[None], example), key)

    each = jax.vmap(of_one)(batch, keys)  # (rows of the batch,)
    return jnp.mean(each) if weights is None else weights.astype(each.dtype) @ each


def like(new: Any, old: Any) -> Any:
    """The new state in the old one's precision."""
    return jax.tree.map(lambda n, o: jnp.asarray(n, o.dtype), new, old)
