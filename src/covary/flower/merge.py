"""The server's update from an exchange's uploads."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from covary.algorithm import Algorithm, Exchange
from covary.client import dry_run
from covary.running.plan import aggregation_weights

Arrays = dict[str, np.ndarray]


class Reply(NamedTuple):
    token: str
    up: Any  # the algorithm's NamedTuple
    buffers: Arrays
    drift: float


def merge(exchange: Exchange, server: Any, replies: Mapping[str, Reply], p: Mapping[str, float]) -> Arrays:
    """The server's arrays after an exchange: `aggregate` of the mean upload, and the mean buffers.

    The mean is over the nodes that replied, each of which stands for N / |S| clients, as in simulation.
    """
    fraction = len(replies) / len(p)
    p_of_cohort = np.array([p[name] for name in replies])
    weights = aggregation_weights(p_of_cohort, fraction, exchange.together, np.float64)
    ups = [reply.up for reply in replies.values()]
    mean = ups[0]._replace(**{field: _mean([getattr(up, field) for up in ups], weights) for field in ups[0]._fields})
    new = exchange.aggregate(server, mean, fraction)
    typed = type(server)(*(np.asarray(a, old.dtype) for a, old in zip(new, server, strict=True)))
    shares = aggregation_weights(p_of_cohort, fraction, True, np.float64)
    buffers = [reply.buffers for reply in replies.values()]
    averaged = {name: _mean([own[name] for own in buffers], shares) for name in buffers[0]}
    return named("server.", typed) | prefixed(averaged)


def _mean(arrays: list[np.ndarray], weights: Iterable[float]) -> np.ndarray:
    """The weighted sum, in float64 whatever the arrays are."""
    total = sum(w * np.asarray(array, np.float64) for w, array in zip(weights, arrays, strict=True))
    return np.asarray(total, arrays[0].dtype)


def named(prefix: str, state: Any) -> Arrays:
    return {f"{prefix}{name}": np.asarray(value, state[0].dtype) for name, value in state._asdict().items()}


def prefixed(buffers: Arrays) -> Arrays:
    return {f"buffers.{name}": array for name, array in buffers.items()}


def upload_like(exchange: Exchange, algorithm: Algorithm, server: Any) -> Any:
    """The form of an upload: its fields, their shapes and types."""
    blank = type(server)(*(np.zeros_like(array) for array in server))
    _, up, _ = dry_run(exchange, blank, algorithm.init_client(blank[0]))
    return type(up)(*(np.asarray(value, server[0].dtype) for value in up))
