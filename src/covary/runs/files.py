"""Files that survive a crash: replaced atomically, checked by a checksum, and locked by one process at a time.

A file that is read may be hostile: links are not followed, and the size is limited. Locks and these checks need a
POSIX system, and so do checkpoints, run folders and deployments.
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

from covary.errors import Corrupted, InvalidInput
from covary.runs.machine import host_memory

Content = tuple[dict[str, np.ndarray], dict[str, Any]]
"""Arrays by name, and facts about them as JSON."""


class Damaged(Corrupted):
    """A file is damaged: its content is not what covary wrote."""


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
        self.path, self.private = path, private  # private: readable by its owner only

    def write(self, arrays: Mapping[str, np.ndarray], facts: Mapping[str, Any]) -> None:
        """Replace the file atomically. When this returns, the new content is on the disk."""
        arrays = {name: np.asarray(array, order="C") for name, array in arrays.items()}
        text = json.dumps(facts, allow_nan=False, default=lambda number: number.item())
        content = save(arrays, {"facts": text, "sha256": _digest(arrays, text)})
        replace(self.path, content, self.private)

    def read(self, most: int | None = None) -> Content | None:
        """The content, or None if there is no file. A damaged file is an error.

        A file of more than `most` bytes (by default half the memory) is an error before it is read.
        """
        try:
            raw = content_of(self.path, host_memory() // 2 if most is None else most)
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
                f"{self.path} is damaged: its checksum does not match. Restore it from a backup or remove it."
            )
        return arrays, facts


def _digest(arrays: Mapping[str, np.ndarray], facts: str) -> str:
    digest = hashlib.sha256(facts.encode())
    for name in sorted(arrays):
        digest.update(f"\0{name} {arrays[name].dtype} {arrays[name].shape}\0".encode())
        digest.update(arrays[name].tobytes())
    return digest.hexdigest()


def replace(path: Path, content: bytes, private: bool = False) -> None:
    """Write a file atomically: after a crash it has either the old content or the new one."""
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
    """The content of a regular file of at most `most` bytes. A link, pipe or device is an error."""
    try:
        number = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        raise
    except OSError as error:
        if not path.is_symlink():
            raise InvalidInput(f"{path} cannot be read ({error.strerror}). Make it readable.") from error
        raise Damaged(
            f"{path} is a link. covary does not follow links in its folders. Replace it by the file itself."
        ) from error
    try:
        about = os.fstat(number)
        if not stat.S_ISREG(about.st_mode):
            raise Damaged(f"{path} is not a regular file. Remove it.")
        if about.st_size > most:
            raise Damaged(f"{path} has {about.st_size:,} bytes; at most {most:,} are allowed. Remove it.")
        with open(number, "rb", closefd=False) as file:
            return file.read(about.st_size)
    finally:
        os.close(number)


def reject_links(folder: Path) -> None:
    """Raise an error if a folder contains a link, because writing through it would change another file.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:  # doctest: +ELLIPSIS
    ...     (Path(folder) / "results.jsonl").symlink_to("elsewhere")
    ...     reject_links(Path(folder))
    Traceback (most recent call last):
    covary.errors.InvalidInput: .../results.jsonl is a link: writing to it would change another file. Remove it.
    """
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_symlink():
                raise InvalidInput(f"{entry.path} is a link: writing to it would change another file. Remove it.")
            if not entry.is_file() and not entry.is_dir():
                raise InvalidInput(f"{entry.path} is neither a file nor a folder. Remove it.")


@contextlib.contextmanager
def held(folder: Path, patience: float = 0.0, private: bool = False) -> Iterator[None]:
    """Lock a folder for this process. The operating system releases the lock when the process ends, even by a crash.

    A private folder loses the permissions of other users.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder, held(Path(folder)), held(Path(folder)):  # doctest: +ELLIPSIS
    ...     pass
    Traceback (most recent call last):
    covary.errors.InvalidInput: ... is in use by process .... Wait until it ends, or choose another folder.
    """
    import fcntl  # POSIX only; imported here so that the rest of the module can be imported without it

    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700 if private else 0o777)
        if private and stat.S_IMODE(folder.stat().st_mode) & 0o077:
            folder.chmod(0o700)
        reject_links(folder)
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        lock = os.open(folder / "lock", flags, 0o600 if private else 0o644)
    except (OSError, ValueError) as error:
        raise InvalidInput(f"{folder} cannot be written to ({error}). Choose another folder.") from None
    deadline = time.monotonic() + patience
    try:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError:
                if time.monotonic() >= deadline:
                    holder = content_of(folder / "lock", 100).decode(errors="replace").strip() or "unknown"
                    fix = "Wait until it ends, or choose another folder."
                    raise InvalidInput(f"{folder} is in use by process {holder}. {fix}") from None
                time.sleep(0.05)
        with contextlib.suppress(OSError):  # on a full disk the lock file has no process id
            os.truncate(lock, 0)
            os.write(lock, str(os.getpid()).encode())
        yield
    finally:
        os.close(lock)
