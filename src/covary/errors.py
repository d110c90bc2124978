"""covary's own errors and warnings. An error names the parameter, what is allowed, what it got, and the fix."""

from __future__ import annotations

from typing import Any


class CovaryError(Exception):
    """An error that covary raises itself. The message says what is wrong, what is allowed, and how to fix it."""


class InvalidInput(CovaryError, ValueError):
    """A value, a file or a combination of values that covary rejects before work begins."""


class Corrupted(CovaryError):
    """A file that covary wrote is damaged, or an invariant is violated."""


class CheckpointWarning(UserWarning):
    """A checkpoint is damaged, and covary falls back to the previous one."""


class EagerWarning(UserWarning):
    """The steps of a PyTorch module cannot be recorded as CUDA graphs, and run one operation after the other."""


class DivergenceWarning(UserWarning):
    """A run diverged: its values became NaN or infinite. It stops and returns its history so far."""


def refused(parameter: str, allowed: str, came: Any, fix: str) -> InvalidInput:
    """The error for an invalid parameter. All such messages have this form.

    >>> print(refused("clients_per_round", "between 1 and 7", 9, "Sample at most all 7 clients."))
    clients_per_round must be between 1 and 7; got 9. Sample at most all 7 clients.
    """
    return InvalidInput(f"{parameter} must be {allowed}; got {came}. {fix}")
