"""Where a deployed run starts: the model, and the algorithm as a server describes it to nodes."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from covary.algorithm import Algorithm
from covary.errors import refused
from covary.flower.merge import Arrays


class Start(NamedTuple):
    """What a model is at the start of a run."""

    x: np.ndarray  # x^0
    buffers: Arrays
    form: str  # the model's fingerprint
    unravel: Callable[[Any], Any]  # from x to the model's own form
    tree: Callable[[Arrays], Any]  # from buffers by name to the model's own form

    @property
    def about(self) -> str:
        return f"{len(self.x)} numbers of {self.x.dtype}"


def built(build: Callable[[], Any], seed: int) -> Any:
    """What the user's function builds, with PyTorch's generator, if it is imported, seeded by the run's seed."""
    torch = sys.modules.get("torch")
    if torch is None:
        return build()
    with torch.random.fork_rng([]):
        torch.manual_seed(seed)
        return build()


def spec_of(algorithm: Algorithm) -> dict[str, Any]:
    """How a node builds the same algorithm."""
    if algorithm.recipe is None:
        fix = "Make it with a function marked by @covary.algorithm.factory, and name that to the client app too."
        raise refused("algorithm", "made by a factory", algorithm.name, fix)
    build, options = algorithm.recipe
    return {"name": build.__name__, "numbers": dict(algorithm.numbers), "options": dict(options)}
