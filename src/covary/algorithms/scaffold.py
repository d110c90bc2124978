"""SCAFFOLD: Algorithm 1 of the paper, options I and II."""

from __future__ import annotations

from typing import Any, NamedTuple

from covary.algorithm import Algorithm, Exchange, factory
from covary.algorithms.common import Change, Local, send_all, send_x, start_at_x
from covary.checks import positive
from covary.errors import refused


class Server(NamedTuple):
    x: Any
    c: Any


class Client(NamedTuple):
    c_i: Any


class Up(NamedTuple):
    dy: Any
    dc: Any


class ControlChange(NamedTuple):
    dc: Any


@factory(eta_l=positive, eta_g=positive)
def scaffold(eta_l: Any, eta_g: Any = 1.0, option: str = "II") -> Algorithm:
    r"""Local steps corrected by control variates, with $c = \frac1N \sum_i c_i$ at all times.

    $$ y_i \leftarrow y_i - \eta_l \left( g_i(y_i) - c_i + c \right) \quad (3) $$
    $$ c_i^+ = \nabla f_i(x) \ \text{(option I)} \quad \text{or} \quad
       c_i^+ = c_i - c + \frac{1}{K \eta_l} (x - y_i) \ \text{(option II)} \quad (4) $$
    $$ x \leftarrow x + \frac{\eta_g}{|S|} \sum_{i \in S} (y_i - x), \qquad
       c \leftarrow c + \frac1N \sum_{i \in S} (c_i^+ - c_i) \quad (5) $$

    Under option II and with the same K on every client, $c_i^+ - c_i = -c - \Delta y_i / (K \eta_l)$. The server then
    computes the mean of $\Delta c$ from the mean of $\Delta y$, and a client sends d numbers, as in FedAvg, not 2d. If
    K differs, or sampled clients are weighted by their examples, clients send $\Delta c$ too.

    Args:
        eta_l: the local step-size.
        eta_g: the global step-size.
        option: "I" (one more pass over the local data, more stable) or "II" (no extra cost; the paper's experiments).

    >>> import covary as cv
    >>> run = cv.simulate(cv.scaffold(eta_l=0.1), cv.lower_bound(G=10), rounds=13, local_steps=10, x0=1.0)
    >>> bool(run.history["loss"][-1] < 1e-6)
    True

    Reference: Karimireddy et al. 2020, Algorithm 1, eqs. (3) to (5).
    """
    if not isinstance(option, str) or option not in ("I", "II"):
        raise refused("option", '"I" or "II"', repr(option), 'The paper\'s experiments use "II".')

    def step(local: Local, down: Server, client: Client, grad: Any) -> Local:
        return Local(local.y - eta_l * (grad(local.y) - client.c_i + down.c))  # eq. (3)

    def finish(local: Local, down: Server, client: Client, full_grad: Any, K: Any) -> tuple[Up, Client]:
        dy = local.y - down.x
        c_i = full_grad(down.x) if option == "I" else client.c_i - down.c - dy / (K * eta_l)  # eq. (4)
        return Up(dy, c_i - client.c_i), Client(c_i)

    def aggregate(server: Server, mean: Up, fraction: Any) -> Server:
        return Server(server.x + eta_g * mean.dy, server.c + fraction * mean.dc)  # eq. (5)

    def only_dy(K: int) -> tuple[Exchange, ...]:
        def finish_dy(*args: Any) -> tuple[Change, Client]:
            up, client = finish(*args)
            return Change(up.dy), client

        def aggregate_dy(server: Server, mean: Change, fraction: Any) -> Server:
            return aggregate(server, Up(mean.dy, -server.c - mean.dy / (K * eta_l)), fraction)

        return (Exchange(send_all, start_at_x, finish_dy, aggregate_dy, step),)

    def set_control(local: Local, down: Any, client: Client, full_grad: Any, K: Any) -> tuple[ControlChange, Client]:
        c_i = full_grad(down.x)
        return ControlChange(c_i - client.c_i), Client(c_i)

    def add_control(server: Server, mean: ControlChange, fraction: Any) -> Server:
        return server._replace(c=server.c + fraction * mean.dc)

    return Algorithm(
        "scaffold",
        init_server=lambda x: Server(x, 0 * x),
        init_client=lambda x: Client(0 * x),
        exchanges=(Exchange(send_all, start_at_x, finish, aggregate, step),),
        with_equal_steps=only_dy if option == "II" else None,
        warm_start=Exchange(send_x, start_at_x, set_control, add_control),  # c_i^0 = g_i(x^0)
        invariant=("c", "c_i"),
    )
