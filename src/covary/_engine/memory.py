"""How many examples fit into memory at once: an estimate from the model's own operations, before they are compiled."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from covary._engine.local import LocalProgram, keys_of_examples, loss_at
from covary.checks import whole
from covary.errors import refused
from covary.model_functions import ModelFunction
from covary.problem import Problem
from covary.runs.machine import device_memory

SHARE = 1 / 8  # of the device's memory, for what a model computes on the way
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
    most = local.plan.max_size
    fit = rows_that_fit(gradient_of(problem.loss.holding()), problem, most, copies)
    return local if fit == most else dataclasses.replace(local, at_once=fit)


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
    params, batch = problem.shapes
    leaves, tree = jax.tree.flatten((problem.held, params, batch))
    shapes = tuple((tuple(leaf.shape), jax.dtypes.canonicalize_dtype(leaf.dtype)) for leaf in leaves)
    needed = functools.partial(_bytes_of_rows, function, tree, shapes, len(jax.tree.leaves(batch)))
    room = SHARE * device_memory() / copies
    if most <= MANY and needed(most) <= room:
        return most
    each = needed(most) / most if most <= MANY else (needed(2 * MANY) - needed(MANY)) / MANY
    fit = min(int(room / max(each, 1.0)), most)
    return most if fit == most else 1 << max(fit.bit_length() - 1, 0)


@functools.lru_cache(maxsize=256)
def _bytes_of_rows(function: Callable[..., Any], tree: Any, shapes: Any, n_batch: int, rows: int) -> int:
    """Bytes of the largest set of arrays that are needed at the same time for a batch of so many rows."""
    leaves = [jax.ShapeDtypeStruct(*leaf) for leaf in shapes[:-n_batch]]
    leaves += [jax.ShapeDtypeStruct((rows, *shape[1:]), dtype) for shape, dtype in shapes[-n_batch:]]
    return most_alive(jax.make_jaxpr(function)(*jax.tree.unflatten(tree, leaves)).jaxpr)


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
        inner = max((most_alive(sub) for sub in _programs_in(eqn.params)), default=0)
        most = max(most, alive + inner)
        over = {v for v in (*eqn.invars, *eqn.outvars) if not _is_constant(v) and last_use.get(v, line) <= line}
        alive -= sum(made.pop(v, 0) for v in over)
    return most


def _programs_in(parameters: dict[str, Any]) -> list[Any]:
    """The programs that an operation consists of: a loop's body, the branches of a condition."""
    found = jax.tree.leaves(list(parameters.values()), is_leaf=lambda value: hasattr(value, "eqns"))
    return [getattr(value, "jaxpr", value) for value in found if hasattr(value, "eqns")]


def _is_constant(v: Any) -> bool:
    return hasattr(v, "val")


def _bytes(aval: Any) -> int:
    return aval.size * aval.dtype.itemsize if hasattr(aval, "size") and hasattr(aval.dtype, "itemsize") else 0
