"""How many examples fit into memory at once: an estimate from the model's own operations, before they are compiled."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax

from covary._engine.local import LocalProgram
from covary.checks import whole
from covary.errors import refused
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
            fix = "The loss of a batch is not the mean of its examples' losses here, so a batch cannot be divided."
            raise refused("microbatch", "None", microbatch, fix)
        return dataclasses.replace(local, at_once=microbatch)
    if problem.mixes_examples:
        return local
    fit = rows_that_fit(_gradient_of(problem.loss), *problem.shapes, copies)
    return local if fit >= local.plan.max_size else dataclasses.replace(local, at_once=fit)


@functools.lru_cache(maxsize=64)
def _gradient_of(loss: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    return jax.grad(loss)


def rows_that_fit(function: Callable[[Any, Any], Any], params: Any, examples: Any, copies: int = 1) -> int:
    """The most examples, a power of two, that `function(params, batch)` has room for, `copies` times side by side.

    Args:
        function: the loss, its gradient, or the metrics.
        params: the model's, or their shapes.
        examples: any number of rows, for their shapes.
        copies: the clients that compute at the same time.

    >>> x = np.zeros((3, 100), np.float32)
    >>> few = rows_that_fit(lambda w, x: jnp.mean(jnp.tanh(x @ w)), np.zeros((100, 1000), np.float32), x)
    >>> many = rows_that_fit(lambda w, x: jnp.mean(jnp.tanh(x @ w)), np.zeros((100, 10), np.float32), x)
    >>> many > 50 * few
    True
    """
    each = bytes_of_a_row(function, params, examples)
    fit = int(SHARE * device_memory() / (copies * max(each, 1.0)))
    return 1 << max(fit.bit_length() - 1, 0)


def bytes_of_a_row(function: Callable[[Any, Any], Any], params: Any, examples: Any) -> float:
    """Bytes that one more example adds to the largest set of arrays that are needed at the same time.

    Nothing is fused in this count, so that it is an upper bound on what the compiled program needs.
    """
    leaves, tree = jax.tree.flatten((params, examples))
    shapes = tuple((tuple(leaf.shape), jax.dtypes.canonicalize_dtype(leaf.dtype)) for leaf in leaves)
    return _bytes_of_a_row(function, tree, shapes, len(jax.tree.leaves(params)))


@functools.lru_cache(maxsize=256)
def _bytes_of_a_row(function: Callable[[Any, Any], Any], tree: Any, shapes: Any, n_params: int) -> float:
    def needed(rows: int) -> int:
        leaves = [jax.ShapeDtypeStruct(*leaf) for leaf in shapes[:n_params]]
        leaves += [jax.ShapeDtypeStruct((rows, *shape[1:]), dtype) for shape, dtype in shapes[n_params:]]
        return most_alive(jax.make_jaxpr(function)(*jax.tree.unflatten(tree, leaves)).jaxpr)

    return (needed(2 * MANY) - needed(MANY)) / MANY


def most_alive(jaxpr: Any) -> int:
    """Bytes of the results that are alive at the same time, at the most, in a program run line by line.

    >>> program = jax.make_jaxpr(lambda x: jnp.sum(jnp.exp(2 * x)))(np.zeros(100, np.float32))
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
