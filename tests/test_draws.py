"""The draws in NumPy are JAX's and the engine's, bit for bit."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from covary import draws
from covary._engine.cohort import cohort_key, sample
from covary._engine.local import folded, shuffle

SEEDS = st.integers(0, 2**32 - 1)
ROUNDS = st.integers(0, 2**31 - 1)
SIZES = (1, 2, 3, 10, 975, 10_000)
# N and S in every branch: all, by sorting once or twice (N <= 4096 or S² > N), by Floyd's method
COHORTS = [(1, 1), (7, 7), (5000, 5000), (2, 1), (10, 3), (1000, 20), (4096, 5), (4096, 4095), (4097, 65), (10**4, 101)]
COHORTS += [(4097, 1), (4097, 64), (10_000, 100), (10**6, 30), (2**31 - 1, 40)]


@functools.partial(jax.jit, static_argnums=2)
def order_by_jax(seed, numbers, size):
    return shuffle(folded(jax.random.key(seed), *numbers), size, size)


@functools.partial(jax.jit, static_argnums=(2, 3))
def cohort_by_jax(seed, r, N, S):
    return sample(cohort_key(jax.random.key(seed), r), N, S)


@pytest.mark.parametrize("size", SIZES)
@settings(max_examples=30, deadline=None)
@given(SEEDS, ROUNDS, st.integers(1, 3), st.integers(0, 2**31 - 1), st.integers(0, 1000))
@example(0, 0, 1, 0, 0)
@example(2**32 - 1, 2**31 - 1, 2, 2**31 - 1, 7)
def test_the_order_of_an_epoch_is_the_engines(size, seed, r, exchange, i, epoch):
    expected = order_by_jax(np.uint32(seed), (r, exchange, i, epoch), size)
    np.testing.assert_array_equal(draws.order_of_epoch(seed, r, exchange, i, epoch, size), expected)


@pytest.mark.parametrize(("N", "S"), COHORTS)
@pytest.mark.parametrize("wide", [True, False])
@settings(max_examples=15, deadline=None)
@given(SEEDS, ROUNDS)
@example(0, 1)
@example(2**32 - 1, 2**31 - 1)
def test_the_cohort_is_the_engines_in_any_precision(wide, N, S, seed, r):
    with jax.enable_x64(wide):
        expected = np.asarray(cohort_by_jax(np.uint32(seed), r, N, S))
    ours = draws.cohort(seed, r, N, S)
    np.testing.assert_array_equal(ours, expected)
    assert len(set(ours.tolist())) == S


@settings(max_examples=50, deadline=None)
@given(SEEDS, st.integers(0, 2**32 - 1), st.integers(1, 300))
def test_the_building_blocks_are_jaxs(seed, number, n):
    ours, theirs = draws.key_of(seed), jax.random.key(seed)
    np.testing.assert_array_equal(ours, jax.random.key_data(theirs))
    for own, other in zip(draws.split(ours), jax.random.split(theirs), strict=True):
        np.testing.assert_array_equal(own, jax.random.key_data(other))
    ours, theirs = draws.fold_in(ours, number), jax.random.fold_in(theirs, number)
    np.testing.assert_array_equal(ours, jax.random.key_data(theirs))
    np.testing.assert_array_equal(draws.bits(ours, n), jax.random.bits(theirs, (n,), jnp.uint32))
    np.testing.assert_array_equal(draws.uniform(ours, n), jax.random.uniform(theirs, (n,), jnp.float32))


def test_many_keys_at_once_draw_what_each_draws():
    clients, epochs = np.array([[0], [5], [2**32 - 1]]), np.arange(4)
    keys = draws.fold_in(draws.key_of(2**32 - 1), 3, 1, clients, epochs)
    assert keys.shape == (3, 4, 2)
    orders = draws.order(keys, 20)
    for at in np.ndindex(3, 4):
        alone = draws.fold_in(draws.key_of(2**32 - 1), 3, 1, int(clients[at[0], 0]), int(epochs[at[1]]))
        np.testing.assert_array_equal(keys[at], alone)
        np.testing.assert_array_equal(orders[at], draws.order(alone, 20))


def test_ties_keep_their_order():
    """Two of 10,000 draws of 23 bits are often the same; the engine's sort is stable."""
    key = draws.fold_in(draws.key_of(0), 1)
    drawn = draws.uniform(key, 10_000)
    assert len(set(drawn.tolist())) < 10_000
    np.testing.assert_array_equal(draws.order(key, 10_000), np.argsort(drawn, kind="stable"))
