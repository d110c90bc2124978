"""FedDyn: dynamic regularisation, with SGD as the local solver."""

from __future__ import annotations

from typing import Any, NamedTuple

from covary.algorithm import Algorithm, Exchange, factory
from covary.algorithms.common import Change, Local, send_x, start_at_x
from covary.checks import positive


class Server(NamedTuple):
    x: Any
    h: Any


class Client(NamedTuple):
    h_i: Any


@factory(eta_l=positive, alpha=positive)
def feddyn(eta_l: Any, alpha: Any = 0.1) -> Algorithm:
    r"""Each client adds a linear term, so that its stationary point agrees with the server's.

    $$ y_i \approx \arg\min_y \; f_i(y) - h_i^\top y + \frac{\alpha}{2} \lVert y - x \rVert^2, \qquad
       h_i \leftarrow h_i - \alpha (y_i - x) $$
    $$ h \leftarrow h - \frac{\alpha}{N} \sum_{i \in S} (y_i - x), \qquad
       x \leftarrow \frac{1}{|S|} \sum_{i \in S} y_i - \frac{1}{\alpha} h $$

    so that $h = \frac1N \sum_i h_i$ at all times.

    Args:
        eta_l: the step-size of the K local gradient steps.
        alpha: the strength of the regulariser.

    >>> import covary as cv
    >>> run = cv.simulate(cv.feddyn(eta_l=0.1, alpha=1.0), cv.lower_bound(G=10), rounds=80, local_steps=10, x0=1.0)
    >>> bool(run.history["loss"][-1] < 1e-6)
    True

    Reference: Acar et al. 2021, Algorithm 1.
    """

    def step(local: Local, down: Any, client: Client, grad: Any) -> Local:
        return Local(local.y - eta_l * (grad(local.y) - client.h_i + alpha * (local.y - down.x)))

    def finish(local: Local, down: Any, client: Client, full_grad: Any, K: Any) -> tuple[Change, Client]:
        dy = local.y - down.x
        return Change(dy), Client(client.h_i - alpha * dy)

    def aggregate(server: Server, mean: Change, fraction: Any) -> Server:
        h = server.h - alpha * fraction * mean.dy
        return Server(server.x + mean.dy - h / alpha, h)

    return Algorithm(
        "feddyn",
        init_server=lambda x: Server(x, 0 * x),
        init_client=lambda x: Client(0 * x),
        exchanges=(Exchange(send_x, start_at_x, finish, aggregate, step),),
        invariant=("h", "h_i"),
    )
