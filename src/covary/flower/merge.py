"""What the server makes of a trip's uploads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from covary.algorithm import Algorithm, Exchange

Arrays = dict[str, np.ndarray]


class Reply(NamedTuple):
    token: str
    up: Any  # the algorithm's NamedTuple
    buffers: Arrays
    drift: float


def merge(trip: Exchange, server: Any, replies: Mapping[str, Reply], p: Mapping[str, float]) -> Arrays:
    """The server's arrays after a trip: what `aggregate` makes of the mean of those that replied, and the mean buffers.

    As in simulation, each of them stands for N / |S| clients; in a trip that goes together, weights sum to one.
    """
    fraction = len(replies) / len(p)
    weights = {name: p[name] / fraction for name in replies}
    total = sum(weights.values())
    v = {name: w / total for name, w in weights.items()} if trip.together else weights
    first = next(iter(replies.values()))
    mean = first.up._replace(
        **{field: _mean({n: getattr(r.up, field) for n, r in replies.items()}, v) for field in first.up._fields}
    )
    new = trip.aggregate(server, mean, fraction)
    typed = type(server)(*(np.asarray(a, old.dtype) for a, old in zip(new, server, strict=True)))
    averaged = {
        name: _mean({n: r.buffers[name] for n, r in replies.items()}, {n: w / total for n, w in weights.items()})
        for name in first.buffers
    }
    return named("server.", typed) | prefixed(averaged)


def _mean(arrays: Mapping[str, np.ndarray], weights: Mapping[str, float]) -> np.ndarray:
    """The weighted sum, in float64 whatever the arrays are."""
    total = sum(weights[name] * np.asarray(array, np.float64) for name, array in arrays.items())
    return np.asarray(total, next(iter(arrays.values())).dtype)


def named(prefix: str, state: Any) -> Arrays:
    return {f"{prefix}{name}": np.asarray(value, state[0].dtype) for name, value in state._asdict().items()}


def prefixed(buffers: Arrays) -> Arrays:
    return {f"buffers.{name}": array for name, array in buffers.items()}


def upload_like(trip: Exchange, algorithm: Algorithm, server: Any) -> Any:
    """The form of an upload: what `finish` makes of vectors of the right length."""
    down, client = trip.broadcast(server), algorithm.init_client(server[0])

    def grad(y: Any) -> Any:
        return y

    up, _ = trip.finish(trip.start(down, client, grad), down, client, grad, 1)
    return type(up)(*(np.asarray(value, server[0].dtype) for value in up))
