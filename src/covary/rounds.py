"""The compiled engine: rounds as one program, the cohort vectorised, no return to the host inside a chunk."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from covary.algorithm import Algorithm, Exchange, rebuild
from covary.client import client_work
from covary.plan import Layout, Plan


@dataclass(frozen=True)
class Program:
    """What a compiled program depends on besides the shapes of its arguments."""

    recipe: Any  # of the algorithm
    plan: Plan
    loss: Callable[[Any, Any], Any]
    metrics: Callable[[Any, Any], dict[str, Any]] | None
    evaluated: tuple[str, ...]  # "loss" and the metrics, or the metrics alone
    unravel: Callable[[Any], Any]
    chunk: int  # most rounds in one call
    eval_every: int
    average: bool


class Target(NamedTuple):
    """What ends a run: the metric's place in `Program.evaluated`, +1 to rise or -1 to fall, and the value."""

    index: Any
    direction: Any
    value: Any


class World(NamedTuple):
    """What a program reads and never changes."""

    examples: Any
    evaluated_on: Any
    example_weights: Any  # of each example in f, or None where they are all the same
    layout: Layout
    target: Target
    decay: Any  # of the weights w_r in the running average; 1 is the uniform mean


class State(NamedTuple):
    """What a program changes."""

    round: Any  # rounds done
    server: Any
    clients: Any  # each field with a leading axis over the N clients
    average: Any  # the paper's weighted output, and the sum of its weights in units of the newest
    average_mass: Any
    reached: Any
    diverged: Any


Records = dict[str, Any]
Rounds = Callable[..., tuple[State, Records]]


@functools.lru_cache(maxsize=64)
def compiled(program: Program) -> Rounds:
    """`(numbers, state, key, last, world) -> state, records`: rounds up to `last`, at most a chunk of them.

    It stops early at the target, or at the last good state when the next is not finite. `records` has one row a round.
    """

    def chunk(numbers: dict[str, Any], state: State, key: Any, last: Any, world: World) -> tuple[State, Records]:
        return loop(program, functools.partial(one_round, program, numbers), state, state.round, key, last, world)

    return jax.jit(chunk, donate_argnums=1)


@functools.lru_cache(maxsize=64)
def compiled_sweep(program: Program) -> Rounds:
    """The same for many members at once: `(numbers, states, keys, first, last, world) -> states, records`.

    Every number has an axis over the points of a grid, every key stands for a seed, and states and records have both
    axes, seeds first. Points share cohorts and batches (common random numbers), so that data is read once for all.
    """

    def chunk(
        numbers: dict[str, Any], states: State, keys: Any, first: Any, last: Any, world: World
    ) -> tuple[State, Records]:
        return loop(program, members(functools.partial(one_round, program), numbers), states, first, keys, last, world)

    return jax.jit(chunk, donate_argnums=1)


@functools.lru_cache(maxsize=64)
def compiled_warm_start(program: Program, sweep: bool = False) -> Rounds:
    """`(numbers, state, key, r, cohort, world) -> state, record`: a round in which a cohort sets its controls."""

    def visit(numbers: dict[str, Any], state: State, key: Any, r: Any, cohort: Any, world: World) -> Any:
        def one(numbers: dict[str, Any], state: State, key: Any, cohort: Any, world: World) -> tuple[State, Records]:
            algorithm = rebuild(program.recipe, numbers)
            key = jax.random.fold_in(key, r)
            assert algorithm.warm_start is not None
            trips = (algorithm.warm_start,)
            server, rows, drift = exchange_all(program, trips, state.server, state.clients, cohort, key, world)
            state = commit(state, state._replace(server=server), rows, cohort, finite(server))
            values = evaluate(program, state, world) | control_error(algorithm, state, world)
            return state, {**values, "drift": drift}

        one_visit = members(one, numbers) if sweep else functools.partial(one, numbers)
        return one_visit(state, key, cohort, world)

    return jax.jit(visit, donate_argnums=1)


def members(round_of_one: Callable[..., Any], numbers: dict[str, Any]) -> Callable[..., Any]:
    """`(numbers, state, key, ...)` of one member, for all seeds (outer axis) and all points (inner axis)."""

    def all_members(states: State, keys: Any, *shared: Any) -> Any:
        def points(states: State, key: Any) -> Any:
            return jax.vmap(lambda n, state: round_of_one(n, state, key, *shared))(numbers, states)

        return jax.vmap(points)(states, keys)

    return all_members


def loop(
    program: Program, step: Callable[..., Any], state: State, first: Any, key: Any, last: Any, world: World
) -> tuple[State, Records]:
    """Rounds while any member goes on, up to `last` and at most a chunk."""

    def proceed(carry: tuple[Any, State, Records]) -> Any:
        r, state, _ = carry
        return (r < jnp.minimum(last, first + program.chunk)) & jnp.any(~state.reached & ~state.diverged)

    def body(carry: tuple[Any, State, Records]) -> tuple[Any, State, Records]:
        r, state, records = carry
        state, record = step(state, key, r + 1, last, world)
        return r + 1, state, jax.tree.map(lambda rows, row: rows.at[r - first].set(row), records, record)

    shapes = jax.eval_shape(step, state, key, first + 1, last, world)[1]
    empty = jax.tree.map(lambda s: jnp.zeros((program.chunk, *s.shape), s.dtype), shapes)
    _, state, records = jax.lax.while_loop(proceed, body, (jnp.asarray(first), state, empty))
    return state, records


def one_round(
    program: Program, numbers: dict[str, Any], state: State, key: Any, r: Any, last: Any, world: World
) -> tuple[State, Records]:
    """Round r of one run. A run that has reached its target or diverged stays as it is."""
    algorithm = rebuild(program.recipe, numbers)
    key = jax.random.fold_in(key, r)
    cohort = sample(jax.random.fold_in(key, 0), program.plan)
    trips = algorithm.trips(program.plan.steps_on_wire)
    server, rows, drift = exchange_all(program, trips, state.server, state.clients, cohort, key, world)
    after = state._replace(server=server)
    if program.average:
        mass = 1 + world.decay * state.average_mass
        after = after._replace(average=state.average + (server[0] - state.average) / mass, average_mass=mass)
    due = (r % program.eval_every == 0) | (r == last)
    values = when(due, program, lambda: evaluate(program, after, world))
    ok = finite(server) & (jnp.isfinite(values.get("loss", 0.0)) | ~due)
    metric = jnp.stack([values[name] for name in program.evaluated])[world.target.index]
    hit = due & (world.target.direction * (metric - world.target.value) >= 0)
    state = commit(state, after._replace(reached=state.reached | hit), rows, cohort, ok)
    values |= when(due, program, lambda: control_error(algorithm, state, world))
    return state, {**values, "cohort": cohort, "drift": drift}


def sample(key: Any, plan: Plan) -> Any:
    """The cohort: uniform, without replacement, in ascending order."""
    if plan.cohort == plan.n_clients:
        return jnp.arange(plan.n_clients)
    return jnp.sort(jax.random.choice(key, plan.n_clients, (plan.cohort,), replace=False))


def exchange_all(
    program: Program, trips: tuple[Exchange, ...], server: Any, clients: Any, cohort: Any, key: Any, world: World
) -> tuple[Any, Any, Any]:
    """All trips of one round: the new server state, the cohort's new client states, and the drift over the cohort."""
    rows = jax.tree.map(lambda leaf: leaf[cohort], clients)
    fraction = len(cohort) / program.plan.n_clients
    # Uniform sampling, so that each of the cohort stands for N / |S| clients: sum p_i u_i is met in expectation.
    w = (world.layout.p[cohort] / fraction).astype(server[0].dtype)
    drift = jnp.zeros((), server[0].dtype)
    for number, trip in enumerate(trips, start=1):
        down = trip.broadcast(server)
        trip_key = jax.random.fold_in(key, number)
        work = functools.partial(work_of_client, program, trip, down, trip_key, world)
        up, new_rows, drifts = jax.vmap(work)(cohort, rows)
        v = w / w.sum() if trip.together else w
        mean = jax.tree.map(lambda leaf, v=v: jnp.tensordot(v, leaf, 1), up)
        server = like(trip.aggregate(server, mean, fraction), server)
        rows = like(new_rows, rows)
        drift += drifts.mean()
    return server, rows, drift


def work_of_client(
    program: Program, trip: Exchange, down: Any, trip_key: Any, world: World, i: Any, client: Any
) -> tuple[Any, Any, Any]:
    """Client i's part of a trip, with its gradients bound to its data."""
    plan = program.plan
    offset, size, batch, per_epoch, steps, _ = jax.tree.map(lambda leaf: leaf[i], world.layout)

    def fetch(positions: Any) -> Any:
        return jax.tree.map(lambda leaf: leaf[offset + positions], world.examples)

    everything = jnp.arange(plan.max_size)
    own = fetch(jnp.minimum(everything, size - 1))
    full_grad = gradient(program, own, everything < size if plan.ragged_sizes else None)

    if plan.batching == "full":

        def grad_of_step(k: Any) -> Callable[[Any], Any]:
            return full_grad
    else:
        client_key = jax.random.fold_in(trip_key, i)
        order = jax.vmap(lambda e: shuffle(jax.random.fold_in(client_key, e), plan, size))(jnp.arange(plan.epochs))

        def grad_of_step(k: Any) -> Callable[[Any], Any]:
            epoch, j = k // per_epoch, k % per_epoch
            if plan.batching == "rows":
                low, high = j * batch, jnp.minimum((j + 1) * batch, size)
            else:
                low, high = j * size // per_epoch, (j + 1) * size // per_epoch
            places = low + jnp.arange(plan.max_batch)
            inside = places < high
            rows = fetch(order[epoch, jnp.minimum(places, size - 1)])
            return gradient(program, rows, inside if plan.ragged_batches else None)

    K = plan.max_steps if plan.steps is not None else steps
    return client_work(trip, down, client, full_grad, grad_of_step, K, plan.max_steps)


def shuffle(key: Any, plan: Plan, size: Any) -> Any:
    """A random order of a client's examples; it depends on the client's own size only, so deployment draws the same."""
    draws = jax.random.uniform(key, (plan.max_size,), jnp.float32)
    return jnp.argsort(jnp.where(jnp.arange(plan.max_size) < size, draws, 2.0))


def gradient(program: Program, batch: Any, inside: Any) -> Callable[[Any], Any]:
    """y -> the gradient of the mean loss over the batch, or over those of its rows that are inside."""
    weights = None if inside is None else inside / inside.sum()
    return jax.grad(lambda y: loss_at(program, y, batch, weights))


def loss_at(program: Program, x: Any, batch: Any, weights: Any) -> Any:
    params = program.unravel(x)
    if weights is None:
        return program.loss(params, batch)
    each = jax.vmap(lambda example: program.loss(params, jax.tree.map(lambda leaf: leaf[None], example)))(batch)
    return weights.astype(each.dtype) @ each


def finite(server: Any) -> Any:
    return jnp.all(jnp.stack([jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves(server)]))


def commit(state: State, after: State, rows: Any, cohort: Any, ok: Any) -> State:
    """The state after the round; the last good state, marked as diverged, if that is not finite; no change if ended."""
    alive = ~state.reached & ~state.diverged
    keep = functools.partial(jnp.where, ok & alive)
    clients = jax.tree.map(lambda leaf, row: leaf.at[cohort].set(keep(row, leaf[cohort])), state.clients, rows)
    kept = jax.tree.map(keep, after._replace(clients=None), state._replace(clients=None))
    return kept._replace(round=state.round + (ok & alive), clients=clients, diverged=state.diverged | (alive & ~ok))


def evaluate(program: Program, state: State, world: World) -> dict[str, Any]:
    """f and the metrics at x, and at the average where one is kept."""
    values = measure(program, state.server[0], world)
    if program.average:
        values |= {f"average_{name}": value for name, value in measure(program, state.average, world).items()}
    return values


def control_error(algorithm: Algorithm, state: State, world: World) -> dict[str, Any]:
    """How far the server's control variate is from the mean of its clients', for algorithms that have one."""
    if algorithm.invariant is None:
        return {}
    c, c_i = getattr(state.server, algorithm.invariant[0]), getattr(state.clients, algorithm.invariant[1])
    return {"control_error": jnp.linalg.norm(c - jnp.tensordot(world.layout.p.astype(c.dtype), c_i, 1))}


def measure(program: Program, x: Any, world: World) -> dict[str, Any]:
    values = {}
    if "loss" in program.evaluated:
        values["loss"] = loss_at(program, x, world.examples, world.example_weights)
    if program.metrics is not None:
        values |= program.metrics(program.unravel(x), world.evaluated_on)
    return {name: jnp.asarray(value, x.dtype) for name, value in values.items()}


def when(due: Any, program: Program, work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """The values at the cadence asked for; between evaluations they are NaN, meaning not measured."""
    if program.eval_every == 1:
        return work()
    blank = jax.tree.map(lambda s: jnp.full(s.shape, jnp.nan, s.dtype), jax.eval_shape(work))
    return jax.lax.cond(due, work, lambda: blank)


def like(new: Any, old: Any) -> Any:
    """The new state in the old one's precision."""
    return jax.tree.map(lambda n, o: jnp.asarray(n, o.dtype), new, old)
