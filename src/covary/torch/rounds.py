"""A simulated run of a PyTorch module, round by round.

One round of SCAFFOLD, from top to bottom: `one_round` draws the cohort, reads its states, and for each exchange lets
the crew work (`crew.py`, and through it `covary.client.client_loop`) and sums the uploads. `advance` keeps the new
states, or the last good ones, and measures.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from covary import trees
from covary.algorithm import Exchange
from covary.draws import Draw, cohort
from covary.running.buffers import Up, buffers_of
from covary.running.history import Log
from covary.running.plan import aggregation_weights
from covary.running.simulation import Simulation, one_row
from covary.running.state import Accounts, Control, State
from covary.running.store import DiskStore, HostStore
from covary.torch.crew import Crew
from covary.torch.evaluate import Evaluation
from covary.torch.prepare import Job


class Round(NamedTuple):
    """What one round computed."""

    server: Any
    rows: Any  # the cohort's new states
    old: Any  # and those before
    drift: torch.Tensor


class Rounds(Simulation):
    """A run: the server's state on the module's device, the clients' in a store."""

    job: Job

    def __init__(self, job: Job, log: Log | None, owner: str | None = None, crew: Crew | None = None):
        super().__init__(job, log, shapes_of)
        x, N = job.starts[0], job.plan.n_clients
        self.device, self.dtype = job.problem.network.device, job.problem.network.dtype
        row = trees.map(lambda leaf: np.asarray(leaf, x.dtype), self.algorithm.init_client(x))
        if job.store == "device" and self.device.type != "cpu":
            self.store: Any = DeviceStore(row, N, self.device)
        elif job.store in ("device", "host"):
            self.store = HostStore(row, N)
        else:
            self.store = DiskStore(row, N, None if job.store == "disk" else Path(job.store), owner)
        self.crew = Crew(job.way, job.examples, job.plan, job.layout) if crew is None else crew
        self.evaluation = Evaluation(job.problem, self.crew, job.p, job.names)
        self.trips = self.algorithm.trips(job.plan.steps_on_wire)  # the same objects in every round
        start = self._vector(x)
        self.state = State(
            server=trees.map(lambda leaf: self._vector(leaf), self.algorithm.init_server(x)),
            clients=None,
            control=Control(round=np.asarray(0), reached=np.asarray(False), diverged=np.asarray(False)),
            accounts=Accounts(average=start, average_mass=np.ones((), x.dtype), scale=np.zeros((), x.dtype)),
        )

    def advance(self, until: int, interrupted: Callable[[], bool]) -> None:
        while self.done < until and not self.ended and not interrupted():
            self._advance_one(self.done + 1)
            if self.watch.due:
                self.control_error()
        if isinstance(self.store, DiskStore):
            self.store.save_places()
            self.seen = self.store.seen

    def _advance_one(self, r: int) -> None:
        job, training = self.job, self.job.training
        warm = r <= len(job.visits)
        due = warm or r % training.eval_every == 0 or r == self.rounds
        ids = job.visits[r - 1] if warm else cohort(training.seed, r, job.plan.n_clients, job.plan.cohort)
        exchanges = (self.algorithm.warm_start,) if warm else self.trips
        try:
            done = self.one_round(exchanges, ids, r, due)
        except torch.OutOfMemoryError as error:
            error.add_note(
                "The device is out of memory. Try microbatch=8, which divides batches; a smaller batch_size; width=1; "
                'store="host", which keeps client states off the device; or precision="bfloat16".'
            )
            raise

        # What is kept
        after, finite = self.state, _finite(done.server)
        if finite:
            after = after._replace(server=done.server, accounts=self._accounts(done, warm))
        row = self._measured(after, done, ids, due)
        if finite and due and not np.isfinite(row.get("loss", 0.0)):
            finite = False
        if finite:
            self.store.write(ids, _outside(self.store, done.rows))
        if finite and "control_error" in row:
            row["control_error"] = self._control_error(after, due)
        self.history.add(one_row(row, ids, job.plan), int(finite), *self.traffic[warm])
        reached = finite and due and not warm and job.target is not None and job.target.met(row[job.target.metric])
        control = Control(np.asarray(r if finite else r - 1), np.asarray(bool(reached)), np.asarray(not finite))
        self.state = (after if finite else self.state)._replace(control=control)

    def one_round(self, exchanges: tuple[Exchange | None, ...], ids: np.ndarray, r: int, measured: bool) -> Round:
        """Every exchange of a round with its cohort."""
        job, server = self.job, self.state.server
        fraction = len(ids) / job.plan.n_clients
        old = rows = trees.map(self._rows, self.store.read(ids))
        drift = torch.zeros((), dtype=torch.float64, device=self.device)
        for number, exchange in enumerate(exchanges, start=1):
            assert exchange is not None
            draws = [Draw(job.training.seed, r, number, int(i)) for i in ids]
            weights = aggregation_weights(job.p[ids], fraction, exchange.together, job.starts[0].dtype)
            shares = aggregation_weights(job.p[ids], fraction, True, job.starts[0].dtype)
            mean, new, at = None, [], 0
            for part in self.crew.exchange(exchange, exchange.broadcast(server), rows, draws, measured):
                count = len(part.drift)
                some = slice(at, at + count)
                mean = _added(mean, part.up, self._vector(weights[some]), self._vector(shares[some]))
                drift += part.drift.sum().to(drift) / len(ids)
                new.append(part.client)
                at += count
            rows = trees.map(lambda *parts: torch.cat(parts), *new)
            aggregated = exchange.aggregate(server, mean, fraction)
            server = type(server)(*(field.to(was.dtype) for field, was in zip(aggregated, server, strict=True)))
        return Round(server, rows, old, drift)

    def _accounts(self, done: Round, warm: bool) -> Accounts:
        """The running average, and the largest control so far."""
        training, (average, mass, scale) = self.job.training, self.state.accounts
        if training.average is not None and not warm:
            mass = np.asarray(1 + training.decay * mass, mass.dtype)
            average = average + (done.server[0] - average) / float(mass)
        if self.algorithm.invariant is not None:
            c, c_i = self.algorithm.invariant
            largest = max(float(getattr(done.server, c).abs().max()), float(getattr(done.rows, c_i).abs().max()))
            scale = np.maximum(scale, np.asarray(largest, scale.dtype))
        return Accounts(average, mass, scale)

    def _measured(self, state: State, done: Round, ids: np.ndarray, due: bool) -> dict[str, np.ndarray]:
        """A row of the history, without the control error."""
        training, dtype = self.job.training, self.job.starts[0].dtype
        row: dict[str, Any] = {}
        points = {"": state.server[0]}
        if training.average is not None:
            points["average_"] = state.accounts.average
        for prefix, x in points.items():
            values = self.evaluation.at(x, buffers_of(state.server)) if due else dict.fromkeys(self.job.names, np.nan)
            row |= {f"{prefix}{name}": value for name, value in values.items()}
        if self.algorithm.invariant is not None:
            before, after = (getattr(rows, self.algorithm.invariant[1]) for rows in (done.old, done.rows))
            change = ((after - before) ** 2).sum(1).mean() if due else np.nan
            row |= {"control_error": np.nan, "control_change": change}
        row["drift"] = done.drift if due else np.nan
        return {name: np.asarray(_number(value), dtype) for name, value in row.items()}

    def _control_error(self, state: State, due: bool) -> np.ndarray:
        """‖c - sum p_i c_i‖, where reading all controls costs no more than the round."""
        plan, dtype = self.job.plan, self.job.starts[0].dtype
        assert self.algorithm.invariant is not None
        if not due or self.job.store != "device" or plan.n_clients > 4 * plan.cohort * plan.local.max_steps:
            return np.asarray(np.nan, dtype)
        c, c_i = self.algorithm.invariant
        rows = getattr(self.store.clients, c_i)
        rows = torch.from_numpy(rows) if isinstance(rows, np.ndarray) else rows
        mean = self._vector(self.job.p.astype(dtype)) @ rows
        return np.asarray(float(torch.linalg.vector_norm(getattr(state.server, c) - mean)), dtype)

    # For the result and for checkpoints

    def control_error(self, clients: Any = None) -> float:
        clients = self.clients() if clients is None else clients
        return self.watch.error(self.state_on_host(), clients, self.seen)

    def state_on_host(self) -> State:
        return trees.map(_numpy, self.state)

    def clients(self) -> Any:
        return self.store.on_host() if isinstance(self.store, DeviceStore) else self.store.clients

    def rows(self, ids: np.ndarray) -> list[np.ndarray]:
        return [_numpy(leaf) for leaf in trees.leaves(self.store.read(ids))]

    def load(self, state: State, clients: Iterator[tuple[np.ndarray, list[np.ndarray]]]) -> None:
        for ids, rows in clients:
            self.load_rows(ids, rows)
        average = self._vector(state.accounts.average)
        self.state = state._replace(
            server=trees.map(self._vector, state.server), accounts=state.accounts._replace(average=average)
        )
        if isinstance(self.store, DiskStore):
            self.store.save_places()
            self.seen = self.store.seen

    def load_rows(self, ids: np.ndarray, rows: list[np.ndarray]) -> None:
        """Replace the states of some clients by saved ones."""
        form = trees.structure(self.store.read(np.arange(1)))
        self.store.write(ids, _outside(self.store, trees.unflatten(form, [torch.from_numpy(row) for row in rows])))

    def _vector(self, array: Any) -> torch.Tensor:
        return torch.from_numpy(np.array(array)).to(self.device)

    def _rows(self, rows: Any) -> torch.Tensor:
        return rows if isinstance(rows, torch.Tensor) else torch.from_numpy(np.ascontiguousarray(rows)).to(self.device)


class DeviceStore:
    """The states of all clients on a GPU."""

    def __init__(self, row: Any, n_clients: int, device: torch.device):
        def for_all(leaf: np.ndarray) -> torch.Tensor:
            return torch.from_numpy(leaf.copy()).to(device).expand(n_clients, *leaf.shape).clone()

        self.clients = trees.map(for_all, row)

    def read(self, ids: np.ndarray) -> Any:
        return trees.map(lambda rows: rows[torch.from_numpy(ids).to(rows.device)], self.clients)

    def write(self, ids: np.ndarray, rows: Any) -> None:
        for everyone, new in zip(trees.leaves(self.clients), trees.leaves(rows), strict=True):
            everyone[torch.from_numpy(ids).to(everyone.device)] = new.to(everyone)

    def on_host(self) -> Any:
        return trees.map(_numpy, self.clients)


def shapes_of(work: Callable[..., Any], *states: Any) -> Any:
    """What an exchange returns, as tensors without numbers."""

    def blank(leaf: np.ndarray) -> torch.Tensor:
        return torch.empty(leaf.shape, dtype=torch.from_numpy(np.empty(0, leaf.dtype)).dtype, device="meta")

    return work(*trees.map(blank, states))


def _added(total: Any, up: Any, weights: torch.Tensor, shares: torch.Tensor) -> Any:
    """The weighted sum of uploads so far. Buffers are averaged, with weights that sum to one."""
    if isinstance(up, Up):
        own, buffers = (None, None) if total is None else total
        return Up(_added(own, up.own, weights, shares), _added_leaf(buffers, up.buffers, shares))
    if total is None:
        return type(up)(*(_added_leaf(None, rows, weights) for rows in up))
    return type(up)(*(_added_leaf(so_far, rows, weights) for so_far, rows in zip(total, up, strict=True)))


def _added_leaf(so_far: torch.Tensor | None, rows: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    weights = weights.to(rows.dtype)
    more = weights[0] * rows[0] if len(rows) == 1 else weights @ rows
    return more if so_far is None else so_far + more


def _finite(server: Any) -> bool:
    """Whether all numbers are finite: one wait for the device."""
    return bool(torch.stack([leaf.isfinite().all() for leaf in trees.leaves(server)]).all())


def _outside(store: Any, rows: Any) -> Any:
    """Rows as the store takes them."""
    return rows if isinstance(store, DeviceStore) else trees.map(_numpy, rows)


def _number(value: Any) -> float:
    return float(value)


def _numpy(leaf: Any) -> np.ndarray:
    return leaf.detach().cpu().numpy() if isinstance(leaf, torch.Tensor) else np.asarray(leaf)
