"""DANE, solved inexactly by K local gradient steps; two exchanges per round."""

from __future__ import annotations

from typing import Any, NamedTuple

from covary.algorithm import Algorithm, Exchange, factory
from covary.algorithms.common import average_models, gradient_exchange, send_all, send_change, stateless
from covary.checks import non_negative, positive


class Server(NamedTuple):
    x: Any
    g: Any


class Local(NamedTuple):
    y: Any
    shift: Any


@factory(eta_l=positive, mu=non_negative, eta=positive)
def dane(eta_l: Any, mu: Any = 0.0, eta: Any = 1.0) -> Algorithm:
    r"""Exchange 1 forms the global gradient. Exchange 2 takes K steps on a local problem with this gradient at x.

    $$ y_i \approx \arg\min_y \; f_i(y) - \left( \nabla f_i(x) - \eta \nabla f(x) \right)^\top y
       + \frac{\mu}{2} \lVert y - x \rVert^2, \qquad x \leftarrow \frac{1}{|S|} \sum_{i \in S} y_i $$

    Under client sampling $\nabla f$ is the mean over the round's cohort.

    Args:
        eta_l: the step-size of the K local gradient steps.
        mu: the strength of the proximal term.
        eta: the weight of the global gradient.

    >>> import covary as cv
    >>> run = cv.simulate(cv.dane(eta_l=0.1), cv.lower_bound(G=100), rounds=30, local_steps=10, x0=1.0)
    >>> bool(run.history["loss"][-1] < 1e-6)
    True

    Reference: Shamir, Srebro and Zhang 2014, eq. (13).
    """

    def start(down: Server, client: Any, full_grad: Any) -> Local:
        return Local(down.x, full_grad(down.x) - eta * down.g)

    def step(local: Local, down: Server, client: Any, grad: Any) -> Local:
        return local._replace(y=local.y - eta_l * (grad(local.y) - local.shift + mu * (local.y - down.x)))

    solve = Exchange(send_all, start, send_change, average_models(1.0), step, together=True)
    return Algorithm("dane", lambda x: Server(x, 0 * x), stateless, (gradient_exchange("g"), solve))
