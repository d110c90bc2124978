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
    metric_names: tuple[str, ...]
    unravel: Callable[[Any], Any]
    chunk: int  # most rounds in one call
    eval_every: int
    average: bool


class Target(NamedTuple):
    """What ends a run: the place in ("loss", *metric_names), +1 to rise or -1 to fall, and the value."""

    index: Any
    direction: Any
    value: Any


class World(NamedTuple):
    """What a program reads and never changes."""

    examples: Any
    evaluated_on: Any
    example_weights: Any  # of each example in f, or None where they are all the same
    layout: Layout
    key: Any
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


@functools.lru_cache(maxsize=64)
def compiled(program: Program) -> Callable[..., tuple[State, dict[str, Any]]]:
    """`(numbers, state, last, world) -> state, records`: rounds up to `last`, at most a chunk of them.

    It stops early at the target, or at the last good state when the next is not finite. `records` has one row a round.
    """

    def chunk(numbers: dict[str, Any], state: State, last: Any, world: World) -> tuple[State, dict[str, Any]]:
        algorithm = rebuild(program.recipe, numbers)
        trips = algorithm.trips(program.plan.steps)
        first = state.round

        def one_round(state: State) -> tuple[State, dict[str, Any]]:
            r = state.round + 1
            key = jax.random.fold_in(world.key, r)
            cohort = sample(jax.random.fold_in(key, 0), program.plan)
            server, rows, drift = exchange_all(program, trips, state.server, state.clients, cohort, key, world)
            after = state._replace(server=server)
            if program.average:
                mass = 1 + world.decay * state.average_mass
                after = after._replace(average=state.average + (server[0] - state.average) / mass, average_mass=mass)
            due = (r % program.eval_every == 0) | (r == last)
            values = when(due, program, lambda: evaluate(program, after, world))
            ok = finite(server) & (jnp.isfinite(values["loss"]) | ~due)
            metric = jnp.stack([values[name] for name in ("loss", *program.metric_names)])[world.target.index]
            hit = world.target.direction * (metric - world.target.value) >= 0
            state = commit(state, after, rows, cohort, ok)._replace(reached=hit & due & ok)
            values |= when(due, program, lambda: control_error(algorithm, state, world))
            return state, {**values, "cohort": cohort, "drift": drift}

        def proceed(carry: tuple[State, dict[str, Any]]) -> Any:
            state, _ = carry
            return (state.round < jnp.minimum(last, first + program.chunk)) & ~state.reached & ~state.diverged

        def body(carry: tuple[State, dict[str, Any]]) -> tuple[State, dict[str, Any]]:
            state, records = carry
            at = state.round - first
            state, record = one_round(state)
            return state, jax.tree.map(lambda rows, row: rows.at[at].set(row), records, record)

        shapes = jax.eval_shape(one_round, state)[1]
        empty = jax.tree.map(lambda s: jnp.zeros((program.chunk, *s.shape), s.dtype), shapes)
        return jax.lax.while_loop(proceed, body, (state, empty))

    return jax.jit(chunk, donate_argnums=1)


@functools.lru_cache(maxsize=64)
def compiled_warm_start(program: Program) -> Callable[..., tuple[State, dict[str, Any]]]:
    """`(numbers, state, cohort, world) -> state, record`: one round in which `cohort` sets its control variates."""

    def visit(numbers: dict[str, Any], state: State, cohort: Any, world: World) -> tuple[State, dict[str, Any]]:
        algorithm = rebuild(program.recipe, numbers)
        key = jax.random.fold_in(world.key, state.round + 1)
        trips = (algorithm.warm_start,)
        server, rows, drift = exchange_all(program, trips, state.server, state.clients, cohort, key, world)
        state = commit(state, state._replace(server=server), rows, cohort, finite(server))
        values = evaluate(program, state, world) | control_error(algorithm, state, world)
        return state, {**values, "drift": drift}

    return jax.jit(visit, donate_argnums=1)


def sample(key: Any, plan: Plan) -> Any:
    """The cohort: uniform, without replacement, in ascending order."""
    if plan.cohort == plan.n_clients:
        return jnp.arange(plan.n_clients)
    return jnp.sort(jax.random.choice(key, plan.n_clients, (plan.cohort,), replace=False))


def exchange_all(
    program: Program, trips: tuple[Exchange | None, ...], server: Any, clients: Any, cohort: Any, key: Any, world: World
) -> tuple[Any, Any, Any]:
    """All trips of one round: the new server state, the cohort's new client states, and the drift over the cohort."""
    rows = jax.tree.map(lambda leaf: leaf[cohort], clients)
    p = world.layout.p[cohort].astype(server[0].dtype)
    fraction = p.sum()
    drift = jnp.zeros((), server[0].dtype)
    for number, trip in enumerate(trips, start=1):
        assert trip is not None
        down = trip.broadcast(server)
        trip_key = jax.random.fold_in(key, number)
        work = functools.partial(work_of_client, program, trip, down, trip_key, world)
        up, new_rows, drifts = jax.vmap(work)(cohort, rows)
        mean = jax.tree.map(lambda leaf: jnp.tensordot(p / fraction, leaf, 1), up)
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
    """The state after the round, or the last good state, marked as diverged, where the outcome is not finite."""
    keep = functools.partial(jnp.where, ok)
    clients = jax.tree.map(lambda leaf, row: leaf.at[cohort].set(keep(row, leaf[cohort])), state.clients, rows)
    kept = jax.tree.map(keep, after._replace(clients=None), state._replace(clients=None))
    return kept._replace(round=state.round + ok, clients=clients, diverged=~ok)


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
    values = {"loss": loss_at(program, x, world.examples, world.example_weights)}
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
