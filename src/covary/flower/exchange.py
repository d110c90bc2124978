"""One exchange with a cohort: the orders to its nodes, and the uploads that may be counted."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from flwr.app import Message

from covary.algorithm import Exchange
from covary.errors import CovaryError
from covary.flower.deployment import Deployment
from covary.flower.membership import Membership
from covary.flower.merge import Reply, upload_like
from covary.flower.messages import Question
from covary.flower.task import Task
from covary.flower.wire import bytes_of, nbytes, pack, vectors_of


class Collected(NamedTuple):
    """The result of an exchange."""

    replies: dict[str, Reply]  # in the order of the members' numbers
    bytes_down: int
    bytes_up: int


def collect(run: Deployment, members: Membership, exchange: Exchange, task: Task, nodes: dict[str, int]) -> Collected:
    """Send an order to each of these members, and collect the valid replies."""
    server, ledger = run.server, run.ledger
    like = upload_like(exchange, run.algorithm, server)
    shared = pack({}, down=exchange.broadcast(server)._asdict(), buffers=run.buffers)
    orders = {name: ledger.order(name) for name in nodes}
    contents = {}
    for name, order in orders.items():
        own = task._replace(number=ledger.members[name].number, cohort=len(nodes))
        contents[name] = run.content(shared, {"task": own._asdict(), "order": order._asdict()})
    bytes_up = 0

    def read(name: str, message: Message, facts: dict[str, Any]) -> Reply:
        nonlocal bytes_up
        bytes_up += bytes_of(message.content)
        return checked(run, message, facts, orders[name].token, like)

    records = {"up": nbytes(like._asdict()), "buffers": nbytes(run.buffers)}
    replies = members.ask(Question("train", contents, read, records, group=str(task.round)), nodes)
    in_order = {name: replies[name] for name in run.by_number(replies)}
    return Collected(in_order, sum(bytes_of(content) for content in contents.values()), bytes_up)


def checked(run: Deployment, message: Message, facts: dict[str, Any], token: str, like: Any) -> Reply:
    """The reply in a message. It is rejected unless it answers this order with vectors of the right form."""
    if facts.get("token") != token:
        raise CovaryError(f"its token {str(facts.get('token'))[:40]!r} is not the one in its order")
    up = type(like)(**vectors_of(message, "up", like._asdict(), run.settings.largest))
    buffers = vectors_of(message, "buffers", run.buffers, run.settings.largest)
    if any(name.endswith("running_var") and (array < 0).any() for name, array in buffers.items()):
        raise CovaryError("its upload has a variance below zero")
    drift = facts.get("drift")
    return Reply(token, up, buffers, drift if isinstance(drift, float) else math.nan)
