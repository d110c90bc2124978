"""Nested containers of arrays ("trees") without JAX, in JAX's order: data sets, states and messages.

The containers are dicts (in the order of their sorted keys), OrderedDicts (in their own order), lists, tuples and
NamedTuples. None is a container without leaves. Containers that are registered with JAX count too, once JAX is
imported. Everything else is a leaf: arrays of NumPy, JAX or PyTorch, numbers, or whatever stands for them.
"""

from __future__ import annotations

import builtins
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

IsLeaf = Callable[[Any], bool]
"""Whether a container is to be taken as a leaf."""


@dataclass(frozen=True)
class Structure:
    """The nesting of a tree, without its leaves.

    >>> print(structure({"b": [1.0, None], "a": (2.0,)}))
    {'a': (*,), 'b': [*, None]}
    >>> structure((1, 2)) == structure((3, 4)), structure((1, 2)) == structure([1, 2])
    (True, False)
    """

    kind: Any  # the container's type, or None for a leaf
    keys: Any = ()  # of a dict; what JAX knows of a registered container
    inner: tuple[Structure, ...] = ()

    def __str__(self) -> str:
        parts = [str(part) for part in self.inner]
        if self.kind is None:
            return "*"
        if self.kind is type(None):
            return "None"
        if self.kind is list:
            return f"[{', '.join(parts)}]"
        if self.kind is tuple:
            return f"({', '.join(parts)}{',' if len(parts) == 1 else ''})"
        if self.kind is dict:
            return f"{{{', '.join(f'{key!r}: {part}' for key, part in zip(self.keys, parts, strict=True))}}}"
        return f"{self.kind.__name__}({', '.join(parts)})"

    __repr__ = __str__


LEAF = Structure(None)


def leaves(tree: Any) -> list[Any]:
    """The leaves of a tree, in order.

    >>> leaves({"b": 1, "a": (2, None, [3])})
    [2, 3, 1]
    """
    return [leaf for _, leaf in leaves_with_path(tree)]


def leaves_with_path(tree: Any) -> list[tuple[str, Any]]:
    """The leaves of a tree, each with where it is.

    >>> from covary.algorithms.scaffold import Client
    >>> leaves_with_path(({"x": 1}, [2], Client(c_i=3)))
    [("[0]['x']", 1), ('[1][0]', 2), ('[2].c_i', 3)]
    """
    return list(_walk("", tree))


def structure(tree: Any) -> Structure:
    """How a tree is nested."""
    return _taken_apart(tree, None)[1]


def unflatten(form: Structure, leaves: Iterable[Any]) -> Any:
    """The tree of this nesting with these leaves.

    >>> unflatten(structure({"b": 1, "a": (2, None)}), [5, 6])
    {'a': (5, None), 'b': 6}
    """
    rest = iter(leaves)
    tree = _rebuilt(form, rest)
    if next(rest, LEAF) is not LEAF:
        raise ValueError(f"there are more leaves than places in {form}")
    return tree


def map(f: Callable[..., Any], tree: Any, *others: Any, is_leaf: IsLeaf | None = None) -> Any:
    """A tree of `f(leaf, *leaves of the others)`. All must be nested alike.

    >>> map(lambda a, b: a + b, {"x": 1, "y": [2]}, {"x": 10, "y": [20]})
    {'x': 11, 'y': [22]}
    >>> map(len, ([1, 2], [3]), is_leaf=lambda node: isinstance(node, list))
    (2, 1)
    >>> map(max, (1, 2), [1, 2])
    Traceback (most recent call last):
    ValueError: trees must be nested alike; got (*, *) and [*, *]
    """
    columns, form = _taken_apart(tree, is_leaf)
    rows = [columns]
    for other in others:
        column, own = _taken_apart(other, is_leaf)
        if own != form:
            raise ValueError(f"trees must be nested alike; got {form} and {own}")
        rows.append(column)
    return unflatten(form, builtins.map(f, *rows))


def _taken_apart(tree: Any, is_leaf: IsLeaf | None) -> tuple[list[Any], Structure]:
    """The leaves and the nesting."""
    node = None if is_leaf is not None and is_leaf(tree) else _node(tree)
    if node is None:
        return [tree], LEAF
    kind, keys, children = node
    parts = [_taken_apart(child, is_leaf) for _, child in children]
    inner = tuple(form for _, form in parts)
    return [leaf for found, _ in parts for leaf in found], Structure(kind, keys, inner)


def _walk(path: str, tree: Any) -> Iterator[tuple[str, Any]]:
    node = _node(tree)
    if node is None:
        yield path, tree
    else:
        for step, child in node[2]:
            yield from _walk(path + step, child)


def _node(tree: Any) -> tuple[Any, Any, list[tuple[str, Any]]] | None:
    """A container's type, its keys and its children, each with its step of the path; None for a leaf."""
    kind = type(tree)
    if tree is None:
        return kind, (), []
    if kind is dict or kind is OrderedDict:
        keys = tuple(sorted(tree) if kind is dict else tree)
        return kind, keys, [(f"[{key!r}]", tree[key]) for key in keys]
    if kind is list or kind is tuple:
        return kind, (), [(f"[{at}]", child) for at, child in enumerate(tree)]
    if isinstance(tree, tuple) and hasattr(kind, "_fields"):
        return kind, (), [(f".{name}", child) for name, child in zip(kind._fields, tree, strict=True)]
    jax: Any = sys.modules.get("jax")
    if jax is None or jax.tree_util.all_leaves([tree]):
        return None
    found, form = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda node: node is not tree)
    return kind, form, [(jax.tree_util.keystr(path), child) for path, child in found]


def _rebuilt(form: Structure, leaves: Iterator[Any]) -> Any:
    if form.kind is None:
        try:
            return next(leaves)
        except StopIteration:
            raise ValueError("there are fewer leaves than places for them") from None
    if form.kind is type(None):
        return None
    inner = [_rebuilt(part, leaves) for part in form.inner]
    if form.kind is dict or form.kind is OrderedDict:
        return form.kind(zip(form.keys, inner, strict=True))
    if form.kind is list or form.kind is tuple:
        return form.kind(inner)
    if hasattr(form.kind, "_fields"):
        return form.kind(*inner)
    return form.keys.unflatten(inner)  # of JAX's registry
