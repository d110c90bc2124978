"""A Flower grid without processes: client apps called in turn, with faults on demand."""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.common.constant import ErrorCode
from flwr.supercore.task_identity import TaskIdentity


class LoopbackGrid:
    """Nodes by number; `fault(node, message)` may return "lost", "dropped" or a function of the reply."""

    def __init__(self, apps: dict[int, tuple[ClientApp, dict[str, Any]]], fault: Any = None):
        self.apps, self.fault = apps, fault or (lambda node, message: None)
        self.offline: set[int] = set()
        self.replies: dict[str, Message] = {}
        self.sent = 0
        TaskIdentity.task_id = TaskIdentity.run_id = TaskIdentity.node_id = 1

    def get_nodes(self) -> list[Any]:
        return [SimpleNamespace(node_id=i, public_key=f"key {i}".encode()) for i in self.apps if i not in self.offline]

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        ids = []
        for message in messages:
            self.sent += 1
            name = f"message-{self.sent}"
            message.metadata.__dict__["_message_id"] = name
            ids.append(name)
            node = message.metadata.dst_node_id
            fault = self.fault(node, message)
            if fault == "lost" or node in self.offline:
                continue
            app, config = self.apps[node]
            context = Context(1, node, config, RecordDict(), {})
            try:
                reply = app(message, context)
            except Exception as error:
                reply = Message(Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, repr(error)), reply_to=message)
            if fault == "dropped":
                continue
            self.replies[name] = fault(reply) if callable(fault) else reply
        return ids

    def pull_messages(self, ids: Iterable[str]) -> list[Message]:
        return [self.replies.pop(i) for i in list(ids) if i in self.replies]
