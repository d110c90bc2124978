"""What crosses the wire, as Flower records: vectors under the paper's names, and one record of plain facts."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from io import BytesIO
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict

from covary.errors import CovaryError
from covary.flower.refusals import NotCovarys

FACTS = "covary"


def pack(facts: Mapping[str, Any], **vectors: Mapping[str, Any]) -> RecordDict:
    """Facts, and groups of vectors by name, as the content of a message."""
    content = RecordDict({FACTS: ConfigRecord({"facts": json.dumps(facts, default=lambda number: number.item())})})
    for group, arrays in vectors.items():
        content[group] = ArrayRecord({name: Array(np.asarray(array)) for name, array in arrays.items()})
    return content


def facts_of(message: Message) -> dict[str, Any]:
    """The facts of a message, which is rejected if it has none."""
    try:
        facts = json.loads(str(message.content.config_records[FACTS]["facts"]))
    except (KeyError, ValueError, RecursionError) as error:
        raise NotCovarys(f"the message is not covary's ({error!r})") from None
    if not isinstance(facts, dict):
        raise NotCovarys("the message is not covary's")
    return facts


def vectors_of(message: Message, group: str, like: Mapping[str, Any], largest: float | None = None) -> dict[str, Any]:
    """A group of vectors, rejected unless they have the names, shapes and types of `like` and are finite.

    With `largest`, numbers above it are rejected too.
    """
    record = message.content.array_records.get(group, {})
    if sorted(record) != sorted(like):
        raise CovaryError(f"{group} has the fields {sorted(record)}, expected {sorted(like)}")
    arrays = {}
    for name, expected in like.items():
        expected, sent = np.asarray(expected), record[name]
        what = f"{group}.{name}"
        if (sent.dtype, tuple(sent.shape)) != (str(expected.dtype), expected.shape):
            came = f"{sent.dtype} of shape {tuple(sent.shape)}"
            raise CovaryError(f"{what} is {came}, expected {expected.dtype} of shape {expected.shape}")
        array = _numbers(what, sent.data, expected)
        if not np.isfinite(array).all():
            raise CovaryError(f"{what} contains NaN or infinity")
        if largest is not None and array.size and np.abs(array).max() > largest:
            raise CovaryError(f"{what} has numbers up to {np.abs(array).max():.3g}; at most {largest:.3g} is allowed")
        arrays[name] = array
    return arrays


def _numbers(what: str, data: bytes, expected: np.ndarray) -> np.ndarray:
    """The array in NumPy's own format. Its header is compared, not parsed: nothing in the bytes is interpreted."""
    header = BytesIO()
    np.lib.format.write_array_header_1_0(header, np.lib.format.header_data_from_array_1_0(expected))
    start = header.getvalue()
    if not data.startswith(start) or len(data) != len(start) + expected.nbytes:
        raise CovaryError(f"{what} is not an array of {expected.dtype} and shape {expected.shape} as NumPy writes it")
    return np.frombuffer(data, expected.dtype, offset=len(start)).reshape(expected.shape)


def check_content(content: RecordDict, groups: Iterable[str], most: int) -> None:
    """Reject a reply with other records than expected, or with more bytes, before anything in it is decoded."""
    strange = set(content) - {FACTS, *groups}
    if strange:
        raise CovaryError(f"its reply has {len(strange)} records that were not asked for")
    size = bytes_of(content)
    if size > most:
        raise CovaryError(f"its reply has {size:,} bytes, and at most {most:,} are expected")


def nbytes(arrays: Mapping[str, np.ndarray]) -> int:
    return sum(np.asarray(array).nbytes for array in arrays.values())


def bytes_of(content: RecordDict) -> int:
    """The bytes of a message's vectors and facts, as they travel."""
    vectors = sum(len(array.data) for record in content.array_records.values() for array in record.values())
    return vectors + sum(
        len(str(value).encode()) for record in content.config_records.values() for value in record.values()
    )
