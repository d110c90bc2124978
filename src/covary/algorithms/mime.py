"""Mime in its SGD form: SVRG-corrected local steps, stateless clients, two exchanges per round."""

from __future__ import annotations

from typing import Any, NamedTuple

from covary.algorithm import Algorithm, Exchange, factory
from covary.algorithms.common import (
    Local,
    average_models,
    gradient_exchange,
    send_all,
    send_change,
    start_at_x,
    stateless,
)
from covary.checks import positive


class Server(NamedTuple):
    x: Any
    c: Any


@factory(eta_l=positive, eta_g=positive)
def mime(eta_l: Any, eta_g: Any = 1.0) -> Algorithm:
    r"""Exchange 1 forms the cohort's gradient c at x. Exchange 2 takes K local steps corrected by c.

    $$ c = \frac{1}{|S|} \sum_{i \in S} \nabla f_i(x), \qquad
       y_i \leftarrow y_i - \eta_l \left( g_i(y_i) - g_i(x) + c \right), \qquad
       x \leftarrow x + \frac{\eta_g}{|S|} \sum_{i \in S} (y_i - x) $$

    Both $g_i$ of a step use the same minibatch. Clients are stateless, which suits clients that are sampled only once.

    Args:
        eta_l: the local step-size.
        eta_g: the global step-size.

    >>> import covary as cv
    >>> run = cv.simulate(cv.mime(eta_l=0.1), cv.lower_bound(G=100), rounds=30, local_steps=10, x0=1.0)
    >>> bool(run.history["loss"][-1] < 1e-6)
    True

    Reference: Karimireddy et al. 2020, "Mime: mimicking centralized stochastic algorithms", Algorithm 1 (Mime, SGD).
    """

    def step(local: Local, down: Server, client: Any, grad: Any) -> Local:
        return Local(local.y - eta_l * (grad(local.y) - grad(down.x) + down.c))

    correct = Exchange(send_all, start_at_x, send_change, average_models(eta_g), step, together=True)
    return Algorithm("mime", lambda x: Server(x, 0 * x), stateless, (gradient_exchange("c"), correct))
