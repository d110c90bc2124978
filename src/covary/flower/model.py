"""The model that a deployed run has trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from covary.errors import InvalidInput, refused
from covary.flower.fingerprint import form_of_params
from covary.flower.start import buffers_of_model
from covary.model_functions import by_path
from covary.problem import Problem
from covary.runs.files import File


def load_model(model: Any, checkpoint: str | Path) -> Any:
    """The model after the last round that the server counted.

    Args:
        model: what `server_app` was given: a PyTorch module, which gets the parameters and the averaged buffers and is
            returned; or a covary model, problem or params, for which params are returned, and for a model with buffers
            a pair of params and buffers.
        checkpoint: the server's folder.

    >>> import covary as cv
    >>> from covary.flower import load_model
    >>> load_model(cv.models.logistic_regression(64, 10), "/no/such/folder")
    Traceback (most recent call last):
    covary.errors.InvalidInput: There is no checkpoint in /no/such/folder. Give the server's checkpoint folder.
    """
    found = File(Path(checkpoint) / "ledger").read()
    if found is None:
        raise InvalidInput(f"There is no checkpoint in {checkpoint}. Give the server's checkpoint folder.")
    arrays, facts = found
    x, trained = arrays["server.x"], facts["settings"]["model"]

    def same(form: str) -> None:
        if form[:12] not in trained:
            fix = "Build it as for server_app."
            raise refused("model", f"the one that was trained, {trained}", f"another ({form[:12]})", fix)

    if hasattr(model, "named_parameters"):
        from covary.torch.module import form_of_module, loaded

        same(form_of_module(model))
        return loaded(model, x, {k.removeprefix("buffers."): v for k, v in arrays.items() if k.startswith("buffers.")})
    own, frozen = buffers_of_model(model), model.frozen if isinstance(model, Problem) else None
    params = model.init(jax.random.key(0)) if hasattr(model, "init") else model
    params = jax.tree.map(lambda leaf: np.asarray(jnp.asarray(leaf)), params)
    same(form_of_params(params, frozen, by_path(own)))
    _, unravel = ravel_pytree(params)
    params = jax.tree.map(np.asarray, unravel(jnp.asarray(x)))
    if own is None:
        return params
    return params, jax.tree.unflatten(jax.tree.structure(own), [arrays[f"buffers.{name}"] for name in by_path(own)])
