"""PyTorch clients: the same algorithm files drive flat torch vectors, by the plain loop of `covary.client`."""

from __future__ import annotations

import contextlib
import hashlib
import random
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import torch
from flwr.app import Context
from flwr.clientapp import ClientApp

from covary.algorithm import Algorithm, Gradient
from covary.checks import whole
from covary.client import Guard, client_loop
from covary.draws import order_of_epoch
from covary.errors import refused
from covary.flower.limits import Limits, smallest_batch_of
from covary.flower.nodes import FACTORIES, Node, Owner, Privacy, build_app, checked_privacy
from covary.flower.task import Draw, Work
from covary.running.plan import batch_bounds, batches_of

AT_ONCE = 4096  # examples at once, where the batch does not matter
Loss = Callable[[torch.nn.Module, Any], torch.Tensor]


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
    trained = _trained(module)
    return torch.cat([p.detach().reshape(-1) for p in trained]).cpu().numpy().copy()


def float_buffers(module: torch.nn.Module) -> dict[str, np.ndarray]:
    """The module's buffers that are averaged: those in floating point, finite, that its `state_dict` has."""
    kept = module.state_dict().keys()
    found = {name: b for name, b in module.named_buffers() if b.is_floating_point() and name in kept}
    found = {name: b for name, b in found.items() if bool(b.isfinite().all())}  # a mask of -inf cannot be averaged
    return {name: buffer.detach().cpu().numpy().copy() for name, buffer in found.items()}


def form_of_module(module: torch.nn.Module) -> str:
    """A fingerprint of a module: names and shapes of what is trained and averaged, and all bits of what is frozen."""
    digest = hashlib.sha256()
    for name, p in module.named_parameters():
        digest.update(f"{name} {tuple(p.shape)} {p.dtype} {p.requires_grad}\n".encode())
        if not p.requires_grad:
            digest.update(p.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
    for name, buffer in float_buffers(module).items():
        digest.update(f"{name} {buffer.shape} {buffer.dtype}\n".encode())
    return digest.hexdigest()


def load_parameters(module: torch.nn.Module, x: Any) -> torch.nn.Module:
    """The module with the vector as its trainable parameters, as they come out of a run.

    >>> import torch
    >>> module = torch.nn.Linear(1, 1)
    >>> load_parameters(module, [2.0, 3.0])(torch.tensor([10.0])).tolist()
    [23.0]
    """
    trained = _trained(module)
    flat = torch.as_tensor(np.array(x), dtype=trained[0].dtype, device=trained[0].device)
    _set_parameters(trained, flat)
    return module


def load_buffers(module: torch.nn.Module, buffers: Mapping[str, np.ndarray]) -> None:
    own = dict(module.named_buffers())
    for name, values in buffers.items():
        own[name].copy_(torch.as_tensor(np.array(values)))


def _trained(module: torch.nn.Module) -> list[torch.nn.Parameter]:
    found = {name: p for name, p in module.named_parameters() if p.requires_grad}
    if not found:
        raise refused("module", "one with parameters to train", "none that require a gradient", "Unfreeze some.")
    wrong = {p.dtype for p in found.values()} - {torch.float32, torch.float64}
    if wrong:
        came = ", ".join(map(str, wrong))
        raise refused("module", "trained in float32 or float64", came, "Use module.float() and autocast in the loss.")
    if len({(p.dtype, p.device) for p in found.values()}) > 1:
        came = ", ".join(sorted({f"{p.dtype} on {p.device}" for p in found.values()}))
        raise refused("module", "trained in one type on one device", came, "Use module.to(...).")
    return list(found.values())


def _set_parameters(trained: list[torch.nn.Parameter], flat: torch.Tensor) -> None:
    sizes = [p.numel() for p in trained]
    if flat.shape != (sum(sizes),):
        raise refused("x", f"a vector of {sum(sizes)} numbers", f"shape {tuple(flat.shape)}", "Use the same module.")
    with torch.no_grad():
        for p, part in zip(trained, flat.split(sizes), strict=True):
            p.copy_(part.view_as(p))


class TorchNode:
    """One client that trains a PyTorch module."""

    def __init__(self, module: torch.nn.Module, loss: Loss, data: Any, metrics: Any = None, test: Any = None):
        self.module, self.loss, self.metrics = module, loss, metrics
        self.trained = _trained(module)
        self.form = form_of_module(module)
        self.training = {part: part.training for part in module.modules()}  # a layer set to eval() stays so
        self.device, self.dtype = self.trained[0].device, self.trained[0].dtype
        self.data = Tensors(data) if _is_batch(data) else Loader(data)
        self.test = self.data if test is None else Tensors(test) if _is_batch(test) else Loader(test)
        self.size = self.data.size

    @property
    def x(self) -> np.ndarray:
        return flat_parameters(self.module)

    @property
    def buffers(self) -> dict[str, np.ndarray]:
        return float_buffers(self.module)

    def steps(self, training: dict[str, Any]) -> int:
        if training["local_steps"] is not None:
            return whole("local_steps", training["local_steps"], 1)
        epochs = 1 if training["local_epochs"] is None else whole("local_epochs", training["local_epochs"], 1)
        return epochs * self.data.per_epoch(training["batch_size"])

    def batches(self, batch_size: Any) -> tuple[int, int]:
        return self.data.smallest_batch(batch_size), self.data.per_epoch(batch_size)

    def work(
        self, work: Work, down: Any, client: Any, buffers: Any, privacy: Privacy
    ) -> tuple[Any, Any, dict[str, np.ndarray], float]:
        load_buffers(self.module, buffers)
        self._restore_modes()
        exchange, K = work.exchange, self.steps(work.training)
        with seeded(seed_of(work.draw), self.device):
            batches = self.data.batches(K, work.training["batch_size"], work.draw)
            done = client_loop(
                exchange,
                self._vectors(down),
                self._vectors(client),
                self._full_gradient,
                (self._gradient([batch]) for batch in batches),  # lazily: without a step, no batch is drawn
                _guard(privacy) if privacy.used else None,
            )
        up, client = (type(t)(**{k: _numpy(v) for k, v in t._asdict().items()}) for t in done[:2])
        return up, client, self.buffers, float(done[2])

    def evaluate(self, x: np.ndarray, buffers: Any) -> tuple[dict[str, float], int]:
        load_buffers(self.module, buffers)
        _set_parameters(self.trained, self._vector(x))
        self.module.eval()
        try:
            values = self._mean(lambda batch: {"loss": self.loss(self.module, batch)}, self.data)
            if self.metrics is not None:
                metrics = self.metrics
                values |= self._mean(lambda batch: metrics(self.module, batch), self.test)
        finally:
            self._restore_modes()
        return values, self.test.size

    def _restore_modes(self) -> None:
        for part, training in self.training.items():
            part.training = training

    def _mean(self, values_of: Callable[[Any], Mapping[str, Any]], data: Tensors | Loader) -> dict[str, float]:
        totals: dict[str, float] = {}
        rows = 0
        with torch.no_grad():
            for batch in data.everything():
                rows += _rows(batch)
                for name, value in values_of(_moved(batch, self.device)).items():
                    totals[name] = totals.get(name, 0.0) + float(value) * _rows(batch)
        return {name: total / rows for name, total in totals.items()}

    def _gradient(self, batches: Iterable[Any]) -> Gradient:
        """y -> the gradient of the mean loss over all these batches together."""

        def grad(y: torch.Tensor) -> torch.Tensor:
            _set_parameters(self.trained, y)
            total, rows = torch.zeros_like(y), 0
            for batch in batches:
                loss = self.loss(self.module, _moved(batch, self.device))
                parts = torch.autograd.grad(loss, self.trained, allow_unused=True)
                flat = [torch.zeros_like(p) if g is None else g for p, g in zip(self.trained, parts, strict=True)]
                count = _rows(batch)
                total, rows = total + count * torch.cat([g.reshape(-1) for g in flat]), rows + count
            return total / rows

        return grad

    def _full_gradient(self, y: torch.Tensor) -> torch.Tensor:
        """The gradient over all data. The buffers stay as they are."""
        before = {name: buffer.clone() for name, buffer in self.module.named_buffers()}
        gradient = self._gradient(self.data.everything())(y)
        for name, buffer in self.module.named_buffers():
            buffer.copy_(before[name])
        return gradient

    def _vectors(self, arrays: Any) -> Any:
        return type(arrays)(**{name: self._vector(array) for name, array in arrays._asdict().items()})

    def _vector(self, array: np.ndarray) -> torch.Tensor:
        return torch.as_tensor(np.array(array), dtype=self.dtype, device=self.device)


class Tensors:
    """Examples in memory, cut into batches by covary, in the order that simulation uses."""

    def __init__(self, data: Any):
        self.data = jax.tree.map(torch.as_tensor, data)
        lengths = {len(leaf) for leaf in jax.tree.leaves(data)}
        if len(lengths) != 1 or lengths == {0}:
            raise refused("loader", "tensors of one length", f"lengths {sorted(lengths)}", "Each row is one example.")
        self.size = lengths.pop()

    def per_epoch(self, batch_size: Any) -> int:
        return int(batches_of(batch_size, np.array([self.size]))[2][0])

    def smallest_batch(self, batch_size: Any) -> int:
        return smallest_batch_of(batch_size, self.size)

    def batches(self, K: int, batch_size: Any, draw: Draw) -> Iterator[Any]:
        rule, batch, per_epoch = batches_of(batch_size, np.array([self.size]))
        parts, rows = int(per_epoch[0]), int(batch[0])
        order = np.empty(0, int)
        for k in range(K):
            if k % parts == 0:
                order = order_of_epoch(draw.seed, draw.round, draw.exchange, draw.client, k // parts, self.size)
            low, high = batch_bounds(rule, rows, parts, self.size, k)
            places = torch.as_tensor(order[low:high])
            yield jax.tree.map(lambda leaf, places=places: leaf[places], self.data)

    def everything(self) -> Iterator[Any]:
        for low in range(0, self.size, AT_ONCE):
            yield jax.tree.map(lambda leaf, low=low: leaf[low : low + AT_ONCE], self.data)


class Loader:
    """Batches that are made elsewhere, such as by a `DataLoader`."""

    def __init__(self, data: Any):
        if not hasattr(data, "__iter__") or not hasattr(data, "__len__"):
            fix = "Return a DataLoader, or tensors in a tuple."
            raise refused("loader", "tensors, or batches with a length", type(data).__name__, fix)
        self.data = data
        found = getattr(data, "sampler", None) or getattr(data, "dataset", None)
        try:
            size, batches = None if found is None else len(found), len(data)
        except TypeError:
            fix = "Give it a length, or read the stream into tensors."
            raise refused("loader", "batches of a known number", "a stream without a length", fix) from None
        self.size = sum(_rows(batch) for batch in data) if size is None else size
        if not self.size or not batches:
            came = f"{self.size} examples in {batches} batches"
            raise refused("loader", "at least one batch", came, "Use a smaller batch, or drop_last=False.")

    def per_epoch(self, batch_size: Any) -> int:
        return len(self.data)

    def smallest_batch(self, batch_size: Any) -> int:
        return self.size  # the node's own choice, not the server's

    def batches(self, K: int, batch_size: Any, draw: Draw) -> Iterator[Any]:
        reseed(self.data, seed_of(draw))
        taken = 0
        while taken < K:
            before = taken
            for batch in self.data:
                yield batch
                taken += 1
                if taken == K:
                    return
            if taken == before:
                raise refused("loader", "at least one batch", "none in a pass", "Check the sampler.")

    def everything(self) -> Iterator[Any]:
        yield from self.data


def seed_of(draw: Draw) -> int:
    """What the generators are seeded with for one order: another for every round, exchange and client."""
    digest = hashlib.sha256(f"{draw.seed} {draw.round} {draw.exchange} {draw.client}".encode()).digest()
    return int.from_bytes(digest[:8]) >> 1


@contextlib.contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Seed the generators that a loader, its augmentations and a module draw from, and put them back afterwards."""
    ours, numpys = random.getstate(), np.random.get_state()
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed % 2**32)
        try:
            yield
        finally:
            random.setstate(ours)
            np.random.set_state(numpys)


def reseed(loader: Any, seed: int) -> None:
    """Seed the generators that a loader, its data set and its samplers hold for themselves."""
    parts, seen = [loader], []
    while parts:
        part = parts.pop()
        seen.append(part)
        held = [getattr(part, name, None) for name in ("sampler", "batch_sampler", "dataset")]
        parts += [each for each in held if each is not None and not any(each is other for other in seen)]
        for own in vars(part).values() if hasattr(part, "__dict__") else ():
            if isinstance(own, torch.Generator):
                own.manual_seed(seed)
            elif isinstance(own, random.Random):
                own.seed(seed)
            elif isinstance(own, np.random.Generator):
                own.bit_generator.state = type(own.bit_generator)(seed).state


def _is_batch(data: Any) -> bool:
    leaves = jax.tree.leaves(data)
    kinds = (torch.Tensor, np.ndarray)
    return isinstance(data, (tuple, dict, *kinds)) and all(isinstance(a, kinds) for a in leaves)


def _rows(batch: Any) -> int:
    """The examples of a batch: the length of its first tensor."""
    for leaf in jax.tree.leaves(batch):
        if isinstance(leaf, torch.Tensor) and leaf.ndim:
            return len(leaf)
    raise refused("loader", "batches with tensors in tuples, lists or dicts", type(batch).__name__, "Use dict(batch).")


def _moved(batch: Any, device: torch.device) -> Any:
    return jax.tree.map(lambda leaf: leaf.to(device) if isinstance(leaf, torch.Tensor) else leaf, batch)


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
