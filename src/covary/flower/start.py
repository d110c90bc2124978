"""Where a deployed run starts: the model and the algorithm, as a server tells them to nodes."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from covary.algorithm import Algorithm
from covary.errors import refused
from covary.flower.client import form_of_params
from covary.flower.merge import Arrays


def start_of(model: Any, seed: int) -> tuple[np.ndarray, Arrays, str, Callable[[Any], Any]]:
    """x^0, the buffers, the model's fingerprint, and the way from x to the model's own form."""
    if not hasattr(model, "named_parameters") and not hasattr(model, "init") and callable(model):
        return start_of(built(model, seed), seed)
    if hasattr(model, "named_parameters"):
        from covary.flower.torch import flat_parameters, float_buffers, form_of_module

        return flat_parameters(model), float_buffers(model), form_of_module(model), lambda x: x
    if hasattr(model, "init"):
        model = jax.jit(model.init)(jax.random.fold_in(jax.random.key(seed), 0))
    params = jax.tree.map(lambda leaf: np.asarray(jnp.asarray(leaf)), model)  # in the types that JAX is set to
    x, unravel = ravel_pytree(params)
    x = np.asarray(x)
    if x.dtype.kind != "f" or not x.size or not np.isfinite(x).all():
        came = f"{x.size} numbers of {x.dtype}"
        raise refused("model", "a model, a PyTorch module or finite parameters", came, "Try covary.models.")
    return x, {}, form_of_params(params), lambda x: jax.tree.map(np.asarray, unravel(x))


def built(build: Callable[[], Any], seed: int) -> Any:
    """What a function of the user's builds, with PyTorch's generator, if there is one, seeded by the run's seed."""
    torch = sys.modules.get("torch")
    if torch is None:
        return build()
    with torch.random.fork_rng([]):
        torch.manual_seed(seed)
        return build()


def spec_of(algorithm: Algorithm) -> dict[str, Any]:
    """How a node builds the same algorithm."""
    if algorithm.recipe is None:
        fix = "Make it with a function marked by @covary.algorithm.factory, and name that to the client app too."
        raise refused("algorithm", "made by a factory", algorithm.name, fix)
    build, options = algorithm.recipe
    return {"name": build.__name__, "numbers": dict(algorithm.numbers), "options": dict(options)}
