"""Where a deployed run starts: the model, and the algorithm as a server describes it to nodes."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from covary.algorithm import Algorithm
from covary.errors import refused
from covary.flower.fingerprint import form_of_params
from covary.flower.merge import Arrays
from covary.model_functions import by_path
from covary.problem import Problem


class Start(NamedTuple):
    """What a model is at the start of a run."""

    x: np.ndarray  # x^0
    buffers: Arrays
    form: str  # the model's fingerprint
    unravel: Callable[[Any], Any]  # from x to the model's own form
    tree: Callable[[Arrays], Any]  # from buffers by name to the model's own form

    @property
    def about(self) -> str:
        return f"{len(self.x)} numbers of {self.x.dtype}"


def start_of(model: Any, seed: int) -> Start:
    """Where a model starts: a module, a model with `init`, parameters, or a function that builds one of these."""
    if not hasattr(model, "named_parameters") and not hasattr(model, "init") and callable(model):
        return start_of(built(model, seed), seed)
    if hasattr(model, "named_parameters"):
        from covary.torch.module import Network, form_of_module

        network = Network(model)
        x = network.x.cpu().numpy()
        return Start(x, network.named_buffers(), form_of_module(model), lambda x: x, dict)
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


def built(build: Callable[[], Any], seed: int) -> Any:
    """What the user's function builds, with PyTorch's generator, if it is imported, seeded by the run's seed."""
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
