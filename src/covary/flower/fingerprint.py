"""The fingerprint of a JAX model, by which a server and its nodes check that they train the same one."""

from __future__ import annotations

import hashlib
from typing import Any

import jax


def form_of_params(params: Any) -> str:
    """A fingerprint of params: the names, shapes and types of the arrays, in their order in the flat vector.

    >>> import numpy as np
    >>> form_of_params({"w": np.zeros(2)}) == form_of_params({"w": np.ones(2)})
    True
    >>> form_of_params({"w": np.zeros(2)}) == form_of_params({"w": np.zeros(3)})
    False
    """
    leaves = jax.tree_util.tree_leaves_with_path(params)
    forms = [(jax.tree_util.keystr(path), tuple(leaf.shape), str(leaf.dtype)) for path, leaf in leaves]
    return hashlib.sha256(repr(forms).encode()).hexdigest()
