"""Partitions and the flat store."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

import covary as cv


@st.composite
def divisions(draw):
    n = draw(st.integers(1, 80))
    labels = np.array(draw(st.lists(st.integers(0, 4), min_size=n, max_size=n)))
    return labels, draw(st.integers(1, n)), draw(st.floats(0, 1)), draw(st.integers(0, 99))


@given(divisions())
def test_by_similarity_loses_nothing_and_shares_evenly(division):
    y, n_clients, similarity, seed = division
    data = cv.partition.by_similarity(np.arange(len(y)), y, n_clients, similarity, seed)
    x, labels = data.examples
    assert sorted(x.tolist()) == list(range(len(y)))
    np.testing.assert_array_equal(labels, y[x])
    assert np.ptp(data.sizes) <= 1
    again = cv.partition.by_similarity(np.arange(len(y)), y, n_clients, similarity, seed)
    np.testing.assert_array_equal(again.examples[0], x)


@given(divisions())
def test_similarity_0_is_sorted_by_label(division):
    y, n_clients, _, seed = division
    labels = cv.partition.by_similarity(np.arange(len(y)), y, n_clients, 0.0, seed).examples[1]
    np.testing.assert_array_equal(labels, np.sort(y))


def test_the_share_of_iid_data():
    y = np.repeat(np.arange(10), 1000)
    for similarity in (0.1, 0.5, 1.0):
        data = cv.partition.by_similarity(np.zeros(10_000), y, 10, similarity)
        own = np.mean([np.mean(data.client(i)[1] == i) for i in range(10)])
        assert abs(own - (1 - similarity + similarity / 10)) < 0.02  # sorted share, and its luck among the i.i.d.


def test_digits():
    (x, y), (x_test, y_test) = cv.datasets.digits()
    assert x.min() == 0
    assert x.max() == 1
    assert set(y) == set(y_test) == set(range(10))
    assert len(x) + len(x_test) == 1797


def test_examples_of_any_nesting():
    data = cv.FederatedData({"pixels": np.ones((4, 2, 2)), "label": np.arange(4)}, [1, 3])
    assert data.client(1)["label"].tolist() == [1, 2, 3]
