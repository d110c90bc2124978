"""A node's part: it follows orders with its own data, and keeps its state on its own disk."""

from __future__ import annotations

import functools
import hashlib
import secrets
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp

from covary import algorithms
from covary._engine.devices import Place, on_devices
from covary._engine.evaluate import Evaluation, measure
from covary._engine.local import LocalProgram, work_of_client
from covary._engine.plan import Layout, LocalPlan, batches_of, plan_local_work
from covary.algorithm import Algorithm, Exchange, rebuild
from covary.checks import flag, non_negative, positive, whole
from covary.client import Guard
from covary.errors import refused
from covary.flower.journal import Order
from covary.flower.limits import Limits, smallest_batch_of
from covary.flower.refusals import (
    BuffersUnclipped,
    KeepsMetrics,
    NotCovarys,
    OtherModel,
    OtherSteps,
    UnknownAlgorithm,
    told,
)
from covary.flower.state import StateFolder, state_folder
from covary.flower.wire import bytes_of, facts_of, pack, vectors_of
from covary.problem import Problem
from covary.training import LocalWork

FACTORIES = tuple(getattr(algorithms, name) for name in algorithms.__all__)


class Task(NamedTuple):
    """What is asked of a node besides the vectors: the facts of an instruction."""

    algorithm: dict[str, Any]  # name, numbers, options
    training: dict[str, Any]  # local_steps, local_epochs, batch_size
    seed: int
    round: int
    trip: int  # from 1
    warm: bool  # a trip of the warm start
    steps: int | None  # K, where the server forms from it what option II leaves unsent
    number: int  # i
    cohort: int  # nodes that are asked in this trip

    @classmethod
    def read(cls, facts: Any) -> Task:
        """The task of an instruction, refused unless its numbers are what they are said to be."""
        try:
            task = cls(**facts)
            for name, least, most in (("seed", 0, 2**32 - 1), ("round", 0, 2**31 - 1), ("trip", 1, 8)):
                whole(name, getattr(task, name), least, most)
            for name in ("number", "cohort"):
                whole(name, getattr(task, name), 0)
            flag("warm", task.warm)
            if task.steps is not None:
                whole("steps", task.steps, 1)
        except (TypeError, ValueError) as error:
            raise NotCovarys(f"the task is not covary's ({error})") from None
        return task

    def build(self, factories: Iterable[Callable[..., Algorithm]]) -> Algorithm:
        """The algorithm that is named, with its numbers checked as always."""
        known = {factory.__name__: factory for factory in factories}
        name = self.algorithm["name"]
        if name not in known:
            raise UnknownAlgorithm(f"the server names the algorithm {name!r}; this node knows {', '.join(known)}")
        return known[name](**self.algorithm["numbers"], **self.algorithm["options"])

    def exchange(self, algorithm: Algorithm) -> Exchange:
        return _exchange(algorithm, self.trip, self.warm, self.steps)


def _exchange(algorithm: Algorithm, trip: int, warm: bool, steps: int | None) -> Exchange:
    trips = (algorithm.warm_start,) if warm else algorithm.trips(steps)
    if trip > len(trips) or (found := trips[trip - 1]) is None:
        raise NotCovarys(f"{algorithm.name} has no {'warm start' if warm else f'trip {trip}'}")
    return found


class Privacy(NamedTuple):
    """What is done to a change of the model, or to a gradient, before it is kept or sent."""

    clip: float | None = None  # its norm is at most this
    noise: float = 0.0  # then Gaussian noise is added, this times `clip` in every coordinate
    evaluate: bool = True  # loss and metrics are told

    @property
    def used(self) -> bool:
        return self.clip is not None


class Node(Protocol):
    """What a framework has to offer for the handlers below. Vectors come and go as NumPy arrays."""

    size: int  # examples

    @property
    def x(self) -> np.ndarray: ...  # a vector of the model's length and type

    @property
    def form(self) -> str: ...  # what the vector's numbers are: equal for equal models

    @property
    def buffers(self) -> dict[str, np.ndarray]: ...  # what is averaged beside the parameters

    def steps(self, training: dict[str, Any]) -> int: ...  # K

    def batches(self, batch_size: Any) -> tuple[int, int]: ...  # rows of the smallest one, and how many make a pass

    def work(
        self, task: Task, algorithm: Algorithm, down: Any, client: Any, buffers: Any, privacy: Privacy
    ) -> tuple[Any, Any, dict[str, np.ndarray], float]: ...  # up, client, buffers, drift

    def evaluate(self, x: np.ndarray, buffers: Any) -> tuple[dict[str, float], int]: ...  # values, examples tested on


def client_app(
    problem: Problem | Callable[[Context], Problem],
    *,
    state: str | Path | None = None,
    clip: float | None = None,
    noise: float = 0.0,
    evaluate: bool | None = None,
    limits: Limits = Limits(),  # noqa: B008 (frozen)
    factories: Iterable[Callable[..., Algorithm]] = (),
) -> ClientApp:
    """A Flower ClientApp for a JAX model: any algorithm that the server names, on this node's own data.

    Args:
        problem: this node's data and model, with one client in it, or a function of Flower's `Context` that builds
            it; `context.node_config` has what the node was started with.
        state: the folder for this node's control variate; by default the node's setting `state`, as in
            `covary node --state /var/lib/covary`.
        clip: the largest norm of a change of the model (and of a gradient) that leaves this node.
        noise: Gaussian noise on top, as a multiple of `clip`, in every coordinate. Both are applied before anything
            is kept or sent, so that what this node keeps is what the server counted.
        evaluate: whether this node tells its loss and metrics at a model that the server sends. By default it does,
            unless it clips: from enough exact losses a server can work out exact gradients.
        limits: what the owner of this node allows a server to ask for: `covary.flower.Limits`.
        factories: algorithms of your own that the server may name, beside covary's.

    >>> import numpy as np, covary as cv
    >>> from covary.flower import client_app
    >>> def problem(context):  # this hospital's table
    ...     rng = np.random.default_rng(context.node_config["partition-id"])
    ...     x = rng.normal(size=(50, 3))
    ...     data = cv.FederatedData.from_clients([(x, (x[:, 0] > 0).astype(int))])
    ...     return cv.supervised(cv.models.logistic_regression(3, 2), data)
    >>> app = client_app(problem)
    """

    def node(context: Context) -> Node:
        return JaxNode(problem if isinstance(problem, Problem) else problem(context))

    return build_app(node, state, checked_privacy(clip, noise, evaluate), limits, (*FACTORIES, *factories))


def checked_privacy(clip: float | None, noise: float, evaluate: bool | None) -> Privacy:
    non_negative("noise", noise)
    if clip is None:
        if noise:
            raise refused("clip", "a norm where there is noise", None, "Noise is a multiple of it. Try clip=1.0.")
        return Privacy(evaluate=evaluate is not False)
    positive("clip", clip)
    return Privacy(float(clip), float(noise), bool(evaluate))


def build_app(
    node_of: Callable[[Context], Node],
    state: str | Path | None,
    privacy: Privacy,
    limits: Limits,
    factories: tuple[Callable[..., Algorithm], ...],
) -> ClientApp:
    """The handlers of a node, whatever its framework. What it does not do, it refuses by name."""
    app = ClientApp()
    if not isinstance(limits, Limits):
        raise refused("limits", "a covary.flower.Limits", type(limits).__name__, "Try Limits(smallest_batch=32).")

    def answer(work: Callable[[Message, Visit], RecordDict]) -> Callable[[Message, Context], Message]:
        def handle(message: Message, context: Context) -> Message:
            try:
                own = limits.overridden(context.node_config)
                node = node_of(context)
                own.check_message(
                    bytes_of(message.content), node.x.nbytes + sum(b.nbytes for b in node.buffers.values())
                )
                folder = state_folder(state, context.node_config, own)
                partition = context.node_config.get("partition-id")
                visit = Visit(facts_of(message), node, own, folder, partition if isinstance(partition, int) else None)
                content = work(message, visit)
            except (Exception, SystemExit) as error:  # its text may quote data: it stays here
                content = pack(told(error))
            return Message(content, reply_to=message)

        return handle

    def algorithm_of(task: Task, visit: Visit) -> Algorithm:
        """The algorithm of an order, if the model is this node's, and its owner allows what is asked."""
        visit.limits.check_algorithm(str(task.algorithm["name"]))
        _check_model(visit.node, visit.facts, privacy)
        algorithm = task.build(factories)
        visit.limits.check_rows(visit.node.size)
        asked = (task.exchange(algorithm),) if task.warm else algorithm.exchanges
        if any(exchange.step is not None for exchange in asked):
            rows, per_pass = visit.node.batches(task.training["batch_size"])
            visit.limits.check_rows(rows)
            visit.limits.check_steps(visit.node.steps(task.training), per_pass)
        return algorithm

    @app.query()
    @answer
    def hello(message: Message, visit: Visit) -> RecordDict:
        task, node = Task.read(visit.facts["task"]), visit.node
        algorithm_of(task, visit)
        visit.state.ready()  # refused now rather than in every round
        found = {"size": node.size, "steps": node.steps(task.training), "buffers": sorted(node.buffers)}
        return pack(found | {"partition": visit.partition})

    @app.train()
    @answer
    def train(message: Message, visit: Visit) -> RecordDict:
        task, order, node = Task.read(visit.facts["task"]), Order(**visit.facts["order"]), visit.node
        visit.limits.check_cohort(task.cohort)
        algorithm = algorithm_of(task, visit)
        exchange, x = task.exchange(algorithm), node.x
        if task.steps is not None and task.steps != node.steps(task.training):
            raise OtherSteps(node.steps(task.training), task.steps)
        down = exchange.broadcast(algorithm.init_server(x))
        down = type(down)(**vectors_of(message, "down", down._asdict(), visit.limits.largest_number))
        buffers = vectors_of(message, "buffers", node.buffers)
        start = algorithm.init_client(down.x)
        visit.state.admit(str(order.job))
        private = visit.state.privately(task) if visit.limits.private_batches else task

        def work(client: Any) -> tuple[Any, Any, dict[str, np.ndarray], float]:
            return node.work(private, algorithm, down, client, buffers, privacy)

        if not start:
            up, _, buffers, drift = work(start)
        else:
            with visit.state.journal(order) as journal:
                fresh = {name: np.asarray(value, x.dtype) for name, value in start._asdict().items()}
                client = type(start)(**journal.begin(order, lambda: fresh))
                up, client, buffers, drift = work(client)
                journal.prepare(order, {name: np.asarray(v, x.dtype) for name, v in client._asdict().items()})
        reply = {"token": order.token, "drift": None if privacy.used else float(drift)}
        return pack(reply, up=up._asdict(), buffers=buffers)

    @app.evaluate()
    @answer
    def evaluate(message: Message, visit: Visit) -> RecordDict:
        node = visit.node
        _check_model(node, visit.facts, privacy)
        if not privacy.evaluate:
            raise KeepsMetrics("this node does not report its loss and metrics")
        visit.limits.check_rows(node.size)
        x = vectors_of(message, "down", {"x": node.x}, visit.limits.largest_number)["x"]
        buffers = vectors_of(message, "buffers", node.buffers)
        visit.state.admit(None)
        values, tested = node.evaluate(x, buffers)
        visit.limits.check_rows(tested)
        return pack({"values": {name: float(v) for name, v in values.items()}, "tested": tested})

    return app


class Visit(NamedTuple):
    """What a handler works with: an instruction's facts, and this node."""

    facts: dict[str, Any]
    node: Node
    limits: Limits
    state: StateFolder
    partition: Any  # the node's place among the clients, as its owner numbers it


def _check_model(node: Node, facts: dict[str, Any], privacy: Privacy) -> None:
    """Refuse a server with another model, and a model that a clip does not cover."""
    if facts["form"] != node.form:
        raise OtherModel(f"the server's model is {facts['about']}, this node's {len(node.x)} numbers of {node.x.dtype}")
    if privacy.used and node.buffers:
        raise BuffersUnclipped(f"clip does not cover the averages of {', '.join(node.buffers)}")


def form_of_params(params: Any) -> str:
    """A fingerprint of params: the names, shapes and types of the arrays, in their order in the flat vector."""
    leaves = jax.tree_util.tree_leaves_with_path(params)
    told = [(jax.tree_util.keystr(path), tuple(leaf.shape), str(leaf.dtype)) for path, leaf in leaves]
    return hashlib.sha256(repr(told).encode()).hexdigest()


class JaxNode:
    """One client of a `Problem`, by the same compiled functions as in simulation."""

    def __init__(self, problem: Problem):
        if not isinstance(problem, Problem):
            raise refused("problem", "a Problem", type(problem).__name__, "Build one with covary.supervised.")
        if problem.n_clients != 1:
            fix = "A node has its own data only: FederatedData.from_clients([(x, y)])."
            raise refused("problem", "of one client", f"{problem.n_clients} clients", fix)
        self.problem = problem
        self.size = int(problem.data.sizes[0])
        self.x, self.unravel = problem.start(None, 0)
        self.form = form_of_params(jax.eval_shape(problem.init, jax.random.key(0)))
        self.place = Place((jax.devices()[0],), width=1)
        self.buffers: dict[str, np.ndarray] = {}

    def steps(self, training: dict[str, Any]) -> int:
        return self._plan(training)[0].max_steps

    def batches(self, batch_size: Any) -> tuple[int, int]:
        return smallest_batch_of(batch_size, self.size), int(batches_of(batch_size, np.array([self.size]))[2][0])

    def _plan(self, training: Mapping[str, Any]) -> tuple[LocalPlan, Layout]:
        plan, layout = plan_local_work(LocalWork(**training), self.problem.data.sizes)
        self.problem.refuse_other_losses(one_by_one=plan.ragged_batches)
        return plan, Layout(*(int(field[0]) for field in layout))

    def work(
        self, task: Task, algorithm: Algorithm, down: Any, client: Any, buffers: Any, privacy: Privacy
    ) -> tuple[Any, Any, dict[str, np.ndarray], float]:
        plan, layout = self._plan(task.training)
        program = LocalProgram(plan, self.problem.loss, self.unravel)
        recipe = algorithm.recipe or algorithm
        run = _compiled_work(program, recipe, layout, (task.trip, task.warm, task.steps), privacy)
        noise = np.array([secrets.randbits(32), secrets.randbits(32)], np.uint32)  # nobody else knows it
        key = np.asarray(jax.random.key_data(jax.random.key(task.seed)))
        examples, _ = on_devices(self.problem, self.place)
        done = run(dict(algorithm.numbers), down, client, key, task.round, task.number, noise, examples)
        up, client, drift = jax.tree.map(np.asarray, done)
        return up, client, buffers, float(drift)

    def evaluate(self, x: np.ndarray, buffers: Any) -> tuple[dict[str, float], int]:
        problem = self.problem
        names = ("loss", *problem.metric_names)
        evaluation = Evaluation(names, problem.loss, problem.metrics, self.unravel, not problem.mixes_examples)
        examples, tested_on = on_devices(problem, self.place)
        values = _compiled_measure(evaluation, self.place, x, examples, None, tested_on)
        tested = self.size if problem.test is None else len(jax.tree.leaves(problem.test)[0])
        return {name: float(value) for name, value in values.items()}, tested


_compiled_measure = jax.jit(measure, static_argnums=(0, 1))


@functools.lru_cache(maxsize=64)
def _compiled_work(
    program: LocalProgram,
    recipe: Any,
    layout: Layout,
    which: tuple[int, bool, int | None],
    privacy: Privacy,
) -> Callable[..., tuple[Any, Any, Any]]:
    """`(numbers, down, client, key, r, i, noise, examples) -> up, client, drift`: an exchange, compiled.

    `which` exchange: its number, whether it is the warm start's, and K where the server knows it.
    """

    def work(numbers: Any, down: Any, client: Any, key: Any, r: Any, i: Any, noise: Any, examples: Any) -> Any:
        exchange = _exchange(rebuild(recipe, numbers), *which)
        key = jax.random.fold_in(jax.random.fold_in(jax.random.wrap_key_data(key), r), which[0])
        guard = _guard(privacy, jax.random.wrap_key_data(noise)) if privacy.used else None

        def fetch(positions: Any) -> Any:
            return jax.tree.map(lambda leaf: leaf.at[positions].get(mode="promise_in_bounds"), examples)

        client_key = jax.random.fold_in(key, i)
        return work_of_client(program, exchange, down, client, fetch, layout, client_key, guard=guard)

    return jax.jit(work)


def _guard(privacy: Privacy, key: Any) -> Guard:
    clip, noise, _ = privacy
    assert clip is not None

    def guard(v: Any, which: int) -> Any:
        v = v * (clip / jnp.maximum(jnp.linalg.norm(v), clip))
        return v + noise * clip * jax.random.normal(jax.random.fold_in(key, which), v.shape, v.dtype)

    return guard
