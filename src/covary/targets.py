"""Targets: a metric, a direction and a value. One rule decides when a target is met."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from covary.errors import refused

FALLING = ("loss", "error", "mse", "rmse", "mae", "nll", "perplexity")


class Target(NamedTuple):
    """A metric's name, +1 if it is to rise or -1 if it is to fall, and the value that ends the run."""

    metric: str
    direction: float
    value: float

    def met(self, measured: Any) -> Any:
        """Whether the measured values meet the target, element by element; NaN does not."""
        return met(self.direction, measured, self.value)

    def first_met(self, curve: np.ndarray) -> int | None:
        """The index of the first value of a curve that meets the target, or None.

        Values that were measured in float32 are compared in float32, as the run itself compared them.

        >>> Target("accuracy", 1.0, 0.7).first_met(np.array([0.5, np.nan, 0.7, 0.9], np.float32))
        2
        """
        curve = np.asarray(curve)
        with np.errstate(over="ignore"):
            single = curve.astype(np.float32)
        if np.array_equal(single, curve, equal_nan=True):
            curve = single
        hits = np.flatnonzero(self.met(curve))
        return int(hits[0]) if hits.size else None


def met(direction: Any, measured: Any, value: Any) -> Any:
    """The one rule, on plain, NumPy and traced numbers: at or beyond the value, in the metric's direction."""
    return direction * (measured - value) >= 0


def direction_of(metric: str) -> float:
    """+1 for a metric that is to rise, -1 for one that is to fall, by its name."""
    return -1.0 if metric.endswith(FALLING) else 1.0


def target_of(wanted: Any, metrics: Sequence[str] | None = None) -> Target | None:
    """A target from what a user wrote: (name, value), (name, "<=" or ">=", value), "name >= value", or None.

    Args:
        wanted: what the user wrote.
        metrics: the names that can be a target, where they are known already.

    >>> target_of(("loss", 0.1)), target_of("bleu >= 30")
    (Target(metric='loss', direction=-1.0, value=0.1), Target(metric='bleu', direction=1.0, value=30.0))
    """
    if wanted is None:
        return None
    parts = _parts(wanted)
    if parts is None or (metrics is not None and parts[0] not in metrics):
        allowed = "(name, value) or (name, '<=' or '>=', value) with a finite value"
        if isinstance(wanted, str):
            allowed = 'a text such as "accuracy >= 0.9"'
        if metrics is not None:
            allowed += f" and a name among {', '.join(metrics)}"
        raise refused("target", allowed, repr(wanted), "Try ('loss', 0.1).")
    name, way, value = parts
    return Target(name, {"<=": -1.0, ">=": 1.0}[way] if way else direction_of(name), value)


def _parts(wanted: Any) -> tuple[str, str | None, float] | None:
    """The name, the comparison if there is one, and the value; None if it is not a target."""
    if isinstance(wanted, str):
        found = re.fullmatch(r"\s*(\w+)\s*(>=|<=)?\s*([-+.\deE]+)\s*", wanted)
        try:
            return None if found is None else (found[1], found[2], float(found[3]))
        except ValueError:
            return None
    if not isinstance(wanted, tuple | list) or len(wanted) not in (2, 3):
        return None
    name, *way, value = wanted
    if not isinstance(name, str) or (way and way[0] not in ("<=", ">=")):
        return None
    if isinstance(value, bool) or not isinstance(value, int | float | np.number) or not np.isfinite(value):
        return None
    return name, way[0] if way else None, float(value)
