"""A node's part, whatever its framework: it follows orders with its own data, and keeps its state on its own disk."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp

from covary import algorithms
from covary.algorithm import Algorithm
from covary.checks import non_negative, positive
from covary.errors import refused
from covary.flower.journal import Order
from covary.flower.limits import Limits
from covary.flower.refusals import BuffersUnclipped, KeepsMetrics, OtherModel, OtherSteps, refusal
from covary.flower.state import StateFolder, state_folder
from covary.flower.task import Task, Work
from covary.flower.wire import bytes_of, facts_of, pack, vectors_of

FACTORIES = tuple(getattr(algorithms, name) for name in algorithms.__all__)


class Privacy(NamedTuple):
    """What is done to a change of the model, or to a gradient, before it is kept or sent."""

    clip: float | None = None  # its norm is at most this
    noise: float = 0.0  # then Gaussian noise is added, this times `clip` in every coordinate
    evaluate: bool = True  # loss and metrics are reported

    @property
    def used(self) -> bool:
        return self.clip is not None


def checked_privacy(clip: float | None, noise: float, evaluate: bool | None) -> Privacy:
    non_negative("noise", noise)
    if clip is None:
        if noise:
            raise refused("clip", "set if noise is", None, "The noise is a multiple of clip. Try clip=1.0.")
        return Privacy(evaluate=evaluate is not False)
    positive("clip", clip)
    return Privacy(float(clip), float(noise), bool(evaluate))


class Node(Protocol):
    """What a framework offers to the handlers below. Vectors come and go as NumPy arrays."""

    size: int  # examples

    @property
    def x(self) -> np.ndarray: ...  # a vector of the model's length and type

    @property
    def form(self) -> str: ...  # the model's fingerprint

    @property
    def buffers(self) -> dict[str, np.ndarray]: ...  # what is averaged besides the parameters

    def steps(self, training: dict[str, Any]) -> int: ...  # K

    def batches(self, batch_size: Any) -> tuple[int, int]: ...  # rows of the smallest one, and how many make a pass

    def work(
        self, work: Work, down: Any, client: Any, buffers: Any, privacy: Privacy
    ) -> tuple[Any, Any, dict[str, np.ndarray], float]: ...  # up, client, buffers, drift

    def evaluate(self, x: np.ndarray, buffers: Any) -> tuple[dict[str, float], int]: ...  # values, examples tested on


class Owner(NamedTuple):
    """What a node's owner has decided, in the app."""

    state: str | Path | None
    privacy: Privacy
    limits: Limits
    factories: tuple[Callable[..., Algorithm], ...]  # of the algorithms that a server may name


class Visit(NamedTuple):
    """What a handler works with: one order, and this node."""

    message: Message
    facts: dict[str, Any]
    node: Node
    owner: Owner
    limits: Limits  # the owner's, with those of the node's own configuration
    state: StateFolder
    partition: int | None  # the node's place among the clients, as its owner numbers it


def build_app(node_of: Callable[[Context], Node], owner: Owner) -> ClientApp:
    """A node's ClientApp. It rejects an order that it does not follow, with the name of the reason."""
    if not isinstance(owner.limits, Limits):
        came = type(owner.limits).__name__
        raise refused("limits", "a covary.flower.Limits", came, "Try Limits(smallest_batch=32).")

    def handler(answer: Callable[[Visit], RecordDict]) -> Callable[[Message, Context], Message]:
        def handle(message: Message, context: Context) -> Message:
            try:
                content = answer(_visit(message, context, node_of, owner))
            except (Exception, SystemExit) as error:  # its text may quote data: it stays here
                content = pack(refusal(error))
            return Message(content, reply_to=message)

        return handle

    app = ClientApp()
    app.query()(handler(introduce))
    app.train()(handler(train))
    app.evaluate()(handler(evaluate))
    return app


def _visit(message: Message, context: Context, node_of: Callable[[Context], Node], owner: Owner) -> Visit:
    limits, node = owner.limits.overridden(context.node_config), node_of(context)
    model = node.x.nbytes + sum(buffer.nbytes for buffer in node.buffers.values())
    limits.check_message(bytes_of(message.content), model)
    state = state_folder(owner.state, context.node_config, limits)
    partition = context.node_config.get("partition-id")
    own_number = partition if isinstance(partition, int) else None
    return Visit(message, facts_of(message), node, owner, limits, state, own_number)


def introduce(visit: Visit) -> RecordDict:
    """The reply to a server that does not know this node yet: its examples, steps and buffers."""
    task, node = Task.read(visit.facts["task"]), visit.node
    permitted(task, visit)
    visit.state.ready()  # rejected now rather than in every round
    facts = {"size": node.size, "steps": node.steps(task.training), "buffers": sorted(node.buffers)}
    return pack(facts | {"partition": visit.partition})


def train(visit: Visit) -> RecordDict:
    """The upload that an order asks for. The new state is on the disk, pending, before the upload is returned."""
    # What is asked, and whether it is permitted
    task, order, node = Task.read(visit.facts["task"]), Order(**visit.facts["order"]), visit.node
    visit.limits.check_cohort(task.cohort)
    algorithm = permitted(task, visit)
    exchange, x = task.which.of(algorithm), node.x
    if task.steps is not None and task.steps != node.steps(task.training):
        raise OtherSteps(node.steps(task.training), task.steps)

    # What the server sent
    down = exchange.broadcast(algorithm.init_server(x))
    down = type(down)(**vectors_of(visit.message, "down", down._asdict(), visit.limits.largest_number))
    buffers = vectors_of(visit.message, "buffers", node.buffers)

    # The work
    visit.state.admit(str(order.job))
    draw = visit.state.private(task.draw) if visit.limits.private_batches else task.draw
    work, privacy = Work(algorithm, task.which, task.training, draw), visit.owner.privacy
    start = algorithm.init_client(down.x)
    if not start:
        up, _, buffers, drift = node.work(work, down, start, buffers, privacy)
    else:
        with visit.state.journal(order) as journal:
            fresh = {name: np.asarray(value, x.dtype) for name, value in start._asdict().items()}
            client = type(start)(**journal.begin(order, lambda: fresh))
            up, client, buffers, drift = node.work(work, down, client, buffers, privacy)
            journal.prepare(order, {name: np.asarray(v, x.dtype) for name, v in client._asdict().items()})
    reply = {"token": order.token, "drift": None if privacy.used else float(drift)}
    return pack(reply, up=up._asdict(), buffers=buffers)


def evaluate(visit: Visit) -> RecordDict:
    """Loss and metrics at the server's model, on this node's data."""
    node = visit.node
    _check_model(visit)
    if not visit.owner.privacy.evaluate:
        raise KeepsMetrics("this node does not report its loss and metrics")
    visit.limits.check_rows(node.size)
    x = vectors_of(visit.message, "down", {"x": node.x}, visit.limits.largest_number)["x"]
    buffers = vectors_of(visit.message, "buffers", node.buffers)
    visit.state.admit(None)
    values, tested = node.evaluate(x, buffers)
    visit.limits.check_rows(tested)
    return pack({"values": {name: float(v) for name, v in values.items()}, "tested": tested})


def permitted(task: Task, visit: Visit) -> Algorithm:
    """The algorithm of an order, if the model is this node's, and its owner allows what is asked."""
    node, limits = visit.node, visit.limits
    limits.check_algorithm(str(task.algorithm["name"]))
    _check_model(visit)
    algorithm = task.build(visit.owner.factories)
    limits.check_rows(node.size)
    asked = (task.which.of(algorithm),) if task.warm else algorithm.exchanges
    if any(exchange.step is not None for exchange in asked):
        rows, per_pass = node.batches(task.training["batch_size"])
        limits.check_rows(rows)
        limits.check_steps(node.steps(task.training), per_pass)
    return algorithm


def _check_model(visit: Visit) -> None:
    """Reject a server with another model, and a model that a clip does not cover."""
    node, facts = visit.node, visit.facts
    if facts["form"] != node.form:
        raise OtherModel(f"the server's model is {facts['about']}, this node's {len(node.x)} numbers of {node.x.dtype}")
    if visit.owner.privacy.used and node.buffers:
        raise BuffersUnclipped(f"clip does not cover the averages of {', '.join(node.buffers)}")
