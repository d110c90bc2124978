"""`simulate`: N clients and a server on one machine, at the machine's full speed."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np

from covary._engine.checkpoint import description, drive, opened, sizes
from covary._engine.engine import History, OnDevices, OutsideDevices
from covary._engine.job import direction, prepare
from covary.algorithm import Algorithm
from covary.checks import whole
from covary.errors import DivergenceWarning, refused
from covary.problem import Problem
from covary.runs.files import held


@dataclass(frozen=True)
class Run:
    """What came out of a simulation; all arrays are NumPy's."""

    algorithm: Algorithm
    params: Any  # the model, in the user's own form
    x: np.ndarray  # the same, flat
    server: Any  # NamedTuple: .x, and .c for SCAFFOLD
    clients: Any  # NamedTuple: .c_i of shape (N, d) for SCAFFOLD
    history: dict[str, np.ndarray] = field(repr=False)  # one row a round
    average: Any = None  # the paper's weighted output, in the form of params, where it was asked for
    reached: int | None = None  # the round that met the target
    diverged: int | None = None  # the round that left the finite numbers; the state is the one before it

    @property
    def rounds(self) -> int:
        """The rounds done."""
        return len(self.history["round"])

    def rounds_to(self, metric: str, value: float) -> int | None:
        """The first round whose metric met the value, or None.

        >>> import covary as cv
        >>> run = cv.simulate(cv.sgd(eta_l=0.1), cv.lower_bound(G=1), rounds=100, x0=1.0)
        >>> run.rounds_to("loss", 1e-6)
        63
        """
        if metric not in self.history or metric in ("round", "cohort"):
            names = [name for name in self.history if name not in ("round", "cohort")]
            raise refused("metric", f"one of {', '.join(names)}", repr(metric), "See run.history.")
        hits = np.flatnonzero(direction(metric) * (self.history[metric] - value) >= 0)
        return int(self.history["round"][hits[0]]) if hits.size else None


def simulate(
    algorithm: Algorithm,
    problem: Problem,
    rounds: int,
    clients_per_round: int | float | None = None,
    local_steps: int | None = None,
    local_epochs: int | None = None,
    batch_size: int | float | None = None,
    seed: int = 0,
    x0: Any = None,
    warm_start: bool = False,
    weights: str = "uniform",
    target: tuple[str, float] | tuple[str, str, float] | None = None,
    average: str | float | None = None,
    eval_every: int = 1,
    log: Callable[[int, dict[str, float]], None] | None = None,
    *,
    store: str | Path | None = None,
    devices: int | None = None,
    width: int | None = None,
    precision: str | None = None,
    checkpoint: str | Path | None = None,
    checkpoint_every: int = 100,
) -> Run:
    """Run an algorithm on a problem.

    Args:
        algorithm: from `covary.scaffold(...)` and its like.
        problem: from `covary.supervised(...)`, `covary.quadratics(...)` or `covary.lower_bound(...)`.
        rounds: communication rounds, those of the warm start included.
        clients_per_round: how many clients are sampled each round (uniformly, without replacement): a number S, a
            fraction in (0, 1), or None for all N.
        local_steps: K, the same for every client.
        local_epochs: passes over the local data instead, so that K differs where sizes do; 1 unless K is given.
        batch_size: a number of examples, a fraction in (0, 1) of each client's data (0.2 cuts an epoch into 5 equal
            batches), or None for full batches. Batches are drawn without replacement within an epoch.
        seed: decides initial parameters, cohorts and batches. Same seed, same machine: the same numbers, bit for bit.
        x0: where to start, as params or as a flat vector; by default the model's own `init`.
        warm_start: first visit every client once, S at a time, and set its c_i to its gradient at x^0.
        weights: "uniform", f = mean f_i as in the paper, or "examples", f = sum p_i f_i with p_i = n_i / n. Clients are
            sampled uniformly all the same, and an upload counts N p_i / S, so that the mean is right in expectation.
        target: stop at the first round that meets it, such as ("accuracy", 0.5), ("loss", 1e-6) or, to say which way,
            ("bleu", ">=", 30). Without that, names that end in loss, error, mse, rmse, mae, nll or perplexity are to
            fall to their target, and other metrics to rise to it.
        average: also keep the paper's weighted output: "uniform", or a number q in (0, 1) for the weights
            w_r = (1 - q)^(1 - r); the theorems use q = mu K eta_l eta_g / 2.
        eval_every: measure loss, metrics, drift, control error and control change every so many rounds (and in the
            last); they are NaN in between.
        log: called as `log(round, values)` for each round, in order, while the run goes on; a tracker of
            `covary.trackers` is such a function.
        store: where client states live: "device", "host" (memory), "disk" (a temporary folder) or a folder of your
            own; by default the first of these that has room.
        devices: over how many devices to spread the cohort; by default as many as help.
        width: how many clients a device works on at the same time; by default what is fastest.
        precision: "bfloat16" rounds the factors of matrix products in local steps, on a GPU or TPU; states, sums and
            evaluation keep theirs.
        checkpoint: a folder to save the run in, every `checkpoint_every` rounds and at its end: the server's state,
            every client's, the history. The same call with the same folder goes on from the last whole checkpoint,
            with the numbers of a run that was never stopped; a finished run returns at once. Ctrl-C and SIGTERM then
            end the run after the rounds under way, saved; a second one ends it at once, with the last checkpoint good.

    Returns:
        A `Run`. Its `history` has one row per round: `round`, `loss` (f at x), every metric, `cohort`, `drift` (E_r of
        the paper over the cohort), `control_error` (‖c - mean c_i‖), `control_change` (the mean of ‖c_i+ - c_i‖² over
        the cohort), `bytes_up` and `bytes_down` (all clients together), and `average_loss` and so on if an average is
        kept. A row of `cohort` that a warm start does not fill ends in -1. Where reading all N controls costs more
        than the round, `control_error` is measured in the last round only. The loss of streamed data is measured only
        if it is the target or there is no test set, because it takes a pass over all data. With the client states on
        disk, `clients` reads them when it is indexed.

    A run that leaves the finite numbers stops, warns with a `DivergenceWarning`, and returns its last good state.

    >>> import covary as cv
    >>> (x, y), test = cv.datasets.digits()
    >>> data = cv.partition.by_similarity(x, y, n_clients=20, similarity=0.0)
    >>> problem = cv.supervised(cv.models.logistic_regression(64, 10), data, test)
    >>> algorithm = cv.scaffold(eta_l=0.3)
    >>> run = cv.simulate(algorithm, problem, rounds=20, clients_per_round=0.2, local_epochs=5, batch_size=0.2)
    >>> run.history["accuracy"].shape, run.history["cohort"].shape
    ((20,), (20, 4))
    """
    if log is not None and not callable(log):
        raise refused("log", "a function of (round, values)", type(log).__name__, "Try log=print.")
    whole("checkpoint_every", checkpoint_every, 1)
    job = prepare(
        algorithm,
        problem,
        rounds=rounds,
        clients_per_round=clients_per_round,
        local_steps=local_steps,
        local_epochs=local_epochs,
        batch_size=batch_size,
        seeds=[seed],
        x0=x0,
        warm_start=warm_start,
        weights=weights,
        target=target,
        average=average,
        eval_every=eval_every,
        store=store,
        resumable=checkpoint is not None,
        devices=devices,
        width=width,
        precision=precision,
    )
    history = History(log)
    key = np.asarray(jax.random.key_data(jax.random.key(seed)))
    given = (job, algorithm, problem, key, rounds, history)
    if checkpoint is None:
        engine = OnDevices(*given) if job.program.resident else OutsideDevices(*given)
        engine.advance(rounds, interrupted=lambda: False)
    else:
        about = description(
            [algorithm],
            problem,
            job.starts[0],
            algorithm.trips(job.plan.steps_on_wire),
            rounds=rounds,
            clients_per_round=job.plan.cohort,
            local_steps=local_steps,
            local_epochs=1 if local_epochs is None and local_steps is None else local_epochs,
            batch_size=batch_size,
            seed=seed,
            warm_start=bool(warm_start),
            weights=weights,
            target=target,
            average=average,
            eval_every=eval_every,
            precision=precision,
        )
        state, row = sizes(algorithm, job.starts[0])
        rows = 8 * rounds * (job.plan.cohort + 2 * len(job.program.evaluated) + 16)  # of the history, at most
        with contextlib.ExitStack() as stack:
            checkpoints = stack.enter_context(opened(checkpoint, about, job.plan.n_clients, state + rows, row))
            if job.store not in ("device", "host", "disk"):
                if Path(job.store).resolve() == Path(checkpoint).resolve():
                    raise refused("store", "another folder than checkpoint", str(store), "Give each its own.")
                stack.enter_context(held(Path(job.store)))
            engine = OnDevices(*given) if job.program.resident else OutsideDevices(*given, owner=checkpoints.run)
            drive(engine, checkpoints, checkpoint_every)
    state, clients = engine.small(), engine.clients()

    columns = history.columns()
    if algorithm.invariant is not None and history.rounds:
        error = engine.control_error()
        if np.isnan(columns["control_error"][-1]):
            columns["control_error"][-1] = error
    done = int(state.round)
    if state.diverged:
        warnings.warn(_divergence(algorithm, done + 1), DivergenceWarning, stacklevel=2)
    elif (text := _runaway(algorithm, columns.get("loss", np.empty(0)))) is not None:
        warnings.warn(text, DivergenceWarning, stacklevel=2)
    unravel = job.program.unravel
    return Run(
        algorithm=algorithm,
        params=jax.tree.map(np.asarray, unravel(state.server[0])),
        x=state.server[0],
        server=state.server,
        clients=clients,
        history=columns,
        average=None if average is None else jax.tree.map(np.asarray, unravel(state.average)),
        reached=done if state.reached else None,
        diverged=done + 1 if state.diverged else None,
    )


def _divergence(algorithm: Algorithm, round: int) -> str:
    return (
        f"{algorithm} diverged in round {round}: its model or loss is no longer finite. The run holds the state and "
        f"history before that round. {_smaller(algorithm)}"
    )


def _runaway(algorithm: Algorithm, losses: np.ndarray) -> str | None:
    """A word on a run whose loss has grown a million times and more, though it is finite still."""
    seen = losses[np.isfinite(losses)].astype(float)
    if len(seen) < 2 or 1e-6 * abs(seen[-1]) < max(abs(seen[0]), 1e-306) or seen[-1] < seen.max():
        return None
    return f"{algorithm} is diverging: its loss grew from {seen[0]:.3g} to {seen[-1]:.3g}. {_smaller(algorithm)}"


def _smaller(algorithm: Algorithm) -> str:
    sizes = " and ".join(f"{name}={value:g}" for name, value in algorithm.numbers.items() if name in ("eta_l", "eta_g"))
    return (
        f"Its step-size is too large for this problem ({sizes or 'see the algorithm'}): try eta_l a factor of 3 to 10 "
        "smaller, or fewer local steps."
    )
