"""Compiled rounds: whole chunks as one program, without a return to the host inside a call.

One round of SCAFFOLD, from top to bottom: `one_round` draws the cohort (`cohort.sample`), takes its states
(`cohort.take`), lets each client work and sums the uploads (`cohort.exchange_all`, which calls `local.work_of_client`
and through it `client.client_work`), and commits the new states (`commit`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from covary import targets
from covary._engine.cohort import Cohort, bound_to_data, cohort_key, exchange_all, put, sample, take
from covary._engine.devices import AXIS, sharded
from covary._engine.evaluate import measure
from covary._engine.invariant import control_change, control_error, largest_control
from covary._engine.program import Program, Records, Rounds, World
from covary.algorithm import Exchange, rebuild
from covary.running.buffers import buffers_of
from covary.running.state import State

EVERYWHERE = PartitionSpec()  # every device has a full copy


@functools.lru_cache(maxsize=64)
def compiled(program: Program) -> Rounds:
    """`(numbers, state, key, until, last, world) -> state, records`: rounds up to `until`, at most a chunk of them.

    It stops early at the target, or at the last good state when the next is not finite. `records` has one row a round.
    Round `last` is the run's last, which is always measured.
    """

    def chunk(
        numbers: dict[str, Any], state: State, key: Any, until: Any, last: Any, world: World
    ) -> tuple[State, Records]:
        step = functools.partial(one_round, program, numbers)
        return loop(program, step, state, state.control.round, wrap(key), until, last, world)

    return spread(program, chunk, (EVERYWHERE, shared_state(0), *[EVERYWHERE] * 3, shared_world(program)))


@functools.lru_cache(maxsize=64)
def compiled_round(program: Program, measured: bool | None) -> Rounds:
    """`(numbers, state, key, r, last, cohort, world) -> state, record`: one round of a given cohort.

    For client states that live outside the devices: `state.clients` and `world.roster` have one row for each of the
    cohort, and so has `world.examples` where data is streamed. With `measured=None`, the round itself decides whether
    it is one that is measured.
    """

    def visit(
        numbers: dict[str, Any], state: State, key: Any, r: Any, last: Any, cohort: Any, world: World
    ) -> tuple[State, Records]:
        wanted = due(program, r, last) if measured is None else measured
        return one_round(program, numbers, wanted, state, wrap(key), r, world, cohort)

    return spread(program, visit, (EVERYWHERE, shared_state(0), *[EVERYWHERE] * 4, shared_world(program)))


@functools.lru_cache(maxsize=64)
def compiled_sweep(program: Program) -> Rounds:
    """Many members at once: `(numbers, states, keys, first, until, last, world) -> states, records`.

    Every number has an axis over the points of a grid, every key stands for a seed, and states and records have both
    axes, seeds first. Points share cohorts and batches (common random numbers), so that data is read once for all.
    """

    def chunk(
        numbers: dict[str, Any], states: State, keys: Any, first: Any, until: Any, last: Any, world: World
    ) -> tuple[State, Records]:
        step = members(functools.partial(one_round, program), numbers)
        return loop(program, step, states, first, wrap(keys), until, last, world)

    return spread(program, chunk, (EVERYWHERE, shared_state(2), *[EVERYWHERE] * 4, shared_world(program)))


@functools.lru_cache(maxsize=64)
def compiled_warm_start(program: Program, sweep: bool = False) -> Rounds:
    """`(numbers, state, key, r, cohort, world) -> state, record`: a round in which a cohort sets its controls."""

    def visit(numbers: dict[str, Any], state: State, key: Any, r: Any, cohort: Any, world: World) -> Any:
        def one(
            numbers: dict[str, Any], measured: bool, state: State, key: Any, cohort: Any, world: World
        ) -> tuple[State, Records]:
            algorithm = rebuild(program.recipe, numbers)
            key = jax.random.fold_in(key, r)
            assert algorithm.warm_start is not None
            exchanges = (algorithm.warm_start,)
            rows = take(program, state.clients, cohort)
            server, new, drift = exchanged(program, exchanges, state, rows, cohort, key, world, True)
            scale = largest_control(program, algorithm, state.accounts.scale, server, new)
            after = state._replace(server=server, accounts=state.accounts._replace(scale=scale))
            state = commit(program, state, after, rows, new, cohort, finite(server))
            values = evaluate(program, state, world) | control_error(program, algorithm, state, world)
            values |= control_change(program, algorithm, cohort, rows, new)
            return state, {**values, "drift": drift}

        one_visit = members(one, numbers) if sweep else functools.partial(one, numbers)
        return one_visit(True, state, wrap(key), cohort, world)

    axes = 2 if sweep else 0
    return spread(program, visit, (EVERYWHERE, shared_state(axes), *[EVERYWHERE] * 3, shared_world(program)))


@functools.lru_cache(maxsize=64)
def compiled_sample(n_clients: int, cohort: int) -> Callable[[Any, Any], Any]:
    """`(key, rounds) -> cohorts`: those that the engine itself draws in these rounds."""

    def one(key: Any, r: Any) -> Any:
        return sample(cohort_key(key, r), n_clients, cohort)

    def draw(key: Any, rounds: Any) -> Any:
        return jax.vmap(lambda r: one(wrap(key), r))(rounds)

    return jax.jit(draw)


def wrap(key: Any) -> Any:
    return jax.random.wrap_key_data(key)


# Over several devices


def shared_state(axes_before_clients: int) -> Any:
    """The layout of a state: each device has its share of the clients' states, and a copy of the rest."""
    state: Any = State._make([EVERYWHERE] * len(State._fields))
    return state._replace(clients=PartitionSpec(*[None] * axes_before_clients, AXIS))


def shared_world(program: Program) -> Any:
    """The layout of the world: each device has its share of streamed data, and a copy of the rest."""
    world: Any = World._make([EVERYWHERE] * len(World._fields))
    return world._replace(examples=PartitionSpec(AXIS)) if program.streamed else world


def spread(program: Program, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Rounds:
    """The function compiled for the program's devices, its arguments laid out as given; the second is the state."""
    donated = (1,) if program.resident else ()  # otherwise the host still reads the state when the next round starts
    if len(program.place.devices) == 1:
        return jax.jit(function, donate_argnums=donated)
    results = (arguments[1], EVERYWHERE)
    return jax.jit(sharded(function, program.place, arguments, results), donate_argnums=donated)


def members(round_of_one: Callable[..., Any], numbers: dict[str, Any]) -> Callable[..., Any]:
    """`(numbers, measured, state, key, ...)` of one member, for all seeds (outer axis) and all points (inner axis)."""

    def all_members(measured: bool, states: State, keys: Any, *shared: Any) -> Any:
        def points(states: State, key: Any) -> Any:
            return jax.vmap(lambda n, state: round_of_one(n, measured, state, key, *shared))(numbers, states)

        return jax.vmap(points)(states, keys)

    return all_members


# Rounds


def loop(
    program: Program,
    step: Callable[..., Any],
    state: State,
    first: Any,
    key: Any,
    until: Any,
    last: Any,
    world: World,
) -> tuple[State, Records]:
    """Rounds while any member is running, up to `until` and at most a chunk.

    Measured and unmeasured rounds are two loops inside one, so that a GPU waits for the host only at the end of each
    loop. Where a round takes long, they are one loop instead, whose rounds decide, because compilation takes long too.
    """
    every, end = program.eval_every, jnp.minimum(until, first + program.chunk)
    shared = program.deep and every > 1
    # compiled functions are traced once, for the shapes of the records and for the loop
    step = jax.jit(step, static_argnums=() if shared else 0, inline=True)

    def running(until: Any) -> Callable[[Any], Any]:
        return lambda carry: (carry[0] < until) & jnp.any(~carry[1].control.reached & ~carry[1].control.diverged)

    def body(measured: bool | None) -> Callable[[Any], Any]:
        def one(carry: Any) -> Any:
            r, state, records = carry
            wanted = due(program, r + 1, last) if measured is None else measured
            state, record = step(wanted, state, key, r + 1, world)
            return r + 1, state, jax.tree.map(lambda rows, row: rows.at[r - first].set(row), records, record)

        return one

    def until_measured(carry: Any) -> Any:
        following = jnp.minimum((carry[0] // every + 1) * every, last)
        carry = jax.lax.while_loop(running(jnp.minimum(following - 1, end)), body(False), carry)
        return jax.lax.while_loop(running(jnp.minimum(following, end)), body(True), carry)

    first = jnp.asarray(first)
    if shared:
        shapes = jax.eval_shape(step, due(program, first + 1, last), state, key, first + 1, world)[1]
    else:
        shapes = jax.eval_shape(functools.partial(step, True), state, key, first + 1, world)[1]
    empty = jax.tree.map(lambda s: jnp.zeros((program.chunk, *s.shape), s.dtype), shapes)
    whole = body(None) if shared else body(True) if every == 1 else until_measured
    _, state, records = jax.lax.while_loop(running(end), whole, (first, state, empty))
    return state, records


def due(program: Program, r: Any, last: Any) -> Any:
    """Whether round r is one that is measured."""
    return (r % program.eval_every == 0) | (r == last)


def one_round(
    program: Program,
    numbers: dict[str, Any],
    measured: Any,
    state: State,
    key: Any,
    r: Any,
    world: World,
    cohort: Any = None,
) -> tuple[State, Records]:
    """Round r of one run. A run that has reached its target or diverged stays as it is.

    Where it is not measured, its loss, metrics, drift, control error and control change are NaN. `measured` is a bool,
    or a traced one if the program serves both kinds of rounds; the drift is then always computed.
    """
    # The round: a cohort, its exchanges, the server's new state
    algorithm = rebuild(program.recipe, numbers)
    if cohort is None:
        cohort = sample(cohort_key(key, r), program.plan.n_clients, program.plan.cohort)
    key = jax.random.fold_in(key, r)
    exchanges = algorithm.trips(program.plan.steps_on_wire)
    rows = take(program, state.clients, cohort)  # fields (S / devices, d), as has `new`
    traced = isinstance(measured, jax.Array)
    server, new, drift = exchanged(program, exchanges, state, rows, cohort, key, world, traced or measured)
    drift = jnp.where(measured, drift, jnp.nan)

    # The scale of rounding, and the average
    accounts = state.accounts
    accounts = accounts._replace(scale=largest_control(program, algorithm, accounts.scale, server, new))
    if program.average:
        mass = 1 + world.decay * accounts.average_mass
        average = accounts.average + (server[0] - accounts.average) / mass
        accounts = accounts._replace(average=average, average_mass=mass)
    after = state._replace(server=server, accounts=accounts)

    # Whether it is finite, and whether it meets the target
    values = only_if(measured, columns(program), server[0], lambda: evaluate(program, after, world))
    ok = finite(server) & (jnp.isfinite(values.get("loss", 0.0)) | jnp.logical_not(measured))
    if program.evaluation.names:
        metric = jnp.stack([values[name] for name in program.evaluation.names])[world.target.index]
        hit = targets.met(world.target.direction, metric, world.target.value)
        after = after._replace(control=after.control._replace(reached=state.control.reached | hit))

    state = commit(program, state, after, rows, new, cohort, ok)
    if algorithm.invariant is not None:
        values |= only_if(
            measured,
            ("control_error", "control_change"),
            server[0],
            lambda: (
                control_error(program, algorithm, state, world) | control_change(program, algorithm, cohort, rows, new)
            ),
        )
    return state, {**values, "cohort": cohort, "drift": drift}


def exchanged(
    program: Program,
    exchanges: tuple[Exchange, ...],
    state: State,
    rows: Any,
    ids: Any,
    key: Any,
    world: World,
    measured: bool,
) -> tuple[Any, Any, Any]:
    """The server's and the cohort's states after the exchanges, and the drift."""
    at = ids if program.resident else jnp.arange(len(ids))
    cohort = Cohort(ids, at, world.roster.p[at], len(ids) / program.plan.n_clients)
    bind = bound_to_data(program, world, key, measured)
    return exchange_all(program.place, exchanges, state.server, rows, cohort, bind, measured=measured)


def evaluate(program: Program, state: State, world: World) -> dict[str, Any]:
    """f and the metrics at x, and at the average where one is kept."""

    def at(x: Any) -> dict[str, Any]:
        held = world.frozen, buffers_of(state.server)
        given = (world.examples, world.example_weights, world.tested_on, held)
        return measure(program.evaluation, program.place, x, *given)

    values = at(state.server[0])
    if program.average:
        values |= {f"average_{name}": value for name, value in at(state.accounts.average).items()}
    return values


def columns(program: Program) -> tuple[str, ...]:
    """The names of what `evaluate` measures."""
    names = program.evaluation.names
    return (*names, *(f"average_{name}" for name in names)) if program.average else names


def only_if(measured: Any, names: tuple[str, ...], x: Any, work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """The measurements of these names, each a number of the type of x, or NaN for each."""

    def none() -> dict[str, Any]:
        return {name: jnp.full((), jnp.nan, x.dtype) for name in names}

    if isinstance(measured, jax.Array):
        return jax.lax.cond(measured, work, none)
    return work() if measured else none()


def finite(server: Any) -> Any:
    return jnp.all(jnp.stack([jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves(server)]))


def commit(program: Program, state: State, after: State, old: Any, new: Any, cohort: Any, ok: Any) -> State:
    """The state after the round; the last good state, marked as diverged, if that is not finite; no change if ended."""
    alive = ~state.control.reached & ~state.control.diverged
    keep = functools.partial(jnp.where, ok & alive)
    clients = put(program, state.clients, cohort, jax.tree.map(keep, new, old))
    kept = jax.tree.map(keep, after._replace(clients=None), state._replace(clients=None))
    control = kept.control._replace(
        round=state.control.round + (ok & alive), diverged=state.control.diverged | (alive & ~ok)
    )
    return kept._replace(clients=clients, control=control)
