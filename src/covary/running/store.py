"""Stores keep client states outside the devices: in host memory, or on disk for the clients sampled so far."""

from __future__ import annotations

import io
import os
import re
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from covary import trees
from covary.errors import CovaryError, refused
from covary.runs import machine
from covary.runs.files import content_of, reject_links, replace
from covary.runs.rowfile import RowFile

OWNER = "run"  # the file in a store's folder with the id of the checkpointed run that owns the states
ALLOWED = '"device", "host", "disk" or a new or empty folder'


def chosen_store(store: str | Path | None, size: int, room: float, streamed: bool) -> str | Path:
    """Where client states live: the user's choice, else the first place with enough room for their bytes."""
    if store is not None and not isinstance(store, str | Path):
        raise refused("store", ALLOWED, repr(store), "None decides by the size.")
    if streamed and store == "device":
        raise refused("store", '"host", "disk" or a folder for streamed data', repr(store), "Leave it out.")
    if store is None:
        return "device" if size <= room and not streamed else "host" if size <= machine.host_memory() / 3 else "disk"
    return store


def store_folder(store: str | Path, resumable: bool) -> str:
    """The place's name, or its folder, which must be new, empty, or that of the same run if it can be resumed."""
    if store in ("device", "host", "disk"):
        return str(store)
    if isinstance(store, str) and os.sep not in store:
        raise refused("store", ALLOWED, repr(store), f"A folder here is './{store}' or a Path.")
    try:
        Path(store).mkdir(parents=True, exist_ok=True)
        names = {path.name for path in Path(store).iterdir()}
        empty = not names or (resumable and (OWNER in names or names <= {"lock", f"{OWNER}.draft"}))
    except (OSError, ValueError) as error:
        raise refused("store", ALLOWED, f"{str(store)!r} ({error})", "Give a folder you can write to.") from None
    if not empty:
        fix = "Give a new folder: covary does not overwrite the files of another run."
        raise refused("store", ALLOWED, str(store), fix)
    return str(Path(store).absolute())


class HostStore:
    """The states of all clients as arrays in host memory.

    >>> from covary.algorithms.scaffold import Client
    >>> store = HostStore(Client(np.zeros(3)), n_clients=4)
    >>> store.write(np.array([2]), Client(np.ones((1, 3))))
    >>> store.read(np.array([1, 2])).c_i.sum(axis=1).tolist()
    [0.0, 3.0]
    """

    def __init__(self, row: Any, n_clients: int):
        def for_all(leaf: np.ndarray) -> np.ndarray:
            # the system allocates memory only where a row is written
            rows = np.zeros((n_clients, *leaf.shape), leaf.dtype)
            if leaf.any():
                rows[:] = leaf
            return rows

        self.clients = trees.map(for_all, row)

    def read(self, ids: np.ndarray) -> Any:
        return trees.map(lambda rows: rows[ids], self.clients)

    def write(self, ids: np.ndarray, rows: Any) -> None:
        for everyone, new in zip(trees.leaves(self.clients), trees.leaves(rows), strict=True):
            everyone[ids] = new


class DiskStore:
    """The states of all clients in a folder, one file per field, with rows in the order in which clients are first
    sampled.

    Rows are read and written by position, not through a memory map: memory then holds only the cohort, and a full
    disk raises an error instead of a crash. A client never written has the initial row and takes no space. A cohort
    of new clients is one write at the end of the file.

    >>> from covary.algorithms.scaffold import Client
    >>> store = DiskStore(Client(np.zeros(3)), n_clients=10**6)
    >>> store.write(np.array([2, 999_999]), Client(np.ones((2, 3))))
    >>> store.clients.c_i[999_999].tolist(), store.clients.c_i.shape, store.seen.sum()
    ([1.0, 1.0, 1.0], (1000000, 3), np.int64(2))
    """

    def __init__(self, row: Any, n_clients: int, folder: Path | None = None, owner: str | None = None):
        """In the given folder, or else in temporary files that disappear when the process ends, even by a crash.

        `owner` is the id of a run with checkpoints. States that the same run left in the folder are removed.
        """
        self.folder, self.row = folder, row
        temporary = tempfile.TemporaryDirectory(prefix="covary-clients-") if folder is None else None
        path = folder or Path(temporary.name if temporary else "")
        if folder is not None and owner is not None:
            _take_over(folder, owner)
        self.places = np.full(n_clients, -1)  # the number of each client's row in the files
        self.used = 0
        self._form = trees.structure(row)
        self.files = [
            RowFile(path / f"{_name(key, number)}.rows", leaf.shape, leaf.dtype, "x")
            for number, (key, leaf) in enumerate(trees.leaves_with_path(row))
        ]
        if temporary:
            temporary.cleanup()  # the open files remain readable and writable

    def save_places(self) -> None:
        """Save the row number of each client, which a later reader of the folder needs."""
        if self.folder is not None:
            content = io.BytesIO()
            np.save(content, self.places)
            try:
                replace(self.folder / "places.npy", content.getvalue())
            except OSError as error:
                fix = "Free some space, or choose another folder."
                raise CovaryError(f"{self.folder} cannot be written to ({error.strerror}). {fix}") from error

    @property
    def seen(self) -> np.ndarray:
        """Which clients have been written."""
        return self.places >= 0

    @property
    def clients(self) -> Any:
        """The fields; rows are read when they are indexed."""
        initial = trees.leaves(self.row)
        return trees.unflatten(self._form, [Rows(self, f, r) for f, r in zip(self.files, initial, strict=True)])

    def read(self, ids: np.ndarray) -> Any:
        return trees.map(lambda rows: rows[ids], self.clients)

    def write(self, ids: np.ndarray, rows: Any) -> None:
        places = self.places[ids]
        new = places < 0
        places[new] = self.used + np.arange(new.sum())
        for file, values in zip(self.files, trees.leaves(rows), strict=True):
            file.write(places, np.ascontiguousarray(values, file.dtype))
        self.places[ids] = places
        self.used += int(new.sum())


def _take_over(folder: Path, owner: str) -> None:
    """Empty a folder that the same run used before; its checkpoint has the states to resume from."""
    reject_links(folder)
    mark = folder / OWNER
    if mark.exists():
        if content_of(mark, 100).decode(errors="replace") != owner:
            fix = "Choose a new folder: the states of another run are not overwritten."
            raise refused("store", "a folder without client states of another run", str(folder), fix)
        for path in [*folder.glob("*.rows"), folder / "places.npy"]:
            path.unlink(missing_ok=True)
    try:
        replace(mark, owner.encode())
    except OSError as error:
        raise refused(
            "store", "a folder you can write to", f"{folder} ({error.strerror})", "Free some space."
        ) from None


class Rows:
    """One field of a disk store, indexed like an array of shape (N, d). An index reads only its rows."""

    def __init__(self, store: DiskStore, file: RowFile, initial: np.ndarray):
        self._store, self._file, self._initial = store, file, initial
        self.shape, self.dtype = (len(store.places), *file.row_shape), file.dtype

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, index: Any) -> np.ndarray:
        """The rows of some clients as a NumPy array; the first index selects clients."""
        parts: Any = (index or (slice(None),)) if isinstance(index, tuple) else (index,)
        first, rest = parts[0], parts[1:]
        if first is None or first is Ellipsis or np.ndim(first) > 1:
            raise IndexError(
                f"states on disk need an index of clients first; got {first!r}. np.asarray(...) reads all states."
            )
        places = self._store.places[first]
        flat = np.atleast_1d(places)
        rows = np.empty((len(flat), *self.shape[1:]), self.dtype)
        rows[flat < 0] = self._initial
        rows[flat >= 0] = self._file.read(flat[flat >= 0])
        if np.ndim(places) == 0:
            return rows[(0, *rest)]
        return rows[(slice(None) if isinstance(first, slice) else np.arange(len(flat)), *rest)]

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self[:], dtype)


def _name(path: str, number: int) -> str:
    """The field's name if it is a valid file name, else its number."""
    name = path.strip(".")
    return name if re.fullmatch("[a-zA-Z_][a-zA-Z0-9_]*", name) else str(number)
