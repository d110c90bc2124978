"""A model's buffers, such as BatchNorm's running statistics: a client's steps change them, the server averages them.

Algorithms know nothing of buffers, and control variates never correct them. `carrying` builds an algorithm whose server
state, messages and local states have the buffers beside the algorithm's own vectors, so that stores, checkpoints and
sweeps treat them like any other vector. Clients of such a model have the same number of examples, as its batches may
not differ in size, so that the mean of the uploads is that of the cohort's buffers.
"""

from __future__ import annotations

import functools
from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from covary.algorithm import Algorithm, Exchange, Gradient
from covary.running.job import AnyProblem

FIELD = "buffers_of_model"  # of the server's state


class Down(NamedTuple):
    own: Any
    buffers: Any  # (b,)

    @property
    def x(self) -> Any:
        return self.own.x


class Local(NamedTuple):
    own: Any
    buffers: Any

    @property
    def y(self) -> Any:
        return self.own.y


class Up(NamedTuple):
    own: Any
    buffers: Any


def with_model(algorithm: Algorithm, problem: AnyProblem) -> Algorithm:
    """The algorithm for a model: with its buffers, if it has any."""
    return algorithm if problem.buffers is None else carrying(algorithm, problem.buffers)


def carrying(algorithm: Algorithm, start: np.ndarray) -> Algorithm:
    """The algorithm with buffers, which begin with these numbers."""

    def init_server(x: Any) -> Any:
        own = algorithm.init_server(x)
        return _server_type(type(own))(*own, start.astype(x.dtype))

    build, options = algorithm.recipe or (algorithm, ())
    return replace(exchanging(algorithm), init_server=init_server, recipe=(_Build(build), options))


def buffers_of(server: Any) -> Any:
    """The buffers in a server's state, or None."""
    return getattr(server, FIELD) if hasattr(type(server), "type_without_buffers") else None


def without_buffers(server: Any) -> Any:
    """The algorithm's own part of a server's state."""
    return type(server).type_without_buffers(*server[:-1]) if hasattr(type(server), "type_without_buffers") else server


@dataclass(frozen=True)
class _Build:
    """Builds an algorithm again, for other numbers, and gives it buffers."""

    build: Callable[..., Algorithm] | Algorithm

    def __call__(self, **arguments: Any) -> Algorithm:
        return exchanging(self.build if isinstance(self.build, Algorithm) else self.build(**arguments))


@functools.cache
def _server_type(own: type) -> Any:
    """The type of a server's state with buffers."""
    kind: Any = namedtuple("Server", (*own._fields, FIELD))  # type: ignore[attr-defined]
    kind.type_without_buffers = own
    return kind


def exchanging(algorithm: Algorithm) -> Algorithm:
    """The algorithm with buffers in its exchanges."""
    equal, warm = algorithm.with_equal_steps, algorithm.warm_start
    return replace(
        algorithm,
        exchanges=_allwith_buffers(algorithm.exchanges),
        with_equal_steps=None if equal is None else lambda K: _allwith_buffers(equal(K)),
        warm_start=None if warm is None else with_buffers(warm),
    )


def _allwith_buffers(exchanges: tuple[Exchange, ...]) -> tuple[Exchange, ...]:
    """An algorithm's exchanges with buffers. Its steps change them or, if it has none, its first gradient does."""
    steps = any(exchange.step is not None for exchange in exchanges)
    return tuple(with_buffers(exchange, by_steps=steps) for exchange in exchanges)


def with_buffers(exchange: Exchange, by_steps: bool = True) -> Exchange:
    """The exchange with buffers beside its messages."""

    def broadcast(server: Any) -> Down:
        return Down(exchange.broadcast(without_buffers(server)), getattr(server, FIELD))

    def start(down: Down, client: Any, full_grad: Gradient) -> Local:
        bound = _at(full_grad, down.buffers)
        own = exchange.start(down.own, client, bound)
        return Local(own, down.buffers if by_steps else getattr(bound, "buffers", down.buffers))

    def step(local: Local, down: Down, client: Any, grad: Gradient) -> Local:
        assert exchange.step is not None
        bound = _at(grad, local.buffers)
        own = exchange.step(local.own, down.own, client, bound)
        return Local(own, getattr(bound, "buffers", local.buffers))

    def finish(local: Local, down: Down, client: Any, full_grad: Gradient, K: Any) -> tuple[Up, Any]:
        own, client = exchange.finish(local.own, down.own, client, _at(full_grad, down.buffers), K)
        return Up(own, local.buffers), client

    def aggregate(server: Any, mean: Up, fraction: Any) -> Any:
        own = exchange.aggregate(without_buffers(server), mean.own, fraction)
        return type(server)(*own, mean.buffers)

    return Exchange(broadcast, start, finish, aggregate, step if exchange.step else None, exchange.together)


def _at(grad: Gradient, buffers: Any) -> Gradient:
    """The gradient with these buffers; a made-up one, of a dry run, has none."""
    bind = getattr(grad, "at", None)
    return grad if bind is None else bind(buffers)
