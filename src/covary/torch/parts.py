"""A long vector in parts: one tensor per parameter, on which an algorithm's arithmetic works part by part.

On a CPU, the results of arithmetic on a vector of tens of megabytes are new memory for every operation, which takes
longer to get than to fill. Tensors of the size of a layer are reused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from covary import trees
from covary.algorithm import Exchange
from covary.client import dry_work


class Parts:
    """Tensors that are one vector together.

    >>> v = Parts([torch.ones(2), torch.zeros(1)])
    >>> (2 - (v + 3 * v) / 2).flat()
    tensor([0., 0., 2.])
    >>> float((v * v).sum(-1))
    2.0
    """

    __slots__ = ("tensors",)

    def __init__(self, tensors: Any):
        self.tensors = tensors

    def _with(self, each: Callable[..., Any], other: Any) -> Parts:
        return Parts(each(self.tensors, other.tensors if isinstance(other, Parts) else _number(other)))

    def __add__(self, other: Any) -> Parts:
        return self._with(torch._foreach_add, other)  # pyright: ignore[reportPrivateImportUsage]

    def __sub__(self, other: Any) -> Parts:
        return self._with(torch._foreach_sub, other)  # pyright: ignore[reportPrivateImportUsage]

    def __mul__(self, other: Any) -> Parts:
        return self._with(torch._foreach_mul, other)  # pyright: ignore[reportPrivateImportUsage]

    def __truediv__(self, other: Any) -> Parts:
        return self._with(torch._foreach_div, other)  # pyright: ignore[reportPrivateImportUsage]

    __radd__, __rmul__ = __add__, __mul__

    def __neg__(self) -> Parts:
        return Parts(torch._foreach_neg(self.tensors))  # pyright: ignore[reportPrivateImportUsage]

    def __rsub__(self, other: Any) -> Parts:
        return -self + other

    def sum(self, dim: int) -> torch.Tensor:
        return torch.stack([tensor.sum() for tensor in self.tensors]).sum()

    def flat(self) -> torch.Tensor:
        """The vector."""
        return torch.cat([tensor.reshape(-1) for tensor in self.tensors])


def _number(value: Any) -> Any:
    """A single number as Python's, which all of PyTorch's functions on lists take."""
    if isinstance(value, torch.Tensor) and value.ndim:
        raise TypeError("a vector in parts and one that is whole cannot be combined")
    return float(value)


def apart(tree: Any, size: int, split: Callable[[torch.Tensor], Any]) -> Any:
    """A state with its vectors of the model's length in parts."""
    return trees.map(lambda leaf: Parts(split(leaf)) if _shape(leaf) == (size,) else leaf, tree)


def whole(tree: Any) -> Any:
    """A state with its vectors in one piece."""
    return trees.map(lambda leaf: leaf.flat() if isinstance(leaf, Parts) else leaf, tree)


def works_on_parts(exchange: Exchange, down: Any, client: Any) -> bool:
    """Whether the algorithm uses arithmetic only, so that it works on a vector in parts."""
    x = down.x
    few = [torch.ones(2, dtype=x.dtype), torch.ones(1, dtype=x.dtype)]
    states = trees.map(lambda leaf: Parts(few) if _shape(leaf) == tuple(x.shape) else leaf, (down, client))
    try:
        dry_work(exchange, *states)
    except (TypeError, AttributeError, RuntimeError):
        return False
    return True


def _shape(leaf: Any) -> tuple[int, ...] | None:
    return tuple(leaf.shape) if isinstance(leaf, torch.Tensor) else None
