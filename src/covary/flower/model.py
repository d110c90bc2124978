"""The model that a deployed run has trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from covary.durable import File
from covary.errors import CovaryError, refused


def load_model(model: Any, checkpoint: str | Path) -> Any:
    """The model as the server's last counted round left it.

    Args:
        model: what `server_app` was given: a PyTorch module, which gets the parameters and the averaged buffers and is
            returned; or a covary model or params, for which params are returned.
        checkpoint: the server's folder.

    >>> import covary as cv
    >>> from covary.flower import load_model
    >>> load_model(cv.models.logistic_regression(64, 10), "/no/such/folder")
    Traceback (most recent call last):
    covary.errors.CovaryError: There is no checkpoint in /no/such/folder. Give the server's checkpoint folder.
    """
    found = File(Path(checkpoint) / "ledger").read()
    if found is None:
        raise CovaryError(f"There is no checkpoint in {checkpoint}. Give the server's checkpoint folder.")
    arrays, _ = found
    x = arrays["server.x"]
    if hasattr(model, "named_parameters"):
        from covary.flower.torch import load_buffers, load_parameters

        load_buffers(model, {k.removeprefix("buffers."): v for k, v in arrays.items() if k.startswith("buffers.")})
        return load_parameters(model, x)
    params = model.init(jax.random.key(0)) if hasattr(model, "init") else model
    flat, unravel = ravel_pytree(jax.tree.map(np.asarray, params))
    if flat.shape != x.shape:
        raise refused("model", f"the one that was trained, of {x.size} numbers", f"{flat.size}", "Use the same model.")
    return jax.tree.map(np.asarray, unravel(jnp.asarray(x, flat.dtype)))
