"""The clients' examples as PyTorch takes them: tensors, data sets of single items, or loaders with their own batches.

covary cuts tensors and data sets into batches, in the order that every runtime uses. A loader brings its own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset, default_collate

from covary import trees
from covary.data.federated import FederatedData
from covary.draws import Draw, order_of_epoch
from covary.errors import InvalidInput, refused
from covary.running.plan import batch_bounds
from covary.torch.seeds import reseed, seed_of


class Cut(NamedTuple):
    """How a client's examples are cut into the batches of its steps."""

    rule: str  # of `covary.running.plan.batches_of`
    batch: int
    per_epoch: int
    steps: int  # K_i


class Examples(Protocol):
    """The examples of all clients."""

    sizes: np.ndarray  # of each client
    loaders: bool  # whether batches are made elsewhere

    def batches(self, i: int, cut: Cut, draw: Draw) -> Iterator[Any]: ...  # of client i's steps

    def everything(self, i: int, at_once: int) -> Iterator[Any]: ...  # all examples of client i, so many at a time


class Picked(ABC):
    """Examples that covary cuts into batches."""

    loaders = False
    sizes: np.ndarray

    @abstractmethod
    def pick(self, i: int, positions: np.ndarray) -> Any:
        """Some examples of client i as a batch."""

    def batches(self, i: int, cut: Cut, draw: Draw) -> Iterator[Any]:
        for positions in positions_of_steps(int(self.sizes[i]), cut, draw):
            yield self.pick(i, positions)

    def everything(self, i: int, at_once: int) -> Iterator[Any]:
        size = int(self.sizes[i])
        for positions in np.array_split(np.arange(size), -(-size // at_once)):  # BatchNorm cannot take a single one
            yield self.pick(i, positions)


class Rows(Picked):
    """Tensors with one row per example, client after client; or arrays in a folder, of which the picked rows are read.

    >>> rows = Rows((torch.arange(5.0),), sizes=[2, 3])
    >>> rows.pick(1, np.array([0, 2]))
    (tensor([2., 4.]),)
    """

    def __init__(self, examples: Any, sizes: Any, dtype: torch.dtype = torch.float32):
        self.examples, self.sizes, self.dtype = examples, np.asarray(sizes), dtype
        self.offsets = np.concatenate([[0], np.cumsum(self.sizes)[:-1]])

    def pick(self, i: int, positions: np.ndarray) -> Any:
        return self.at(self.offsets[i] + positions)

    def at(self, rows: np.ndarray) -> Any:
        """The examples in these rows."""
        low, high = int(rows[0]), int(rows[-1]) + 1
        if len(rows) == high - low and bool((rows[1:] > rows[:-1]).all()):  # a slice needs no copy
            return trees.map(lambda leaf: self._tensor(leaf[low:high]), self.examples)
        return trees.map(lambda leaf: self._rows_of(leaf, rows), self.examples)

    def to(self, device: torch.device) -> Rows:
        """The same with tensors on a device."""
        return Rows(trees.map(lambda leaf: leaf.to(device), self.examples), self.sizes, self.dtype)

    def _tensor(self, leaf: Any) -> torch.Tensor:
        return leaf if isinstance(leaf, torch.Tensor) else converted(np.array(leaf), self.dtype)

    def _rows_of(self, leaf: Any, rows: np.ndarray) -> torch.Tensor:
        if isinstance(leaf, torch.Tensor):
            return leaf.index_select(0, torch.from_numpy(rows).to(leaf.device))
        return self._tensor(leaf[rows])

    @property
    def nbytes(self) -> int:
        return sum(leaf.nbytes for leaf in trees.leaves(self.examples))


class Items(Picked):
    """Data sets of single items, one per client. An item is made when it is needed, and may be augmented at random."""

    def __init__(self, datasets: Sequence[Any]):
        self.datasets = datasets
        self.sizes = np.array([_length(f"data[{i}]", each) for i, each in enumerate(datasets)])

    def pick(self, i: int, positions: np.ndarray) -> Any:
        dataset = self.datasets[i]
        if hasattr(dataset, "__getitems__"):
            return default_collate(dataset.__getitems__(positions.tolist()))
        return default_collate([dataset[at] for at in positions.tolist()])


class Loaders:
    """Loaders, one per client, whose batches are taken as they come."""

    loaders = True

    def __init__(self, loaders: Sequence[Any]):
        self.each = loaders
        self.sizes = np.array([_examples_in(f"data[{i}]", each) for i, each in enumerate(loaders)])
        self.per_epoch = np.array([len(each) for each in loaders])

    def batches(self, i: int, cut: Cut, draw: Draw) -> Iterator[Any]:
        loader, taken = self.each[i], 0
        reseed(loader, seed_of(draw))
        while taken < cut.steps:
            before = taken
            for batch in loader:
                yield batch
                taken += 1
                if taken == cut.steps:
                    return
            if taken == before:
                raise refused("loader", "at least one batch", "none in a pass", "Check the sampler.")

    def everything(self, i: int, at_once: int) -> Iterator[Any]:
        reseed(self.each[i], int(torch.randint(2**62, ())))  # by the generator that the caller has seeded
        yield from self.each[i]


def positions_of_steps(size: int, cut: Cut, draw: Draw) -> Iterator[np.ndarray]:
    """The positions of each step's batch among a client's examples.

    >>> cut, draw = Cut("rows", batch=2, per_epoch=2, steps=2), Draw(seed=0, round=1, exchange=1, client=0)
    >>> [positions.tolist() for positions in positions_of_steps(3, cut, draw)]
    [[2, 0], [1]]
    """
    order = np.arange(size)
    for k in range(cut.steps):
        if cut.rule != "full" and k % cut.per_epoch == 0:
            order = order_of_epoch(*draw, k // cut.per_epoch, size)
        low, high = batch_bounds(cut.rule, cut.batch, cut.per_epoch, size, k)
        yield order[low:high]


def examples_of(data: Any, dtype: torch.dtype) -> Examples:
    """The examples of all clients, from what the user has.

    Args:
        data: a `FederatedData`; or a list with one entry per client: tensors or arrays in a tuple, dict or list, a data
            set, or a loader.
        dtype: of the module. Real numbers from NumPy are converted to it, and whole numbers to int64, except bytes.
    """
    if isinstance(data, FederatedData):
        if data.streamed:
            return Rows(data.examples, data.sizes, dtype)
        return Rows(trees.map(lambda leaf: converted(leaf, dtype), data.examples), data.sizes)
    fix = "Pass a FederatedData, or one tuple of tensors, Dataset or DataLoader per client."
    if not isinstance(data, Sequence) or not len(data):
        came = f"an empty {type(data).__name__}" if isinstance(data, Sequence) else type(data).__name__
        raise refused("data", "the examples of at least one client", came, fix)
    if all(isinstance(each, TensorDataset) for each in data):
        data = [each.tensors for each in data]
    if all(is_batch(each) for each in data):
        return _together([trees.map(lambda leaf: converted(leaf, dtype), each) for each in data])
    if all(_is_loader(each) for each in data):
        return Loaders(data)
    if all(_is_dataset(each) for each in data):
        if all(isinstance(each, Subset) and isinstance(each.dataset, TensorDataset) for each in data):
            return _together([tuple(t[list(each.indices)] for t in each.dataset.tensors) for each in data])
        return Items(data)
    kinds = ", ".join(sorted({_kind(each) for each in data}))
    raise refused("data", "the same for all clients: tensors or arrays, data sets, or loaders", kinds, fix)


def is_batch(data: Any) -> bool:
    """Whether these are tensors or arrays in a tuple, a dict or a list, not a data set or a loader."""
    kinds = (torch.Tensor, np.ndarray)
    return isinstance(data, (tuple, list, dict, *kinds)) and all(isinstance(leaf, kinds) for leaf in trees.leaves(data))


def converted(leaf: Any, dtype: torch.dtype) -> torch.Tensor:
    """A tensor as it is; an array as a tensor whose type PyTorch's layers and losses take.

    >>> [converted(np.zeros(1, kind), torch.float32).dtype for kind in ("float64", "int32", "uint8")]
    [torch.float32, torch.int64, torch.uint8]
    """
    if isinstance(leaf, torch.Tensor):
        return leaf.detach()
    array = np.ascontiguousarray(leaf)
    array = array.astype(array.dtype.newbyteorder("="), copy=False)
    if array.dtype.kind not in "biuf":
        raise refused("data", "numbers", f"dtype {array.dtype}", "Encode text and dates as numbers.")
    if array.dtype.kind in "iu" and array.dtype != np.uint8:
        return torch.from_numpy(array.astype(np.int64, copy=not array.flags.writeable))
    tensor = torch.from_numpy(array if array.flags.writeable else array.copy())
    return tensor.to(dtype) if array.dtype.kind == "f" else tensor


def moved(batch: Any, device: torch.device) -> Any:
    """A batch on a device. What is no tensor stays as it is."""
    if isinstance(batch, torch.Tensor | tuple | list | dict):
        return trees.map(lambda leaf: _there(leaf, device) if isinstance(leaf, torch.Tensor) else leaf, batch)
    return batch.to(device) if hasattr(batch, "to") else batch  # such as the BatchEncoding of transformers


def rows_in(batch: Any) -> int:
    """The examples of a batch: the length of its first tensor."""
    parts = dict(batch) if hasattr(batch, "keys") else batch
    for leaf in trees.leaves(parts):
        if isinstance(leaf, torch.Tensor) and leaf.ndim:
            return len(leaf)
    raise refused("data", "batches with tensors in tuples, lists or dicts", type(batch).__name__, "Use dict(batch).")


def reject_non_finite(examples: Examples, parameter: str = "data") -> None:
    """Reject NaN and infinity in tensors, with their place."""
    if not isinstance(examples, Rows):
        return
    for name, leaf in trees.leaves_with_path(examples.examples):
        if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() and not bool(leaf.isfinite().all()):
            row = int((~leaf.reshape(len(leaf), -1).isfinite()).any(1).nonzero()[0])
            i = int(np.searchsorted(examples.offsets, row, side="right") - 1)
            whose = f" of client {i}" if parameter == "data" else ""
            raise InvalidInput(
                f"{parameter}{name} has NaN or infinity, first in example {row - examples.offsets[i]}{whose}. Drop or "
                "impute such values before training."
            )


def _together(clients: list[Any]) -> Rows:
    """One store of all clients' tensors."""
    first, sizes = clients[0], []
    for i, client in enumerate(clients):
        leaves = trees.leaves(client)
        if trees.structure(client) != trees.structure(first):
            raise refused(f"data[{i}]", f"nested like data[0], {trees.structure(first)}", trees.structure(client), "")
        lengths = {len(leaf) if leaf.ndim else -1 for leaf in leaves}
        if len(lengths) != 1 or not lengths.isdisjoint({0, -1}):
            shapes = ", ".join(str(tuple(leaf.shape)) for leaf in leaves)
            fix = "Each row is one example; a client needs at least one."
            raise refused(f"data[{i}]", "tensors of one length", f"shapes {shapes}", fix)
        for leaf, own in zip(leaves, trees.leaves(first), strict=True):
            if leaf.shape[1:] != own.shape[1:] or leaf.dtype != own.dtype:
                allowed = f"{own.dtype} of shape (rows{''.join(f', {n}' for n in own.shape[1:])})"
                came = f"{leaf.dtype} of shape {tuple(leaf.shape)}"
                raise refused(f"data[{i}]", f"like data[0]: {allowed}", came, "Give all clients the same features.")
        sizes.append(lengths.pop())
    return Rows(trees.map(lambda *parts: torch.cat(parts), *clients), sizes)


def _is_loader(data: Any) -> bool:
    if isinstance(data, DataLoader):
        return True
    return not isinstance(data, Dataset) and hasattr(data, "__iter__") and not hasattr(data, "__getitem__")


def _is_dataset(data: Any) -> bool:
    if isinstance(data, Dataset):
        return True
    return hasattr(data, "__getitem__") and hasattr(data, "__len__") and not isinstance(data, tuple | dict)


def _kind(data: Any) -> str:
    """What the data of a client is, say "tuple of Tensor, list"."""
    name = type(data).__name__
    inside = data.values() if isinstance(data, dict) else data if isinstance(data, tuple) else ()
    return f"{name} of {', '.join(type(each).__name__ for each in inside)}" if inside else name


def _length(name: str, dataset: Any) -> int:
    try:
        size = len(dataset)
    except TypeError:
        fix = "Give it a length, or read the stream into tensors."
        raise refused(name, "a data set of a known length", "a stream without a length", fix) from None
    if not size:
        raise refused(name, "at least one example", "an empty data set", "Leave the client out.")
    return size


def _examples_in(name: str, loader: Any) -> int:
    """The examples of a loader, which may be an iterable of batches with a length."""
    found = getattr(loader, "sampler", None) or getattr(loader, "dataset", None)
    try:
        size, batches = None if found is None else len(found), len(loader)
    except TypeError:
        fix = "Give it a length, or read the stream into tensors."
        raise refused(name, "batches of a known number", "a stream without a length", fix) from None
    size = sum(rows_in(batch) for batch in loader) if size is None else size
    if not size or not batches:
        came = f"{size} examples in {batches} batches"
        raise refused(name, "at least one batch", came, "Use a smaller batch, or drop_last=False.")
    return size


def _there(leaf: torch.Tensor, device: torch.device) -> torch.Tensor:
    return leaf if leaf.device == device else leaf.to(device, non_blocking=leaf.is_pinned())
