"""Files that survive a crash: written whole or not at all, checked when read, held by one process at a time."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

from covary.errors import CovaryError

Content = tuple[dict[str, np.ndarray], dict[str, Any]]
"""Arrays by name, and facts about them that JSON can hold."""


class Damaged(CovaryError):
    """A file is not what was written."""


class File:
    """Arrays and facts in one safetensors file with a checksum.

    >>> import tempfile, numpy as np
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     file = File(Path(folder) / "state")
    ...     print(file.read())
    ...     file.write({"x": np.arange(3.0)}, {"round": 7})
    ...     file.read()
    None
    ({'x': array([0., 1., 2.])}, {'round': 7})
    """

    def __init__(self, path: Path):
        self.path = path

    def write(self, arrays: Mapping[str, np.ndarray], facts: Mapping[str, Any]) -> None:
        """Replace the file. When this returns, the new content is on the disk; before, the old one is."""
        arrays = {name: np.asarray(array, order="C") for name, array in arrays.items()}
        told = json.dumps(facts, allow_nan=False, default=lambda number: number.item())
        content = save(arrays, {"facts": told, "sha256": _digest(arrays, told)})
        self.path.parent.mkdir(parents=True, exist_ok=True)
        draft = self.path.with_name(self.path.name + ".draft")
        with draft.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(self.path)
        folder = os.open(self.path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def read(self) -> Content | None:
        """The content, or None if there is no file. A file that is not what was written is refused."""
        try:
            raw = self.path.read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return None
        try:
            arrays = load(raw)
            length = int.from_bytes(raw[:8], "little")
            notes = json.loads(raw[8 : 8 + length])["__metadata__"]
            whole = _digest(arrays, notes["facts"]) == notes["sha256"]
            facts = json.loads(notes["facts"])
        except (SafetensorError, ValueError, KeyError, TypeError):
            whole, arrays, facts = False, {}, {}
        if not whole:
            raise Damaged(
                f"{self.path} is damaged: its checksum does not fit its content. Restore it from a backup or remove it."
            )
        return arrays, facts


def _digest(arrays: Mapping[str, np.ndarray], told: str) -> str:
    digest = hashlib.sha256(told.encode())
    for name in sorted(arrays):
        digest.update(f"\0{name} {arrays[name].dtype} {arrays[name].shape}\0".encode())
        digest.update(arrays[name].tobytes())
    return digest.hexdigest()


@contextlib.contextmanager
def held(folder: Path, patience: float = 0.0) -> Iterator[None]:
    """Hold a folder against other processes; the operating system lets go of it when this process ends, however.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder, held(Path(folder)), held(Path(folder)):  # doctest: +ELLIPSIS
    ...     pass
    Traceback (most recent call last):
    covary.errors.CovaryError: ... is in use by process .... Wait until it ends, or give another folder.
    """
    import fcntl  # not on Windows, where the rest of covary works

    folder.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + patience
    with (folder / "lock").open("a") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError:
                if time.monotonic() >= deadline:
                    holder = (folder / "lock").read_text().strip() or "unknown"
                    fix = "Wait until it ends, or give another folder."
                    raise CovaryError(f"{folder} is in use by process {holder}. {fix}") from None
                time.sleep(0.05)
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield
