"""A file of rows of equal size, read and written by row number."""

from __future__ import annotations

import errno
import itertools
import os
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from covary.errors import CovaryError, refused
from covary.runs.files import Damaged


class RowFile:
    """A file of rows of equal size, read and written by row number; consecutive rows take one call."""

    def __init__(self, path: Path, row_shape: tuple[int, ...], dtype: Any, mode: str, skip: int = 0):
        self.row_shape, self.dtype, self._skip = row_shape, np.dtype(dtype), skip
        self._bytes = int(np.prod(row_shape, dtype=np.int64)) * self.dtype.itemsize
        flags = {"r": os.O_RDONLY, "x": os.O_RDWR | os.O_CREAT | os.O_EXCL}[mode]
        try:
            self._file = os.open(path, flags | getattr(os, "O_CLOEXEC", 0), 0o600)
        except FileExistsError:
            fix = "Choose a new folder: the states of another run are not overwritten."
            raise refused("store", "a folder without client states", str(path), fix) from None
        self._close = weakref.finalize(self, os.close, self._file)
        self._path = path

    def read(self, places: np.ndarray) -> np.ndarray:
        out = np.empty((len(places), *self.row_shape), self.dtype)
        for first, last in _runs(places):
            self.read_into(out[first:last], int(places[first]))
        return out

    def read_into(self, out: np.ndarray, first: int) -> None:
        """Fill `out`, one or several rows, starting at row `first`."""
        view, at = _bytes(out), self._skip + first * self._bytes
        while view:
            got = os.preadv(self._file, [view], at)
            if got == 0:
                raise Damaged(f"{self._path} is truncated: it ends before row {first}. Write it again.")
            view, at = view[got:], at + got

    def write(self, places: np.ndarray, rows: np.ndarray) -> None:
        for first, last in _runs(places):
            view, at = _bytes(rows[first:last]), self._skip + int(places[first]) * self._bytes
            while view:
                try:
                    done = os.pwritev(self._file, [view], at)
                except OSError as error:
                    if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                        raise
                    raise CovaryError(
                        f"The disk is full: client states cannot be written to {self._path} ({error.strerror}). "
                        "Free some space, or choose another folder: store='/path/with/space'."
                    ) from error
                view, at = view[done:], at + done


def _runs(places: np.ndarray) -> Iterator[tuple[int, int]]:
    """The ranges of consecutive rows: (first, one past the last) of each."""
    ends = [0, *(np.flatnonzero(np.diff(places) != 1) + 1).tolist(), len(places)]
    return ((a, b) for a, b in itertools.pairwise(ends) if a < b)


def _bytes(array: np.ndarray) -> memoryview:
    """The memory of a contiguous array."""
    flat: Any = array.reshape(-1).view(np.uint8)
    return memoryview(flat)
