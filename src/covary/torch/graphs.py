"""Steps as CUDA graphs: a step is recorded once for each shape of a batch, and then replayed by one call."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch

from covary import trees
from covary.errors import EagerWarning

MOST = 4  # shapes of batches that are recorded; steps with others run as they are


class Recorder:
    """Records steps of one kind, `step(local, down, client, batch) -> local`, and replays them.

    The replayed steps read and write fixed memory: a copy of the local state, of the download and of the client's
    state. A returned local state is that copy, valid until the next client begins.
    """

    def __init__(self, step: Callable[[Any, Any, Any, Any], Any]):
        self.step = step
        self.held: Any = None  # (local, down, client) in fixed memory
        self.given: Any = (None, None)  # the download and the client's state that are there
        self.graphs: dict[Any, tuple[torch.cuda.CUDAGraph, Any]] = {}
        self.pool: Any = None
        self.failed = False

    def __call__(self, local: Any, down: Any, client: Any, batch: Any, seed: int | None = None) -> Any:
        """One step. With a seed, what it draws is seeded."""
        form = (str(trees.structure(batch)), *((tuple(leaf.shape), leaf.dtype) for leaf in trees.leaves(batch)))
        if self.failed or (form not in self.graphs and len(self.graphs) == MOST):
            return self._eager(local, down, client, batch, seed)
        if self.held is None:
            self.held = trees.map(torch.clone, (local, down, client))
        self._load(local, down, client)
        if form not in self.graphs:
            own = trees.map(torch.clone, batch)
            try:
                self.graphs[form] = (self._recorded(own), own)
            except RuntimeError as error:
                self.failed = True
                warnings.warn(EagerWarning(_why(error)), stacklevel=2)
                return self._eager(local, down, client, batch, seed)
        graph, own = self.graphs[form]
        _copy(own, batch)
        if seed is not None:
            torch.manual_seed(seed)
        graph.replay()
        return self.held[0]

    def _eager(self, local: Any, down: Any, client: Any, batch: Any, seed: int | None) -> Any:
        if seed is not None:
            torch.manual_seed(seed)
        return self.step(local, down, client, batch)

    def _load(self, local: Any, down: Any, client: Any) -> None:
        if local is not self.held[0]:
            _copy(self.held[0], local)
        if down is not self.given[0] or client is not self.given[1]:
            _copy(self.held[1:], (down, client))
            self.given = (down, client)

    def _recorded(self, batch: Any) -> torch.cuda.CUDAGraph:
        """The graph of a step that replaces the local state by the next."""

        def replace() -> None:
            local, down, client = self.held
            _copy(local, self.step(local, down, client, batch))

        before = trees.map(torch.clone, self.held[0])
        try:
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(3):  # libraries choose their kernels, and compiled modules are compiled
                    replace()
            torch.cuda.current_stream().wait_stream(stream)
            if self.pool is None:
                self.pool = torch.cuda.graph_pool_handle()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self.pool):
                replace()
            return graph
        except RuntimeError:
            # a capture that failed leaves its generator waiting for the end of the capture
            own = torch.cuda.default_generators[torch.cuda.current_device()]
            own.graphsafe_set_state(own.clone_state())
            raise
        finally:
            _copy(self.held[0], before)


def _copy(into: Any, tree: Any) -> None:
    """Copy the tensors of a tree into those of another. A tensor that is already there stays."""
    pairs = [(to, new) for to, new in _pairs(into, tree) if to is not new]
    for to, new in pairs:
        to.copy_(new, non_blocking=True)


def _pairs(into: Any, tree: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    return zip(trees.leaves(into), trees.leaves(tree), strict=True)


def _why(error: RuntimeError) -> str:
    reason = str(error).strip().splitlines()[0]
    return (
        f"A local step cannot be recorded as a CUDA graph, so it runs one operation after the other ({reason}). "
        "A step can be recorded if it does not wait for the GPU: no .item(), .cpu(), print or branch on a tensor's "
        "value in the module or its loss."
    )
