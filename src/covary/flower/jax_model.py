"""A JAX model as a deployed run sees it: where it starts, its fingerprint, and the way back from vectors."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from covary.errors import refused
from covary.flower.merge import Arrays
from covary.flower.start import Start
from covary.model_functions import by_path
from covary.problem import Problem


def start_of_params(model: Any, seed: int) -> Start:
    """Where a model with `init` starts, or where these parameters are."""
    own, frozen = buffers_of_model(model), model.frozen if isinstance(model, Problem) else None
    if hasattr(model, "init"):
        model = jax.jit(model.init)(jax.random.fold_in(jax.random.key(seed), 0))
    params = jax.tree.map(lambda leaf: np.asarray(jnp.asarray(leaf)), model)  # in the types that JAX is set to
    x, unravel = ravel_pytree(params)
    x = np.asarray(x)
    if x.dtype.kind != "f" or not x.size or not np.isfinite(x).all():
        came = f"{x.size} numbers of {x.dtype}"
        raise refused("model", "a model, a PyTorch module or finite parameters", came, "Try covary.models.")
    buffers, tree = by_path(own), jax.tree.structure(own)
    return Start(
        x,
        buffers,
        form_of_params(params, frozen, buffers),
        lambda x: jax.tree.map(np.asarray, unravel(x)),
        lambda found: jax.tree.unflatten(tree, [found[name] for name in buffers]) if buffers else None,
    )


def buffers_of_model(model: Any) -> Any:
    """The buffers of a JAX model at the start, in its own form; None if it has none."""
    if isinstance(model, Problem):
        return model.buffers_of(model.buffers)
    if getattr(model, "init_buffers", None) is not None:
        return jax.tree.map(np.asarray, jax.jit(model.init_buffers)(jax.random.key(0)))
    return None


def params_of(model: Any, arrays: Arrays, check: Callable[[str], None]) -> Any:
    """The params after a run, from its checkpoint's arrays; with a model's buffers, a pair of both.

    `check` gets the model's fingerprint, and rejects another model.
    """
    x = arrays["server.x"]
    own, frozen = buffers_of_model(model), model.frozen if isinstance(model, Problem) else None
    params = model.init(jax.random.key(0)) if hasattr(model, "init") else model
    params = jax.tree.map(lambda leaf: np.asarray(jnp.asarray(leaf)), params)
    check(form_of_params(params, frozen, by_path(own)))
    _, unravel = ravel_pytree(params)
    params = jax.tree.map(np.asarray, unravel(jnp.asarray(x)))
    if own is None:
        return params
    return params, jax.tree.unflatten(jax.tree.structure(own), [arrays[f"buffers.{name}"] for name in by_path(own)])


def form_of_params(params: Any, frozen: dict[str, Any] | None = None, buffers: dict[str, Any] | None = None) -> str:
    """A fingerprint of params: the names, shapes and types of the arrays, in their order in the flat vector. Of frozen
    parameters, the numbers count too, and of buffers the form.

    >>> import numpy as np
    >>> form_of_params({"w": np.zeros(2)}) == form_of_params({"w": np.ones(2)})
    True
    >>> form_of_params({"w": np.zeros(2)}) == form_of_params({"w": np.zeros(3)})
    False
    """
    leaves = jax.tree_util.tree_leaves_with_path(params)
    forms = [(jax.tree_util.keystr(path), tuple(leaf.shape), str(leaf.dtype)) for path, leaf in leaves]
    forms += [(name, tuple(array.shape), str(array.dtype)) for name, array in (buffers or {}).items()]
    digest = hashlib.sha256(repr(forms).encode())
    for name, array in (frozen or {}).items():
        digest.update(f"{name} {array.dtype} {array.shape} ".encode() + np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()
