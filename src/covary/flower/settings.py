"""The settings of a deployed run: set in code, and overridden by a run configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from covary import targets
from covary._engine.plan import batches_of
from covary.checks import positive, whole
from covary.errors import CovaryError, refused
from covary.targets import Target


@dataclass(frozen=True)
class Settings:
    """The settings of a deployed run. Those that `covary.simulate` has too mean the same here.

    >>> from covary.flower import Settings
    >>> Settings(rounds=20, local_epochs=1, batch_size=0.1, target="accuracy >= 0.9").min_clients
    2
    """

    rounds: int
    clients_per_round: int | float | None = None
    local_steps: int | None = None
    local_epochs: int | None = None
    batch_size: int | float | None = None
    seed: int = 0
    warm_start: bool = False
    weights: str = "uniform"
    target: str | None = None  # such as "accuracy >= 0.9"
    eval_every: int = 1  # on all nodes that are online; 0 for never
    min_clients: int = 2  # nodes to wait for before the first round
    min_replies: int = 1  # a round with fewer is abandoned and tried again
    round_timeout: float = 600.0  # seconds for an exchange; a node that replies later is left out
    patience: float = 600.0  # seconds without a finished round, or without enough nodes, before the server gives up
    forget_after: int | None = None  # rounds of absence after which a node counts as gone for good
    largest: float = 1e6  # uploads with larger numbers are refused
    screen: float | None = 5.0  # uploads with more than so many times the median norm are not counted
    checkpoint: str | Path = "checkpoint"
    resume: bool = False

    def __post_init__(self) -> None:
        for name in ("rounds", "min_clients", "min_replies"):
            whole(name, getattr(self, name), 1)
        whole("eval_every", self.eval_every, 0)
        whole("seed", self.seed, 0, most=2**32 - 1)
        for name in ("round_timeout", "patience", "largest"):
            positive(name, getattr(self, name))
        if self.screen is not None and not self.screen > 1:
            raise refused("screen", "a number above 1, or None", self.screen, "Try 5, the default.")
        if self.largest > 1e100:
            raise refused("largest", "at most 1e100", self.largest, "Try 1e6, the default.")
        if self.forget_after is not None:
            whole("forget_after", self.forget_after, 1)
        if self.weights not in ("uniform", "examples"):
            fix = "The paper's f is the uniform mean."
            raise refused("weights", '"uniform" or "examples"', repr(self.weights), fix)
        if self.local_steps is not None and self.local_epochs is not None:
            came = f"local_steps={self.local_steps} and local_epochs={self.local_epochs}"
            raise CovaryError(f"{came} exclude each other. Give one of them.")
        if self.target is not None and target_of(self.target)[0] == "drift":
            raise refused("target", "a loss or a metric", self.target, "A single node can claim any drift.")
        for name in ("warm_start", "resume"):
            if not isinstance(getattr(self, name), bool):
                raise refused(
                    name, "True or False", repr(getattr(self, name)), "In a run configuration: true or false."
                )
        for name in ("local_steps", "local_epochs"):
            if getattr(self, name) is not None:
                whole(name, getattr(self, name), 1)
        if self.batch_size is not None:
            batches_of(self.batch_size, np.array([2**31]))
        S = self.clients_per_round
        if S is not None and not (isinstance(S, float) and 0 < S < 1):
            whole("clients_per_round", S, 1)

    @property
    def weighted(self) -> bool:
        return self.weights == "examples"

    @property
    def training(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("local_steps", "local_epochs", "batch_size")}


def checked_settings(rounds: int, others: Mapping[str, Any]) -> Settings:
    known = {f.name for f in fields(Settings)}
    for name in others:
        if name not in known:
            raise refused("settings", f"among {', '.join(sorted(known))}", repr(name), "Check the spelling.")
    return Settings(rounds, **others)


OPTIONAL = ("clients_per_round", "local_steps", "local_epochs", "batch_size", "forget_after", "screen", "target")


def _meant(name: str, value: Any) -> Any:
    """A value of a run configuration, which cannot say None: 0 and "" stand for it."""
    return None if name in OPTIONAL and value in (0, "") else value


def overridden(settings: Settings, wanted: Mapping[str, Any]) -> Settings:
    """The settings with those that a run configuration names, with underscores."""
    ours = {f.name for f in fields(Settings)}
    return replace(settings, **{name: _meant(name, value) for name, value in wanted.items() if name in ours})


def target_of(text: str) -> Target:
    """The target of a text such as "accuracy >= 0.9".

    >>> target_of("loss <= 0.1")
    Target(metric='loss', direction=-1.0, value=0.1)
    """
    target = targets.target_of(text) if isinstance(text, str) else None
    if target is None:
        raise refused("target", 'a text such as "accuracy >= 0.9"', repr(text), "Name a metric.")
    return target
