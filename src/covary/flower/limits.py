"""What a node's owner allows a server to ask for. It is checked before any work."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from covary.checks import flag, positive, whole
from covary.errors import refused
from covary.flower.refusals import BeyondLimit
from covary.running.plan import batch_bounds, batches_of


@dataclass(frozen=True)
class Limits:
    """The most that a node does for a server.

    The defaults reject orders that serve only to reveal single rows: small batches, and uploads that leave out a part
    of the data. They also keep from the server which rows are in which batch. This bounds what a curious server learns
    cheaply. Against a hostile one, which chooses models that expose single rows, only noise helps: `clip` and `noise`
    of the client app.

    Every limit can also be set where the node is started, and then overrides the app's:
    `covary node ... --config 'smallest-batch=32 algorithms="scaffold fedavg"'`.

    Args:
        algorithms: the names that a server may use; None allows covary's and those of the app's own factories.
        smallest_batch: the fewest rows of any batch, including the last one of a pass, and of all data.
        whole_passes: an order's steps make whole passes over the data. `local_epochs` does that by itself. A
            `DataLoader` decides its own batches: only whole passes over it are asked for.
        private_batches: a secret of this node decides which rows form a batch, and not the server's seed. The numbers
            then differ from a simulation's as under another seed; with False they are equal.
        smallest_cohort: the fewest nodes of a round, as the server states it.
        fewest_steps, most_steps: of one order.
        most_orders, most_jobs: over the life of the state folder; evaluations count as orders.
        largest_message: in bytes; None for eight times the model and one megabyte.
        largest_number: of a model and of control variates that the server sends.
        keep_days: the state of a job that had no orders for so long is deleted.

    >>> from covary.flower import Limits
    >>> Limits(smallest_batch=32, algorithms=("scaffold",)).most_steps
    100000
    """

    algorithms: tuple[str, ...] | None = None
    smallest_batch: int = 8
    whole_passes: bool = True
    private_batches: bool = True
    smallest_cohort: int = 1
    fewest_steps: int = 1
    most_steps: int = 100_000
    most_orders: int = 10_000
    most_jobs: int = 100
    largest_message: int | None = None
    largest_number: float = 1e6
    keep_days: int = 90

    def __post_init__(self) -> None:
        names = self.algorithms
        if names is not None and (isinstance(names, str) or not all(isinstance(name, str) for name in names)):
            raise refused("algorithms", "names in a tuple, or None", repr(names), 'Try ("scaffold",).')
        for name in ("whole_passes", "private_batches"):
            flag(name, getattr(self, name))
        positive("largest_number", self.largest_number)
        for limit in fields(self):
            value = getattr(self, limit.name)
            if limit.type in ("int", "int | None") and value is not None:
                whole(limit.name, value, 1, most=2**62)

    def overridden(self, config: Mapping[str, Any]) -> Limits:
        """These limits, overridden by the node's own configuration, where their names have dashes.

        >>> Limits().overridden({"smallest-batch": 32, "algorithms": "scaffold fedavg", "partition-id": 0}).algorithms
        ('scaffold', 'fedavg')
        """
        names = {f.name.replace("_", "-"): f.name for f in fields(self)}
        for key in config:
            if key not in names and key.replace("_", "-") in names:
                raise refused(
                    "a name in the node's configuration", f"spelled {key.replace('_', '-')}", key, "Use dashes."
                )
        named = {name: config[key] for key, name in names.items() if key in config}
        if isinstance(named.get("algorithms"), str):
            named["algorithms"] = tuple(named["algorithms"].split())
        return replace(self, **named)

    def check_message(self, size: int, model: int) -> None:
        """Reject a message of more bytes than a model of this size needs."""
        most = 8 * model + 2**20 if self.largest_message is None else self.largest_message
        if size > most:
            raise BeyondLimit("largest_message", f"{most:,} bytes", f"{size:,}", "Set largest_message to allow it.")

    def check_algorithm(self, name: str) -> None:
        if self.algorithms is not None and name not in self.algorithms:
            raise BeyondLimit("algorithms", ", ".join(self.algorithms) or "none", name, "Add it to allow it.")

    def check_rows(self, rows: int) -> None:
        """Reject an order that computes anything from fewer rows."""
        if rows < self.smallest_batch:
            fix = "Ask for a batch_size that is a fraction, such as 0.1: the last batch of a pass counts too."
            raise BeyondLimit("smallest_batch", f"at least {self.smallest_batch} rows", rows, fix)

    def check_cohort(self, cohort: int) -> None:
        if cohort < self.smallest_cohort:
            fix = "Raise clients_per_round."
            raise BeyondLimit("smallest_cohort", f"at least {self.smallest_cohort} nodes a round", cohort, fix)

    def check_steps(self, steps: int, per_pass: int) -> None:
        """Reject a number of local steps, of which `per_pass` make a pass over the data."""
        if steps > self.most_steps:
            raise BeyondLimit("most_steps", f"at most {self.most_steps:,}", f"{steps:,}", "Lower local_steps.")
        if steps < self.fewest_steps:
            raise BeyondLimit("fewest_steps", f"at least {self.fewest_steps:,}", steps, "Raise local_steps.")
        if self.whole_passes and steps % per_pass:
            fix = "Use local_epochs, or set whole_passes to false to allow it."
            raise BeyondLimit("whole_passes", f"steps in multiples of {per_pass}", steps, fix)


def smallest_batch_of(batch_size: int | float | None, size: int) -> int:
    """The rows of the smallest batch when `size` rows are cut as the server asks.

    >>> smallest_batch_of(16, 40), smallest_batch_of(0.3, 40), smallest_batch_of(None, 40)
    (8, 10, 40)
    """
    rule, batch, per_epoch = batches_of(batch_size, np.array([size]))
    low, high = batch_bounds(rule, batch, per_epoch, size, np.arange(per_epoch[0]))  # of every step in an epoch
    return int((high - low).min())
