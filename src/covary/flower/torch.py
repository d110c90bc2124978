"""PyTorch clients: the same algorithm files drive flat torch vectors, by the plain loop of `covary.client`."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import Context
from flwr.clientapp import ClientApp

from covary.algorithm import Algorithm
from covary.checks import whole
from covary.client import Guard
from covary.draws import Draw
from covary.errors import InvalidInput, refused
from covary.flower.limits import Limits, smallest_batch_of
from covary.flower.nodes import FACTORIES, Node, Owner, Privacy, build_app, checked_privacy
from covary.flower.task import Work
from covary.running.buffers import Down, with_buffers
from covary.running.plan import batches_of
from covary.torch.examples import Cut, Examples, Loaders, examples_of, is_batch, moved, rows_in
from covary.torch.module import Network, form_of_module, loaded
from covary.torch.problem import averaged, evaluating
from covary.torch.work import Loss, Worker

AT_ONCE = 4096  # examples at once, where the batch does not matter


def torch_client_app(
    module: torch.nn.Module | Callable[[Context], torch.nn.Module],
    loss: Loss,
    loader: Any,
    *,
    metrics: Callable[[torch.nn.Module, Any], dict[str, Any]] | None = None,
    test: Any = None,
    state: str | Path | None = None,
    clip: float | None = None,
    noise: float = 0.0,
    evaluate: bool | None = None,
    limits: Limits = Limits(),  # noqa: B008 (frozen)
    factories: Iterable[Callable[..., Algorithm]] = (),
) -> ClientApp:
    """A Flower ClientApp for a PyTorch module.

    Parameters with `requires_grad=False` are left as they are and are not sent: every node has to build them alike.
    Float buffers, such as the running statistics of BatchNorm, are averaged over the clients and never corrected by
    control variates. Other buffers, such as its counter of batches, are not sent and stay as the module is built.

    Before each order the generators of PyTorch, NumPy and Python are seeded from the server's seed, the round, the
    exchange and the client's number. So a `DataLoader`'s order and dropout differ from round to round, and repeat with
    the seed. A `torch.manual_seed` in `module` or `loader` does not change that.

    Args:
        module: the model, or a function of Flower's `Context` that builds it.
        loss: `loss(module, batch) -> scalar`, the mean over the examples of the batch.
        loader: this node's data, or a function of `Context` that returns it. Tensors of one length in a tuple or dict
            are cut into the server's `batch_size`, in the order that simulation uses; a `DataLoader` brings its own
            batches.
        metrics: `metrics(module, batch) -> dict of numbers`, means over the batch, for evaluation.
        test: what to evaluate metrics on, in the form of `loader`; by default the training data.
        state, clip, noise, evaluate, limits, factories: as in `client_app`.

    >>> import torch
    >>> from covary.flower import torch_client_app
    >>> def loss(module, batch):
    ...     x, y = batch
    ...     return torch.nn.functional.cross_entropy(module(x), y)
    >>> data = (torch.randn(50, 3), torch.randint(2, (50,)))
    >>> app = torch_client_app(torch.nn.Linear(3, 2), loss, data)
    """

    def node(context: Context) -> Node:
        built = module if isinstance(module, torch.nn.Module) else module(context)
        own, tested = (part(context) if callable(part) else part for part in (loader, test))
        return TorchNode(built, loss, own, metrics, tested)

    return build_app(node, Owner(state, checked_privacy(clip, noise, evaluate), limits, (*FACTORIES, *factories)))


def flat_parameters(module: torch.nn.Module) -> np.ndarray:
    """The module's trainable parameters as one vector: where a server starts from.

    >>> import torch
    >>> flat_parameters(torch.nn.Linear(3, 2)).shape
    (8,)
    """
    return Network(module).x.cpu().numpy()


def load_parameters(module: torch.nn.Module, x: Any) -> torch.nn.Module:
    """The module with the vector as its trainable parameters, as they come out of a run.

    >>> import torch
    >>> module = torch.nn.Linear(1, 1)
    >>> load_parameters(module, [2.0, 3.0])(torch.tensor([10.0])).tolist()
    [23.0]
    """
    return loaded(module, x)


class TorchNode:
    """One client that trains a PyTorch module."""

    def __init__(self, module: torch.nn.Module, loss: Loss, data: Any, metrics: Any = None, test: Any = None):
        self.network = Network(module)
        self.form = form_of_module(module)
        self.loss, self.metrics = loss, metrics
        self.data = _own_examples(data, self.network)
        self.test = self.data if test is None else _own_examples(test, self.network)
        self.size = int(self.data.sizes[0])

    @property
    def x(self) -> np.ndarray:
        return self.network.x.cpu().numpy()

    @property
    def buffers(self) -> dict[str, np.ndarray]:
        return self.network.named_buffers()

    def steps(self, training: dict[str, Any]) -> int:
        if training["local_steps"] is not None:
            return whole("local_steps", training["local_steps"], 1)
        epochs = 1 if training["local_epochs"] is None else whole("local_epochs", training["local_epochs"], 1)
        return epochs * self._cut(training["batch_size"]).per_epoch

    def batches(self, batch_size: Any) -> tuple[int, int]:
        if isinstance(self.data, Loaders):  # the node's own choice, not the server's
            return self.size, int(self.data.per_epoch[0])
        return smallest_batch_of(batch_size, self.size), self._cut(batch_size).per_epoch

    def _cut(self, batch_size: Any, steps: int = 0) -> Cut:
        if isinstance(self.data, Loaders):
            per_epoch = int(self.data.per_epoch[0])
            return Cut("loader", -(-self.size // per_epoch), per_epoch, steps)
        rule, batch, per_epoch = batches_of(batch_size, np.array([self.size]))
        return Cut(rule, int(batch[0]), int(per_epoch[0]), steps)

    def work(
        self, work: Work, down: Any, client: Any, buffers: Any, privacy: Privacy
    ) -> tuple[Any, Any, dict[str, np.ndarray], float]:
        network, steps = self.network, work.algorithm.exchanges
        network.set_named_buffers(buffers)
        by_steps = work.which.warm or any(exchange.step is not None for exchange in steps)
        exchange = with_buffers(work.exchange, by_steps) if network.averaged else work.exchange
        vectors = self._vectors(down)
        up, new, drift = Worker(network, self.loss).work(
            exchange,
            Down(vectors, network.buffers) if network.averaged else vectors,
            self._vectors(client),
            _OnlyOne(self.data),
            work.draw.client,
            self._cut(work.training["batch_size"], self.steps(work.training)),
            work.draw,
            guard=_guard(privacy) if privacy.used else None,
        )
        if network.averaged:
            network.set_buffers(up.buffers)
            up = up.own
        up, new = (type(t)(**{k: _numpy(v) for k, v in t._asdict().items()}) for t in (up, new))
        return up, new, self.buffers, float(drift)

    def evaluate(self, x: np.ndarray, buffers: Any) -> tuple[dict[str, float], int]:
        network = self.network
        network.set_named_buffers(buffers)
        network.set(self._vector(x))
        with evaluating(network):
            values = self._mean(lambda batch: {"loss": self.loss(network.module, batch)}, self.data)
            if self.metrics is not None:
                metrics = self.metrics
                values |= self._mean(lambda batch: averaged(metrics(network.module, batch)), self.test)
        return values, int(self.test.sizes[0])

    def _mean(self, values_of: Callable[[Any], Mapping[str, Any]], data: Examples) -> dict[str, float]:
        totals: dict[str, float] = {}
        rows = 0
        for batch in data.everything(0, AT_ONCE):
            count = rows_in(batch)
            for name, value in values_of(moved(batch, self.network.device)).items():
                totals[name] = totals.get(name, 0.0) + float(value) * count
            rows += count
        return {name: total / rows for name, total in totals.items()}

    def _vectors(self, arrays: Any) -> Any:
        return type(arrays)(**{name: self._vector(array) for name, array in arrays._asdict().items()})

    def _vector(self, array: np.ndarray) -> torch.Tensor:
        return torch.as_tensor(np.array(array), dtype=self.network.dtype, device=self.network.device)


class _OnlyOne:
    """A node's own examples, which are those of the client whose number the server gives it."""

    def __init__(self, own: Examples):
        self.own, self.sizes, self.loaders = own, own.sizes, own.loaders

    def batches(self, i: int, cut: Cut, draw: Draw) -> Iterator[Any]:
        return self.own.batches(0, cut, draw)

    def everything(self, i: int, at_once: int) -> Iterator[Any]:
        return self.own.everything(0, at_once)


def _own_examples(data: Any, network: Network) -> Examples:
    """The examples of one node, from tensors, a data set or a loader."""
    if not is_batch(data) and not hasattr(data, "__len__"):
        fix = "Return a DataLoader, a Dataset, or tensors in a tuple."
        raise refused("loader", "tensors, or batches with a length", type(data).__name__, fix)
    try:
        return examples_of([data], network.dtype)
    except InvalidInput as error:
        raise InvalidInput(str(error).replace("data[0]", "loader").replace("data must", "loader must")) from None


def _numpy(value: Any) -> np.ndarray:
    return value.detach().cpu().numpy() if isinstance(value, torch.Tensor) else np.asarray(value)


def _guard(privacy: Privacy) -> Guard:
    clip, noise, _ = privacy
    assert clip is not None
    seeds = [secrets.randbits(63), secrets.randbits(63)]

    def guard(v: torch.Tensor, which: int) -> torch.Tensor:
        v = v * (clip / torch.clamp(torch.linalg.vector_norm(v), min=clip))
        source = torch.Generator().manual_seed(seeds[which])
        return v + noise * clip * torch.randn(v.shape, generator=source, dtype=v.dtype).to(v.device)

    return guard
