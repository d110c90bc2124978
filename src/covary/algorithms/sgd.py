"""SGD: one full-batch step per sampled client and round, the paper's large-batch baseline."""

from __future__ import annotations

from typing import Any

from covary.algorithm import Algorithm, Exchange, factory
from covary.algorithms.common import Local, Server, average_models, send_change, send_x, stateless
from covary.checks import positive


@factory(eta_l=positive, eta_g=positive)
def sgd(eta_l: Any, eta_g: Any = 1.0) -> Algorithm:
    r"""Take one step on the full local data per sampled client and round. The number of local steps is ignored.

    $$ y_i = x - \eta_l \nabla f_i(x), \qquad x \leftarrow x + \frac{\eta_g}{|S|} \sum_{i \in S} (y_i - x) $$

    Args:
        eta_l: the step-size.
        eta_g: the server's step-size; only the product with `eta_l` matters.

    >>> import covary as cv
    >>> run = cv.simulate(cv.sgd(eta_l=0.1), cv.lower_bound(G=10), rounds=63, x0=1.0)
    >>> bool(run.history["loss"][-1] < 1e-6)
    True

    Reference: Karimireddy et al. 2020, section "Experiments", setup.
    """

    def start(down: Any, client: Any, full_grad: Any) -> Local:
        return Local(down.x - eta_l * full_grad(down.x))

    exchange = Exchange(send_x, start, send_change, average_models(eta_g))
    return Algorithm("sgd", Server, stateless, (exchange,))
