"""FedAvg with two step-sizes: section "Convergence of FedAvg" of the paper."""

from __future__ import annotations

from typing import Any

from covary.algorithm import Algorithm, Exchange, factory
from covary.algorithms.common import Local, Server, average_models, send_change, send_x, start_at_x, stateless
from covary.checks import positive


@factory(eta_l=positive, eta_g=positive)
def fedavg(eta_l: Any, eta_g: Any = 1.0) -> Algorithm:
    r"""Take K local steps on each sampled client, then average the changes.

    $$ y_i \leftarrow y_i - \eta_l g_i(y_i) \quad (1) \qquad
       x \leftarrow x + \frac{\eta_g}{|S|} \sum_{i \in S} (y_i - x) \quad (2) $$

    Args:
        eta_l: the local step-size.
        eta_g: the global step-size.

    >>> import covary as cv
    >>> run = cv.simulate(cv.fedavg(eta_l=0.1), cv.lower_bound(G=10), rounds=200, local_steps=10, x0=1.0)
    >>> bool(run.history["loss"][-1] > 1.0)  # client drift: it converges to a point far from the optimum
    True

    Reference: McMahan et al. 2017; Karimireddy et al. 2020, eqs. (1) and (2).
    """

    def step(local: Local, down: Any, client: Any, grad: Any) -> Local:
        return Local(local.y - eta_l * grad(local.y))  # eq. (1)

    exchange = Exchange(send_x, start_at_x, send_change, average_models(eta_g), step)  # eq. (2)
    return Algorithm("fedavg", Server, stateless, (exchange,))
