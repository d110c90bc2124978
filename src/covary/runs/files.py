"""Files that survive a crash: written whole or not at all, checked when read, held by one process at a time.

Nothing here trusts what it reads: links are not followed, and a file may be no larger than it can rightly be.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import stat
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

from covary.errors import CovaryError
from covary.runs import machine

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

    def __init__(self, path: Path, private: bool = False):
        self.path, self.private = path, private  # private: for nobody else to read

    def write(self, arrays: Mapping[str, np.ndarray], facts: Mapping[str, Any]) -> None:
        """Replace the file. When this returns, the new content is on the disk; before, the old one is."""
        arrays = {name: np.asarray(array, order="C") for name, array in arrays.items()}
        told = json.dumps(facts, allow_nan=False, default=lambda number: number.item())
        content = save(arrays, {"facts": told, "sha256": _digest(arrays, told)})
        replace(self.path, content, self.private)

    def read(self, most: int | None = None) -> Content | None:
        """The content, or None if there is no file. A file that is not what was written is refused.

        So is one of more than `most` bytes, or of half the memory, before it is read.
        """
        try:
            raw = content_of(self.path, machine.memory() // 2 if most is None else most)
        except (FileNotFoundError, NotADirectoryError):
            return None
        try:
            arrays = load(raw)
            length = int.from_bytes(raw[:8], "little")
            notes = json.loads(raw[8 : 8 + length])["__metadata__"]
            whole = _digest(arrays, notes["facts"]) == notes["sha256"]
            facts = json.loads(notes["facts"])
            whole = whole and isinstance(facts, dict)
        except (SafetensorError, ValueError, KeyError, TypeError, RecursionError):
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


def replace(path: Path, content: bytes, private: bool = False) -> None:
    """Put a file in the place of another, if there is one: at every moment there is the old one or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700 if private else 0o777)
    draft = path.with_name(path.name + ".draft")
    draft.unlink(missing_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL  # not through a link
    with open(os.open(draft, flags, 0o600 if private else 0o666), "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def content_of(path: Path, most: int) -> bytes:
    """What is in a file of at most so many bytes. What is no file (a link, a pipe, a device) is refused."""
    try:
        number = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        raise
    except OSError as error:
        if not path.is_symlink():
            raise CovaryError(f"{path} cannot be read ({error.strerror}). Make it readable.") from error
        raise Damaged(
            f"{path} is a link, and covary follows none in its folders. Put the file itself there."
        ) from error
    try:
        about = os.fstat(number)
        if not stat.S_ISREG(about.st_mode):
            raise Damaged(f"{path} is not a file. Remove it.")
        if about.st_size > most:
            raise Damaged(f"{path} has {about.st_size:,} bytes, and at most {most:,} can be right. Remove it.")
        with open(number, "rb", closefd=False) as file:
            return file.read(about.st_size)
    finally:
        os.close(number)


def refuse_links(folder: Path) -> None:
    """A folder to write in has files and folders of its own, not links to others' files.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:  # doctest: +ELLIPSIS
    ...     (Path(folder) / "results.jsonl").symlink_to("elsewhere")
    ...     refuse_links(Path(folder))
    Traceback (most recent call last):
    covary.errors.CovaryError: .../results.jsonl is a link: what is written there would change another file. Remove it.
    """
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_symlink():
                what = "is a link: what is written there would change another file"
                raise CovaryError(f"{entry.path} {what}. Remove it.")
            if not entry.is_file() and not entry.is_dir():
                raise CovaryError(f"{entry.path} is neither a file nor a folder. Remove it.")


@contextlib.contextmanager
def held(folder: Path, patience: float = 0.0, private: bool = False) -> Iterator[None]:
    """Hold a folder against other processes; the operating system lets go of it when this process ends, however.

    A private folder is closed to other users, even if it was open to them before.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder, held(Path(folder)), held(Path(folder)):  # doctest: +ELLIPSIS
    ...     pass
    Traceback (most recent call last):
    covary.errors.CovaryError: ... is in use by process .... Wait until it ends, or give another folder.
    """
    import fcntl  # not on Windows, where the rest of covary works

    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700 if private else 0o777)
        if private and stat.S_IMODE(folder.stat().st_mode) & 0o077:
            folder.chmod(0o700)
        refuse_links(folder)
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        lock = os.open(folder / "lock", flags, 0o600 if private else 0o644)
    except (OSError, ValueError) as error:
        raise CovaryError(f"{folder} cannot be written to ({error}). Give another folder.") from None
    deadline = time.monotonic() + patience
    try:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError:
                if time.monotonic() >= deadline:
                    holder = content_of(folder / "lock", 100).decode(errors="replace").strip() or "unknown"
                    fix = "Wait until it ends, or give another folder."
                    raise CovaryError(f"{folder} is in use by process {holder}. {fix}") from None
                time.sleep(0.05)
        with contextlib.suppress(OSError):  # where the disk is full, nobody is told who holds it
            os.truncate(lock, 0)
            os.write(lock, str(os.getpid()).encode())
        yield
    finally:
        os.close(lock)
