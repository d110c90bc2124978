"""Messages to nodes, and their replies: what one node sends, or fails to send, does not stop the others."""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from flwr.app import Message, RecordDict
from flwr.common.constant import ErrorCode

from covary.errors import CovaryError
from covary.flower.log import log, log_bug, shown
from covary.flower.refusals import explained
from covary.flower.watch import WatchedGrid
from covary.flower.wire import check_content, facts_of

FACTS_BYTES = 2**20  # that a reply may have besides its vectors

FAILURES = {
    ErrorCode.LOAD_CLIENT_APP_EXCEPTION: (
        "the node cannot load its client app. Check that `clientapp` in the app's pyproject.toml names one; the node's "
        "own log has the error"
    ),
    ErrorCode.CLIENT_APP_RAISED_EXCEPTION: (
        "its app ended with an error before covary could answer: the node's owner has not approved this app, or it "
        "failed when it was installed or imported. The node's own log says which. An owner approves an app with "
        "`covary node --app`"
    ),
    ErrorCode.MESSAGE_UNAVAILABLE: (
        "the SuperLink does not have the message or the whole reply: it expired, or the node died while it was sending"
    ),
    ErrorCode.REPLY_MESSAGE_UNAVAILABLE: "its reply has expired. Raise round_timeout if it needs more time",
    ErrorCode.NODE_UNAVAILABLE: "the SuperLink no longer hears from the node. Check that it is running and connected",
    ErrorCode.MOD_FAILED_PRECONDITION: "a Flower mod of its client app rejected the message. Remove the mod",
    ErrorCode.INVALID_FAB: (
        "the node could not verify the app's signature. Start it without --trusted-entities, and approve the app with "
        "`covary node --app`"
    ),
    ErrorCode.CLIENT_APP_CRASHED: (
        "the process of its app died or stopped responding, as when memory runs out. The node's own log says more"
    ),
}


class Question(NamedTuple):
    """What some nodes are asked, and how a reply is read."""

    kind: str  # "query", "train" or "evaluate"
    contents: Mapping[str, RecordDict]  # of the message to each node, by its name
    read: Callable[[str, Message, dict[str, Any]], Any]  # (name, reply, its facts) -> what is kept of it
    records: Mapping[str, int] = {}  # that a reply may have besides its facts, with their bytes
    group: str = ""


def ask(
    grid: WatchedGrid,
    question: Question,
    nodes: Mapping[str, int],
    timeout: float,
    on_rejection: Callable[[str, dict[str, Any]], None],
) -> dict[str, Any]:
    """Each reply, as `question.read` reads it, by the node's name, when all have replied or the time is up.

    A node is left out and named in the log if it does not answer, reports an error, rejects the order (`on_rejection`
    gets its reason), sends more than it was asked for, or sends a reply that `read` rejects.
    """
    waiting = _send(grid, question, nodes, timeout)
    kept: dict[str, Any] = {}
    deadline, pause = time.monotonic() + timeout, 0.02
    late = False
    while waiting and not late:
        late = time.monotonic() >= deadline  # then this is the last pull
        _bound_pulls(max(1.0, deadline - time.monotonic()))
        for message in grid.pull_messages(list(waiting)):
            name = waiting.pop(message.metadata.reply_to_message_id, None)
            if name is None:
                log.warning("A second reply to one message was dropped.")
                continue
            try:
                kept[name] = _read(name, message, question, on_rejection)
            except CovaryError as error:
                log.warning("%s is left out: %s", name, shown(error, 600))
            except Exception as error:
                log_bug(name, error)
        time.sleep(pause)
        pause = min(0.1, 1.5 * pause)
    for name in waiting.values():
        log.warning("%s is left out: it did not reply within %g s.", name, timeout)
    return kept


def _send(grid: WatchedGrid, question: Question, nodes: Mapping[str, int], timeout: float) -> dict[str, str]:
    """The names of the nodes that a message was sent to, by the message's id."""
    messages = [
        Message(content, dst_node_id=nodes[name], message_type=question.kind, ttl=timeout, group_id=question.group)
        for name, content in question.contents.items()
    ]
    ids = grid.push_messages(messages) if messages else []
    sent = {str(i): name for i, name in zip(ids, question.contents, strict=False) if i is not None}
    for name in set(question.contents) - set(sent.values()):
        log.warning("%s is left out: its message could not be sent.", name)
    return sent


def _read(name: str, message: Message, question: Question, on_rejection: Callable[[str, dict[str, Any]], None]) -> Any:
    """One reply, as the question reads it. A reply that was not asked for is rejected."""
    if message.has_error():
        raise CovaryError(failure(message.error.code))
    check_content(message.content, question.records, sum(question.records.values()) + FACTS_BYTES)
    facts = facts_of(message)
    if "refused" in facts:
        on_rejection(name, facts)
        raise CovaryError(explained(facts))
    return question.read(name, message, facts)


def failure(code: int) -> str:
    """The meaning of one of Flower's errors. Its own text is not shown, because it may quote anything.

    >>> failure(5)
    'Flower reports error 5: the SuperLink no longer hears from the node. Check that it is running and connected.'
    """
    return f"Flower reports error {code}: {FAILURES.get(code, 'the logs of the node and the SuperLink say why')}."


def _bound_pulls(seconds: float) -> None:
    """Let Flower wait so long, not two hours, for the rest of a reply whose sender died while it was sending."""
    with contextlib.suppress(ImportError):  # of another version of Flower
        from flwr.supercore.inflatable.inflatable_utils import pull_objects

        if pull_objects.__kwdefaults__ and "max_time" in pull_objects.__kwdefaults__:
            pull_objects.__kwdefaults__["max_time"] = seconds


def identity(info: Any) -> str:
    """A node's name: its public key's fingerprint. It is the same after a restart if the key was registered.

    >>> from types import SimpleNamespace
    >>> identity(SimpleNamespace(node_id=7, public_key=b""))
    'node-7'
    """
    if info.public_key:
        return hashlib.sha256(bytes(info.public_key)).hexdigest()[:16]
    return f"node-{info.node_id}"
