"""covary's own errors and warnings. An error names the parameter, what is allowed, what it got, and the fix."""

from __future__ import annotations

from typing import Any


class CovaryError(ValueError):
    """Invalid input: a parameter, a model or a file that covary rejects, before or during a run."""


class DivergenceWarning(UserWarning):
    """A run diverged: its values became NaN or infinite. It stops and returns its history so far."""


def refused(parameter: str, allowed: str, came: Any, fix: str) -> CovaryError:
    """The error for an invalid parameter. All such messages have this form.

    >>> print(refused("clients_per_round", "between 1 and 7", 9, "Sample at most all 7 clients."))
    clients_per_round must be between 1 and 7; got 9. Sample at most all 7 clients.
    """
    return CovaryError(f"{parameter} must be {allowed}; got {came}. {fix}")
