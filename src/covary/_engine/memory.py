"""What a local step takes, counted from the model's own operations before they are compiled: memory and arithmetic."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from covary._engine.convolutions import kernels, programs_in
from covary._engine.local import LocalProgram, keys_of_examples, loss_at
from covary.checks import whole
from covary.errors import refused
from covary.model_functions import ModelFunction
from covary.problem import Problem
from covary.runs.machine import device_memory

SHARE = {"cpu": 1 / 8}  # of the device's memory, for what a model computes on the way; half of an accelerator's
VECTORS = 8  # of the model's size that a client needs besides: y, its gradient, c_i old and new, and so on
MANY = 4096  # rows at which what a batch needs outweighs what the parameters need


def fitted(local: LocalProgram, problem: Problem, copies: int = 1, microbatch: int | None = None) -> LocalProgram:
    """The program with gradients from as many examples at a time as the user says, or as fit into memory.

    Args:
        local: the program.
        problem: the model and its data.
        copies: the clients that compute at the same time.
        microbatch: what the user says.
    """
    if microbatch is not None:
        whole("microbatch", microbatch, 1)
        if problem.mixes_examples:
            fix = "A batch can only be divided if its loss is the mean of its examples' own losses, without buffers."
            raise refused("microbatch", "None", microbatch, fix)
        return dataclasses.replace(local, at_once=microbatch)
    if problem.mixes_examples:
        return local
    most, batch = local.plan.max_size, local.plan.max_batch
    if _needed(gradient_of(local.loss), problem)(batch) * most <= _room() / copies * batch:
        return local
    fit = rows_that_fit(gradient_of(local.loss), problem, most, copies)
    return local if fit == most else dataclasses.replace(local, at_once=fit)


def clients_that_fit(local: LocalProgram, problem: Problem, x: np.ndarray) -> int:
    """How many clients there is room for, each with a step on a whole batch."""
    return int(_room() / (_needed(gradient_of(local.loss), problem)(local.plan.max_batch) + VECTORS * x.nbytes))


@functools.lru_cache(maxsize=64)
def gradient_of(bare: ModelFunction) -> Callable[[Any, Any, Any], Any]:
    """`(held, params, batch) -> gradient`, as local steps compute it."""

    def of(held: Any, params: Any, batch: Any) -> Any:
        numbers = jnp.arange(len(jax.tree.leaves(batch)[0]))
        keys = keys_of_examples(jax.random.key(0), numbers) if bare.draws else None
        return jax.grad(lambda params: loss_at(bare.holding(*held), params, batch, None, keys))(params)

    return of


@functools.lru_cache(maxsize=64)
def value_of(bare: ModelFunction) -> Callable[[Any, Any, Any], Any]:
    """`(held, params, batch) -> the loss or the metrics`."""
    return lambda held, params, batch: bare.holding(*held)(params, batch)


def rows_that_fit(function: Callable[[Any, Any, Any], Any], problem: Problem, most: int, copies: int = 1) -> int:
    """How many examples, up to `most`, `function(held, params, batch)` has room for, `copies` times side by side.

    All of them, or a power of two. Nothing is fused in this count, so it is an upper bound on what is needed.
    """
    needed, room = _needed(function, problem), _room() / copies
    if most <= MANY and needed(most) <= room:
        return most
    each = needed(most) / most if most <= MANY else (needed(2 * MANY) - needed(MANY)) / MANY
    fit = min(int(room / max(each, 1.0)), most)
    return most if fit == most else 1 << max(fit.bit_length() - 1, 0)


def _room() -> float:
    """Bytes for what a model computes on the way."""
    return SHARE.get(jax.local_devices()[0].platform, 1 / 2) * device_memory()


def _needed(function: Callable[[Any, Any, Any], Any], problem: Problem) -> Callable[[int], int]:
    """rows -> bytes that `function(held, params, batch)` needs for a batch of so many."""
    return functools.partial(_bytes_of_rows, function, *_shapes(problem))


def _shapes(problem: Problem) -> tuple[Any, Any, int]:
    """The shapes of what a model's function gets, as a tree and its leaves, and how many of these are the batch's."""
    params, batch = problem.shapes
    leaves, tree = jax.tree.flatten((problem.held, params, batch))
    shapes = tuple((tuple(leaf.shape), jax.dtypes.canonicalize_dtype(leaf.dtype)) for leaf in leaves)
    return tree, shapes, len(jax.tree.leaves(batch))


@functools.lru_cache(maxsize=256)
def _bytes_of_rows(function: Callable[..., Any], tree: Any, shapes: Any, n_batch: int, rows: int) -> int:
    """Bytes of the largest set of arrays that are needed at the same time for a batch of so many rows."""
    return most_alive(_traced(function, tree, shapes, n_batch, rows))


def step_flops(local: LocalProgram, problem: Problem) -> float:
    """Floating-point operations of one local step."""
    return operations(_traced(gradient_of(local.loss), *_shapes(problem), local.plan.max_batch))


def operations(jaxpr: Any) -> float:
    """Floating-point operations of a program: two for each pair of a product or convolution, else one for each result.

    >>> def product(x):
    ...     return x @ x
    >>> x = jnp.ones((10, 10))
    >>> operations(jax.make_jaxpr(product)(x).jaxpr)
    2000.0
    >>> operations(jax.make_jaxpr(lambda x: jax.lax.scan(lambda x, _: (product(x), None), x, None, 7))(x).jaxpr)
    14000.0
    """
    total = 0.0
    for eqn in jaxpr.eqns:
        inside = [operations(inner) for inner in programs_in(eqn.params)]
        each = float(sum(getattr(v.aval, "size", 0) for v in eqn.outvars))
        match eqn.primitive.name:
            case "dot_general":
                (contracted, _), _ = eqn.params["dimension_numbers"]
                total += 2 * each * math.prod(eqn.invars[0].aval.shape[axis] for axis in contracted)
            case "conv_general_dilated":
                kernel = eqn.invars[1].aval
                total += 2 * each * kernel.size / kernel.shape[eqn.params["dimension_numbers"].rhs_spec[0]]
            case "scan":
                total += eqn.params["length"] * sum(inside)
            case "cond":
                total += max(inside)
            case _:
                total += sum(inside) if inside else each
    return total


def clients_convolve(local: LocalProgram, problem: Problem) -> bool:
    """Whether a step has convolutions whose kernels differ from client to client."""
    gradient, (tree, shapes, n_batch), rows = gradient_of(local.loss), _shapes(problem), local.plan.max_batch
    alone = kernels(_traced(gradient, tree, shapes, n_batch, rows))
    if not alone:
        return False
    held, *own = _arguments(tree, shapes, n_batch, rows)
    two = jax.tree.map(lambda a: jax.ShapeDtypeStruct((2, *a.shape), a.dtype), own)
    return kernels(jax.make_jaxpr(jax.vmap(gradient, (None, 0, 0)))(held, *two).jaxpr) > alone


@functools.lru_cache(maxsize=256)
def _traced(function: Callable[..., Any], tree: Any, shapes: Any, n_batch: int, rows: int) -> Any:
    """The operations of `function(held, params, batch)` on so many rows."""
    return jax.make_jaxpr(function)(*_arguments(tree, shapes, n_batch, rows)).jaxpr


def _arguments(tree: Any, shapes: Any, n_batch: int, rows: int) -> Any:
    leaves = [jax.ShapeDtypeStruct(*leaf) for leaf in shapes[:-n_batch]]
    leaves += [jax.ShapeDtypeStruct((rows, *shape[1:]), dtype) for shape, dtype in shapes[-n_batch:]]
    return jax.tree.unflatten(tree, leaves)


def most_alive(jaxpr: Any) -> int:
    """Bytes of the results that are alive at the same time, at the most, in a program run line by line.

    >>> program = jax.make_jaxpr(lambda x: jnp.sum(jnp.exp(2 * x)))(jnp.zeros(100, jnp.float32))
    >>> most_alive(program.jaxpr)  # 2 * x and its exponential
    800
    """
    last_use = {v: line for line, eqn in enumerate(jaxpr.eqns) for v in eqn.invars if not _is_constant(v)}
    last_use |= {v: len(jaxpr.eqns) for v in jaxpr.outvars if not _is_constant(v)}
    made: dict[Any, int] = {}
    alive = most = 0
    for line, eqn in enumerate(jaxpr.eqns):
        made |= {v: _bytes(v.aval) for v in eqn.outvars}
        alive += sum(made[v] for v in eqn.outvars)
        inner = max((most_alive(sub) for sub in programs_in(eqn.params)), default=0)
        most = max(most, alive + inner)
        over = {v for v in (*eqn.invars, *eqn.outvars) if not _is_constant(v) and last_use.get(v, line) <= line}
        alive -= sum(made.pop(v, 0) for v in over)
    return most


def _is_constant(v: Any) -> bool:
    return hasattr(v, "val")


def _bytes(aval: Any) -> int:
    return aval.size * aval.dtype.itemsize if hasattr(aval, "size") and hasattr(aval.dtype, "itemsize") else 0
