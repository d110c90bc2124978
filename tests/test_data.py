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


def test_the_seed_decides_the_partition():
    y = np.arange(60) % 3
    for divide in (cv.partition.iid, lambda x, y, n, seed: cv.partition.dirichlet(x, y, n, 1.0, seed)):
        first, second = (divide(np.arange(60), y, 4, seed=seed).examples[0].tolist() for seed in (0, 1))
        assert first != second


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


@given(divisions(), st.floats(0.01, 100))
def test_dirichlet_loses_nothing_and_leaves_no_client_empty(division, alpha):
    y, n_clients, _, seed = division
    data = cv.partition.dirichlet(np.arange(len(y)), y, n_clients, alpha, seed)
    x, labels = data.examples
    assert sorted(x.tolist()) == list(range(len(y)))
    np.testing.assert_array_equal(labels, y[x])
    assert data.n_clients == n_clients
    again = cv.partition.dirichlet(np.arange(len(y)), y, n_clients, alpha, seed)
    np.testing.assert_array_equal(again.examples[0], x)
    np.testing.assert_array_equal(again.sizes, data.sizes)


def test_alpha_is_how_much_clients_have_in_common():
    y = np.repeat(np.arange(10), 500)

    def distance(alpha):  # of the clients' label shares from those of all
        counts = cv.partition.dirichlet(np.zeros(len(y)), y, 20, alpha).label_counts()
        return np.abs(counts / counts.sum(axis=1, keepdims=True) - 0.1).sum(axis=1).mean()

    assert distance(0.05) > 1.2 > distance(1.0) > distance(100.0) < 0.15


@given(divisions())
def test_by_group_keeps_every_group_whole(division):
    y, _, _, _ = division
    data = cv.partition.by_group(np.arange(len(y)), y, groups=y)
    assert data.n_clients == len(set(y.tolist()))
    for i, label in enumerate(sorted(set(y.tolist()))):
        assert data.client(i)[0].tolist() == np.flatnonzero(y == label).tolist()


def test_similarity_1_is_iid():
    y = np.repeat(np.arange(10), 1000)
    counts = cv.partition.iid(np.zeros(len(y)), y, 20).label_counts()
    chi_squared = ((counts - 50) ** 2 / 50).sum()
    assert chi_squared < 250  # 171 degrees of freedom
