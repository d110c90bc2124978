"""Client states outside the devices: in host memory, or in a sparse file that holds only clients ever sampled."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
import weakref
from pathlib import Path
from typing import Any

import jax
import numpy as np

from covary.errors import CovaryError, refused

BLOCK = 1024  # clients read at a time when all are


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
            rows = np.zeros((n_clients, *leaf.shape), leaf.dtype)  # takes memory only where something else is written
            if leaf.any():
                rows[:] = leaf
            return rows

        self.clients = jax.tree.map(for_all, row)

    def read(self, ids: np.ndarray) -> Any:
        return jax.tree.map(lambda rows: rows[ids], self.clients)

    def write(self, ids: np.ndarray, rows: Any) -> None:
        for everyone, new in zip(jax.tree.leaves(self.clients), jax.tree.leaves(rows), strict=True):
            everyone[ids] = new


class DiskStore:
    """The states of all clients in a folder, one sparse file a field: client i's row is at i times its length.

    Rows are read and written by position, not through a memory map: memory then holds the cohort alone, and a full
    disk is an error that can be told, not a crash. Clients never written have the initial row and take no space.

    >>> from covary.algorithms.scaffold import Client
    >>> store = DiskStore(Client(np.zeros(3)), n_clients=10**6)
    >>> store.write(np.array([2, 999_999]), Client(np.ones((2, 3))))
    >>> store.clients.c_i[999_999].tolist(), store.clients.c_i.shape, store.seen.sum()
    ([1.0, 1.0, 1.0], (1000000, 3), np.int64(2))
    """

    def __init__(self, row: Any, n_clients: int, folder: Path | None = None):
        if folder is None:
            folder = Path(tempfile.mkdtemp(prefix="covary-clients-"))
            self._clean_up = weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        self.folder, self.row = folder, row
        self.seen = np.zeros(n_clients, bool)
        names = getattr(row, "_fields", [str(k) for k in range(len(jax.tree.leaves(row)))])
        leaves, self._form = jax.tree.flatten(row)
        self.files = [
            RowFile(folder / f"{name}.rows", n_clients, leaf.shape, leaf.dtype, "x")
            for name, leaf in zip(names, leaves, strict=True)
        ]

    @property
    def clients(self) -> Any:
        """The fields, read when they are looked at."""
        initial = jax.tree.leaves(self.row)
        return jax.tree.unflatten(self._form, [Rows(self, f, r) for f, r in zip(self.files, initial, strict=True)])

    def read(self, ids: np.ndarray) -> Any:
        return jax.tree.map(lambda rows: rows[ids], self.clients, is_leaf=lambda node: isinstance(node, Rows))

    def write(self, ids: np.ndarray, rows: Any) -> None:
        for file, new in zip(self.files, jax.tree.leaves(rows), strict=True):
            file.write(ids, np.ascontiguousarray(new, file.dtype))
        self.seen[ids] = True


class Rows:
    """One field of a disk store, indexed like an array of shape (N, d); an index reads those rows."""

    def __init__(self, store: DiskStore, file: RowFile, initial: np.ndarray):
        self._store, self._file, self._initial = store, file, initial
        self.shape, self.dtype = (file.n_rows, *file.row_shape), file.dtype

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, index: Any) -> np.ndarray:
        first, rest = index if isinstance(index, tuple) else (index, ())
        ids = np.arange(len(self))[first]
        flat = np.atleast_1d(ids)
        rows = np.empty((len(flat), *self.shape[1:]), self.dtype)
        seen = self._store.seen[flat]
        rows[~seen] = self._initial
        rows[seen] = self._file.read(flat[seen])
        rows = rows[0] if np.ndim(ids) == 0 else rows
        return rows[rest] if np.ndim(ids) == 0 or rest == () else rows[:, rest]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self[:], dtype)


class RowFile:
    """A file of equal rows, read and written by their number."""

    def __init__(self, path: Path, n_rows: int, row_shape: tuple[int, ...], dtype: Any, mode: str, skip: int = 0):
        self.n_rows, self.row_shape, self.dtype, self._skip = n_rows, row_shape, np.dtype(dtype), skip
        self._bytes = int(np.prod(row_shape, dtype=np.int64)) * self.dtype.itemsize
        flags = {"r": os.O_RDONLY, "x": os.O_RDWR | os.O_CREAT | os.O_EXCL}[mode]
        try:
            self._file = os.open(path, flags | getattr(os, "O_CLOEXEC", 0), 0o600)
        except FileExistsError:
            fix = "Give a new folder: states of another run are not overwritten."
            raise refused("store", "a folder without client states", str(path), fix) from None
        self._close = weakref.finalize(self, os.close, self._file)
        if mode == "x":
            os.ftruncate(self._file, n_rows * self._bytes)
        self._path = path

    def read(self, ids: np.ndarray) -> np.ndarray:
        out = np.empty((len(ids), *self.row_shape), self.dtype)
        for k, i in enumerate(ids):
            self.read_into(out[k : k + 1], int(i))
        return out

    def read_into(self, out: np.ndarray, first: int) -> None:
        """Fill `out`, one row or several, from row `first` on."""
        view, at = _bytes(out), self._skip + first * self._bytes
        while view:
            got = os.preadv(self._file, [view], at)
            if got == 0:
                raise CovaryError(f"{self._path} ends before row {first}: it was cut short. Make it again.")
            view, at = view[got:], at + got

    def write(self, ids: np.ndarray, rows: np.ndarray) -> None:
        for k, i in enumerate(ids):
            view, at = _bytes(rows[k : k + 1]), self._skip + int(i) * self._bytes
            while view:
                try:
                    done = os.pwritev(self._file, [view], at)
                except OSError as error:
                    if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                        raise
                    raise CovaryError(
                        f"The disk is full: client states could not be written to {self._path} ({error.strerror}). "
                        "Free some space, or give another folder: store='/path/with/room'."
                    ) from error
                view, at = view[done:], at + done


def _bytes(array: np.ndarray) -> memoryview:
    """A contiguous array's memory."""
    flat: Any = array.reshape(-1).view(np.uint8)
    return memoryview(flat)


def mean_control(clients: Any, field: str, p: np.ndarray, seen: np.ndarray | None = None) -> np.ndarray:
    """sum p_i c_i over all clients, in float64 whatever the states' precision, a block of clients at a time."""
    rows = getattr(clients, field)
    ids = np.arange(len(p))
    total = np.zeros(rows.shape[1:])
    if seen is not None and not seen.all():  # all the others have one and the same row
        total += p[~seen].sum() * np.asarray(rows[int(np.flatnonzero(~seen)[0])], float)
        ids = ids[seen]
    for block in np.split(ids, range(BLOCK, len(ids), BLOCK)):
        total += np.tensordot(p[block], np.asarray(rows[block], float), 1)
    return total
