"""A vector of R^d in pieces: what the compiled local loop works on."""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

SMALL, FEW = 2**14, 8  # arrays of fewer numbers share a block if there are more than a few of them


@jax.tree_util.register_pytree_node_class
class Blocks:
    """A vector kept as the model's own arrays, so that no step has to cut it up and join it again.

    An algorithm only does arithmetic on vectors, so it works on both forms.

    >>> y = Blocks([jnp.ones((2, 2)), jnp.zeros(3)])
    >>> (y - 0.5 * (y + y)).arrays[0].tolist()
    [[0.0, 0.0], [0.0, 0.0]]
    """

    def __init__(self, arrays: Any):
        self.arrays = list(arrays)

    def tree_flatten(self) -> tuple[list[Any], None]:
        return self.arrays, None

    @classmethod
    def tree_unflatten(cls, _: None, arrays: Any) -> Blocks:
        return cls(arrays)

    __array_ufunc__ = None  # a NumPy number on the left leaves the arithmetic to us

    def _each(self, apply: Callable[[Any, Any], Any], other: Any) -> Blocks:
        others = other.arrays if isinstance(other, Blocks) else [_number(other)] * len(self.arrays)
        return Blocks(apply(a, b) for a, b in zip(self.arrays, others, strict=True))

    def __add__(self, other: Any) -> Blocks:
        return self._each(operator.add, other)

    def __sub__(self, other: Any) -> Blocks:
        return self._each(operator.sub, other)

    def __rsub__(self, other: Any) -> Blocks:
        return -self + other

    def __mul__(self, other: Any) -> Blocks:
        return self._each(operator.mul, other)

    def __truediv__(self, other: Any) -> Blocks:
        return self._each(operator.truediv, other)

    def __rtruediv__(self, other: Any) -> Blocks:
        return Blocks(_number(other) / a for a in self.arrays)

    def __pow__(self, other: Any) -> Blocks:
        return self._each(operator.pow, other)

    def __matmul__(self, other: Blocks) -> Any:
        return sum(jnp.vdot(a, b) for a, b in zip(self.arrays, other.arrays, strict=True))

    def __neg__(self) -> Blocks:
        return Blocks(-a for a in self.arrays)

    def __pos__(self) -> Blocks:
        return self

    def __abs__(self) -> Blocks:
        return Blocks(abs(a) for a in self.arrays)

    __radd__, __rmul__ = __add__, __mul__


def _number(other: Any) -> Any:
    """Reject a vector of another form: it must be split into blocks first."""
    if getattr(other, "ndim", 0):
        raise TypeError(f"a vector in blocks cannot be combined with an array of shape {other.shape}")
    return other


class Form:
    """The conversion between a flat vector, blocks, and a model's params.

    A block is one of the model's arrays, or many small ones together, whose own operations would take longer than their
    numbers.

    >>> params = {"scales": [jnp.full(3, float(k)) for k in range(10)], "w": jnp.ones((200, 200))}
    >>> x, unravel = jax.flatten_util.ravel_pytree(params)
    >>> form = Form(unravel, x)
    >>> [block.shape for block in form.split(x).arrays], form.params(form.split(x))["scales"][2].tolist()
    ([(200, 200), (30,)], [2.0, 2.0, 2.0])
    >>> bool((form.join(form.split(x)) == x).all())
    True
    """

    def __init__(self, unravel: Callable[[Any], Any], x: Any):
        leaves, self.tree = jax.tree.flatten(jax.eval_shape(unravel, x))
        self.unravel, self.shape = unravel, x.shape
        self.whole = any(leaf.dtype != x.dtype for leaf in leaves)
        small = [place for place, leaf in enumerate(leaves) if leaf.size < SMALL]
        self.small = small if len(small) > FEW else []
        self.large = [place for place in range(len(leaves)) if place not in self.small]
        self.shapes = [leaf.shape for leaf in leaves]

    def as_one(self) -> Form:
        """The same, without blocks."""
        form = copy.copy(self)
        form.whole = True
        return form

    def split(self, tree: Any) -> Any:
        """Every vector of R^d in a message or state as blocks."""
        return tree if self.whole else jax.tree.map(lambda v: self._blocks(v) if v.shape == self.shape else v, tree)

    def join(self, tree: Any) -> Any:
        """All blocks as vectors again."""

        def flat(v: Any) -> Any:
            return jnp.concatenate([a.reshape(-1) for a in self._leaves(v)]) if isinstance(v, Blocks) else v

        return jax.tree.map(flat, tree, is_leaf=lambda v: isinstance(v, Blocks))

    def params(self, y: Any) -> Any:
        """The model's params of a vector in either form."""
        return jax.tree.unflatten(self.tree, self._leaves(y)) if isinstance(y, Blocks) else self.unravel(y)

    def _blocks(self, v: Any) -> Blocks:
        leaves = jax.tree.leaves(self.unravel(v))
        together = [jnp.concatenate([leaves[place].reshape(-1) for place in self.small])] if self.small else []
        return Blocks([leaves[place] for place in self.large] + together)

    def _leaves(self, y: Blocks) -> list[Any]:
        """The arrays of the model, in its order."""
        if not self.small:
            return y.arrays
        *large, together = y.arrays
        ends = np.cumsum([int(np.prod(self.shapes[place])) for place in self.small])[:-1]
        parts = zip(self.small, jnp.split(together, ends), strict=True)
        leaves = dict(zip(self.large, large, strict=True)) | {at: a.reshape(self.shapes[at]) for at, a in parts}
        return [leaves[place] for place in range(len(leaves))]
