"""A deployed run's history, in simulation's form."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

NOT_MEASURED = ("round", "epoch", "asked", "cohort", "bytes_up", "bytes_down", "seconds")


def is_metric(name: str, value: Any) -> bool:
    if name in (*NOT_MEASURED, "drift") or not re.fullmatch(r"[\w.@/-]{1,64}", name):
        return False
    return isinstance(value, float) and math.isfinite(value)


def measured(row: Mapping[str, Any]) -> list[str]:
    return [name for name, value in row.items() if name not in NOT_MEASURED and isinstance(value, float)]


def columns(rows: list[dict[str, Any]]) -> dict[str, np.ndarray]:
    """The history in simulation's form: one array a column, cohorts padded with -1, NaN where nothing was measured."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    widest = max((len(row["cohort"]) for row in rows), default=0)
    columns = {}
    for name in names:
        if name == "cohort":
            columns[name] = np.array([row[name] + [-1] * (widest - len(row[name])) for row in rows])
        else:
            columns[name] = np.array([math.nan if row.get(name) is None else row[name] for row in rows])
    return columns
