"""Why a node does not follow an order.

The text of an error may quote the rows it failed on, or the paths of the machine it happened on. So the server gets the
name of the error and a reference number; the text and the traceback stay in the node's own log, under that number. The
server's log explains the names below in its own words.
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
    """An order that a node does not follow. `meaning` is what the server's log says about it."""

    meaning: ClassVar[str] = "it failed"
    facts: Mapping[str, Any] = {}  # numbers and names that the server acts on


class Stale(Refused):
    meaning = "it has followed a newer order, perhaps of another server"


class StateLost(Refused):
    """The client does not have the state that the server has counted."""

    meaning = "it does not have the state that the server has counted"

    def __init__(self, why: str, epoch: int = -1):
        super().__init__(why)
        self.facts = {"epoch": epoch}  # of the client's state; the next one must be newer


class SharedState(Refused):
    meaning = (
        "its state folder belongs to another node. If two nodes use one folder, or a copy of it, give each its own. If "
        "its key is new, give it a new folder, and drop the old member with forget_after"
    )


class NoState(Refused):
    meaning = 'it has no folder for its state. Start it with state="/some/folder" in its node configuration'


class OtherSteps(Refused):
    """The server expects another number of steps than this node takes now."""

    meaning = "its number of examples has changed, and so has its number of steps, which the server uses from now on"

    def __init__(self, steps: int, expected: int):
        super().__init__(f"this node now takes {steps} steps, and the server expects {expected}")
        self.facts = {"steps": steps}


class OtherModel(Refused):
    meaning = (
        "its model differs in names, shapes, types or frozen parameters. Use one model, and one setting of "
        "jax_enable_x64, on all machines"
    )


class UnknownAlgorithm(Refused):
    meaning = "its app knows no algorithm of this name. Pass your own factory to the client app too: factories=[...]"


class BeyondLimit(Refused):
    """An order that the node's owner does not allow."""

    meaning = "its owner does not allow it"

    def __init__(self, limit: str, allowed: str, came: Any, fix: str):
        super().__init__(f"{limit}: this node allows {allowed}; the server asks for {came}. {fix}")
        self.facts = {"limit": limit}


class NotFinite(Refused):
    meaning = "its new state is not finite: eta_l is too large for its data"


class NotCovarys(Refused):
    meaning = "it received a message that covary did not write"


class BuffersUnclipped(Refused):
    meaning = "it clips its uploads, and a clip does not cover averaged buffers. Use a model without buffers"


class KeepsMetrics(Refused):
    meaning = "it does not report its loss and metrics"


HINTS = {
    "smallest_batch": "Use a fraction as batch_size, such as 0.1. The last batch of a pass counts too, as do test data",
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


def refusal(error: BaseException) -> dict[str, Any]:
    """What a node sends in place of a result; the error itself goes to the node's own log."""
    reference = secrets.token_hex(4)
    if isinstance(error, Refused):
        log.warning("Order rejected (reference %s). %s: %s", reference, type(error).__name__, error)
    else:
        log.error("Order failed (reference %s).", reference, exc_info=error)
    facts = error.facts if isinstance(error, Refused) else {}
    return {"refused": _name(error), "reference": reference, **facts}


def _name(error: BaseException) -> str:
    """The type's name if a known library defines it: a name that an app made up may quote data too."""
    kind = type(error)
    return kind.__name__ if kind.__module__.split(".")[0] in KNOWN else "Exception"


def explained(facts: Mapping[str, Any]) -> str:
    """The server's log line about a rejected order. It has none of the node's own text.

    >>> explained({"refused": "BeyondLimit", "limit": "most_jobs", "reference": "0a1b2c3d"})
    'BeyondLimit (most_jobs): its owner does not allow it. See reference 0a1b2c3d in its own log.'
    >>> explained({"refused": "KeyError", "reference": "0a1b2c3d"})
    'KeyError: it failed. See reference 0a1b2c3d in its own log.'
    >>> explained({"refused": "patient 12 has", "reference": "no number"})
    'an error without a name: it failed. See its own log.'
    """
    name, limit, reference = (str(facts.get(key, "")) for key in ("refused", "limit", "reference"))
    what = name if re.fullmatch(r"[A-Za-z_]\w{0,63}", name) else "an error without a name"
    which = f" ({limit})" if re.fullmatch(r"[a-z_]{1,32}", limit) else ""
    where = f"reference {reference} in its own log" if re.fullmatch(r"[0-9a-f]{8}", reference) else "its own log"
    hint = f" {HINTS[limit]}." if limit in HINTS else ""
    return f"{what}{which}: {MEANINGS.get(name, Refused.meaning)}.{hint} See {where}."
