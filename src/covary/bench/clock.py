"""The clock of a benchmark: when each round of `simulate` was done."""

from __future__ import annotations

import time

import numpy as np


class Clock:
    """The time at which each round is logged. The rounds of one chunk are logged together, when it ends."""

    def __init__(self) -> None:
        self.start = time.perf_counter()
        self.ticks: list[tuple[float, int]] = []

    def tick(self, r: int, _: dict[str, float]) -> None:
        self.ticks.append((time.perf_counter(), r))

    def first(self) -> float:
        """Seconds from the start to the end of the first round."""
        return self.ticks[0][0] - self.start

    def fastest_round(self) -> float:
        """Seconds of the fastest round, where every round is logged when it is done."""
        return float(np.diff([time for time, _ in self.ticks]).min())

    def fastest(self) -> float:
        """Seconds per round of the fastest chunk, without the last one, which evaluates.

        A chunk starts after a wait of at least a fifth of the longest wait, compilation excluded. Shorter waits (a
        hiccup while rounds are logged, or the first chunks of one short round) are ignored.
        """
        times, rounds = (np.array(column, float) for column in zip(*self.ticks, strict=True))
        waits = np.diff(times)
        begins = np.flatnonzero(waits[1:] >= 0.2 * waits[1:].max()) + 1 if len(waits) > 1 else np.array([0])
        ends = np.append(begins[1:], len(times) - 1)
        seconds = (times[begins + 1] - times[begins]) / (rounds[ends] - rounds[begins])
        return float(np.min(seconds[:-1] if len(seconds) > 1 else seconds))
