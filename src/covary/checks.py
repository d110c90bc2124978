"""Checks of single parameters."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np

from covary.errors import InvalidInput, refused


def whole(name: str, value: Any, least: int, most: int = 2**31 - 1) -> int:
    """The value as an int. It must be a whole number from `least` to `most`."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < least:
        raise refused(name, f"a whole number of at least {least}", repr(value), f"Try {max(least, 10)}.")
    if value > most:
        raise refused(name, f"at most {most:,}", f"{value:,}", f"Try {max(least, 10)}.")
    return int(value)


def array(name: str, value: Any) -> np.ndarray:
    """The value as an array. Its rows must have equal length."""
    try:
        return np.asarray(value)
    except (ValueError, TypeError) as error:
        raise refused(name, "an array", f"{type(value).__name__} ({error})", "Give all rows the same length.") from None


def path(name: str, value: Any) -> Path:
    """The value as a path."""
    if not isinstance(value, str | Path) or value == "" or "\0" in str(value):
        raise refused(name, "a path", repr(value), "Pass a string or a pathlib.Path.")
    return Path(value)


def flag(name: str, value: Any) -> bool:
    """The value as a bool."""
    if not isinstance(value, bool | np.bool_):
        raise refused(name, "True or False", repr(value), "Leave it out for the default.")
    return bool(value)


def positive(name: str, value: Any) -> None:
    """Check for a finite number above 0. A traced value passes, because its number is not known yet."""
    if _number(name, value) <= 0:
        raise refused(name, "a number above 0", value, _advice(name))


def non_negative(name: str, value: Any) -> None:
    """Check for a finite number of 0 or more."""
    if _number(name, value) < 0:
        raise refused(name, "a number of 0 or more", value, "Use 0 to switch the term off.")


def is_traced(value: Any) -> bool:
    """Whether the value is a JAX tracer, a number that is not known yet. Before JAX is imported there are none."""
    jax = sys.modules.get("jax")
    return jax is not None and isinstance(value, jax.core.Tracer)


def _number(name: str, value: Any) -> float:
    if is_traced(value):
        return 1.0
    if hasattr(value, "update") or hasattr(value, "step") or callable(value):
        raise InvalidInput(
            f"{name} must be a number, the step-size of plain SGD; got {type(value).__name__}. covary has no local "
            "optimisers and no schedules. Option II takes (x - y)/(K eta_l) as the mean of the local gradients, which "
            "holds only if every local step is -eta_l times a gradient: with momentum or Adam it would be wrong. "
            f"Pass a number such as {name}=0.1, and tune it."
        )
    number = np.asarray("not a number") if isinstance(value, bool | str) else array(name, value)
    if number.ndim > 0:
        raise refused(name, "one number", f"an array of shape {number.shape}", "Use covary.sweep for many values.")
    if number.dtype.kind not in "fiu" or not np.isfinite(number):
        raise refused(name, "a finite number", repr(value), _advice(name))
    return float(number)


def _advice(name: str) -> str:
    return "Try 0.1, then tune it by factors of 3." if name.startswith("eta") else "Try 1.0."
