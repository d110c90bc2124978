"""Why a node does not follow an order.

The text of an error may quote the rows it failed on, or the paths of the machine it happened on. So the server gets the
name of the error and a reference number; the text and the trace stay in the node's own log, under that number. What
the names below mean, the server's log says in its own words.
"""

from __future__ import annotations

import logging
import re
import secrets
import sys
from collections.abc import Mapping
from typing import Any, ClassVar

from covary.errors import CovaryError

log = logging.getLogger("covary.node")


class Refused(CovaryError):
    """An order that a node does not follow. A subclass says in `meaning` what the server may tell its operator."""

    meaning: ClassVar[str] = "its own log says why"
    facts: Mapping[str, Any] = {}  # numbers and names that the server acts on


class Stale(Refused):
    meaning = "it has followed a newer order, perhaps of another server"


class StateLost(Refused):
    """The client does not have the state that the server counts on."""

    meaning = "it does not have the state that the server counts on"

    def __init__(self, why: str, epoch: int = -1):
        super().__init__(why)
        self.facts = {"epoch": epoch}  # that of the client's state, for the server to go beyond


class SharedState(Refused):
    meaning = (
        "its state folder belongs to another node. Either two nodes use one folder, or a copy of one: give each its "
        "own. Or its key is new: give it a new folder, and let the old member go with forget_after"
    )


class NoState(Refused):
    meaning = 'it has no folder for its state. Start it with state="/some/folder" in its node configuration'


class OtherSteps(Refused):
    """The server counts on another number of steps than this node takes now."""

    meaning = "the number of its examples changed, and with it its steps; the server takes note"

    def __init__(self, steps: int, expected: int):
        super().__init__(f"this node now takes {steps} steps, and the server counts on {expected}")
        self.facts = {"steps": steps}


class OtherModel(Refused):
    meaning = (
        "its model differs in names, shapes, types or frozen parameters. Use one model, and one setting of "
        "jax_enable_x64, on all machines"
    )


class UnknownAlgorithm(Refused):
    meaning = "its app knows no algorithm of this name. Pass your own factory to the client app too: factories=[...]"


class BeyondLimit(Refused):
    """An order outside what the node's owner allows."""

    meaning = "its owner does not allow it"

    def __init__(self, limit: str, allowed: str, came: Any, fix: str):
        super().__init__(f"{limit}: this node allows {allowed}; the server asks for {came}. {fix}")
        self.facts = {"limit": limit}


class NotFinite(Refused):
    meaning = "its new state is not finite: eta_l is too large for its data"


class NotCovarys(Refused):
    meaning = "it received a message that is not covary's"


class BuffersUnclipped(Refused):
    meaning = "it clips, and a clip does not cover the averages of buffers. Use a model without them"


class KeepsMetrics(Refused):
    meaning = "it does not report its loss and metrics"


HINTS = {
    "smallest_batch": "Use a fraction as batch_size, such as 0.1: the last batch of a pass counts, and so do test data",
    "whole_passes": "Use local_epochs",
    "most_steps": "Lower local_steps or local_epochs",
    "fewest_steps": "Raise local_steps or local_epochs",
    "smallest_cohort": "Raise clients_per_round",
}
KNOWN = sys.stdlib_module_names | {"covary", "jax", "jaxlib", "numpy", "pandas", "polars", "scipy", "sklearn", "torch"}

MEANINGS = {
    kind.__name__: kind.meaning
    for kind in (
        Stale,
        StateLost,
        SharedState,
        NoState,
        OtherSteps,
        OtherModel,
        UnknownAlgorithm,
        BeyondLimit,
        NotFinite,
        NotCovarys,
        BuffersUnclipped,
        KeepsMetrics,
    )
}


def told(error: BaseException) -> dict[str, Any]:
    """What a node answers in place of a result, after writing the whole story to its own log."""
    reference = secrets.token_hex(4)
    if isinstance(error, Refused):
        log.warning("Order refused (reference %s). %s: %s", reference, type(error).__name__, error)
    else:
        log.error("Order failed (reference %s).", reference, exc_info=error)
    facts = error.facts if isinstance(error, Refused) else {}
    return {"refused": _name(error), "reference": reference, **facts}


def _name(error: BaseException) -> str:
    """The type's name, if it is of a library: a name that an app made up may quote data, too."""
    kind = type(error)
    return kind.__name__ if kind.__module__.split(".")[0] in KNOWN else "Exception"


def explained(facts: Mapping[str, Any]) -> str:
    """What the server's log says of a refusal. Nothing of it is the node's own text.

    >>> explained({"refused": "BeyondLimit", "limit": "most_jobs", "reference": "0a1b2c3d"})
    'BeyondLimit (most_jobs): its owner does not allow it. Reference 0a1b2c3d in its own log.'
    >>> explained({"refused": "KeyError", "reference": "0a1b2c3d"})
    'KeyError: its own log says why. Reference 0a1b2c3d in its own log.'
    >>> explained({"refused": "patient 12 has", "reference": "no number"})
    'an error without a name: its own log says why.'
    """
    name, limit, reference = (str(facts.get(key, "")) for key in ("refused", "limit", "reference"))
    what = name if re.fullmatch(r"[A-Za-z_]\w{0,63}", name) else "an error without a name"
    which = f" ({limit})" if re.fullmatch(r"[a-z_]{1,32}", limit) else ""
    where = f" Reference {reference} in its own log." if re.fullmatch(r"[0-9a-f]{8}", reference) else ""
    hint = f" {HINTS[limit]}." if limit in HINTS else ""
    return f"{what}{which}: {MEANINGS.get(name, 'its own log says why')}.{hint}{where}"
