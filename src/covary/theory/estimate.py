"""Estimates: a measured number with its standard error and its cost."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from covary.errors import InvalidInput


@dataclass(frozen=True)
class Estimate:
    """A measured number. `se` is 0 if nothing was sampled and the search was complete."""

    value: float
    se: float = 0.0
    cost: int = 0  # gradients of one example's loss

    def __float__(self) -> float:
        return float(self.value)

    def __str__(self) -> str:
        return f"{self.value:.4g}" + (f" ± {self.se:.2g}" if self.se > 0 else "")


def mean_error(values: np.ndarray, weights: np.ndarray, left_out: float) -> float:
    """The standard error of a weighted mean over a sample of the clients."""
    if left_out <= 0:
        return 0.0
    values = values.astype(float)
    return float(np.linalg.norm(weights * (values - weights @ values)) * np.sqrt(left_out))


def reject_nan(ids: np.ndarray, values: np.ndarray, what: str) -> None:
    bad = ids[~np.isfinite(values)]
    if bad.size:
        raise InvalidInput(
            f"The {what} of client {bad[0]} ({len(bad)} of {len(ids)} clients) is NaN or infinite at this point: the "
            "loss overflows, or it has no such derivative there, like a root or a norm at 0. Measure at another x, "
            "scale the data, or smooth the loss, for example with sqrt(z + 1e-12)."
        )
