"""A client's work in PyTorch: gradients of the user's loss at a vector, bound to the batches of its steps."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from covary import trees
from covary.algorithm import Exchange
from covary.client import Guard, client_loop
from covary.draws import Draw
from covary.torch.examples import Cut, Examples, moved, rows_in
from covary.torch.module import Network, unwrapped
from covary.torch.parts import Parts, apart, whole, works_on_parts
from covary.torch.seeds import seed_of, seed_pytorch, seeded

Loss = Callable[[torch.nn.Module, Any], torch.Tensor]
LARGE = 2_000_000  # parameters above which a pass over all examples takes few at a time
AT_ONCE, FEW_AT_ONCE = 1024, 64


class Worker:
    """A module that does the work of clients, one after the other.

    Args:
        network: the module.
        loss: `loss(module, batch)`, the mean over the batch.
        precision: that of `torch.autocast` in local steps; None is the parameters' own.
        microbatch: the most examples whose gradient is computed at once.
        seeds_steps: whether every step seeds PyTorch's generators. It need not where nothing draws from them.
    """

    def __init__(
        self,
        network: Network,
        loss: Loss,
        precision: str | None = None,
        microbatch: int | None = None,
        seeds_steps: bool = True,
    ):
        self.network, self.loss, self.precision, self.microbatch = network, loss, precision, microbatch
        self.seeds_steps = seeds_steps
        self._plain, self._rows = unwrapped(loss), None  # the rows of a whole batch, where other batches are rare

    def work(
        self,
        exchange: Exchange,
        down: Any,
        client: Any,
        examples: Examples,
        i: int,
        cut: Cut,
        draw: Draw,
        *,
        measured: bool = True,
        guard: Guard | None = None,
    ) -> tuple[Any, Any, Any]:
        """What client i does in one exchange: its upload, its new state and its drift."""
        self.network.restore()
        self._rows = cut.batch if cut.rule == "rows" else None
        at_once = passes_at_once(self.network, cut)
        full = Slope(self, lambda: examples.everything(i, at_once), self.seed(draw, 0))
        with seeded(seed_of(draw), self.network.device) if self.seeds_steps else contextlib.nullcontext():
            slopes = (
                Slope(self, lambda batch=batch: [batch], self.seed(draw, k))
                for k, batch in enumerate(examples.batches(i, cut, draw), start=1)
            )  # lazily: without a step, no batch is drawn
            if not self._in_parts(exchange, down, client, guard):
                return client_loop(exchange, down, client, full, slopes, guard, measured=measured)
            down, client = apart((down, client), sum(self.network.sizes), self.network.parts)
            return whole(client_loop(exchange, down, client, full, slopes, measured=measured))

    def _in_parts(self, exchange: Exchange, down: Any, client: Any, guard: Guard | None) -> bool:
        """Whether to work on vectors in parts: where they are long, on a CPU, and all that sees them allows it."""
        network = self.network
        long = network.device.type == "cpu" and sum(network.sizes) > LARGE
        if not long or guard is not None or len(network.buffers) == sum(network.sizes):
            return False
        return works_on_parts(exchange, down, client)

    def seed(self, draw: Draw, k: int) -> int | None:
        """What step k = 1, 2, ... is seeded with; 0 is that of gradients over all examples."""
        return seed_of(draw, k) if self.seeds_steps else None

    def value(self, batch: Any) -> torch.Tensor:
        """The loss of a batch, as local steps compute it.

        What `torch.compile` has wrapped is compiled for whole batches. The last one of an epoch, if it is smaller, and
        passes over all data would take a compilation each.
        """
        loss, module = self.loss, self.network.module
        if self._rows is not None and rows_in(batch) != self._rows:
            loss, module = self._plain, self.network.own
        if self.precision is None:
            return loss(module, batch)
        with torch.autocast(self.network.device.type, getattr(torch, self.precision), cache_enabled=False):
            return loss(module, batch)

    def gradient(self, batches: Iterable[Any], in_parts: bool = False) -> Any:
        """The gradient of the mean loss over all these batches together."""
        total, rows = None, 0
        for batch in batches:
            for part in self._parts(moved(batch, self.network.device)):
                slope, count = self.network.gradient(self.value(part), in_parts), rows_in(part)
                if total is None and rows == 0:
                    total, rows = slope, count
                    continue
                assert total is not None
                total = total * (rows / (rows + count)) + slope * (count / (rows + count))
                rows += count
        assert total is not None
        return total

    def _parts(self, batch: Any) -> Iterator[Any]:
        """The batch, or parts of it that fit into memory."""
        rows = None if self.microbatch is None else rows_in(batch)
        if self.microbatch is None or rows is None or rows <= self.microbatch:
            yield batch
            return
        parts = -(-rows // self.microbatch)
        for k in range(parts):
            low, high = k * rows // parts, (k + 1) * rows // parts
            yield trees.map(lambda leaf, low=low, high=high: leaf[low:high], batch)


class Slope:
    """y -> the gradient at y. With a model's buffers, `at(buffers)(y)`, after which `buffers` are the new ones.

    Of several calls in one step, the first changes them.
    """

    def __init__(self, worker: Worker, batches: Callable[[], Iterable[Any]], seed: int | None, old: Any = None):
        self.worker, self.batches, self.seed = worker, batches, seed
        self.old = self.buffers = old

    def at(self, buffers: Any) -> Slope:
        return Slope(self.worker, self.batches, self.seed, buffers)

    def __call__(self, y: Any) -> Any:
        network = self.worker.network
        network.set(y)
        if self.old is not None:
            network.set_buffers(self.old)
        if self.seed is not None:
            seed_pytorch(self.seed, network.device)
        slope = self.worker.gradient(self.batches(), isinstance(y, Parts))
        if self.buffers is self.old and self.old is not None:
            self.buffers = network.buffers
        return slope


def passes_at_once(network: Network, cut: Cut) -> int:
    """How many examples a pass over all of a client's data takes at a time."""
    return max(cut.batch, FEW_AT_ONCE if sum(network.sizes) > LARGE else AT_ONCE)
