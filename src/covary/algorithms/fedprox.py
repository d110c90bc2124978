"""FedProx with SGD as the local solver, as in the paper."""

from __future__ import annotations

from typing import Any

from covary.algorithm import Algorithm, Exchange, factory
from covary.algorithms.common import Local, Server, average_models, send_change, send_x, start_at_x, stateless
from covary.checks import non_negative, positive


@factory(eta_l=positive, mu=non_negative, eta_g=positive)
def fedprox(eta_l: Any, mu: Any = 1.0, eta_g: Any = 1.0) -> Algorithm:
    r"""FedAvg with a proximal term that pulls the local steps back to the server model.

    $$ y_i \leftarrow y_i - \eta_l \left( g_i(y_i) + \mu (y_i - x) \right), \qquad
       x \leftarrow x + \frac{\eta_g}{|S|} \sum_{i \in S} (y_i - x) $$

    Args:
        eta_l: the local step-size.
        mu: the strength of the proximal term. The paper fixes it to 1; 0 gives FedAvg.
        eta_g: the global step-size.

    >>> import covary as cv
    >>> run = cv.simulate(cv.fedprox(eta_l=0.1, mu=1.0), cv.lower_bound(G=1), rounds=50, local_steps=10, x0=1.0)
    >>> run.x.shape
    (1,)

    Reference: Li et al. 2018; Karimireddy et al. 2020, section "Experiments", setup.
    """

    def step(local: Local, down: Any, client: Any, grad: Any) -> Local:
        return Local(local.y - eta_l * (grad(local.y) + mu * (local.y - down.x)))

    exchange = Exchange(send_x, start_at_x, send_change, average_models(eta_g), step)
    return Algorithm("fedprox", Server, stateless, (exchange,))
