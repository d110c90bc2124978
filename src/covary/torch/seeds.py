"""Seeds of everything random in a client's work: its loader, its augmentations and its module's dropout."""

from __future__ import annotations

import contextlib
import hashlib
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from covary.draws import Draw


def seed_of(draw: Draw, *step: int) -> int:
    """What the generators are seeded with: another for every round, exchange and client, and for every step.

    >>> seed_of(Draw(seed=0, round=1, exchange=1, client=2), 1) == seed_of(Draw(0, 1, 1, 2), 2)
    False
    """
    digest = hashlib.sha256(" ".join(map(str, (*draw, *step))).encode()).digest()
    return int.from_bytes(digest[:8]) >> 1


def seed_pytorch(seed: int, device: torch.device) -> None:
    """As `torch.manual_seed`, which takes a hundred times as long: it notes its caller for a GPU that is not in use."""
    if device.type == "cpu":
        torch.default_generator.manual_seed(seed)
    else:
        torch.manual_seed(seed)


@contextlib.contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Seed the generators that a loader, its augmentations and a module draw from, and put them back afterwards."""
    ours, numpys = random.getstate(), np.random.get_state()
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        seed_pytorch(seed, device)
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
