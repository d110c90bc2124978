"""The two ways a run goes: with all client states on the devices, or with a store outside them."""

from __future__ import annotations

import contextlib
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from covary._engine.checkpoint import state_arrays, state_from
from covary._engine.devices import AXIS, agreed, lay_out, to_host
from covary._engine.job import CHUNK, Job, initial, traffic
from covary._engine.plan import Plan
from covary._engine.program import State
from covary._engine.rounds import compiled, compiled_warm_start
from covary._engine.store import DiskStore, HostStore, mean_control
from covary._engine.stream import Span, Stream, streamed_loss
from covary.algorithm import Algorithm
from covary.data.federated import StreamedData
from covary.errors import CovaryError
from covary.problem import Problem
from covary.runs.files import Damaged

SavedClients = Callable[[list[np.ndarray]], Iterator[tuple[np.ndarray, list[np.ndarray]]]]
"""The states in a checkpoint, for a client whose states have the form given: numbers and states, a part at a time."""


class BrokenInvariant(CovaryError):
    """c is no longer the mean of c_i."""


class History:
    """The rows of a run so far, told to the user's `log` as they come."""

    def __init__(self, log: Callable[[int, dict[str, float]], None] | None):
        self.parts: list[dict[str, np.ndarray]] = []
        self.log = log
        self.rounds = 0

    def add(self, rows: dict[str, Any], count: int, bytes_down: int, bytes_up: int) -> None:
        """The first `count` rows of a chunk's records."""
        if self.parts and set(rows) | {"round", "bytes_down", "bytes_up"} != set(self.parts[0]):
            raise Damaged(f"The history of a checkpoint has other columns: {', '.join(self.parts[0])}. Start anew.")
        rows = {name: np.asarray(values)[:count] for name, values in rows.items()}
        rows["round"] = np.arange(self.rounds + 1, self.rounds + count + 1)
        self.rounds += count
        replied = (rows["cohort"] >= 0).sum(axis=1)
        rows |= {"bytes_down": replied * bytes_down, "bytes_up": replied * bytes_up}
        self.parts.append(rows)
        if self.log is not None:
            for at, number in enumerate(rows["round"]):
                told = {name: float(v[at]) for name, v in rows.items() if v.ndim == 1 and name != "round"}
                self.log(int(number), told)

    def restore(self, columns: dict[str, np.ndarray], cohort_size: int, measured: tuple[str, ...]) -> None:
        """Begin with the rows of an earlier call."""
        if not columns:
            return
        missing = {"round", "cohort", "drift", "bytes_up", "bytes_down", *measured} - set(columns)
        if missing:
            raise Damaged(f"The history of a checkpoint has no {', '.join(sorted(missing))}. Start anew.")
        numbers, cohort = columns.get("round", np.empty(0)), columns.get("cohort", np.empty(0))
        lengths = {len(column) if column.ndim else 0 for column in columns.values()}
        others = all(column.ndim == 1 for name, column in columns.items() if name != "cohort")
        ours = cohort.ndim == 2 and cohort.shape[1] == cohort_size and cohort.dtype.kind == "i"
        if lengths != {len(numbers)} or not others or not ours:
            raise Damaged("The history of a checkpoint is not one row a round. Start anew in another folder.")
        if not np.array_equal(numbers, np.arange(1, len(numbers) + 1)):
            raise Damaged("The history of a checkpoint does not count its rounds. Start anew in another folder.")
        self.parts, self.rounds = [columns], len(numbers)

    def touched(self, since: int) -> np.ndarray:
        """The clients that took part after round `since`."""
        cohorts = [part["cohort"][part["round"] > since] for part in self.parts]
        clients = np.unique(np.concatenate([cohort.ravel() for cohort in cohorts])) if cohorts else np.empty(0, int)
        return clients[clients >= 0]

    def columns(self) -> dict[str, np.ndarray]:
        if not self.parts:
            return {}
        names = ["round", *(name for name in self.parts[0] if name != "round")]
        return {name: np.concatenate([part[name] for part in self.parts]) for name in names}


class Pace:
    """How many rounds to ask for in one call: as many as take about half a second, so that progress is seen and an
    interruption heard, and so that the host's part does not count."""

    def __init__(self, most: int = CHUNK):
        self.most, self.asked, self.since = most, 0, 0.0
        self.calls = 0

    def rounds(self) -> int:
        """For the next call, which begins now."""
        now = time.perf_counter()
        if self.calls < 2:  # the first compiles, the second can be timed
            self.asked = 1
        else:
            self.asked = agreed(int(np.clip(0.5 * self.asked / (now - self.since), 1, self.most)))
        self.calls, self.since = self.calls + 1, now
        return self.asked


class Watch:
    """How c and the mean of c_i, which never differ by more than rounding, are held against each other.

    Both sides are kept by different hands, the server's by adding changes and the clients' by replacing states, so that
    a lost, doubled or damaged state shows here.
    """

    def __init__(self, algorithm: Algorithm, p: np.ndarray):
        self.algorithm, self.p = algorithm, p
        self.began, self.spent = time.perf_counter(), 0.0

    @property
    def due(self) -> bool:
        """Whether there is something to check, and checking has taken no more than a fiftieth of the time so far."""
        if self.algorithm.invariant is None:
            return False
        return bool(agreed(self.spent <= 0.02 * (time.perf_counter() - self.began)))

    def error(self, state: State, clients: Any, seen: np.ndarray | None = None) -> float:
        """‖c - sum p_i c_i‖ over all clients, summed in float64; a difference beyond rounding stops the run."""
        assert self.algorithm.invariant is not None
        started = time.perf_counter()
        server_field, client_field = self.algorithm.invariant
        c = np.asarray(getattr(state.server, server_field))
        mean = mean_control(clients, client_field, self.p, seen)
        error = float(np.linalg.norm(c - mean))
        eps, round = float(jnp.finfo(c.dtype).eps), int(state.round)
        rounding = (np.sqrt(eps) + eps * round) * np.sqrt(c.size) * float(state.scale)
        if not error <= rounding:
            raise BrokenInvariant(
                f"After round {round} the server's {server_field} is {error:.3g} away from the mean of the clients' "
                f"{client_field}, and rounding explains no more than {rounding:.3g}: a client's state was lost, or "
                "changed from outside. What follows would be another algorithm: go on from the last checkpoint, or "
                "start anew."
            )
        self.spent += time.perf_counter() - started
        return error


class Engine(ABC):
    """A run under way: its state, which `advance` takes on by some rounds, and its history."""

    state: State
    seen: np.ndarray | None = None  # which clients have a state of their own, where that is known

    def __init__(self, job: Job, algorithm: Algorithm, problem: Problem, key: np.ndarray, rounds: int, log: History):
        self.job, self.algorithm, self.problem, self.key = job, algorithm, problem, key
        self.rounds, self.history = rounds, log
        x, trips = job.starts[0], algorithm.trips(job.plan.steps_on_wire)
        self.watch, self.saved = Watch(algorithm, job.layout.p), 0  # the round of the last checkpoint
        self.bytes_of = {False: traffic(algorithm, trips, x), True: traffic(algorithm, (algorithm.warm_start,), x)}

    @property
    def done(self) -> int:
        return int(self.state.round)

    @property
    def ended(self) -> bool:
        return self.done >= self.rounds or bool(self.state.reached) or bool(self.state.diverged)

    @abstractmethod
    def advance(self, until: int, interrupted: Callable[[], bool]) -> None:
        """Go on until that round, the end, or an interruption."""

    @abstractmethod
    def clients(self) -> Any:
        """The states of all clients, field by field."""

    def small(self) -> State:
        """The state without the clients', in NumPy."""
        return to_host(self.state._replace(clients=None))

    def arrays(self) -> dict[str, np.ndarray]:
        """All but the clients' states, for a checkpoint."""
        columns = enumerate(self.history.columns().items())  # numbered: a file has them in an order of its own
        return state_arrays(self.small()) | {f"history.{number:03d}.{name}": v for number, (name, v) in columns}

    def news(self) -> tuple[int, np.ndarray, bool]:
        """The number of the next checkpoint, the clients that changed since the last one, and whether all did."""
        touched, self.saved = self.history.touched(self.saved), self.done
        return self.done, touched, False

    @abstractmethod
    def rows(self, ids: np.ndarray) -> list[np.ndarray]:
        """The states of some clients, field by field."""

    @abstractmethod
    def put_back(self, small: State, clients: Iterator[tuple[np.ndarray, list[np.ndarray]]]) -> None:
        """Replace the state by a saved one."""

    def restore(self, arrays: dict[str, np.ndarray], saved_clients: SavedClients) -> None:
        """Go on from what was saved."""
        columns = {name[12:]: arrays[name] for name in sorted(arrays) if name.startswith("history.")}
        control = ("control_error", "control_change") if self.algorithm.invariant is not None else ()
        self.history.restore(columns, self.job.plan.cohort, (*self.job.program.evaluated, *control))
        self.put_back(state_from(self.small(), arrays), saved_clients(self.rows(np.arange(1))))
        self.saved = self.done
        if not self.done == self.history.rounds <= self.rounds:
            raise Damaged("A checkpoint does not know its round. Start anew in another folder.")

    def control_error(self) -> float:
        """‖c - sum p_i c_i‖ over all clients; a difference beyond rounding stops the run."""
        return self.watch.error(self.state, self.clients(), self.seen)


class OnDevices(Engine):
    """With all client states on the devices, in compiled chunks of rounds."""

    def __init__(self, *given: Any):
        super().__init__(*given)
        self.state = initial(self.algorithm, self.job)
        self.pace = Pace()

    def advance(self, until: int, interrupted: Callable[[], bool]) -> None:
        job, program, numbers = self.job, self.job.program, dict(self.algorithm.numbers)
        while self.done < until and not self.ended and not interrupted():
            before = self.done
            if before < len(job.visits):
                cohort = job.visits[before]
                warm = compiled_warm_start(program)
                self.state, row = warm(numbers, self.state, self.key, before + 1, cohort, job.world)
                rows = {name: np.asarray(value)[None] for name, value in row.items()}
                rows |= {"cohort": _padded(cohort, job.plan)}
                self.history.add(rows, self.done - before, *self.bytes_of[True])
                continue
            goal = min(until, before + self.pace.rounds())
            self.state, rows = compiled(program)(numbers, self.state, self.key, goal, self.rounds, job.world)
            rows, after = jax.device_get((rows, self.state.round))  # at once: each copy from a GPU has to be waited for
            self.history.add(rows, int(after) - before, *self.bytes_of[False])
            if self.watch.due:
                self.control_error()

    def rows(self, ids: np.ndarray) -> list[np.ndarray]:
        return [rows_of(leaf, ids, 0) for leaf in jax.tree.leaves(self.state.clients)]

    def put_back(self, small: State, clients: Iterator[tuple[np.ndarray, list[np.ndarray]]]) -> None:
        fields, form = jax.tree.flatten(to_host(self.state.clients))
        fields = [np.array(field) for field in fields]
        for ids, rows in clients:
            for field, row in zip(fields, rows, strict=True):
                field[ids] = row
        place = self.job.program.place
        self.state = lay_out(place, small._replace(clients=None))._replace(
            clients=lay_out(place, jax.tree.unflatten(form, fields), PartitionSpec(AXIS))
        )

    def clients(self) -> Any:
        return jax.tree.map(lambda leaf: leaf[: self.job.plan.n_clients], to_host(self.state.clients))


class OutsideDevices(Engine):
    """With client states in a store, or with streamed data: one compiled round after the other."""

    def __init__(self, *given: Any, owner: str | None = None):
        super().__init__(*given)
        job, x = self.job, self.job.starts[0]
        row = jax.tree.map(lambda leaf: np.asarray(leaf, x.dtype), self.algorithm.init_client(x))
        if job.store == "host":
            self.store: Any = HostStore(row, job.plan.n_clients)
        else:
            self.store = DiskStore(row, job.plan.n_clients, None if job.store == "disk" else Path(job.store), owner)
        self.state = initial(self.algorithm, job)._replace(clients=None)
        self.form = jax.tree.structure(row)

    def advance(self, until: int, interrupted: Callable[[], bool]) -> None:
        job, algorithm, program, problem, rounds = self.job, self.algorithm, self.job.program, self.problem, self.rounds

        def due(r: int) -> bool:
            return r % program.eval_every == 0 or r == rounds

        def pass_over_data(r: int, state: State) -> dict[str, Any]:
            """What the host measures itself: the loss of streamed data, where it was asked for."""
            if not isinstance(problem.data, StreamedData) or not job.passes or not due(r):
                return {}
            points = {"loss": state.server[0]} | ({"average_loss": state.average} if program.average else {})
            return {name: streamed_loss(program, problem.data, job.layout.p, x) for name, x in points.items()}

        measured_here = ("loss", "average_loss") if program.average else ("loss",)
        unmeasured = dict.fromkeys(measured_here, np.nan) if job.passes else {}
        stream = Stream(program, job.world, problem.data, self.store)
        span = Span(self.done + 1, until, rounds, interrupted)
        going = stream.rounds(algorithm, self.state, self.key, job.visits, span, pass_over_data)
        with contextlib.closing(going) as handed_out:
            for state, record, cohort, warm in handed_out:
                state = to_host(state._replace(clients=None))
                row = unmeasured | {name: value for name, value in record.items() if name != "cohort"}
                row = {name: np.asarray(value)[None] for name, value in row.items()}
                row |= {"cohort": _padded(cohort, job.plan)}
                good = not (job.passes and due(self.history.rounds + 1)) or np.isfinite(row["loss"][0])
                self.history.add(row, int(state.round) - self.history.rounds if good else 0, *self.bytes_of[warm])
                if not good:
                    self.state = self.state._replace(diverged=np.asarray(True))
                    break
                self.state = state
                judged = job.passes and not warm and not state.diverged
                if judged and job.goal is not None and job.goal[1] * (row["loss"][0] - job.goal[2]) >= 0:
                    self.state = state._replace(reached=np.asarray(True))
                if self.state.reached or self.state.diverged:
                    break
        if isinstance(self.store, DiskStore):
            self.store.save_places()
            self.seen = self.store.seen
        if self.watch.due:
            self.control_error()

    def rows(self, ids: np.ndarray) -> list[np.ndarray]:
        return jax.tree.leaves(self.store.read(ids))

    def put_back(self, small: State, clients: Iterator[tuple[np.ndarray, list[np.ndarray]]]) -> None:
        for ids, rows in clients:
            self.store.write(ids, jax.tree.unflatten(self.form, rows))
        self.state = small
        if isinstance(self.store, DiskStore):
            self.store.save_places()
            self.seen = self.store.seen

    def clients(self) -> Any:
        return self.store.clients


def rows_of(array: Any, ids: np.ndarray, axis: int) -> np.ndarray:
    """Some rows of an array on the devices. As many are fetched as the next power of two: each number of rows would
    else be a program of its own, compiled and kept for ever."""
    fetched = np.pad(ids, (0, (1 << (len(ids) - 1).bit_length()) - len(ids)), mode="edge")
    return np.asarray(jax.device_get(array.take(fetched, axis=axis))).take(np.arange(len(ids)), axis=axis)


def _padded(cohort: np.ndarray, plan: Plan) -> np.ndarray:
    return np.pad(cohort, (0, plan.cohort - len(cohort)), constant_values=-1)[None]
