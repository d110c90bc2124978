"""The history of a run: rows from the records of compiled rounds, with the bytes that each round sends."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from covary import trees
from covary.algorithm import Algorithm, Exchange
from covary.client import dry_run
from covary.runs.files import Damaged

Log = Callable[[int, dict[str, float]], None]
Shapes = Callable[..., Any]
"""(function, *trees) -> what the function returns, where only shapes and types count: `jax.eval_shape`, for example."""


class History:
    """The rows of a run. Each new row is passed to the user's `log`."""

    def __init__(self, log: Log | None):
        self.parts: list[dict[str, np.ndarray]] = []
        self.log = log
        self.rounds = 0

    def add(self, rows: dict[str, Any], count: int, bytes_down: int, bytes_up: int) -> None:
        """Add the first `count` rows of a chunk's records."""
        if self.parts and set(rows) | {"round", "bytes_down", "bytes_up"} != set(self.parts[0]):
            columns = ", ".join(self.parts[0])
            raise Damaged(f"The history of a checkpoint has other columns: {columns}. Start a new run.")
        rows = {name: np.asarray(values)[:count] for name, values in rows.items()}
        rows["round"] = np.arange(self.rounds + 1, self.rounds + count + 1)
        self.rounds += count
        replied = (rows["cohort"] >= 0).sum(axis=1)
        rows |= {"bytes_down": replied * bytes_down, "bytes_up": replied * bytes_up}
        self.parts.append(rows)
        if self.log is not None:
            for at, number in enumerate(rows["round"]):
                values = {name: float(v[at]) for name, v in rows.items() if v.ndim == 1 and name != "round"}
                self.log(int(number), values)

    def restore(self, columns: dict[str, np.ndarray], cohort_size: int, measured: tuple[str, ...]) -> None:
        """Start with the rows of an earlier call."""
        if not columns:
            return
        missing = {"round", "cohort", "drift", "bytes_up", "bytes_down", *measured} - set(columns)
        if missing:
            raise Damaged(f"The history of a checkpoint has no {', '.join(sorted(missing))}. Start a new run.")
        numbers, cohort = columns.get("round", np.empty(0)), columns.get("cohort", np.empty(0))
        lengths = {len(column) if column.ndim else 0 for column in columns.values()}
        others = all(column.ndim == 1 for name, column in columns.items() if name != "cohort")
        ours = cohort.ndim == 2 and cohort.shape[1] == cohort_size and cohort.dtype.kind == "i"
        if lengths != {len(numbers)} or not others or not ours:
            raise Damaged("The history of a checkpoint does not have one row per round. Start a run in another folder.")
        if not np.array_equal(numbers, np.arange(1, len(numbers) + 1)):
            raise Damaged("The rounds in a checkpoint's history are not 1, 2, 3, ... Start a run in another folder.")
        self.parts, self.rounds = [columns], len(numbers)

    def participants(self, since: int) -> np.ndarray:
        """The clients that took part after round `since`."""
        cohorts = [part["cohort"][part["round"] > since] for part in self.parts]
        clients = np.unique(np.concatenate([cohort.ravel() for cohort in cohorts])) if cohorts else np.empty(0, int)
        return clients[clients >= 0]

    def columns(self) -> dict[str, np.ndarray]:
        """The whole history, `round` first."""
        if not self.parts:
            return {}
        names = ["round", *(name for name in self.parts[0] if name != "round")]
        return {name: np.concatenate([part[name] for part in self.parts]) for name in names}


def traffic_by_kind(
    algorithm: Algorithm, steps_on_wire: int | None, x: np.ndarray, shapes: Shapes
) -> dict[bool, tuple[int, int]]:
    """Bytes of one client's downloads and uploads in a round of the warm start (True), and in any other (False)."""
    warm = () if algorithm.warm_start is None else (algorithm.warm_start,)
    trips = algorithm.trips(steps_on_wire)
    return {True: traffic(algorithm, warm, x, shapes), False: traffic(algorithm, trips, x, shapes)}


def traffic(algorithm: Algorithm, exchanges: tuple[Exchange, ...], x: np.ndarray, shapes: Shapes) -> tuple[int, int]:
    """Bytes of one client's downloads and uploads in a round: the results of `broadcast`, and `finish`'s uploads.

    >>> import covary as cv
    >>> algorithm = cv.scaffold(eta_l=0.1)
    >>> traffic(algorithm, algorithm.trips(5), np.zeros(10, np.float32), lambda work, *states: work(*states))
    (80, 40)
    """
    server, client = (
        trees.map(lambda leaf: np.asarray(leaf, x.dtype), state)
        for state in (algorithm.init_server(x), algorithm.init_client(x))
    )
    total = np.zeros(2, int)
    for exchange in exchanges:
        down, up, _ = shapes(lambda s, c, exchange=exchange: dry_run(exchange, s, c), server, client)
        total += [
            sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in trees.leaves(sent)) for sent in (down, up)
        ]
    return int(total[0]), int(total[1])
