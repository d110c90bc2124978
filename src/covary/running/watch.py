"""c = mean(c_i), checked by the host in float64."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from covary.algorithm import Algorithm
from covary.errors import Corrupted
from covary.running.job import finfo
from covary.running.state import State

BLOCK = 2**24  # numbers read at a time when those of all clients are read
PACE = 2e8  # numbers that are read and added in a second


class BrokenInvariant(Corrupted):
    """c is no longer the mean of c_i."""


class Watch:
    """Checks c against the mean of c_i, which never differ by more than rounding.

    The two sides are kept by different code, the server's by adding changes and the clients' by replacing states, so a
    lost, doubled or damaged state shows up here.
    """

    def __init__(self, algorithm: Algorithm, p: np.ndarray, d: int, agreed: Callable[[int], int] = int):
        self.algorithm, self.p, self.agreed = algorithm, p, agreed  # `agreed` makes several hosts decide alike
        self.began, self.spent = time.perf_counter(), 0.0
        self.next = len(p) * d / PACE  # what a check takes: an estimate, then what the last one took

    @property
    def due(self) -> bool:
        """Whether there is something to check, and checking takes no more than a fiftieth of the time so far."""
        if self.algorithm.invariant is None:
            return False
        return bool(self.agreed(self.spent + self.next <= 0.02 * (time.perf_counter() - self.began)))

    def error(self, state: State, clients: Any, seen: np.ndarray | None = None) -> float:
        """‖c - sum p_i c_i‖ over all clients, summed in float64; a difference beyond rounding stops the run."""
        assert self.algorithm.invariant is not None
        started = time.perf_counter()
        server_field, client_field = self.algorithm.invariant
        c = np.asarray(getattr(state.server, server_field))
        difference = c - mean_control(clients, client_field, self.p, seen)
        scale = np.ldexp(0.5, np.frexp(np.abs(difference).max())[1])  # a power of two: no square overflows
        error = float(scale * np.linalg.norm(difference / scale))
        eps, round = float(finfo(c.dtype).eps), int(state.control.round)
        rounding = (np.sqrt(eps) + eps * round) * np.sqrt(c.size) * float(state.accounts.scale)
        if not error <= rounding:
            raise BrokenInvariant(
                f"After round {round} the server's {server_field} is {error:.3g} away from the mean of the clients' "
                f"{client_field}, and rounding explains at most {rounding:.3g}: a client's state was lost or changed "
                "from outside. The run stops, because its later rounds would not be those of the algorithm. Resume "
                "from the last checkpoint, or start a new run."
            )
        self.next = time.perf_counter() - started
        self.spent += self.next
        return error


def mean_control(clients: Any, field: str, p: np.ndarray, seen: np.ndarray | None = None) -> np.ndarray:
    """sum p_i c_i over all clients, in float64 for states of any precision, a block of clients at a time."""
    rows = getattr(clients, field)
    ids = np.arange(len(p))
    total = np.zeros(rows.shape[1:])
    if seen is not None and not seen.all():  # all other clients have the initial row
        total += p[~seen].sum() * np.asarray(rows[int(np.flatnonzero(~seen)[0])], float)
        ids = ids[seen]
    at_once = max(1, BLOCK // max(total.size, 1))
    for block in np.split(ids, range(at_once, len(ids), at_once)):
        total += np.tensordot(p[block], np.asarray(rows[block], float), 1)
    return total
