"""Reading gzipped IDX files (the format of MNIST and EMNIST) that may be damaged or hostile."""

from __future__ import annotations

import gzip
import hashlib
import math
import struct
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np

from covary.errors import InvalidInput

MAGIC = {"images": 0x00000803, "labels": 0x00000801}  # unsigned bytes in three dimensions or in one
LARGEST = 2**31  # bytes of an unpacked file; EMNIST's largest has 547 million


class Official(NamedTuple):
    """The checksum and size of an official file."""

    sha256: str
    size: int


def read_idx(path: Path, kind: str, fix: str, official: Mapping[str, Official] | None = None) -> np.ndarray:
    """The array in a gzipped IDX file of `kind` "images" or "labels", checked against the official list if given.

    A file that unpacks to more than its header declares, or to more than `LARGEST` bytes, is an error.
    """
    if not path.is_file():
        raise InvalidInput(f"{path} is missing. {fix}")
    if official is not None:
        _check_official(path, fix, official)
    try:
        with gzip.open(path) as file:
            magic, count = struct.unpack(">II", _exactly(file, 8))
            if magic != MAGIC[kind]:
                raise InvalidInput(f"{path} is not a file of {kind}: {_found(magic, kind)}. {fix}")
            shape = (count,) if kind == "labels" else (count, *struct.unpack(">II", _exactly(file, 8)))
            if math.prod(shape) > LARGEST:
                came = f"{math.prod(shape):,} bytes; at most {LARGEST:,} are allowed"
                raise InvalidInput(f"{path} declares {came}. {fix}")
            data = _exactly(file, math.prod(shape))
            if file.read(1):
                raise InvalidInput(f"{path} is longer than its header declares ({shape}). {fix}")
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise InvalidInput(f"{path} is truncated or not a gzip file ({error}). {fix}") from None
    return np.frombuffer(data, np.uint8).reshape(shape)


def read_pair(
    images: Path, labels: Path, fix: str, official: Mapping[str, Official] | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Images of shape (n, height, width) and their n labels."""
    x, y = read_idx(images, "images", fix, official), read_idx(labels, "labels", fix, official)
    if len(x) != len(y):
        raise InvalidInput(
            f"{images} has {len(x)} images but {labels} has {len(y)} labels. The files do not match. {fix}"
        )
    return x, y


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _check_official(path: Path, fix: str, official: Mapping[str, Official]) -> None:
    digest, expected = sha256_of(path), official[path.name]
    if digest == expected.sha256:
        return
    other = next((name for name, file in official.items() if file.sha256 == digest), None)
    size = path.stat().st_size
    if other is not None:
        reason = f"it is the official {other} under another name"
    elif size != expected.size:
        reason = f"it has {size:,} bytes, the official file has {expected.size:,}"
    else:
        reason = f"its sha256 is {digest}, the official one is {expected.sha256}"
    raise InvalidInput(f"{path} is not the official file: {reason}. {fix}")


def _exactly(file: gzip.GzipFile, count: int) -> bytes:
    data = file.read(count)
    if len(data) < count:
        raise EOFError(f"{count - len(data):,} bytes are missing at its end")
    return data


def _found(magic: int, kind: str) -> str:
    other = next((name for name, number in MAGIC.items() if number == magic), None)
    return (
        f"it holds {other}; the files may be swapped"
        if other
        else f"it starts with {magic:#010x}, not {MAGIC[kind]:#010x}"
    )
