"""The errors and warnings that covary raises itself, in one shape: parameter, what is allowed, what came, the fix."""

from __future__ import annotations

from typing import Any


class CovaryError(ValueError):
    """A value was refused at the door, before anything was compiled or trained."""


class DivergenceWarning(UserWarning):
    """A run left the finite numbers; it was stopped and its history so far was returned."""


def refused(parameter: str, allowed: str, came: Any, fix: str) -> CovaryError:
    """The one error message shape.

    >>> print(refused("clients_per_round", "between 1 and 7", 9, "Sample at most all 7 clients."))
    clients_per_round must be between 1 and 7; got 9. Sample at most all 7 clients.
    """
    return CovaryError(f"{parameter} must be {allowed}; got {came}. {fix}")
