"""Parts that most algorithms share: stateless clients, a server that holds `x`, an upload of `dy`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from covary.algorithm import Exchange


class Server(NamedTuple):
    x: Any


class NoState(NamedTuple):
    """The state of a stateless client."""


class Model(NamedTuple):
    """The download: the server model."""

    x: Any


class Local(NamedTuple):
    y: Any


class Change(NamedTuple):
    """The upload: dy = y - x."""

    dy: Any


def stateless(x: Any) -> NoState:
    return NoState()


def send_x(server: Any) -> Model:
    return Model(server.x)


def send_all(server: Any) -> Any:
    return server


def start_at_x(down: Any, client: Any, full_grad: Any) -> Local:
    return Local(down.x)


def send_change(local: Any, down: Any, client: Any, full_grad: Any, K: Any) -> tuple[Change, Any]:
    return Change(local.y - down.x), client


def average_models(eta_g: Any) -> Callable[..., Any]:
    """x <- x + eta_g mean(dy), the second line of FedAvg."""

    def aggregate(server: Any, mean: Change, fraction: Any) -> Any:
        return server._replace(x=server.x + eta_g * mean.dy)

    return aggregate


class Gradient(NamedTuple):
    """The upload of a client's full gradient at the server model."""

    g: Any


def gradient_exchange(field: str) -> Exchange:
    """An exchange without local steps: the server's `field` becomes the mean of the clients' gradients at x."""

    def finish(local: NoState, down: Model, client: Any, full_grad: Any, K: Any) -> tuple[Gradient, Any]:
        return Gradient(full_grad(down.x)), client

    def aggregate(server: Any, mean: Gradient, fraction: Any) -> Any:
        return server._replace(**{field: mean.g})

    return Exchange(send_x, lambda down, client, full_grad: NoState(), finish, aggregate)


gradient_trip = gradient_exchange  # its name in 0.1.0
