"""The derivatives of a module's loss, backwards and backwards again, as `covary.running.derivatives` describes them.

The loss is measured in evaluation mode, in which nothing is dropped out, except that BatchNorm normalises by the batch,
as in local steps. So f_i is the same function at every call. A module that draws random numbers even then, as a
variational autoencoder does, draws the same ones at every call.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules.batchnorm import _NormBase

from covary import trees
from covary.errors import InvalidInput, refused
from covary.running.derivatives import Parts
from covary.runs import machine
from covary.torch.examples import Rows, moved, rows_in
from covary.torch.module import Network, unwrapped
from covary.torch.problem import Problem
from covary.torch.seeds import seeded
from covary.torch.work import Loss

NOISES = (0.01, 0.1)  # by which the start is moved to see how a loss behaves
TOGETHER = 2**25  # numbers in the gradients of single examples that are computed at once
KERNELS: tuple[Callable[[], Any], ...] = (  # fast ones, then those that PyTorch can differentiate twice
    contextlib.nullcontext,
    lambda: sdpa_kernel(SDPBackend.MATH),
    lambda: _without_fused_kernels(),
)


class TorchDerivatives:
    """Losses, gradients and Hessian-vector products of a copy of the module."""

    def __init__(self, problem: Problem, x0: Any, seed: int):
        if not isinstance(problem.examples, Rows):
            raise InvalidInput(
                "The constants are measured on examples that stay the same, but those of data sets and loaders may be "
                "drawn anew each time. Pass tensors, one tuple per client: supervised(module, loss, [(x, y), ...])."
            )
        self.loss = unwrapped(problem.loss)
        self.network = Network(problem.network.copied().own)  # not compiled, because that differentiates only once
        narrow = [p.dtype for p in self.network.trained if p.dtype.itemsize < 4]
        if narrow:
            fix = "Its rounding hides curvatures. Measure the module in float32, and train in any precision."
            raise refused("module", "in float32 or float64", str(narrow[0]), fix)
        self.start = problem.start(x0, seed)[0]
        self.examples, device = problem.examples, self.network.device
        if device.type != "cpu" and self.examples.nbytes <= machine.device_memory() / 4:
            self.examples = self.examples.to(device)
        few = problem.few_on_device()
        self._choose_kernels(few)
        self.divisible = self._is_mean(few)
        self._one_by_one = False  # whether gradients of single examples are computed apart

    def survey(self, x: np.ndarray, parts: Parts, p: np.ndarray, centre: np.ndarray) -> tuple[np.ndarray, ...]:
        away, mean = self.vectors(centre), torch.zeros_like(self.vectors(x))
        losses, squares, deviations = [], [], []
        with self._at(x):
            for i in range(parts.functions):
                f, g = self._slope(parts, i)
                mean += float(p[i]) * g
                losses.append(f)
                squares.append(g.square().sum())
                deviations.append((g - away).square().sum())
        return *(_numbers(each) for each in (losses, squares, deviations)), mean.cpu().numpy()

    def responses(
        self, x: np.ndarray, v: np.ndarray, parts: Parts, p: np.ndarray, centre: np.ndarray
    ) -> tuple[np.ndarray, ...]:
        away, V = self.vectors(centre), self.vectors(v)[None]
        mean, squares, deviations = torch.zeros_like(away), [], []
        with self._at(x):
            for i in range(parts.functions):
                (h,) = self._products(parts, i, V)
                mean += float(p[i]) * h
                squares.append(h.square().sum())
                deviations.append((h - away).square().sum())
        return _numbers(squares), _numbers(deviations), mean.cpu().numpy()

    def gradients(self, x: np.ndarray, parts: Parts) -> np.ndarray:
        with self._at(x):
            return np.stack([self._slope(parts, i)[1].cpu().numpy() for i in range(parts.functions)])

    def own_products(self, x: np.ndarray, V: torch.Tensor, parts: Parts) -> torch.Tensor:
        with self._at(x):
            return torch.cat([self._products(parts, i, V[i : i + 1]) for i in range(parts.functions)])

    def common_products(self, x: np.ndarray, V: torch.Tensor, parts: Parts, p: np.ndarray) -> torch.Tensor:
        shares = [1.0] if parts.functions == 1 else p.tolist()
        total = torch.zeros_like(V)
        with self._at(x):
            for i, share in enumerate(shares):
                total += share * self._products(parts, i, V)
        return total

    def square_deviations(self, x: np.ndarray, rows: np.ndarray, centres: np.ndarray) -> np.ndarray:
        with self._at(x):
            found = [self._deviations(x, *each) for each in zip(rows, centres, strict=True)]
        return np.stack(found)

    def vectors(self, values: np.ndarray) -> torch.Tensor:
        return torch.tensor(values, dtype=self.network.dtype, device=self.network.device)

    def basis(self, start: torch.Tensor, steps: int) -> TorchBasis:
        return TorchBasis(start, steps)

    @contextlib.contextmanager
    def _at(self, x: np.ndarray) -> Iterator[None]:
        """The module with these parameters, in the mode in which it is measured."""
        self.network.restore()
        for part in self.network.own.modules():
            part.training = part.training and isinstance(part, _NormBase)
        self.network.set(self.vectors(x))
        with torch.enable_grad(), seeded(0, self.network.device), self.kernels():
            yield

    def _value(self, batch: Any) -> torch.Tensor:
        torch.manual_seed(0)
        return self.loss(self.network.module, moved(batch, self.network.device))

    def _batches(self, parts: Parts, i: int) -> Iterator[tuple[float, Any]]:
        """The batches of function i with their weights. The loss is a mean, so a batch has rows of one weight."""
        if parts.share is None:
            yield 1.0, self.examples.at(parts.rows[i])
            return
        for k in range(parts.first[i], parts.first[i + 1]):
            share = parts.share[k]
            kinds = (share / share.max()).round(9)
            for kind in np.unique(kinds[kinds > 0]):
                yield float(share[kinds == kind].sum()), self.examples.at(parts.rows[k][kinds == kind])

    def _slope(self, parts: Parts, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        """f_i and ∇f_i."""
        f, g = 0.0, 0.0
        for weight, batch in self._batches(parts, i):
            value = self._value(batch)
            f, g = f + weight * value.detach(), g + weight * self.network.gradient(value)
        return torch.as_tensor(f), torch.as_tensor(g)

    def _products(self, parts: Parts, i: int, V: torch.Tensor) -> torch.Tensor:
        """∇²f_i v for each of the vectors."""
        total = torch.zeros_like(V)
        for weight, batch in self._batches(parts, i):
            total += weight * self._products_of(batch, V)
        return total

    def _products_of(self, batch: Any, V: torch.Tensor) -> torch.Tensor:
        slopes, products = self._curved(batch), torch.zeros_like(V)
        if not slopes:
            return products
        trained = self.network.trained
        for row, v in zip(products, V, strict=True):
            along = [part.to(slope.dtype) for part, slope in zip(self.network.parts(v), trained, strict=True)]
            given = [along[k] for k in slopes]
            found = torch.autograd.grad([*slopes.values()], trained, given, retain_graph=True, allow_unused=True)
            row.copy_(self.network.flat(found))
        return products

    def _curved(self, batch: Any) -> dict[int, torch.Tensor]:
        """The slopes of those parameters, by number, in which the loss is not linear."""
        trained = self.network.trained
        slopes = torch.autograd.grad(self._value(batch), trained, create_graph=True, allow_unused=True)
        return {k: slope for k, slope in enumerate(slopes) if slope is not None and slope.requires_grad}

    def _deviations(self, x: np.ndarray, rows: np.ndarray, centre: np.ndarray) -> np.ndarray:
        """‖∇l_j - centre‖² of these examples."""
        away = self.vectors(centre)
        if not self._one_by_one:
            try:
                return self._deviations_together(self.vectors(x), rows, away)
            except Exception:  # what torch.func cannot do, or what does not fit into memory
                self._one_by_one = True
        slopes = (self.network.gradient(self._value(self.examples.at(np.array([j])))) for j in rows)
        return _numbers([(slope - away).square().sum() for slope in slopes])

    def _deviations_together(self, y: torch.Tensor, rows: np.ndarray, away: torch.Tensor) -> np.ndarray:
        whole = _WithLoss(self.network, self.loss)

        def value(y: torch.Tensor, example: Any) -> torch.Tensor:
            named = {f"own.{name}": part for name, part in self.network.named_parts(y).items()}
            return torch.func.functional_call(whole, named, (trees.map(lambda leaf: leaf[None], example),))

        def deviation(example: Any) -> torch.Tensor:
            return (torch.func.grad(value)(y, example) - away).square().sum()

        at_once = max(1, TOGETHER // len(y))
        batch = moved(self.examples.at(rows), self.network.device)
        with warnings.catch_warnings():  # where PyTorch warns of a slow way, one by one is no slower
            warnings.filterwarnings("error", "There is a performance drop")
            return torch.vmap(deviation, chunk_size=at_once)(batch).cpu().numpy()

    def _choose_kernels(self, few: Any) -> None:
        """The first kernels with which PyTorch differentiates the loss twice."""
        reason = None
        for self.kernels in KERNELS:
            try:
                with self._at(self.start):
                    slopes = [*self._curved(few).values()]
                    if slopes:  # `backward` goes to all ends, also those that have an error in place of a derivative
                        torch.autograd.backward(slopes, [torch.ones_like(slope) for slope in slopes])
            except RuntimeError as error:
                reason = reason or error
            else:
                self.network.own.zero_grad()
                return
        raise InvalidInput(
            "loss(module, batch) must be twice differentiable, because beta, mu and delta are curvatures, but PyTorch "
            f"cannot differentiate its gradient ({str(reason).splitlines()[0]}). Make functions of your own "
            "(torch.autograd.Function) differentiable, and leave out torch.compile inside the module."
        ) from reason

    def _is_mean(self, few: Any) -> bool:
        """Whether the loss of a batch is the mean of its examples' own losses, near the start and farther away."""
        draws, ones = np.random.default_rng(0).normal(size=self.start.size), np.arange(rows_in(few))
        for noise in NOISES:
            with self._at(self.start + noise * draws):
                once = self._value(few).item()
                try:
                    each = [self._value(trees.map(lambda leaf, j=j: leaf[j : j + 1], few)).item() for j in ones]
                except Exception:  # a loss that needs several examples, as with BatchNorm
                    return False
            if np.isfinite(once) and abs(once - np.mean(each)) > 1e-3 * max(abs(once), 1e-3 * np.abs(each).max()):
                return False
        return True


class TorchBasis:
    """The vectors of Lanczos' method on the module's device, (steps, matrices, d)."""

    def __init__(self, start: torch.Tensor, steps: int):
        self.first = start / torch.linalg.vector_norm(start, dim=1, keepdim=True)
        self.steps, self.roundoff = min(steps, start.shape[1]), 50 * torch.finfo(start.dtype).eps
        self._vectors, self._count = start.new_empty((self.steps, *start.shape)), 0

    def add(self, v: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, np.ndarray, np.ndarray]:
        along = (v * w).sum(dim=1)
        self._vectors[self._count] = v
        self._count += 1
        basis = self._vectors[: self._count]
        for _ in range(2):  # because of rounding
            w = w - torch.einsum("km,kmd->md", torch.einsum("kmd,md->km", basis, w), basis)
        left = torch.linalg.vector_norm(w, dim=1)
        return w, along.double().cpu().numpy(), left.double().cpu().numpy()

    def unit(self, w: torch.Tensor, lengths: np.ndarray) -> torch.Tensor:
        by = torch.tensor(lengths, dtype=w.dtype, device=w.device)[:, None]
        return torch.where(by > 0, w / by, 0)

    def combined(self, mix: np.ndarray) -> torch.Tensor:
        vectors = self._vectors[: mix.shape[1]]
        return torch.einsum("mks,kmd->msd", torch.tensor(mix, dtype=vectors.dtype, device=vectors.device), vectors)


class _WithLoss(torch.nn.Module):
    """The module and its loss as one module, so that a call can replace the parameters for both."""

    def __init__(self, network: Network, loss: Loss):
        super().__init__()
        self.own, self._loss = network.own, loss

    def forward(self, batch: Any) -> torch.Tensor:
        return self._loss(self.own, batch)


@contextlib.contextmanager
def _without_fused_kernels() -> Iterator[None]:
    """Without the fused kernels of attention and, on a GPU, of recurrent layers."""
    with sdpa_kernel(SDPBackend.MATH), torch.backends.cudnn.flags(enabled=False):
        yield


def _numbers(scalars: list[torch.Tensor]) -> np.ndarray:
    return torch.stack(scalars).cpu().numpy()
