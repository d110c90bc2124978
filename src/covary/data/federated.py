"""The examples of all clients in one flat array per field."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from covary import trees
from covary.checks import path as checked_path
from covary.data.folder import read_folder, write_folder
from covary.errors import InvalidInput, refused
from covary.runs.machine import device_memory
from covary.runs.rowfile import RowFile

PASS = 16_384  # examples read at a time in a pass over all of them


class FederatedData:
    """The examples of all clients, client after client, and the number of examples of each.

    Args:
        examples: arrays with one row per example, in any nesting (a tuple `(x, y)`, a dict, ...). A model's `loss`
            receives batches with the same nesting.
        sizes: the number of examples of each client; client 0 has the first `sizes[0]` rows, and so on.

    >>> import numpy as np, covary as cv
    >>> data = cv.FederatedData((np.eye(5), np.arange(5)), sizes=[2, 3])
    >>> data
    FederatedData(2 clients, 5 examples, 2 to 3 each)
    >>> data.client(1)[1]
    array([2, 3, 4])
    """

    streamed = False  # True if the data is read from a folder, one cohort at a time

    def __init__(self, examples: Any, sizes: Sequence[int] | np.ndarray):
        self.examples: Any = trees.map(np.asarray, examples)
        try:
            self.sizes: np.ndarray = np.asarray(sizes)
        except ValueError:
            raise refused("sizes", "a list of whole numbers, one per client", sizes, "Count the examples.") from None
        leaves = trees.leaves_with_path(self.examples)
        if not leaves or any(a.ndim == 0 for _, a in leaves):
            raise refused(
                "examples", "arrays with one row per example", _shapes(leaves), "Pass NumPy arrays such as (x, y)."
            )
        if len({len(a) for _, a in leaves}) > 1:
            raise refused("examples", "arrays of equal length", _shapes(leaves), "Each row is one example.")
        if self.sizes.ndim != 1 or self.sizes.size == 0 or self.sizes.dtype.kind not in "iu":
            raise refused("sizes", "a list of whole numbers, one per client", sizes, "Count each client's examples.")
        empty = np.flatnonzero(self.sizes < 1)
        if empty.size:
            raise InvalidInput(
                f"Client {empty[0]} has no examples (sizes[{empty[0]}] = {self.sizes[empty[0]]}). Give every client "
                "at least one, or remove the client."
            )
        if self.sizes.sum() != self.n_examples:
            raise refused(
                "sizes",
                f"numbers with the sum {self.n_examples}, the number of examples",
                int(self.sizes.sum()),
                "Count each client's examples.",
            )
        for path, array in leaves:
            self._reject_non_finite(path, array)

    @classmethod
    def from_clients(cls, clients: Sequence[Any]) -> FederatedData:
        """A data set from one batch per client.

        >>> import numpy as np, covary as cv
        >>> cv.FederatedData.from_clients([(np.zeros((3, 2)), np.zeros(3)), (np.ones((1, 2)), np.ones(1))])
        FederatedData(2 clients, 4 examples, 1 to 3 each)
        """
        if not isinstance(clients, Sequence) or len(clients) == 0:
            came = f"an empty {type(clients).__name__}" if isinstance(clients, Sequence) else type(clients).__name__
            raise refused("clients", "a list of at least one batch", came, "Pass one (x, y) per client.")
        batches = [trees.map(np.asarray, batch, is_leaf=lambda node: isinstance(node, list)) for batch in clients]
        sizes = []
        for i, batch in enumerate(batches):
            leaves = trees.leaves(batch)
            if trees.structure(batch) != trees.structure(batches[0]) or not leaves:
                raise refused(
                    f"clients[{i}]", "nested like clients[0]", trees.structure(batch), "Pass one (x, y) per client."
                )
            if any(leaf.ndim == 0 for leaf in leaves) or len({len(leaf) for leaf in leaves}) != 1:
                shapes = ", ".join(str(leaf.shape) for leaf in leaves)
                raise refused(f"clients[{i}]", "arrays of equal length", f"shapes {shapes}", "Each row is one example.")
            for leaf, first in zip(leaves, trees.leaves(batches[0]), strict=True):
                if leaf.shape[1:] != first.shape[1:]:
                    allowed = f"of shape (rows, {', '.join(map(str, first.shape[1:]))})"
                    raise refused(
                        f"clients[{i}]", allowed, f"shape {leaf.shape}", "Give all clients the same features."
                    )
            sizes.append(len(leaves[0]))
        return cls(trees.map(lambda *parts: np.concatenate(parts), *batches), sizes)

    @staticmethod
    def write(folder: str | Path, clients: Iterable[Any]) -> None:
        """Write a federated data set to a new folder, client by client. It need not fit into memory.

        Args:
            folder: the new folder; it must not exist.
            clients: the examples of each client, in order: a list or a generator.

        >>> import numpy as np, tempfile, covary as cv
        >>> folder = tempfile.mkdtemp() + "/visits"
        >>> cv.FederatedData.write(folder, ((np.ones((1 + i, 4)), np.arange(1 + i)) for i in range(3)))
        >>> cv.FederatedData.open(folder)
        FederatedData(3 clients, 6 examples, 1 to 3 each)
        """
        if not isinstance(clients, Iterable):
            raise refused(
                "clients", "a list or generator of batches", type(clients).__name__, "Yield one (x, y) per client."
            )

        def checked() -> Iterator[Any]:
            for i, client in enumerate(clients):
                if i == 0:
                    FederatedData.from_clients([client])  # the same checks as for data in memory
                yield client

        write_folder(checked_path("folder", folder), checked())

    @staticmethod
    def open(folder: str | Path, stream: bool | None = None) -> FederatedData:
        """Open a data set that `write` wrote.

        Args:
            folder: the folder.
            stream: True reads each round's cohort when it is needed, False loads everything onto the device. By
                default a data set larger than a quarter of the memory is streamed.
        """
        if stream is not None and not isinstance(stream, bool):
            raise refused("stream", "True, False or None", repr(stream), "None decides by the size.")
        examples, sizes = read_folder(checked_path("folder", folder))
        if stream is None:
            stream = sum(leaf.nbytes for leaf in trees.leaves(examples)) > device_memory() / 4
        return StreamedData(examples, sizes) if stream else FederatedData(examples, sizes)

    @property
    def n_clients(self) -> int:
        return len(self.sizes)

    @property
    def n_examples(self) -> int:
        return len(trees.leaves(self.examples)[0])

    @cached_property
    def offsets(self) -> np.ndarray:
        """The first row of each client."""
        return np.concatenate([[0], np.cumsum(self.sizes)[:-1]])

    def client(self, i: int) -> Any:
        """The examples of client i, as one batch."""
        if not isinstance(i, int | np.integer) or not 0 <= i < self.n_clients:
            raise refused("i", f"between 0 and {self.n_clients - 1}", i, "Clients are counted from 0.")
        rows = slice(self.offsets[i], self.offsets[i] + self.sizes[i])
        return trees.map(lambda a: a[rows], self.examples)

    def label_counts(self) -> np.ndarray:
        """The number of examples per client and label, for examples `(x, y)` with whole-number labels.

        >>> import numpy as np, covary as cv
        >>> cv.FederatedData((np.zeros(5), np.array([0, 0, 2, 2, 1])), sizes=[2, 3]).label_counts()
        array([[2, 0, 0],
               [0, 1, 2]])
        """
        if not isinstance(self.examples, tuple) or len(self.examples) != 2 or self.examples[1].dtype.kind not in "biu":
            raise refused(
                "examples", "a pair (x, y) with whole-number labels", type(self.examples).__name__, "Pass (x, y)."
            )
        labels = self.examples[1].astype(int)
        if labels.ndim != 1 or labels.min() < 0:
            raise refused("labels", "one whole number of 0 or more per row", f"shape {labels.shape}", "Renumber them.")
        parts = np.split(labels, self.offsets[1:])
        return np.stack([np.bincount(part, minlength=int(labels.max()) + 1) for part in parts])

    def __repr__(self) -> str:
        return (
            f"FederatedData({self.n_clients} clients, {self.n_examples} examples, "
            f"{self.sizes.min()} to {self.sizes.max()} each)"
        )

    def _reject_non_finite(self, name: str, array: np.ndarray) -> None:
        if array.dtype.kind not in "biuf":
            raise refused(f"examples{name}", "numbers", f"dtype {array.dtype}", "Encode text and dates as numbers.")
        if array.dtype.kind != "f" or np.isfinite(array).all():
            return
        row = int(np.flatnonzero(~np.isfinite(array.reshape(len(array), -1)).all(axis=1))[0])
        client = int(np.searchsorted(self.offsets, row, side="right") - 1)
        raise InvalidInput(
            f"examples{name} has NaN or infinity, first in row {row} (example {row - self.offsets[client]} of client "
            f"{client}). Drop or impute such values before training."
        )


class StreamedData(FederatedData):
    """A data set that stays in its folder. Each round reads only the cohort's examples."""

    streamed = True

    def __init__(self, examples: Any, sizes: np.ndarray):
        """From arrays that are memory maps of `.npy` files."""
        self.examples, self.sizes = examples, sizes
        self._files = [
            RowFile(Path(leaf.filename), leaf.shape[1:], leaf.dtype, "r", skip=leaf.offset)
            for leaf in trees.leaves(examples)
        ]

    def gather(self, cohort: np.ndarray, rows: int, spare: int) -> Any:
        """The cohort's examples, `rows` rows per client, followed by `spare` empty clients."""

        def read(file: RowFile) -> np.ndarray:
            out = np.zeros((len(cohort) + spare, rows, *file.row_shape), file.dtype)
            for place, i in zip(out, cohort, strict=False):
                file.read_into(place[: self.sizes[i]], int(self.offsets[i]))
            return out

        return trees.unflatten(trees.structure(self.examples), [read(file) for file in self._files])

    def passes(self) -> Iterator[tuple[Any, np.ndarray]]:
        """All examples in order, a block at a time, with the client of each."""
        for first in range(0, self.n_examples, PASS):
            count = min(PASS, self.n_examples - first)
            parts = [np.empty((count, *file.row_shape), file.dtype) for file in self._files]
            for file, out in zip(self._files, parts, strict=True):
                file.read_into(out, first)
            clients = np.searchsorted(self.offsets, np.arange(first, first + count), side="right") - 1
            yield trees.unflatten(trees.structure(self.examples), parts), clients


def _shapes(leaves: Sequence[tuple[str, np.ndarray]]) -> str:
    shapes = ", ".join(f"examples{path} of shape {a.shape}" for path, a in leaves[:4])
    return (shapes + (", ..." if len(leaves) > 4 else "")) or "nothing"
