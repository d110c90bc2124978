"""`simulate`: N clients and a server on one machine, at the machine's full speed."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import numpy as np

from covary.algorithm import Algorithm
from covary.checks import whole
from covary.errors import CovaryError, DivergenceWarning, refused
from covary.plan import Plan, make_plan
from covary.problem import Problem
from covary.rounds import Program, State, Target, World, compiled, compiled_warm_start

CHUNK = 25  # rounds between two looks from the host


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
        eval_every: measure loss and metrics every so many rounds (and in the last); they are NaN in between.
        log: called as `log(round, values)` for each round, in order, while the run goes on.

    Returns:
        A `Run`. Its `history` has one row a round: `round`, `loss` (f at x), every metric, `cohort`, `drift` (E_r of
        the paper over the cohort), `control_error` (‖c - mean c_i‖), `bytes_up` and `bytes_down` (all clients
        together), and `average_loss` and so on where an average is kept. Rows of `cohort` that a warm start does not
        fill end in -1.

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
    )
    program, world, numbers, key = job.program, job.world, dict(algorithm.numbers), jax.random.key(seed)
    state = initial(algorithm, job.plan, job.starts[0])
    down, up = traffic(algorithm.trips(job.plan.steps_on_wire), state)
    history: list[dict[str, np.ndarray]] = []

    def record(rows: dict[str, Any], count: int, per_client_down: int, per_client_up: int) -> None:
        rows = {name: np.asarray(values)[:count] for name, values in rows.items()}
        first = 1 + sum(len(part["round"]) for part in history)
        rows["round"] = np.arange(first, first + count)
        replied = (rows["cohort"] >= 0).sum(axis=1)
        history.append(rows | {"bytes_down": replied * per_client_down, "bytes_up": replied * per_client_up})
        if log is not None:
            for at, number in enumerate(rows["round"]):
                log(int(number), {name: float(v[at]) for name, v in rows.items() if v.ndim == 1 and name != "round"})

    done = 0
    for cohort in job.visits:
        state, row = compiled_warm_start(program)(numbers, state, key, done + 1, cohort, world)
        padded = np.pad(cohort, (0, job.plan.cohort - len(cohort)), constant_values=-1)
        row = {name: np.asarray(value)[None] for name, value in row.items()} | {"cohort": padded[None]}
        record(row, int(state.round) - done, *traffic((algorithm.warm_start,), state))
        done = int(state.round)
        if state.diverged:
            break
    while done < rounds and not (state.reached or state.diverged):
        state, rows = compiled(program)(numbers, state, key, rounds, world)
        record(rows, int(state.round) - done, down, up)
        done = int(state.round)

    names = ["round", *(name for name in history[0] if name != "round")]
    columns = {name: np.concatenate([part[name] for part in history]) for name in names}
    state = jax.tree.map(np.asarray, state)
    if state.diverged:
        warnings.warn(_divergence(algorithm, done + 1), DivergenceWarning, stacklevel=2)
    elif (text := _runaway(algorithm, columns["loss"])) is not None:
        warnings.warn(text, DivergenceWarning, stacklevel=2)
    return Run(
        algorithm=algorithm,
        params=jax.tree.map(np.asarray, program.unravel(state.server[0])),
        x=state.server[0],
        server=state.server,
        clients=state.clients,
        history=columns,
        average=None if average is None else jax.tree.map(np.asarray, program.unravel(state.average)),
        reached=done if state.reached else None,
        diverged=done + 1 if state.diverged else None,
    )


class Job(NamedTuple):
    """A request that has passed every check, ready for the engine."""

    plan: Plan
    program: Program
    world: World
    starts: list[np.ndarray]  # x^0, one a seed
    visits: list[np.ndarray]  # the cohorts of the warm start


def prepare(
    algorithm: Algorithm,
    problem: Problem,
    *,
    rounds: int,
    clients_per_round: int | float | None,
    local_steps: int | None,
    local_epochs: int | None,
    batch_size: int | float | None,
    seeds: Sequence[int],
    x0: Any,
    warm_start: bool,
    weights: str,
    target: tuple[str, float] | tuple[str, str, float] | None,
    eval_every: int,
    average: str | float | None = None,
    measure_loss: bool = True,
) -> Job:
    """Check a request whole, before anything is compiled, and lay out what the engine needs."""
    if not isinstance(algorithm, Algorithm):
        raise refused(
            "algorithm", "an Algorithm", type(algorithm).__name__, "Build one, say covary.scaffold(eta_l=0.1)."
        )
    if not isinstance(problem, Problem):
        raise refused("problem", "a Problem", type(problem).__name__, "Build one, say covary.supervised(model, data).")
    if not isinstance(warm_start, bool | np.bool_):
        raise refused("warm_start", "True or False", repr(warm_start), "It costs N / S rounds at the start.")
    whole("rounds", rounds, 1)
    whole("eval_every", eval_every, 1)
    for seed in seeds:
        whole("seed", seed, 0, most=2**32 - 1)
    plan, layout = make_plan(problem, algorithm, clients_per_round, local_steps, local_epochs, batch_size, weights)
    visits = _warm_start_cohorts(algorithm, plan, rounds) if warm_start else []
    names = ("loss", *problem.metric_names)
    evaluated = names if measure_loss or len(names) == 1 or (target and target[0] == "loss") else names[1:]
    goal = _target(target, names, evaluated)
    decay = _decay(average)
    starts, unravel = [], None
    for seed in seeds:
        x, unravel = problem.start(x0, seed)
        starts.append(x)
    for name, value in algorithm.numbers.items():
        with np.errstate(over="ignore"):
            cast = float(starts[0].dtype.type(value))
        if (cast == 0 and value != 0) or not np.isfinite(cast):
            raise refused(name, f"a number that {starts[0].dtype} can hold", f"{value:g}", "Choose a less extreme one.")
    problem.refuse_other_losses(one_by_one=plan.ragged_batches or plan.ragged_sizes)
    assert unravel is not None
    program = Program(
        recipe=algorithm.recipe or algorithm,
        plan=plan,
        loss=problem.loss,
        metrics=problem.metrics,
        evaluated=evaluated,
        unravel=unravel,
        chunk=CHUNK,
        eval_every=eval_every,
        average=average is not None,
    )
    example_weights = None
    if not plan.flat_weights:
        example_weights = np.repeat(layout.p / layout.size, layout.size).astype(starts[0].dtype)
    world = World(
        examples=problem.data.on_device,
        evaluated_on=problem.evaluated_on if problem.metrics is not None else None,
        example_weights=example_weights,
        layout=layout,
        target=goal,
        decay=decay,
    )
    return Job(plan, program, world, starts, visits)


def initial(algorithm: Algorithm, plan: Plan, x: np.ndarray) -> State:
    def own(leaf: Any) -> np.ndarray:
        return np.array(leaf, x.dtype)

    def for_all(leaf: Any) -> np.ndarray:
        return np.repeat(own(leaf)[None], plan.n_clients, axis=0)

    return State(
        round=np.asarray(0),
        server=jax.tree.map(own, algorithm.init_server(x)),
        clients=jax.tree.map(for_all, algorithm.init_client(x)),
        average=own(x),
        average_mass=own(1),  # x^0 has weight w_1
        reached=np.asarray(False),
        diverged=np.asarray(False),
    )


def traffic(trips: Any, state: State) -> tuple[int, int]:
    """Bytes down to and up from one client in one round: all that `broadcast` and `finish` put on the wire."""
    server, client = state.server, jax.tree.map(lambda leaf: leaf[0], state.clients)
    total_down = total_up = 0
    for trip in trips:

        def up_of(down: Any, client: Any, trip: Any = trip) -> Any:
            def grad(y: Any) -> Any:
                return y

            return trip.finish(trip.start(down, client, grad), down, client, grad, 1)[0]

        down = jax.eval_shape(trip.broadcast, server)
        up = jax.eval_shape(up_of, down, client)
        total_down += sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(down))
        total_up += sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(up))
    return total_down, total_up


def _warm_start_cohorts(algorithm: Algorithm, plan: Plan, rounds: int) -> list[np.ndarray]:
    if algorithm.warm_start is None:
        raise CovaryError(
            f"warm_start=True needs control variates to set, and {algorithm.name} has none that a gradient can set. "
            "Use warm_start=False, or scaffold."
        )
    cohorts = np.split(np.arange(plan.n_clients), range(plan.cohort, plan.n_clients, plan.cohort))
    if rounds <= len(cohorts):
        raise CovaryError(
            f"rounds={rounds} leaves no round to train in: the warm start visits {plan.n_clients} clients, "
            f"{plan.cohort} at a time, which takes {len(cohorts)} rounds. Use more rounds or warm_start=False."
        )
    return cohorts


def _target(target: Any, names: tuple[str, ...], evaluated: tuple[str, ...]) -> Target:
    if target is None:
        return Target(0, 1.0, np.inf)  # never met
    form = f"(name, value) or (name, '<=' or '>=', value) with a name among {', '.join(names)}"
    if not isinstance(target, tuple | list) or len(target) not in (2, 3):
        raise refused("target", form, repr(target), "Try ('loss', 0.1).")
    name, *way, value = target
    if not isinstance(name, str) or name not in names or (way and way[0] not in ("<=", ">=")):
        raise refused("target", form, repr(target), "Try ('loss', 0.1).")
    if isinstance(value, bool) or not isinstance(value, int | float | np.number) or not np.isfinite(value):
        raise refused("target", f"{form} and a finite value", repr(target), "Try ('loss', 0.1).")
    sign = {"<=": -1.0, ">=": 1.0}[way[0]] if way else direction(name)
    return Target(evaluated.index(name), sign, float(value))


def direction(metric: str) -> float:
    """+1 for a metric that is to rise, -1 for one that is to fall, by its name."""
    return -1.0 if metric.endswith(("loss", "error", "mse", "rmse", "mae", "nll", "perplexity")) else 1.0


def _decay(average: str | float | None) -> float:
    if average is None or (isinstance(average, str) and average == "uniform"):
        return 1.0
    if not isinstance(average, float | np.floating) or not 0 < average < 1:
        raise refused(
            "average", '"uniform" or a number in (0, 1)', repr(average), "The theorems use mu K eta_l eta_g / 2."
        )
    return 1 - float(average)


def _divergence(algorithm: Algorithm, round: int) -> str:
    return (
        f"{algorithm} diverged in round {round}: its model or loss is no longer finite. The run holds the state and "
        f"history before that round. {_smaller(algorithm)}"
    )


def _runaway(algorithm: Algorithm, losses: np.ndarray) -> str | None:
    """A word on a run whose loss has grown a million times and more, though it is finite still."""
    seen = losses[np.isfinite(losses)]
    if len(seen) < 2 or abs(seen[-1]) < 1e6 * max(abs(seen[0]), 1e-300) or seen[-1] < seen.max():
        return None
    return f"{algorithm} is diverging: its loss grew from {seen[0]:.3g} to {seen[-1]:.3g}. {_smaller(algorithm)}"


def _smaller(algorithm: Algorithm) -> str:
    sizes = " and ".join(f"{name}={value:g}" for name, value in algorithm.numbers.items() if name in ("eta_l", "eta_g"))
    return (
        f"Its step-size is too large for this problem ({sizes or 'see the algorithm'}): try eta_l a factor of 3 to 10 "
        "smaller, or fewer local steps."
    )
