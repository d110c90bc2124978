"""The compiled engine: rounds as one program, the cohort spread over devices, no return to the host inside a chunk."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from covary.algorithm import Algorithm, Exchange, rebuild
from covary.blocks import Form
from covary.client import client_work
from covary.devices import AXIS, Place, sharded
from covary.plan import Layout, Plan

EVALUATED_AT_ONCE = 16_384  # examples of the training data whose loss is computed in one go


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
    place: Place  # the devices, and how many clients at once on each
    precision: str | None = None  # of the products, where it is not the model's own
    resident: bool = True  # all clients' states are on the devices; else a call brings its cohort's
    streamed: bool = False  # a call brings its cohort's data too
    divisible: bool = True  # the loss over all data is the mean of the losses of its parts


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
    clients: Any  # each field with a leading axis over the N clients, or over the cohort where they live elsewhere
    average: Any  # the paper's weighted output, and the sum of its weights in units of the newest
    average_mass: Any
    reached: Any
    diverged: Any


Records = dict[str, Any]
Rounds = Callable[..., tuple[State, Records]]


@functools.lru_cache(maxsize=64)
def compiled(program: Program) -> Rounds:
    """`(numbers, state, key, until, last, world) -> state, records`: rounds up to `until`, at most a chunk of them.

    It stops early at the target, or at the last good state when the next is not finite. `records` has one row a round.
    Round `last` is the run's last, which is measured whatever the cadence.
    """

    def chunk(
        numbers: dict[str, Any], state: State, key: Any, until: Any, last: Any, world: World
    ) -> tuple[State, Records]:
        step = functools.partial(one_round, program, numbers)
        return loop(program, step, state, state.round, wrap(key), until, last, world)

    return spread(program, chunk)


@functools.lru_cache(maxsize=64)
def compiled_round(program: Program, measured: bool) -> Rounds:
    """`(numbers, state, key, r, cohort, world) -> state, record`: one round of a cohort that is given.

    For client states that live outside the devices: `state.clients` and `world.layout` have one row for each of the
    cohort, and so has `world.examples` where data is streamed.
    """

    def visit(
        numbers: dict[str, Any], state: State, key: Any, r: Any, cohort: Any, world: World
    ) -> tuple[State, Records]:
        return one_round(program, numbers, measured, state, wrap(key), r, world, cohort)

    return spread(program, visit)


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

    return spread(program, chunk, axes_before_clients=2)


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
            trips = (algorithm.warm_start,)
            rows = take(program, state.clients, cohort)
            server, new, drift = exchange_all(program, trips, state.server, rows, cohort, key, world)
            state = commit(program, state, state._replace(server=server), rows, new, cohort, finite(server))
            values = evaluate(program, state, world) | control_error(program, algorithm, state, world)
            return state, {**values, "drift": drift}

        one_visit = members(one, numbers) if sweep else functools.partial(one, numbers)
        return one_visit(True, state, wrap(key), cohort, world)

    return spread(program, visit, axes_before_clients=2 if sweep else 0)


@functools.lru_cache(maxsize=64)
def compiled_sample(plan: Plan) -> Callable[[Any, Any], Any]:
    """`(key, rounds) -> cohorts`: those that the engine itself draws in these rounds."""

    def draw(key: Any, rounds: Any) -> Any:
        return jax.vmap(lambda r: sample(jax.random.fold_in(jax.random.fold_in(wrap(key), r), 0), plan))(rounds)

    return jax.jit(draw)


def wrap(key: Any) -> Any:
    return jax.random.wrap_key_data(key)


def spread(program: Program, function: Callable[..., Any], axes_before_clients: int = 0) -> Rounds:
    """The function compiled; on several devices, each holds a share of `state.clients` and of streamed data."""
    everywhere = PartitionSpec()
    donated = (1,) if program.resident else ()  # else the host still looks at the state when the next round begins
    if len(program.place.devices) == 1:
        return jax.jit(function, donate_argnums=donated)
    shared_out = PartitionSpec(*[None] * axes_before_clients, AXIS)
    state: Any = State._make([everywhere] * len(State._fields))._replace(clients=shared_out)
    world: Any = World._make([everywhere] * len(World._fields))
    if program.streamed:
        world = world._replace(examples=PartitionSpec(AXIS))
    special = {"state": state, "states": state, "world": world}
    specs = tuple(special.get(name, everywhere) for name in inspect.signature(function).parameters)
    return jax.jit(sharded(function, program.place, specs, (state, everywhere)), donate_argnums=donated)


def members(round_of_one: Callable[..., Any], numbers: dict[str, Any]) -> Callable[..., Any]:
    """`(numbers, measured, state, key, ...)` of one member, for all seeds (outer axis) and all points (inner axis)."""

    def all_members(measured: bool, states: State, keys: Any, *shared: Any) -> Any:
        def points(states: State, key: Any) -> Any:
            return jax.vmap(lambda n, state: round_of_one(n, measured, state, key, *shared))(numbers, states)

        return jax.vmap(points)(states, keys)

    return all_members


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
    """Rounds while any member goes on, up to `until` and at most a chunk.

    Rounds that are measured and rounds that are not are two loops inside one: on a GPU nothing then waits for the host
    between them but the end of each loop.
    """
    every, end = program.eval_every, jnp.minimum(until, first + program.chunk)

    def going_on(until: Any) -> Callable[[Any], Any]:
        return lambda carry: (carry[0] < until) & jnp.any(~carry[1].reached & ~carry[1].diverged)

    def body(measured: bool) -> Callable[[Any], Any]:
        def one(carry: Any) -> Any:
            r, state, records = carry
            state, record = step(measured, state, key, r + 1, world)
            return r + 1, state, jax.tree.map(lambda rows, row: rows.at[r - first].set(row), records, record)

        return one

    def to_the_next_measured(carry: Any) -> Any:
        due = jnp.minimum((carry[0] // every + 1) * every, last)
        carry = jax.lax.while_loop(going_on(jnp.minimum(due - 1, end)), body(False), carry)
        return jax.lax.while_loop(going_on(jnp.minimum(due, end)), body(True), carry)

    shapes = jax.eval_shape(functools.partial(step, True), state, key, first + 1, world)[1]
    empty = jax.tree.map(lambda s: jnp.zeros((program.chunk, *s.shape), s.dtype), shapes)
    start = (jnp.asarray(first), state, empty)
    _, state, records = jax.lax.while_loop(going_on(end), body(True) if every == 1 else to_the_next_measured, start)
    return state, records


def one_round(
    program: Program,
    numbers: dict[str, Any],
    measured: bool,
    state: State,
    key: Any,
    r: Any,
    world: World,
    cohort: Any = None,
) -> tuple[State, Records]:
    """Round r of one run. A run that has reached its target or diverged stays as it is.

    Where it is not measured, its loss, metrics, drift and control error are NaN.
    """
    algorithm = rebuild(program.recipe, numbers)
    key = jax.random.fold_in(key, r)
    if cohort is None:
        cohort = sample(jax.random.fold_in(key, 0), program.plan)
    trips = algorithm.trips(program.plan.steps_on_wire)
    rows = take(program, state.clients, cohort)
    server, new, drift = exchange_all(program, trips, state.server, rows, cohort, key, world, measured)
    after = state._replace(server=server)
    if program.average:
        mass = 1 + world.decay * state.average_mass
        after = after._replace(average=state.average + (server[0] - state.average) / mass, average_mass=mass)
    ok, values = finite(server), only_if(measured, lambda: evaluate(program, after, world))
    if measured:
        ok &= jnp.isfinite(values.get("loss", 0.0))
    if measured and program.evaluated:
        metric = jnp.stack([values[name] for name in program.evaluated])[world.target.index]
        hit = world.target.direction * (metric - world.target.value) >= 0
        after = after._replace(reached=state.reached | hit)
    state = commit(program, state, after, rows, new, cohort, ok)
    values |= only_if(measured, lambda: control_error(program, algorithm, state, world))
    return state, {**values, "cohort": cohort, "drift": drift}


def only_if(measured: bool, work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What is measured, or NaN of the same form."""
    if measured:
        return work()
    return jax.tree.map(lambda s: jnp.full(s.shape, jnp.nan, s.dtype), jax.eval_shape(work))


def sample(key: Any, plan: Plan) -> Any:
    """The cohort: uniform, without replacement, in ascending order, in time that depends on S alone where N is large.

    Of many clients, by R. Floyd's method: the k-th draw is from the first N - S + k; one that was drawn before is
    replaced by the last of these, which cannot have been.
    """
    N, S = plan.n_clients, plan.cohort
    if N == S:
        return jnp.arange(N)
    if N <= 4096 or S * S > N:
        return jnp.sort(jax.random.choice(key, N, (S,), replace=False))

    def draw(k: Any, chosen: Any) -> Any:
        last = N - S + k
        one = jax.random.randint(jax.random.fold_in(key, k), (), 0, last + 1)
        return chosen.at[k].set(jnp.where(jnp.any(chosen == one), last, one))

    return jnp.sort(jax.lax.fori_loop(0, S, draw, jnp.full(S, -1, jnp.arange(1).dtype)))


def take(program: Program, clients: Any, cohort: Any) -> Any:
    """The states of this device's part of the cohort."""
    if not program.resident:
        return clients
    if len(program.place.devices) == 1:
        return jax.tree.map(lambda leaf: leaf[cohort], clients)

    def from_owners(leaf: Any) -> Any:
        at, mine = owned(program, cohort, len(leaf))
        rows = where(mine, leaf[jnp.clip(at, 0, len(leaf) - 1)], 0)
        return jax.lax.psum_scatter(rows, AXIS, tiled=True)

    return jax.tree.map(from_owners, clients)


def put(program: Program, clients: Any, cohort: Any, rows: Any) -> Any:
    """The clients' states with those of the cohort replaced."""
    if not program.resident:
        return rows
    if len(program.place.devices) == 1:
        return jax.tree.map(lambda leaf, row: leaf.at[cohort].set(row), clients, rows)

    def to_owners(leaf: Any, row: Any) -> Any:
        at, mine = owned(program, cohort, len(leaf))
        everyones = jax.lax.all_gather(row, AXIS, tiled=True)
        return leaf.at[jnp.where(mine, at, len(leaf))].set(everyones, mode="drop")

    return jax.tree.map(to_owners, clients, rows)


def owned(program: Program, cohort: Any, share: int) -> tuple[Any, Any]:
    """Where the cohort's clients are among the `share` clients whose states this device keeps, and which are at all."""
    at = padded(program, cohort, -1) - jax.lax.axis_index(AXIS) * share
    return at, (at >= 0) & (at < share)


def padded(program: Program, cohort: Any, filler: int) -> Any:
    """The cohort, lengthened so that every device has as many clients."""
    return jnp.pad(cohort, (0, -len(cohort) % len(program.place.devices)), constant_values=filler)


def exchange_all(
    program: Program,
    trips: tuple[Exchange, ...],
    server: Any,
    rows: Any,
    cohort: Any,
    key: Any,
    world: World,
    measured: bool = True,
) -> tuple[Any, Any, Any]:
    """All trips of one round: the new server state, this device's new client states, and the drift over the cohort."""
    fraction = len(cohort) / program.plan.n_clients
    at = cohort if program.resident else jnp.arange(len(cohort))  # rows of the layout
    # Uniform sampling, so that each of the cohort stands for N / |S| clients: sum p_i u_i is met in expectation.
    w = (world.layout.p[at] / fraction).astype(server[0].dtype)
    everyone = w
    ids, at, w, real = share(program, cohort, at, w)
    drift = jnp.zeros((), server[0].dtype)
    for number, trip in enumerate(trips, start=1):
        down = trip.broadcast(server)
        trip_key = jax.random.fold_in(key, number)
        work = functools.partial(work_of_client, program, trip, down, trip_key, world, measured)
        up, rows, drifts = each_client(program, work, ids, at, rows)
        v = w / everyone.sum() if trip.together else w
        mean = jax.tree.map(lambda leaf, v=v: total(program, v, leaf, real), up)
        server = like(trip.aggregate(server, mean, fraction), server)
        drift += total(program, jnp.full(len(ids), 1 / len(cohort), drift.dtype), drifts, real)
    if not measured:
        drift = jnp.full_like(drift, jnp.nan)
    return server, rows, drift


def share(program: Program, cohort: Any, at: Any, w: Any) -> tuple[Any, Any, Any, Any]:
    """This device's part of the cohort: clients, rows of the layout, weights, and which of them are no padding."""
    devices = len(program.place.devices)
    if devices == 1:
        return cohort, at, w, None
    each = -(-len(cohort) // devices)
    first = jax.lax.axis_index(AXIS) * each
    ids, at, w = (jax.lax.dynamic_slice_in_dim(padded(program, v, 0), first, each) for v in (cohort, at, w))
    return ids, at, w, None if len(cohort) % devices == 0 else first + jnp.arange(each) < len(cohort)


def each_client(program: Program, work: Callable[..., Any], ids: Any, at: Any, rows: Any) -> Any:
    """The clients' work, `width` of them at a time: all at once, one by one, or in between."""
    slots = jnp.arange(len(ids))  # where streamed data lies on this device
    width = program.place.width
    if width >= len(ids):
        return jax.vmap(work)(ids, at, slots, rows)
    return jax.lax.map(lambda one: work(*one), (ids, at, slots, rows), batch_size=None if width == 1 else width)


def total(program: Program, weights: Any, values: Any, real: Any) -> Any:
    """The weighted sum over the cohort, wherever its clients are."""
    if real is not None:
        values = where(real, values, 0)
    here = jnp.tensordot(weights, values, 1)
    return here if len(program.place.devices) == 1 else jax.lax.psum(here, AXIS)


def where(chosen: Any, rows: Any, other: Any) -> Any:
    """The rows that are chosen, and the other in place of the rest."""
    return jnp.where(chosen.reshape(-1, *[1] * (rows.ndim - 1)), rows, other)


def work_of_client(
    program: Program,
    trip: Exchange,
    down: Any,
    trip_key: Any,
    world: World,
    measured: bool,
    i: Any,
    at: Any,
    slot: Any,
    client: Any,
) -> tuple[Any, Any, Any]:
    """Client i's part of a trip, with its gradients bound to its data."""
    plan = program.plan
    offset, size, batch, per_epoch, steps, _ = jax.tree.map(lambda leaf: leaf[at], world.layout)

    def fetch(positions: Any) -> Any:
        if program.streamed:
            return jax.tree.map(lambda leaf: leaf[slot, positions], world.examples)
        return jax.tree.map(lambda leaf: leaf[offset + positions], world.examples)

    everything = jnp.arange(plan.max_size)
    own = fetch(jnp.minimum(everything, size - 1))
    client_key = jax.random.fold_in(trip_key, i)
    order = jax.vmap(lambda e: shuffle(jax.random.fold_in(client_key, e), plan, size))(jnp.arange(plan.epochs))

    def work(form: Form) -> tuple[Any, Any, Any]:
        full_grad = gradient(program, form, own, everything < size if plan.ragged_sizes else None)

        def grad_of_step(k: Any) -> Callable[[Any], Any]:
            if plan.batching == "full":
                return full_grad
            epoch, j = k // per_epoch, k % per_epoch
            if plan.batching == "rows":
                low, high = j * batch, jnp.minimum((j + 1) * batch, size)
            else:
                low, high = j * size // per_epoch, (j + 1) * size // per_epoch
            places = low + jnp.arange(plan.max_batch)
            inside = places < high
            rows = fetch(order[epoch, jnp.minimum(places, size - 1)])
            return gradient(program, form, rows, inside if plan.ragged_batches else None)

        K = plan.max_steps if plan.steps is not None else steps
        up, new, drift = client_work(
            trip, form.split(down), form.split(client), full_grad, grad_of_step, K, plan.max_steps, measured
        )
        return form.join(up), like(form.join(new), client), drift

    form = Form(program.unravel, down.x)
    try:
        return work(form)
    except (TypeError, AttributeError):  # an algorithm that asks for more than arithmetic gets vectors
        return work(form.as_one())


def shuffle(key: Any, plan: Plan, size: Any) -> Any:
    """A random order of a client's examples; it depends on the client's own size only, so deployment draws the same."""
    draws = jax.random.uniform(key, (plan.max_size,), jnp.float32)
    return jnp.argsort(jnp.where(jnp.arange(plan.max_size) < size, draws, 2.0))


def gradient(program: Program, form: Form, batch: Any, inside: Any) -> Callable[[Any], Any]:
    """y -> the gradient of the mean loss over the batch, or over those of its rows that are inside."""
    weights = None if inside is None else inside / inside.sum()

    def slope(y: Any) -> Any:
        products = contextlib.nullcontext()
        if program.precision is not None:
            products = jax.default_matmul_precision("BF16_BF16_F32")
        with products:
            return jax.grad(lambda y: loss_at(program, form.params(y), batch, weights))(y)

    return slope


def loss_at(program: Program, params: Any, batch: Any, weights: Any) -> Any:
    if weights is None:
        return program.loss(params, batch)
    each = jax.vmap(lambda example: program.loss(params, jax.tree.map(lambda leaf: leaf[None], example)))(batch)
    return weights.astype(each.dtype) @ each


def finite(server: Any) -> Any:
    return jnp.all(jnp.stack([jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves(server)]))


def commit(program: Program, state: State, after: State, old: Any, new: Any, cohort: Any, ok: Any) -> State:
    """The state after the round; the last good state, marked as diverged, if that is not finite; no change if ended."""
    alive = ~state.reached & ~state.diverged
    keep = functools.partial(jnp.where, ok & alive)
    clients = put(program, state.clients, cohort, jax.tree.map(keep, new, old))
    kept = jax.tree.map(keep, after._replace(clients=None), state._replace(clients=None))
    return kept._replace(round=state.round + (ok & alive), clients=clients, diverged=state.diverged | (alive & ~ok))


def evaluate(program: Program, state: State, world: World) -> dict[str, Any]:
    """f and the metrics at x, and at the average where one is kept."""
    values = measure(program, state.server[0], world)
    if program.average:
        values |= {f"average_{name}": value for name, value in measure(program, state.average, world).items()}
    return values


def control_error(program: Program, algorithm: Algorithm, state: State, world: World) -> dict[str, Any]:
    """How far the server's control variate is from the mean of its clients', for algorithms that have one.

    Reading all N controls must not cost more than the round: where N is large against S K, this is left to the end.
    """
    if algorithm.invariant is None:
        return {}
    c = getattr(state.server, algorithm.invariant[0])
    plan = program.plan
    if not program.resident or plan.n_clients > 4 * plan.cohort * plan.max_steps:
        return {"control_error": jnp.full((), jnp.nan, c.dtype)}
    c_i, p = getattr(state.clients, algorithm.invariant[1]), world.layout.p.astype(c.dtype)
    if len(program.place.devices) > 1:
        p = jnp.pad(p, (0, len(c_i) * len(program.place.devices) - len(p)))
        p = jax.lax.dynamic_slice_in_dim(p, jax.lax.axis_index(AXIS) * len(c_i), len(c_i))
    return {"control_error": jnp.linalg.norm(c - total(program, p, c_i, None))}


def measure(program: Program, x: Any, world: World) -> dict[str, Any]:
    values = {}
    params = program.unravel(x)
    if "loss" in program.evaluated:
        values["loss"] = training_loss(program, params, world)
    metrics = program.metrics
    if metrics is not None and world.evaluated_on is not None:
        values |= by_first_device(program, lambda: metrics(params, world.evaluated_on))
    return {name: jnp.asarray(value, x.dtype) for name, value in values.items()}


def training_loss(program: Program, params: Any, world: World) -> Any:
    """f, the loss over all examples: in parts that fit into memory, shared out over the devices."""
    devices = len(program.place.devices)
    n = len(jax.tree.leaves(world.examples)[0])
    parts = -(-n // (devices * EVALUATED_AT_ONCE))  # of each device
    size = n // (devices * parts)

    def part(first: Any, count: int) -> Any:
        rows = jax.tree.map(lambda leaf: jax.lax.dynamic_slice_in_dim(leaf, first, count), (world.examples, weights))
        value = loss_at(program, params, *rows)
        return value * (count / n) if weights is None else value

    weights = world.example_weights
    if devices == parts == 1 or size == 0 or not program.divisible:
        return loss_at(program, params, world.examples, weights)
    mine = jax.lax.axis_index(AXIS) * parts if devices > 1 else 0
    here = jnp.sum(jax.lax.map(lambda k: part((mine + k) * size, size), jnp.arange(parts)))
    whole = here if devices == 1 else jax.lax.psum(here, AXIS)
    rest = n - devices * parts * size
    return whole + part(n - rest, rest) if rest else whole


def by_first_device(program: Program, work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What need not be done twice: one device works with all threads, and tells the others."""
    if len(program.place.devices) == 1:
        return work()
    blank = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), jax.eval_shape(work))
    values = jax.lax.cond(jax.lax.axis_index(AXIS) == 0, work, lambda: blank)
    return jax.tree.map(lambda v: jax.lax.psum(v, AXIS), values)


def like(new: Any, old: Any) -> Any:
    """The new state in the old one's precision."""
    return jax.tree.map(lambda n, o: jnp.asarray(n, o.dtype), new, old)
