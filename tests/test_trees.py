"""Trees have JAX's order and paths, with JAX and without."""

import dataclasses
from collections import OrderedDict, namedtuple

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from covary import trees

Pair = namedtuple("Pair", "first second")


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Registered:
    b: object
    a: object


def containers(inner):
    return st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.text("abc", max_size=2), inner, max_size=3),
        st.dictionaries(st.integers(0, 9), inner, max_size=3).map(OrderedDict),
        st.builds(Pair, inner, inner),
        st.builds(Registered, inner, inner),
    )


TREES = st.recursive(st.one_of(st.integers(), st.none()), containers, max_leaves=12)


@given(TREES)
def test_a_tree_is_taken_apart_and_rebuilt_as_by_jax(tree):
    expected = [(jax.tree_util.keystr(path), leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)]
    assert trees.leaves_with_path(tree) == expected
    assert trees.leaves(tree) == [leaf for _, leaf in expected]
    assert trees.unflatten(trees.structure(tree), trees.leaves(tree)) == tree
    twice = trees.map(lambda a, b: a + b, tree, tree)
    assert twice == jax.tree.map(lambda a: 2 * a, tree)
    assert trees.structure(twice) == trees.structure(tree)


@given(TREES, TREES)
def test_trees_are_nested_alike_where_jax_says_so(one, other):
    alike = jax.tree.structure(one) == jax.tree.structure(other)
    assert (trees.structure(one) == trees.structure(other)) == alike
    if not alike:
        with pytest.raises(ValueError, match="nested alike"):
            trees.map(lambda *leaves: leaves, one, other)


def test_arrays_and_what_is_not_known_are_leaves():
    for leaf in (np.zeros((2, 2)), jax.numpy.zeros(2), "text", {1, 2}, type("Own", (dict,), {})(a=1)):
        (found,) = trees.leaves([leaf])
        assert found is leaf


@pytest.mark.parametrize("leaves", [[1], [1, 2, 3]])
def test_another_number_of_leaves_is_an_error(leaves):
    with pytest.raises(ValueError, match=r"(more|fewer) .* than places"):
        trees.unflatten(trees.structure((0, 0)), leaves)
