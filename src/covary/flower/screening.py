"""The size of each upload beside the others, and the uploads that are left out because they are too large.

A mean has no defence against one wrong term. So the norm of every upload and its cosine with the sum of the others are
measured and written into the history, and an upload with several times the median norm is not counted. To the journal
it is an upload that never arrived: the node drops the state that goes with it, and c stays the mean of the c_i.

Like is compared with like. A node whose c_i is still zero takes longer steps than one whose c_i has settled, so the
first uploads of an epoch are compared with first uploads only. A node that takes more steps may go further, in
proportion but at most 25 times as far: its number of steps is its own claim. Buffers are compared by their change.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from covary.flower.journal import Member, norm
from covary.flower.merge import Arrays, Reply

FEWEST = 3  # norms for a median to be meaningful
FURTHER = 25.0  # how many times as far a node with more steps may go
BUFFERS = "buffers"  # the name under which buffers are compared, beside the fields of an upload


def screened(
    exchange: int,
    replies: Mapping[str, Reply],
    members: Mapping[str, Member],
    buffers: Arrays,
    earlier: Iterable[Mapping[str, Any]],
    bound: float | None,
) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """The nodes to leave out, each with its multiple of the median norm; and a record of each field's norms.

    `exchange` is the number of the exchange in its round, `buffers` are the server's, `earlier` the records of the same
    epoch, and `bound` is the largest multiple that is counted, or None.
    """
    first = {name: not members[name].counted for name in replies}
    left_out: dict[str, float] = {}
    records = []
    fields = next(iter(replies.values())).up._fields if replies else ()
    for field in (*fields, *((BUFFERS,) if fields and buffers else ())):
        uploads = {name: _sent(reply, field, buffers) for name, reply in replies.items()}
        norms = {name: norm(array) for name, array in uploads.items()}
        for group in (True, False):
            own = {name: norms[name] for name in replies if first[name] is group}
            steps = {name: members[name].steps for name in own}
            past = _first_norms(earlier, exchange, field) if group else []
            for name, multiple in _multiples(own, steps, past).items():
                if bound is not None and multiple > bound:
                    left_out[name] = max(multiple, left_out.get(name, 0.0))
        records.append(
            {
                "trip": exchange,
                "field": field,
                "members": [members[name].number for name in replies],
                "steps": [members[name].steps for name in replies],
                "first": list(first.values()),
                "norm": list(norms.values()),
                "cosine": _cosines(list(uploads.values()), list(norms.values())),
            }
        )
    for record in records:
        record["left_out"] = [members[name].number for name in left_out]
    return left_out, records


def _sent(reply: Reply, field: str, buffers: Arrays) -> np.ndarray:
    if field != BUFFERS:
        return getattr(reply.up, field)
    return np.concatenate([np.ravel(reply.buffers[name] - old) for name, old in buffers.items()])


def _multiples(norms: Mapping[str, float], steps: Mapping[str, int], past: list[tuple[float, int]]) -> dict[str, float]:
    """Each norm as a multiple of the median, divided by what more steps than usual account for."""
    if len(norms) + len(past) < FEWEST:
        return {}
    usual = float(np.median([*norms.values(), *(each for each, _ in past)]))
    K = float(np.median([*steps.values(), *(each for _, each in past)]))
    if not usual > 0:
        return {}
    return {name: value / usual / min(max(steps[name] / K, 1.0), FURTHER) for name, value in norms.items()}


def _first_norms(earlier: Iterable[Mapping[str, Any]], exchange: int, field: str) -> list[tuple[float, int]]:
    """The norms and steps of the counted first uploads of an epoch."""
    found = []
    for record in earlier:
        if (record["trip"], record["field"]) == (exchange, field):
            rows = zip(record["members"], record["first"], record["norm"], record["steps"], strict=True)
            found += [(size, K) for i, first, size, K in rows if first and i not in record["left_out"]]
    return found


def _cosines(uploads: list[np.ndarray], norms: list[float]) -> list[float | None]:
    """The cosine of each upload with the sum of the others; None if there is no direction."""
    total = np.zeros(uploads[0].shape)
    for upload in uploads:
        total += upload
    cosines: list[float | None] = []
    for upload, size in zip(uploads, norms, strict=True):
        others = total - upload
        length = float(np.linalg.norm(others))
        alone = length <= 1e-12 * sum(norms) or not size
        cosines.append(None if alone else float(others @ upload) / (size * length))
    return cosines
