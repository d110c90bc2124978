"""Small PyTorch problems that the tests of `covary.torch` share."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

import covary as cv
import covary.torch as cvt

torch.set_num_threads(1)  # the tests of other processes run on the same cores
D, CLASSES = 5, 3
LINEAR = {"in_features": D, "out_features": CLASSES, "dtype": torch.float64}
EVEN, UNEVEN = (12,) * 6, (7, 12, 9, 20, 5, 6)


def cross_entropy(module: torch.nn.Module, batch: Any) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(module(batch[0]), batch[1])


def hits(module: torch.nn.Module, batch: Any) -> dict[str, torch.Tensor]:
    return {"accuracy": module(batch[0]).argmax(1) == batch[1]}


def parts(sizes: Any = EVEN, seed: int = 0) -> list[tuple[np.ndarray, np.ndarray]]:
    """Clients whose features differ, in NumPy."""
    rng = np.random.default_rng(seed)
    return [(rng.normal(i / 2, 1, (n, D)), rng.integers(0, CLASSES, n)) for i, n in enumerate(sizes)]


def tensors(sizes: Any = EVEN, seed: int = 0) -> list[tuple[torch.Tensor, ...]]:
    return [tuple(map(torch.from_numpy, part)) for part in parts(sizes, seed)]


def linear() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Linear(**LINEAR)


def network(*before: torch.nn.Module) -> torch.nn.Module:
    """Layers in float64, and a linear one behind them, with the same numbers at every call."""
    torch.manual_seed(0)
    module = torch.nn.Sequential(*before, torch.nn.Linear(D, CLASSES)).double()
    for p in module.parameters():
        torch.nn.init.uniform_(p, -0.5, 0.5)
    return module


def dropout() -> torch.nn.Module:
    return network(torch.nn.Dropout(0.5))


def batch_norm() -> torch.nn.Module:
    return network(torch.nn.BatchNorm1d(D))


def both() -> torch.nn.Module:
    return network(torch.nn.BatchNorm1d(D), torch.nn.Linear(D, D).requires_grad_(False), torch.nn.Dropout(0.3))


def problem(module: Any = None, sizes: Any = EVEN, data: Any = None, loss: Any = cross_entropy, **more: Any) -> Any:
    return cvt.supervised(linear() if module is None else module, loss, data or tensors(sizes), **more)


def same(run: cv.Run, other: cv.Run) -> None:
    """The same numbers, bit for bit."""
    np.testing.assert_array_equal(run.x, other.x)
    for own, others in ((run.server, other.server), (run.clients, other.clients)):
        for name in own._fields:
            np.testing.assert_array_equal(np.asarray(getattr(own, name)), np.asarray(getattr(others, name)), name)
    assert list(run.history) == list(other.history)
    for name, column in run.history.items():
        if name != "control_error":  # a rounding error, which is not measured in every round in every store
            np.testing.assert_array_equal(column, other.history[name], name)
    for name, values in (run.buffers or {}).items():
        np.testing.assert_array_equal(values, other.buffers[name], name)


def bits_of(module: torch.nn.Module) -> dict[str, Any]:
    """Everything of a module that a run must leave alone."""
    modes = {f"mode of {name}": part.training for name, part in module.named_modules()}
    grads = {f"gradient of {name}": p.grad for name, p in module.named_parameters()}
    return {name: value.clone() for name, value in module.state_dict().items()} | modes | grads


@contextlib.contextmanager
def generators_as_before() -> Iterator[None]:
    """Nothing draws from the generators of PyTorch, Python and NumPy, seen from outside."""
    ours, numpys, torchs = random.getstate(), np.random.get_state(), torch.get_rng_state()
    yield
    assert torch.equal(torch.get_rng_state(), torchs)
    assert random.getstate() == ours
    assert all(np.array_equal(a, b) for a, b in zip(np.random.get_state(), numpys, strict=True))


class Crash(Exception):
    """Ends a run from its log, as a bug or a full disk would."""


def crash_at(r: int) -> Any:
    def log(number: int, values: Any) -> None:
        if number >= r:
            raise Crash

    return log
