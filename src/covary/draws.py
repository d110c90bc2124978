"""The random draws of every runtime: JAX's Threefry generator in NumPy, bit for bit.

A run's seed, round, exchange and client decide its cohorts and the order of every client's examples, so a simulation in
JAX, one in PyTorch and a deployment draw the same. A key is two numbers of 32 bits. Arrays of keys, with the two
numbers in the last axis, give an array of results, in which NumPy's cost per call is shared.

Reference: Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"; `jax_threefry_partitionable=True`.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

import numpy as np

WORD = 2**32 - 1


class Draw(NamedTuple):
    """What a client's random numbers are drawn from: its batches, and what a module or a loader draws."""

    seed: int
    round: int
    exchange: int
    client: int  # i


ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
PARITY = 0x1BD11BDA
_SHIFTS = tuple(tuple((np.uint32(by), np.uint32(32 - by)) for by in group) for group in ROTATIONS)


def key_of(seed: int) -> np.ndarray:
    """The key of a seed from 0 to 2^32 - 1, as `jax.random.key`.

    >>> key_of(7)
    array([0, 7], dtype=uint32)
    """
    return np.array([0, seed], np.uint32)


def fold_in(key: np.ndarray, *numbers: int | np.ndarray) -> np.ndarray:
    """The key with numbers folded in, one after the other: of a round, of an exchange in it, of a client in that.

    An array of numbers gives an array of keys.

    >>> fold_in(key_of(0), 1, 2)
    array([3152301319,  792466127], dtype=uint32)
    >>> (fold_in(key_of(0), 1, np.array([1, 2]))[1] == fold_in(key_of(0), 1, 2)).all()
    np.True_
    """
    for number in numbers:
        if key.ndim == 1 and np.ndim(number) == 0:
            high, low = key.tolist()
            key = np.array(_one_block(high, low, 0, int(number) & WORD), np.uint32)
        else:
            high, low = np.atleast_1d(
                key[..., 0], key[..., 1]
            )  # arrays, because NumPy warns of single numbers that wrap
            key = np.stack(_blocks(high, low, np.uint32(0), np.asarray(number, np.uint32)), axis=-1)
    return key


def split(key: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Two new keys of a key, as `jax.random.split`; or of each of many keys."""
    return fold_in(key, 0), fold_in(key, 1)  # the counters that JAX splits with are those of a fold


def bits(key: np.ndarray, n: int) -> np.ndarray:
    """n random words of 32 bits of a key, or of each of many keys."""
    first, second = _blocks(key[..., :1], key[..., 1:], np.uint32(0), np.arange(n, dtype=np.uint32))
    return np.bitwise_xor(first, second, out=first)


def uniform(key: np.ndarray, n: int) -> np.ndarray:
    """n float32 numbers in [0, 1), as `jax.random.uniform`.

    >>> uniform(key_of(0), 2)
    array([0.947667 , 0.9785799], dtype=float32)
    """
    ones = (bits(key, n) >> np.uint32(9)) | np.uint32(0x3F800000)  # 23 bits behind the exponent of 1
    return ones.view(np.float32) - np.float32(1)


def order(key: np.ndarray, size: int) -> np.ndarray:
    """A random order of 0 ... size - 1: the places that `jnp.argsort` gives `size` uniform numbers.

    >>> order(key_of(0), 5)
    array([2, 3, 4, 0, 1])
    """
    return _places_of_sorted(bits(key, size) >> np.uint32(9))  # the 23 bits of a uniform number


def order_of_epoch(seed: int, r: int, exchange: int, i: int, epoch: int, size: int) -> np.ndarray:
    """The order in which client i goes through its examples in an epoch of an exchange of round r."""
    return order(fold_in(_key_of_client(seed, r, exchange, i), epoch), size)


def cohort(seed: int, r: int, N: int, S: int) -> np.ndarray:
    """The S of N clients that take part in round r, in ascending order.

    >>> cohort(seed=0, r=1, N=10, S=3)
    array([3, 4, 5])
    """
    return sample(cohort_key(seed, r), N, S)


def cohort_key(seed: int, r: int) -> np.ndarray:
    """What the cohort of round r is drawn with. Exchanges are numbered from 1, so that 0 is the cohort's."""
    return fold_in(key_of(seed), r, 0)


def sample(key: np.ndarray, N: int, S: int) -> np.ndarray:
    """S of N clients: uniform, without replacement, in ascending order, in time that depends on S alone for large N.

    The draws of `covary._engine.cohort.sample`: for many clients by R. Floyd's method, in which the k-th draw is from
    the first N - S + k, and a client that was drawn before is replaced by the last of these.
    """
    if N == S:
        return np.arange(N)
    if N <= 4096 or S * S > N:
        return np.sort(_shuffled(key, N)[:S])
    last = N - S + np.arange(S)
    drawn, chosen = _below(fold_in(key, np.arange(S)), last + 1), set()
    for one, end in zip(drawn.tolist(), last.tolist(), strict=True):
        chosen.add(end if one in chosen else one)
    return np.sort(np.fromiter(chosen, int, S))


def _shuffled(key: np.ndarray, n: int) -> np.ndarray:
    """0 ... n - 1 shuffled as `jax.random.permutation` does it: sorted by random words, so often that ties are rare."""
    places = np.arange(n)
    for _ in range(math.ceil(3 * np.log(n) / np.log(WORD))):
        key, own = split(key)
        places = places[_places_of_sorted(bits(own, n))]
    return places


def _below(keys: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """One whole number below each end, as `jax.random.randint` draws it from the key of the same row in int32."""
    high, low = (bits(each, 1)[:, 0] for each in split(keys))
    span = ends.astype(np.uint32)
    factor = np.uint32(2**16) % span
    return ((high % span) * (factor * factor % span) + low % span) % span  # in 32 bits, as there


def _places_of_sorted(words: np.ndarray) -> np.ndarray:
    """A stable argsort of words, by sorting each word with its place behind it."""
    packed = words.astype(np.uint64) << np.uint64(32)
    packed |= np.arange(words.shape[-1], dtype=np.uint64)
    packed.sort()
    return (packed & np.uint64(WORD)).astype(np.intp)


@lru_cache(maxsize=4096)
def _key_of_client(seed: int, r: int, exchange: int, i: int) -> np.ndarray:
    return fold_in(key_of(seed), r, exchange, i)


def _blocks(
    key_high: np.ndarray, key_low: np.ndarray, high: np.ndarray | np.uint32, low: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Threefry-2x32 with 20 rounds: the words of every counter (high, low) under its key."""
    keys = (key_high, key_low, key_high ^ key_low ^ np.uint32(PARITY))
    x, y = np.broadcast_arrays(high + keys[0], low + keys[1])
    x, y = x.copy(), y.copy()
    spare = np.empty_like(y)
    for group in range(5):
        for left, right in _SHIFTS[group % 2]:
            np.add(x, y, out=x)
            np.left_shift(y, left, out=spare)
            np.right_shift(y, right, out=y)
            np.bitwise_or(y, spare, out=y)
            np.bitwise_xor(y, x, out=y)
        np.add(x, keys[(group + 1) % 3], out=x)
        np.add(y, keys[(group + 2) % 3] + np.uint32(group + 1), out=y)
    return x, y


def _one_block(key_high: int, key_low: int, high: int, low: int) -> tuple[int, int]:
    """The same for one counter, in plain numbers, which are faster than arrays of one number."""
    keys = (key_high, key_low, key_high ^ key_low ^ PARITY)
    x, y = (high + keys[0]) & WORD, (low + keys[1]) & WORD
    for group in range(5):
        for by in ROTATIONS[group % 2]:
            x = (x + y) & WORD
            y = ((y << by) & WORD | y >> (32 - by)) ^ x
        x = (x + keys[(group + 1) % 3]) & WORD
        y = (y + keys[(group + 2) % 3] + group + 1) & WORD
    return x, y
