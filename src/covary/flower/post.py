"""Messages to nodes and their replies: whatever one node sends or fails to send, the others go on."""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import Callable, Mapping
from typing import Any

from flwr.app import Message, RecordDict
from rich.console import Console

from covary.errors import CovaryError
from covary.flower.refusals import explained
from covary.flower.watch import WatchedGrid
from covary.flower.wire import check_content, facts_of, shown

FACTS_BYTES = 2**20  # that a reply may have besides its vectors

console = Console(highlight=False, markup=False, soft_wrap=True)  # what nodes say is shown as it is


def exchange(
    grid: WatchedGrid,
    kind: str,
    nodes: Mapping[str, int],
    contents: Mapping[str, RecordDict],
    look: Callable[[str, Message, dict[str, Any]], Any],
    heed: Callable[[str, dict[str, Any]], None],
    time_left: float,
    group: str = "",
    expected: Mapping[str, int] | None = None,
) -> dict[str, Any]:
    """Send, and look at each reply as it comes, until all are there or time is up.

    `expected` has the records that a reply may have, with their bytes. Who reports an error, refuses (`heed` is told
    what it says), sends more than expected, is refused at the look, or does not answer is named in the log and left
    out.
    """
    expected = expected or {}
    names = list(nodes)
    messages = [
        Message(contents[n], dst_node_id=nodes[n], message_type=kind, ttl=time_left, group_id=group) for n in names
    ]
    sent = grid.push_messages(messages) if messages else []
    waiting = {str(i): name for i, name in zip(sent, names, strict=False) if i is not None}
    seen: dict[str, Any] = {}
    for name in set(names) - set(waiting.values()):
        console.print(f"{name}: its message could not be sent.")
    deadline, pause = time.monotonic() + time_left, 0.02
    late = False
    while waiting and not late:
        late = time.monotonic() >= deadline  # then this is the last look
        _bound_pulls(max(1.0, deadline - time.monotonic()))
        for message in grid.pull_messages(list(waiting)):
            name = waiting.pop(message.metadata.reply_to_message_id, None)
            if name is None:
                console.print("A second reply to one message was dropped.")
                continue
            try:
                if message.has_error():  # its reason may quote anything
                    code = message.error.code
                    raise CovaryError(f"Flower reports error {code}. Its own log says why. Has it approved this app?")
                check_content(message.content, expected, sum(expected.values()) + FACTS_BYTES)
                facts = facts_of(message)
                if "refused" in facts:
                    heed(name, facts)
                    raise CovaryError(explained(facts))
                seen[name] = look(name, message, facts)
            except Exception as error:  # whatever one node sends, the others go on
                why = str(error) if isinstance(error, CovaryError) else repr(error)
                console.print(f"{name} is left out: {shown(why)}")
        time.sleep(pause)
        pause = min(0.1, 1.5 * pause)
    for name in waiting.values():
        console.print(f"{name} is left out: no reply in {time_left:g} s.")
    return seen


def _bound_pulls(seconds: float) -> None:
    """Let Flower wait so long, not two hours, for the rest of a reply whose sender died while it was sending."""
    with contextlib.suppress(ImportError):  # of another version of Flower
        from flwr.supercore.inflatable.inflatable_utils import pull_objects

        if pull_objects.__kwdefaults__ and "max_time" in pull_objects.__kwdefaults__:
            pull_objects.__kwdefaults__["max_time"] = seconds


def identity(info: Any) -> str:
    """A node's name: its public key's fingerprint. It is the same after a restart if the key was registered."""
    if info.public_key:
        return hashlib.sha256(bytes(info.public_key)).hexdigest()[:16]
    return f"node-{info.node_id}"
