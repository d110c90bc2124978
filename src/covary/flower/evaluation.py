"""What the nodes measure at a model: each on its own data, and the means over all."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from flwr.app import Message

from covary.checks import whole
from covary.errors import CovaryError
from covary.flower.deployment import Deployment
from covary.flower.history import is_metric
from covary.flower.log import log
from covary.flower.membership import Membership
from covary.flower.messages import Question
from covary.flower.wire import pack

MOST_METRICS = 100  # of one node

Measure = Callable[[np.ndarray], Mapping[str, float]]


class Measurements:
    """What nodes have measured so far: the loss counts by the nodes' weights, a metric by the examples tested on."""

    def __init__(self) -> None:
        self.totals: dict[str, list[float]] = {}  # of each metric: the weighted sum, and the sum of the weights
        self.by_node: dict[str, list[tuple[int, float]]] = {}

    def add(self, name: str, number: int, p: float, facts: dict[str, Any]) -> None:
        """Add one node's report. It is rejected unless it has the right form."""
        tested, found = whole("tested", facts.get("tested"), 1), facts.get("values")
        if not isinstance(found, dict) or len(found) > MOST_METRICS:
            raise CovaryError(f"its measurements must be a dict of at most {MOST_METRICS} numbers")
        for metric, value in found.items():
            if not is_metric(metric, value):
                log.warning("%s: a metric is ignored: its name is invalid, or it is not a finite number.", name)
                continue
            weight = p if metric == "loss" else float(tested)
            self.by_node.setdefault(metric, []).append((number, value))
            total = self.totals.setdefault(metric, [0.0, 0.0])
            total[0], total[1] = total[0] + weight * value, total[1] + weight

    def means(self) -> dict[str, float]:
        return {metric: total / weight for metric, (total, weight) in self.totals.items()}


def evaluate(run: Deployment, members: Membership, online: dict[str, int], on_server: Measure | None) -> dict[str, Any]:
    """Loss and metrics at x: their means, what each node reports, and how many were asked.

    What the server measures itself, with `on_server`, takes the place of what nodes report under the same name.
    """
    x, p = run.server.x, run.weights()
    online = {name: node for name, node in online.items() if name in p}
    content = run.content(pack({}, down={"x": x}, buffers=run.buffers), {})
    found = Measurements()

    def read(name: str, message: Message, facts: dict[str, Any]) -> None:
        found.add(name, run.ledger.members[name].number, p[name], facts)

    members.ask(Question("evaluate", dict.fromkeys(online, content), read), online)
    own = {} if on_server is None else {name: float(value) for name, value in on_server(x).items()}
    by_node = {name: reports for name, reports in found.by_node.items() if name not in own}
    return {**found.means(), **own, "by_node": by_node, "evaluated": len(online)}
