"""A federated data set in a folder: one `.npy` file per array of the examples, and the clients' sizes."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from covary import trees
from covary.errors import CovaryError, InvalidInput, refused
from covary.runs.files import content_of
from covary.runs.machine import host_memory

FORMAT = 1
_HEADER = 128  # bytes before an array: enough for NumPy's header of every allowed shape


def write_folder(folder: Path, clients: Iterable[Any]) -> None:
    """Write the folder completely or not at all: it gets its name when it is complete."""
    if folder.exists():
        raise refused("folder", "a new folder", str(folder), "Choose another name, or remove the folder.")
    draft = folder.with_name(f".{folder.name}.{os.getpid()}")
    draft.mkdir(parents=True)
    try:
        _write(draft, clients)
        draft.rename(folder)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise


def _write(folder: Path, clients: Iterable[Any]) -> None:
    sizes: list[int] = []
    first: Any = None
    described: Any = None
    files: list[Any] = []
    try:
        for i, client in enumerate(clients):
            arrays = trees.map(np.asarray, client, is_leaf=lambda node: isinstance(node, list))
            leaves, form = trees.leaves(arrays), trees.structure(arrays)
            if first is None:
                described = _described(client)
                first = trees.unflatten(form, [leaf[:0] for leaf in leaves])
                files = [(folder / f"{k}.npy").open("wb") for k in range(len(leaves))]
                for file in files:
                    file.write(b"\0" * _HEADER)
            alike = [(leaf.shape[1:], leaf.dtype) for leaf in leaves if leaf.ndim]
            if form != trees.structure(first) or alike != [(a.shape[1:], a.dtype) for a in trees.leaves(first)]:
                came = ", ".join(f"shape {leaf.shape}, dtype {leaf.dtype}" for leaf in leaves)
                allowed = ", ".join(f"(rows, {str(a.shape[1:])[1:-1]}), {a.dtype}" for a in trees.leaves(first))
                raise refused(f"clients[{i}]", f"like client 0: {allowed}", came, "Give all clients the same features.")
            whole = len({len(leaf) for leaf in leaves}) == 1 and len(leaves[0]) > 0
            if not whole or any(leaf.dtype.kind == "f" and not np.isfinite(leaf).all() for leaf in leaves):
                raise refused(
                    f"clients[{i}]",
                    "at least one example, in arrays of equal length with finite values",
                    ", ".join(f"shape {leaf.shape}" for leaf in leaves) + (", NaN or infinity" if whole else ""),
                    "Leave out the client, or drop or impute such values.",
                )
            for file, leaf in zip(files, leaves, strict=True):
                file.write(np.ascontiguousarray(leaf).data)
            sizes.append(len(leaves[0]))
        if first is None:
            raise refused("clients", "at least one client", "none", "Yield one batch of examples per client.")
        for file, leaf in zip(files, trees.leaves(first), strict=True):
            shape = (sum(sizes), *leaf.shape[1:])
            text = repr({"descr": leaf.dtype.str, "fortran_order": False, "shape": shape}).encode()
            file.seek(0)
            file.write(b"\x93NUMPY\x01\x00" + (_HEADER - 10).to_bytes(2, "little") + text.ljust(_HEADER - 11) + b"\n")
    finally:
        for file in files:
            file.close()
    np.save(folder / "sizes.npy", np.array(sizes))
    about = {"format": FORMAT, "form": _numbered(described, iter(range(len(files))))}
    (folder / "data.json").write_text(json.dumps(about) + "\n")


def read_folder(folder: Path) -> tuple[Any, np.ndarray]:
    """The examples, as memory maps, which are read only where they are used, and the clients' sizes."""
    try:
        about = json.loads(content_of(folder / "data.json", 2**20))
        if about["format"] != FORMAT:
            raise refused(
                "folder", f"in format {FORMAT}", about["format"], "Write it again with this version of covary."
            )
        sizes = _mapped(folder / "sizes.npy")
        examples = _rebuilt(about["form"], folder)
        leaves = trees.leaves(examples)
        if sizes.nbytes > host_memory() / 16:
            raise ValueError(f"sizes.npy declares {sizes.nbytes:,} bytes, which is too large")
        sizes = np.array(sizes)
        if sizes.ndim != 1 or sizes.dtype.kind not in "iu" or len(sizes) == 0 or sizes.min() < 1:
            raise ValueError("sizes.npy is not a list of positive whole numbers")
        most = min(len(leaf) for leaf in leaves) if leaves else 0
        if sizes.max() > most or any(len(leaf) != sizes.sum() for leaf in leaves) or not leaves:
            raise ValueError(f"sizes.npy counts {sizes.sum()} examples, the arrays have {[len(a) for a in leaves]}")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, MemoryError) as error:
        if isinstance(error, CovaryError):
            raise
        raise InvalidInput(
            f"{folder} is not a covary data set: {error}. Write one with covary.FederatedData.write(folder, clients)."
        ) from None
    return examples, sizes


def _described(tree: Any) -> Any:
    """The nesting of the examples as JSON, with None for each array."""
    if type(tree) is dict and all(type(key) is str for key in tree):
        return {"dict": {key: _described(tree[key]) for key in sorted(tree)}}
    if type(tree) is tuple:
        return {"tuple": [_described(node) for node in tree]}
    if isinstance(tree, list) or trees.structure(tree) == trees.LEAF:  # an array, or like one
        return None
    fix = "Pass (x, y), or a dict of arrays by name."
    raise refused("examples", "arrays nested in tuples and in dicts with names", type(tree).__name__, fix)


def _numbered(form: Any, number: Iterator[int]) -> Any:
    """The same nesting with the number of its file for each array."""
    if form is None:
        return next(number)
    ((kind, inner),) = form.items()
    if kind == "dict":
        return {kind: {key: _numbered(node, number) for key, node in inner.items()}}
    return {kind: [_numbered(node, number) for node in inner]}


def _mapped(path: Path) -> np.ndarray:
    """The array of a file as a memory map, which fails if the file is shorter than its header declares."""
    if not path.is_file():
        raise ValueError(f"{path.name} is not a file")
    return np.load(path, mmap_mode="r", allow_pickle=False)


def _rebuilt(form: Any, folder: Path) -> Any:
    if isinstance(form, int):
        array = _mapped(folder / f"{form}.npy")
        if array.ndim == 0 or array.size == 0 or array.dtype.kind not in "biuf":
            raise ValueError(f"{form}.npy is not an array of numbers with rows")
        return array
    ((kind, inner),) = form.items()
    if kind == "dict":
        return {k: _rebuilt(v, folder) for k, v in inner.items()}
    return {"tuple": tuple}[kind](_rebuilt(node, folder) for node in inner)
