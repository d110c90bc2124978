"""VRL-SGD: variance-reduced local SGD, for full participation."""

from __future__ import annotations

from typing import Any, NamedTuple

from covary.algorithm import Algorithm, Exchange, factory
from covary.algorithms.common import Change, Server, average_models, send_x
from covary.checks import positive


class Client(NamedTuple):
    delta_i: Any  # the correction in the client's last round
    y_i: Any  # its local model at the end of that round
    rate_i: Any  # 1 / (K eta_l) of that round; 0 before the first


class Local(NamedTuple):
    y: Any
    delta: Any


@factory(eta_l=positive)
def vrl_sgd(eta_l: Any) -> Algorithm:
    r"""Local steps corrected by $\Delta_i$, which is updated when the new average arrives.

    $$ \Delta_i \leftarrow \Delta_i + \frac{1}{K \eta_l} (x - y_i), \qquad
       y_i \leftarrow y_i - \eta_l \left( g_i(y_i) - \Delta_i \right), \qquad x \leftarrow \frac1N \sum_i y_i $$

    It needs every client in every round, all with the same K, because $\sum_i \Delta_i = 0$ holds only then. It then
    takes the steps of SCAFFOLD option II, with $\Delta_i = c_i - c$.

    Args:
        eta_l: the local step-size.

    >>> import covary as cv
    >>> run = cv.simulate(cv.vrl_sgd(eta_l=0.1), cv.lower_bound(G=10), rounds=13, local_steps=10, x0=1.0)
    >>> bool(run.history["loss"][-1] < 1e-6)
    True

    Reference: Liang et al. 2019, Algorithm 1.
    """

    def start(down: Any, client: Client, full_grad: Any) -> Local:
        return Local(down.x, client.delta_i + client.rate_i * (down.x - client.y_i))

    def step(local: Local, down: Any, client: Client, grad: Any) -> Local:
        return local._replace(y=local.y - eta_l * (grad(local.y) - local.delta))

    def finish(local: Local, down: Any, client: Client, full_grad: Any, K: Any) -> tuple[Change, Client]:
        return Change(local.y - down.x), Client(local.delta, local.y, 1 / (K * eta_l))

    exchange = Exchange(send_x, start, finish, average_models(1.0), step)
    return Algorithm("vrl_sgd", Server, lambda x: Client(0 * x, x, 0.0), (exchange,), lockstep=True)
