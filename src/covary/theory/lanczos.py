"""Extreme eigenvalues of many symmetric matrices at once, from matrix-vector products."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from covary.running.derivatives import Basis

EVERY = 4  # steps between two convergence checks
LEAST = 12  # steps before a check can end the search


class Extremes(NamedTuple):
    """Of each matrix: the lowest and highest Ritz value, their error bounds, and their vectors."""

    values: np.ndarray  # (matrices, 2)
    errors: np.ndarray  # (matrices, 2): norms of the residuals
    vectors: Any  # (matrices, 2, d)

    @property
    def norms(self) -> np.ndarray:
        """The spectral norm of each matrix."""
        return np.abs(self.values).max(axis=1)

    @property
    def norm_errors(self) -> np.ndarray:
        return np.take_along_axis(self.errors, np.abs(self.values).argmax(axis=1)[:, None], axis=1)[:, 0]


def lanczos(
    product: Callable[[Any], Any],
    basis: Basis,
    enough: Callable[[np.ndarray, np.ndarray], bool],
) -> Extremes:
    """Lanczos' method with full reorthogonalisation, on all matrices at once.

    Args:
        product: (matrices, d) -> (matrices, d), each matrix times its own vector.
        basis: holds the first vectors, and room for one more in each step.
        enough: (values, errors) -> whether they are accurate enough. A small error only says that some eigenvalue is
            near, so two checks in a row must pass.

    Reference: Lanczos 1950; Golub and Van Loan, Matrix Computations, chapter 10.
    """
    v, steps, m = basis.first, basis.steps, len(basis.first)
    T = np.zeros((m, steps, steps))
    length = np.full(m, steps)  # of each matrix's basis; shorter if it spans an invariant subspace
    extremes, satisfied = None, 0
    for k in range(steps):
        w, alpha, beta = basis.add(v, product(v))
        T[:, k, k] = alpha
        going = length == steps
        scale = np.abs(T[:, : k + 1, : k + 1]).max(axis=(1, 2))
        ended = ~(beta > basis.roundoff * np.maximum(scale, np.finfo(np.float32).tiny))
        length[going & ended] = k + 1
        rest = np.where(length == steps, beta, 0.0)
        if not np.isfinite(alpha).all() or k + 1 == steps or not rest.any() or (k + 1) % EVERY == 0:
            extremes = _extremes(T[:, : k + 1, : k + 1], np.minimum(length, k + 1), rest)
            values, errors, _ = extremes
            satisfied = satisfied + 1 if np.isfinite(values).all() and enough(values, errors) else 0
            found = satisfied > 1 and k + 1 >= LEAST
            if k + 1 == steps or not rest.any() or not np.isfinite(values).all() or found:
                break
        T[:, k, k + 1] = T[:, k + 1, k] = rest
        v = basis.unit(w, rest)
    assert extremes is not None
    values, errors, mix = extremes
    return Extremes(values, errors, basis.combined(mix))


def _extremes(T: np.ndarray, length: np.ndarray, rest: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    m, size, _ = T.shape
    values, errors, mix = np.full((m, 2), np.nan), np.full((m, 2), np.nan), np.zeros((m, size, 2))
    for i, k in enumerate(length):
        if np.isfinite(T[i, :k, :k]).all():
            eigenvalues, s = np.linalg.eigh(T[i, :k, :k])
            values[i] = eigenvalues[[0, -1]]
            errors[i] = np.abs(rest[i] * s[-1, [0, -1]])
            mix[i, :k] = s[:, [0, -1]]
    return values, errors, mix
