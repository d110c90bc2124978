"""`simulate`: N clients and a server on one machine, at full hardware speed."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from covary.algorithm import Algorithm
from covary.checks import flag, whole
from covary.errors import CovaryError, DivergenceWarning, InvalidInput, refused
from covary.running.buffers import buffers_of, without_buffers
from covary.running.checkpoint import fingerprint, opened, run_to_end, state_sizes
from covary.running.engine import Engine, engine_of
from covary.running.history import Log
from covary.running.job import AnyProblem, Job
from covary.running.simulation import Simulation
from covary.runs.files import held
from covary.targets import Target, direction_of
from covary.training import Training


@dataclass(frozen=True)
class Run:
    """The result of a simulation. All arrays are NumPy's, except that a module's `params` are a state_dict."""

    algorithm: Algorithm
    params: Any  # the model, in the user's own form
    x: np.ndarray  # the same, flat
    server: Any  # NamedTuple: .x, and .c for SCAFFOLD
    clients: Any  # NamedTuple: .c_i of shape (N, d) for SCAFFOLD
    history: dict[str, np.ndarray] = field(repr=False)  # one row a round
    average: Any = None  # the paper's weighted output, in the form of params, if it was requested
    reached: int | None = None  # the round that met the target
    diverged: int | None = None  # the round that was no longer finite; the state is that of the round before
    buffers: Any = None  # the model's own, averaged over the last cohort
    build_model: Callable[[], Any] | None = field(default=None, repr=False)

    @property
    def rounds(self) -> int:
        """The number of completed rounds."""
        return len(self.history["round"])

    def model(self) -> Any:
        """The trained PyTorch module: a copy of the user's, with the parameters and buffers of this run.

        >>> import torch, covary as cv, covary.torch as cvt
        >>> clients = [(torch.ones(4, 1), torch.full((4, 1), target)) for target in (1.0, 3.0)]
        >>> problem = cvt.supervised(torch.nn.Linear(1, 1), lambda m, b: ((m(b[0]) - b[1]) ** 2).mean(), clients)
        >>> run = cv.simulate(cv.scaffold(eta_l=0.1), problem, rounds=40, local_steps=5)
        >>> round(run.model()(torch.ones(1)).item(), 3)
        2.0
        """
        if self.build_model is None:
            raise CovaryError("A run of debug=True has no model to build. Its parameters are run.params.")
        return self.build_model()

    def rounds_to(self, metric: str, value: float) -> int | None:
        """The first round whose metric meets the value, or None.

        >>> import covary as cv
        >>> run = cv.simulate(cv.sgd(eta_l=0.1), cv.lower_bound(G=1), rounds=100, x0=1.0)
        >>> run.rounds_to("loss", 1e-6)
        63
        """
        if metric not in self.history or metric in ("round", "cohort"):
            names = [name for name in self.history if name not in ("round", "cohort")]
            raise refused("metric", f"one of {', '.join(names)}", repr(metric), "See run.history.")
        first = Target(metric, direction_of(metric), value).first_met(self.history[metric])
        return None if first is None else int(self.history["round"][first])


def simulate(
    algorithm: Algorithm,
    problem: AnyProblem,
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
    log: Log | None = None,
    *,
    store: str | Path | None = None,
    devices: int | None = None,
    width: int | None = None,
    microbatch: int | None = None,
    precision: str | None = None,
    checkpoint: str | Path | None = None,
    checkpoint_every: int = 100,
    debug: bool = False,
) -> Run:
    """Run an algorithm on a problem.

    Args:
        algorithm: an `Algorithm`, built by `covary.scaffold(...)` or another factory.
        problem: a `Problem`, built by `covary.supervised(...)`, `covary.quadratics(...)` or `covary.lower_bound(...)`.
        rounds: the number of communication rounds, including those of the warm start.
        clients_per_round: how many clients are sampled each round, uniformly and without replacement: a number S, a
            fraction in (0, 1), or None for all N.
        local_steps: K, the same for every client.
        local_epochs: passes over the local data instead, so that K differs between clients of different size. The
            default is 1 if `local_steps` is not given.
        batch_size: a number of examples, a fraction in (0, 1) of each client's data (0.2 cuts an epoch into 5 equal
            batches), or None for full batches. Batches are drawn without replacement within an epoch.
        seed: determines initial parameters, cohorts and batches. The same seed on the same machine gives the same
            numbers, bit for bit.
        x0: the starting point, as params or as a flat vector. The default is the model's `init`.
        warm_start: first visit every client once, S at a time, and set its c_i to its gradient at x^0.
        weights: "uniform" for f = mean f_i, as in the paper, or "examples" for f = sum p_i f_i with p_i = n_i / n.
            Sampling is uniform in both cases. An upload counts N p_i / S, so the mean is right in expectation.
        target: stop at the first round that meets it: ("accuracy", 0.5), ("loss", 1e-6), or ("bleu", ">=", 30) with
            an explicit direction. Without one, metrics whose names end in loss, error, mse, rmse, mae, nll or
            perplexity must fall to the target, and others must rise to it.
        average: also keep the paper's weighted output: "uniform", or a number q in (0, 1) for the weights
            w_r = (1 - q)^(1 - r). The theorems for convex f use q = mu K eta_l eta_g / 2; for non-convex f the paper
            draws a random iterate instead.
        eval_every: measure loss, metrics, drift, control error and control change in every so many rounds and in the
            last one. They are NaN in between.
        log: a function that is called as `log(round, values)` for each round, in order, during the run. A tracker of
            `covary.trackers` is such a function.
        store: where client states live: "device", "host" (memory), "disk" (a temporary folder) or a folder. The default
            is the first of these with enough room.
        devices: the number of devices that share the cohort. The default is as many as make the round faster.
        width: the number of clients that a device computes at once. The default is the fastest by rule: large
            convolutions one by one, as everything large on a CPU; otherwise as many clients as fit into memory.
        microbatch: the most examples whose gradient a client computes at once. A larger batch is divided, and its
            gradient is the same up to rounding. The default is what fits into memory.
        precision: "bfloat16" computes the loss and its gradient in local steps with the params and examples rounded to
            bfloat16, on a GPU or TPU: products, convolutions and attention are then faster. The model itself, control
            variates, their sums, buffers and evaluation keep their precision. A loss that takes the keyword argument
            `precision` gets everything as it is, and does its own rounding; the argument is None in evaluation.
        checkpoint: a folder for checkpoints, saved every `checkpoint_every` rounds and at the end: the server's state,
            every client's state, and the history. The same call with the same folder resumes from the last intact
            checkpoint and gives the numbers of an uninterrupted run; a finished run returns at once. With a checkpoint,
            Ctrl-C or SIGTERM finishes the current rounds, saves, and stops; a second one stops immediately.
        checkpoint_every: the number of rounds between two checkpoints.
        debug: run in plain Python and NumPy (`covary.plain`), one client and one step after the other, with the same
            cohorts and batches. It is slow, and a breakpoint can be set anywhere.

    Returns:
        A `Run`. Its `history` has one row per round: `round`, `loss` (f at x), every metric, `cohort`, `drift` (E_r of
        the paper over the cohort), `control_error` (‖c - mean c_i‖), `control_change` (the mean of ‖c_i+ - c_i‖² over
        the cohort), `bytes_up` and `bytes_down` (all clients together), and `average_loss` and so on if an average is
        kept. A row of `cohort` that a warm start does not fill ends in -1. Where reading all N controls costs more
        than the round, `control_error` is measured in the last round only. The loss of streamed data is measured only
        if it is the target or there is no test set, because it takes a pass over all data. With the client states on
        disk, `clients` reads them when it is indexed.

    A run whose model or loss is no longer finite stops, warns with a `DivergenceWarning`, and returns its last good
    state.

    >>> import covary as cv
    >>> (x, y), test = cv.datasets.digits()
    >>> data = cv.partition.by_similarity(x, y, n_clients=20, similarity=0.0)
    >>> problem = cv.supervised(cv.models.logistic_regression(64, 10), data, test)
    >>> algorithm = cv.scaffold(eta_l=0.3)
    >>> run = cv.simulate(algorithm, problem, rounds=20, clients_per_round=0.2, local_epochs=5, batch_size=0.2)
    >>> run.history["accuracy"].shape, run.history["cohort"].shape
    ((20,), (20, 4))
    """
    training = Training.of(locals())
    if log is not None and not callable(log):
        raise refused("log", "a function of (round, values)", type(log).__name__, "Try log=print.")
    whole("checkpoint_every", checkpoint_every, 1)
    engine = engine_of(algorithm, problem)
    where = {"store": store, "devices": devices, "width": width, "microbatch": microbatch}
    if flag("debug", debug):
        _reject_engine_options(problem, **where, precision=precision, checkpoint=checkpoint)
    job = engine.prepare(algorithm, problem, training, seeds=[seed], x0=x0, resumable=checkpoint is not None, **where)
    if debug:
        run = _debugged(engine, job, log)
    else:
        run = _result(engine, algorithm, _simulated(engine, job, log, store, checkpoint, checkpoint_every))
    _warn_of_divergence(run, precision)
    return run


def _reject_engine_options(problem: AnyProblem, **given: Any) -> None:
    """Reject options that the plain server does not support."""
    if problem.data.streamed:
        raise InvalidInput("debug=True needs data in memory, and this data set is streamed. Debug on a few clients.")
    if problem.buffers is not None:
        raise InvalidInput("debug=True does not carry a model's buffers. Debug the same model with its buffers fixed.")
    for name, value in given.items():
        if value is not None:
            fix = "debug=True runs plain Python on one core, in memory and without checkpoints."
            raise refused(name, "None with debug=True", repr(value), fix)


def _debugged(engine: Engine, job: Job, log: Log | None) -> Run:
    """The run by the plain server."""
    ended = engine.debugged(job, log)
    done = len(ended.history.get("round", ()))
    return Run(
        algorithm=job.algorithm,
        params=engine.params(job, ended.server[0], None),
        x=ended.server[0],
        server=ended.server,
        clients=ended.clients,
        history=ended.history,
        average=None if job.training.average is None else engine.params(job, ended.average, None),
        reached=done if ended.reached else None,
        diverged=done + 1 if ended.diverged else None,
    )


def _simulated(
    engine: Engine,
    job: Job,
    log: Log | None,
    store: str | Path | None,
    checkpoint: str | Path | None,
    checkpoint_every: int,
) -> Simulation:
    """The run at its end, with checkpoints where a folder is given."""
    if checkpoint is None:
        simulation = engine.simulation(job, log)
        simulation.advance(simulation.rounds, interrupted=lambda: False)
        return simulation
    about = fingerprint(job, [job.algorithm], job.training.facts(), engine.about(job, job.algorithm))
    state, row = state_sizes(job.algorithm, job.starts[0])
    rows = 8 * job.training.rounds * (job.plan.cohort + 2 * len(job.names) + 16)  # at most
    with contextlib.ExitStack() as stack:
        sizes = {"n_clients": job.plan.n_clients, "shared_bytes": state + rows, "row_bytes": row}
        checkpoints = stack.enter_context(opened(checkpoint, about, **sizes, hosts=engine.hosts()))
        if job.store not in ("device", "host", "disk"):
            if Path(job.store).resolve() == Path(checkpoint).resolve():
                raise refused("store", "another folder than checkpoint", str(store), "Give each its own.")
            stack.enter_context(held(Path(job.store)))
        simulation = engine.simulation(job, log, owner=checkpoints.run)
        run_to_end(simulation, checkpoints, checkpoint_every)
    return simulation


def _result(engine: Engine, algorithm: Algorithm, simulation: Simulation) -> Run:
    state, job, columns = simulation.state_on_host(), simulation.job, simulation.history.columns()
    clients = simulation.clients()
    if job.algorithm.invariant is not None and simulation.history.rounds:
        error = simulation.control_error(clients)
        if np.isnan(columns["control_error"][-1]):
            columns["control_error"][-1] = error
    done, buffers = int(state.control.round), buffers_of(state.server)
    return Run(
        algorithm=algorithm,
        params=engine.params(job, state.server[0], buffers),
        x=state.server[0],
        server=without_buffers(state.server),
        clients=clients,
        history=columns,
        average=None if job.training.average is None else engine.params(job, state.accounts.average, buffers),
        reached=done if state.control.reached else None,
        diverged=done + 1 if state.control.diverged else None,
        buffers=engine.buffers(job, buffers),
        build_model=lambda: engine.model(job, state.server[0], buffers),
    )


def _warn_of_divergence(run: Run, precision: str | None) -> None:
    """Warn if the run is no longer finite, or if its loss has grown by a factor of a million."""
    text = None
    losses = run.history.get("loss", np.empty(0))
    seen = losses[np.isfinite(losses)].astype(float)
    if run.diverged is not None:
        text = (
            f"{run.algorithm} diverged in round {run.diverged}: its model or loss is no longer finite. The run holds "
            "the state and history up to the round before."
        )
    elif len(seen) > 1 and 1e-6 * abs(seen[-1]) >= max(abs(seen[0]), 1e-306) and seen[-1] >= seen.max():
        text = f"{run.algorithm} is diverging: its loss grew from {seen[0]:.3g} to {seen[-1]:.3g}."
    if text is not None:
        numbers = run.algorithm.numbers
        sizes = " and ".join(f"{name}={numbers[name]:g}" for name in ("eta_l", "eta_g") if name in numbers)
        fix = (
            f"Its step-size is too large for this problem ({sizes or 'see the algorithm'}): try eta_l a factor of 3 to "
            "10 smaller, or fewer local steps."
        )
        if precision is not None:
            fix += f" If it stays finite without precision={precision!r}, that precision has too few digits for it."
        warnings.warn(f"{text} {fix}", DivergenceWarning, stacklevel=3)
