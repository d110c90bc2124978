"""The fingerprint of a JAX model, by which a server and its nodes check that they train the same one."""

from __future__ import annotations

import hashlib
from typing import Any

import jax
import numpy as np


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
