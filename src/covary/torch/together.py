"""Small modules: the steps of several clients at once, by `torch.func`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from covary import trees
from covary.algorithm import Exchange, Gradient
from covary.client import client_loop
from covary.draws import Draw
from covary.torch.examples import Cut, Rows, positions_of_steps
from covary.torch.module import uncompiled
from covary.torch.work import Worker

Step = Callable[[Any, Any, Any, Any], Any]
"""(local states, download, client states, batches) -> the next local states."""


class Together:
    """The work of clients with equally many examples, whose states are rows: fields of shape (clients, d).

    The module may neither draw at random nor have averaged buffers.
    """

    def __init__(self, worker: Worker, rows: Rows):
        self.worker, self.rows = worker, rows
        self.whole = _WithLoss(worker)

    def work(
        self,
        exchange: Exchange,
        down: Any,
        clients: Any,
        ids: Sequence[int],
        cut: Cut,
        draws: Sequence[Draw],
        *,
        measured: bool = True,
        steps_by: Callable[[Exchange, Step], Step] | None = None,
    ) -> tuple[Any, Any, Any]:
        """What these clients do in one exchange: uploads, new states and drifts, each with a leading axis.

        `steps_by(exchange, step)` computes the steps of an exchange instead of the function `step`.
        """
        self.worker.network.restore()
        device, dtype = self.worker.network.device, self.worker.network.dtype
        offsets = torch.from_numpy(self.rows.offsets[list(ids)]).to(device)
        everything = offsets[:, None] + torch.arange(int(self.rows.sizes[ids[0]]), device=device)

        def start(down: Any, clients: Any, _: Any) -> Any:
            def of(client: Any, own: Any) -> Any:
                return exchange.start(down, client, self.slope(lambda: self._at(own)))

            return torch.vmap(of)(clients, everything)

        def step(locals: Any, down: Any, clients: Any, batches: Any) -> Any:
            def of(local: Any, client: Any, batch: Any) -> Any:
                assert exchange.step is not None
                return exchange.step(local, down, client, self.slope(lambda: batch))

            return torch.vmap(of)(locals, clients, batches)

        def finish(locals: Any, down: Any, clients: Any, _: Any, K: Any) -> Any:
            def of(local: Any, client: Any, own: Any) -> Any:
                done = exchange.finish(local, down, client, self.slope(lambda: self._at(own)), K)
                # a field may be a plain number
                return trees.map(lambda leaf: torch.as_tensor(leaf, dtype=dtype, device=device), done)

            return torch.vmap(of)(locals, clients, everything)

        one_step = None if exchange.step is None else step if steps_by is None else steps_by(exchange, step)
        vmapped = replace(exchange, start=start, step=one_step, finish=finish)
        batches: Any = self._batches(offsets, cut, draws)
        return client_loop(vmapped, down, clients, _unused, batches, measured=measured)

    def slope(self, batch: Callable[[], Any]) -> Gradient:
        """y -> the gradient at y on a batch."""

        def loss(y: torch.Tensor) -> torch.Tensor:
            named = {f"own.{name}": part for name, part in self.worker.network.named_parts(y).items()}
            return torch.func.functional_call(self.whole, named, (batch(),))

        return torch.func.grad(loss)

    def _at(self, rows: torch.Tensor) -> Any:
        return trees.map(lambda leaf: leaf[rows], self.rows.examples)

    def _batches(self, offsets: torch.Tensor, cut: Cut, draws: Sequence[Draw]) -> Iterator[Any]:
        """Each step's batches, with a leading axis over the clients."""
        size = int(self.rows.sizes[draws[0].client])
        orders = zip(*(positions_of_steps(size, cut, draw) for draw in draws), strict=True)
        for positions in orders:
            rows = offsets[:, None] + torch.from_numpy(np.stack(positions)).to(offsets.device, non_blocking=True)
            yield trees.map(lambda leaf, rows=rows: leaf[rows], self.rows.examples)


class _WithLoss(torch.nn.Module):
    """The module and its loss as one module, so that a call can replace the parameters for both."""

    def __init__(self, worker: Worker):
        super().__init__()
        self.own, self._value = uncompiled(worker.network.module), worker.value

    def forward(self, batch: Any) -> torch.Tensor:
        return self._value(batch)


def _unused(y: Any) -> Any:
    raise AssertionError("gradients are bound inside the exchange")
