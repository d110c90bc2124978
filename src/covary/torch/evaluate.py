"""f and the metrics at a point, over all examples, in evaluation mode."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch

from covary import trees
from covary.torch.crew import Crew
from covary.torch.examples import Rows, moved, rows_in
from covary.torch.module import unwrapped
from covary.torch.problem import Problem, averaged, evaluating
from covary.torch.seeds import seeded
from covary.torch.work import FEW_AT_ONCE, LARGE, Worker

MANY_AT_ONCE = 4096


class Piece(NamedTuple):
    """A part of what is measured: batches whose mean counts with a weight."""

    weight: float
    batches: Callable[[], Iterable[Any]]


class Evaluation:
    """Measures a problem's model.

    Args:
        problem: the model, with what it is tested on.
        crew: whose workers measure.
        p: the clients' weights.
        names: what is measured: "loss" and metrics.
    """

    def __init__(self, problem: Problem, crew: Crew, p: np.ndarray, names: tuple[str, ...]):
        self.problem, self.crew, self.names = problem, crew, names
        self.at_once = FEW_AT_ONCE if sum(problem.network.sizes) > LARGE else MANY_AT_ONCE
        self.of_loss = self._pieces_of_clients(p) if "loss" in names else []
        self.of_metrics = self._pieces_of_test() if problem.metric_names else []

    def at(self, x: torch.Tensor, buffers: Any) -> dict[str, torch.Tensor]:
        """The loss and the metrics at x."""
        values, loss = dict[str, torch.Tensor](), unwrapped(self.problem.loss)
        if self.of_loss:
            values |= self._mean(lambda module, batch: {"loss": loss(module, batch)}, self.of_loss, x, buffers)
        if self.of_metrics:
            metrics = self.problem.metrics
            assert metrics is not None
            values |= self._mean(lambda module, batch: averaged(metrics(module, batch)), self.of_metrics, x, buffers)
        return {name: values[name] for name in self.names}

    def _mean(
        self,
        measure: Callable[[torch.nn.Module, Any], Mapping[str, Any]],
        pieces: list[Piece],
        x: torch.Tensor,
        buffers: Any,
    ) -> dict[str, torch.Tensor]:
        """The weighted sum of the pieces, of which every worker measures its share."""

        def share(worker: Worker, pieces: list[Piece]) -> dict[str, torch.Tensor]:
            network, total = worker.network, dict[str, torch.Tensor]()
            network.restore()
            network.set(x)
            if buffers is not None:
                network.set_buffers(buffers)
            # what is drawn is the same in every round, and a worker that draws is the only one
            own = seeded(0, network.device) if worker.seeds_steps else contextlib.nullcontext()
            with evaluating(network), own:
                for piece in pieces:
                    sums, rows = dict[str, torch.Tensor](), 0
                    for batch in piece.batches():
                        there = moved(batch, network.device)
                        for name, value in measure(network.own, there).items():
                            sums[name] = sums.get(name, 0.0) + torch.as_tensor(value).double() * rows_in(there)
                        rows += rows_in(there)
                    for name, value in sums.items():
                        total[name] = total.get(name, 0.0) + value * (piece.weight / rows)
            return total

        shares = np.array_split(np.arange(len(pieces)), min(len(self.crew.way.workers), len(pieces)))
        totals = list(self.crew.map(share, [[pieces[k] for k in some] for some in shares]))
        return {name: torch.stack([total[name] for total in totals]).sum() for name in totals[0]}

    def _pieces_of_clients(self, p: np.ndarray) -> list[Piece]:
        """f, the weighted mean of the clients' mean losses. Where examples weigh the same, they are taken in order."""
        examples = self.crew.examples
        if isinstance(examples, Rows) and np.allclose(p / examples.sizes, p[0] / examples.sizes[0], rtol=1e-12):
            return self._pieces(int(examples.sizes.sum()), examples.at)
        return [Piece(float(weight), lambda i=i: examples.everything(i, self.at_once)) for i, weight in enumerate(p)]

    def _pieces_of_test(self) -> list[Piece]:
        """The test examples; without a test set, those of the clients.

        Means of one number per example are measured in parts, other metrics on all examples at once, except on
        examples in items or loaders, of which they are taken to be means too.
        """
        examples, test = self.crew.examples, self.problem.test
        if test is None and not isinstance(examples, Rows):
            weights = examples.sizes / examples.sizes.sum()
            return [Piece(float(w), lambda i=i: examples.everything(i, self.at_once)) for i, w in enumerate(weights)]
        if test is None:
            assert isinstance(examples, Rows)
            n, take = int(examples.sizes.sum()), examples.at
        else:
            n = rows_in(test)

            def take(rows: np.ndarray) -> Any:
                return trees.map(lambda leaf: leaf[rows[0] : rows[-1] + 1], test)

        divisible = self.problem.means == set(self.problem.metric_names)
        return self._pieces(n, take) if divisible else [Piece(1.0, lambda: [take(np.arange(n))])]

    def _pieces(self, n: int, take: Callable[[np.ndarray], Any]) -> list[Piece]:
        """Rows in parts that fit into memory and keep all workers busy."""
        parts = max(-(-n // self.at_once), min(len(self.crew.way.workers), -(-n // 256)))
        split = np.array_split(np.arange(n), parts)
        return [Piece(len(rows) / n, lambda rows=rows: [take(rows)]) for rows in split]
