"""Rounds of clients whose states or data are not on the devices, but are transferred for each cohort.

While a round computes, the next cohort's rows are read and the last one's are written, by one thread in this order.
If a client is in two rounds in a row, its row stays on the device.
"""

from __future__ import annotations

import concurrent.futures
import functools
from collections.abc import Callable, Generator, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import PartitionSpec

from covary._engine.cohort import where
from covary._engine.devices import AXIS, lay_out
from covary._engine.local import LocalProgram, in_parts, loss_at
from covary._engine.program import Program, World
from covary._engine.rounds import compiled_round, compiled_sample, compiled_warm_start, due
from covary.algorithm import Algorithm
from covary.data.federated import FederatedData, StreamedData
from covary.running.state import State

AHEAD = 64  # rounds whose cohorts are drawn at once


class Span(NamedTuple):
    """Which rounds to go through: from `first` to `until`, or until interrupted; the run's last one is `last`."""

    first: int
    until: int
    last: int
    interrupted: Callable[[], bool]


class Stream:
    """One run: a place for client states, the data where that is streamed, and the thread that serves both."""

    def __init__(self, program: Program, world: World, data: FederatedData, store: Any):
        self.program, self.world, self.data, self.store = program, world, data, store
        self.thread = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="covary-store")

    def rounds(
        self,
        algorithm: Algorithm,
        state: State,
        key: np.ndarray,
        visits: list[np.ndarray],
        span: Span,
        evaluate: Callable[[int, State], dict[str, Any]],
    ) -> Generator[tuple[State, dict[str, Any], np.ndarray, bool]]:
        """The state and record after each round, with its cohort and whether it was one of the warm start.

        A round is returned when the next one has started, unless `evaluate` needs every state.
        """
        numbers, (first, until, last, interrupted) = dict(algorithm.numbers), span
        cohorts = self._cohorts(key, visits, first, until)
        cohort = next(cohorts)
        ahead = self.thread.submit(self._read, cohort)
        done: tuple[State, dict[str, Any], np.ndarray, bool] | None = None  # the last round, if not handed out
        unwritten: tuple[np.ndarray, Any] | None = None  # the last round's rows: they may still be computing
        writes: list[concurrent.futures.Future[None]] = []
        try:
            for r in range(first, until + 1):
                if r > first and interrupted():
                    break
                # The round: with the rows that were read ahead, except those that the last round still has
                rows, world = ahead.result()
                if unwritten is not None:
                    rows = self._carried_over(rows, cohort, *unwritten)
                warm, given = r <= len(visits), state._replace(clients=rows)
                if warm:
                    state, record = compiled_warm_start(self.program)(numbers, given, key, r, cohort, world)
                else:
                    wanted = None if self.program.deep else bool(due(self.program, r, last))
                    state, record = compiled_round(self.program, wanted)(numbers, given, key, r, last, cohort, world)

                # The last round: its rows are written and its result is handed out while this one computes
                for write in writes:
                    write.result()  # raises the error of the write
                writes.clear()
                if unwritten is not None:
                    writes.append(self.thread.submit(self._write, *unwritten))
                unwritten = (cohort, state.clients)
                if done is not None:
                    yield done

                # What the host measures of this round, if it measures anything
                seen = evaluate(r, state)
                done = (state, record | seen, cohort, warm)
                if not np.isfinite(seen.get("loss", 0.0)):
                    unwritten = None  # the run ends with the state before this round
                if seen:  # by the host, which may end the run here
                    yield done
                    done = None

                # The next round's rows
                if r < until:
                    cohort = next(cohorts)
                    ahead = self.thread.submit(self._read, cohort)
            if done is not None:
                yield done
        finally:
            if unwritten is not None:
                writes.append(self.thread.submit(self._write, *unwritten))
            self.thread.shutdown(wait=True)
            for write in writes:
                write.result()

    def _cohorts(self, key: np.ndarray, visits: list[np.ndarray], first: int, until: int) -> Iterator[np.ndarray]:
        plan = self.program.plan
        yield from visits[first - 1 : until]
        for r in range(max(first, len(visits) + 1), until + 1, AHEAD):
            drawn = np.asarray(compiled_sample(plan.n_clients, plan.cohort)(key, np.arange(r, r + AHEAD)))
            yield from drawn[: until + 1 - r]

    def _read(self, cohort: np.ndarray) -> tuple[Any, World]:
        """The cohort's states, fields (S + spare, d), and the world with the cohort's part of the roster and data."""
        place, spare = self.program.place, -len(cohort) % len(self.program.place.devices)
        rows = jax.tree.map(
            lambda leaf: np.pad(leaf, [(0, spare)] + [(0, 0)] * (leaf.ndim - 1)), self.store.read(cohort)
        )
        world = self.world._replace(roster=jax.tree.map(lambda leaf: leaf[cohort], self.world.roster))
        if isinstance(self.data, StreamedData):
            data = self.data.gather(cohort, self.program.plan.local.max_size, spare)
            world = world._replace(examples=lay_out(place, data, PartitionSpec(AXIS)))
        return lay_out(place, rows, PartitionSpec(AXIS)), world

    def _write(self, cohort: np.ndarray, rows: Any) -> None:
        self.store.write(cohort, jax.tree.map(lambda leaf: np.asarray(leaf)[: len(cohort)], rows))

    def _carried_over(self, rows: Any, cohort: np.ndarray, before: np.ndarray, earlier: Any) -> Any:
        """The rows read; those of the round that is still running replace the store's."""
        at = np.searchsorted(before, cohort)  # (S,): the cohort's positions in the previous one, -1 for none
        at = np.where(before[np.minimum(at, len(before) - 1)] == cohort, at, -1)
        if (at < 0).all():
            return rows
        spare = -len(cohort) % len(self.program.place.devices)
        at = np.pad(at, (0, spare), constant_values=-1)
        return jax.tree.map(lambda new, old: _overlay(new, old, at), rows, earlier)


@jax.jit
def _overlay(new: Any, old: Any, at: Any) -> Any:
    return where(at >= 0, old[at], new)


def streamed_loss(local: LocalProgram, data: StreamedData, p: np.ndarray, x: Any, held: Any, at_once: int) -> float:
    """f at x by one pass over data that is not in memory."""
    weights = p / data.sizes
    total = 0.0
    for batch, clients in data.passes():
        total += float(_part_of_loss(local, at_once)(x, batch, weights[clients].astype(x.dtype), held))
    return total


@functools.lru_cache(maxsize=16)
def _part_of_loss(local: LocalProgram, at_once: int) -> Callable[[Any, Any, Any, Any], Any]:
    def part(x: Any, batch: Any, weights: Any, held: Any) -> Any:
        loss, params = local.loss.holding(*held), local.unravel(x)
        return in_parts(lambda rows, weights: loss_at(loss, params, rows, weights), batch, weights, at_once)

    return jax.jit(part)
