"""The settings of a deployed run: set in code, and overridden by a run configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, ClassVar

from covary import targets
from covary.checks import flag, positive, whole
from covary.errors import refused
from covary.targets import Target
from covary.training import LocalWork, Training

ONLY_SIMULATED = ("average", "precision")
MAY_CHANGE = ("rounds", "target", "eval_every")  # when a run is resumed


@dataclass(frozen=True)
class Settings(Training):
    """The settings of a deployed run: those of `covary.simulate`, with the same meaning, and the deployment's own.

    >>> from covary.flower import Settings
    >>> Settings(rounds=20, local_epochs=1, batch_size=0.1, target="accuracy >= 0.9").min_clients
    2
    """

    least_eval_every: ClassVar[int] = 0  # 0 for never; else on all nodes that are online

    min_clients: int = 2  # nodes to wait for before the first round
    min_replies: int = 1  # a round with fewer is abandoned and tried again
    round_timeout: float = 600.0  # seconds for an exchange; a node that replies later is left out
    patience: float = 600.0  # seconds without a finished round, or without enough nodes, before the server gives up
    forget_after: int | None = None  # rounds of absence after which a node counts as gone for good
    largest: float = 1e6  # uploads with larger numbers are rejected
    screen: float | None = 5.0  # uploads with more than so many times the median norm are not counted
    checkpoint: str | Path = "checkpoint"
    resume: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ONLY_SIMULATED:
            if getattr(self, name) is not None:
                raise refused(name, "None in a deployment", repr(getattr(self, name)), "Leave it out.")
        if self.target is not None and target_of(self.target).metric == "drift":
            raise refused("target", "a loss or a metric", self.target, "A single node can claim any drift.")
        for name in ("min_clients", "min_replies"):
            whole(name, getattr(self, name), 1)
        for name in ("round_timeout", "patience", "largest"):
            positive(name, getattr(self, name))
        if self.screen is not None and not self.screen > 1:
            raise refused("screen", "a number above 1, or None", self.screen, "Try 5, the default.")
        if self.largest > 1e100:
            raise refused("largest", "at most 1e100", self.largest, "Try 1e6, the default.")
        if self.forget_after is not None:
            whole("forget_after", self.forget_after, 1)
        flag("resume", self.resume)

    def fixed(self) -> dict[str, Any]:
        """The settings of the run that stay the same when it is resumed, besides those of a client's work."""
        others = {*LocalWork._fields, *MAY_CHANGE, *ONLY_SIMULATED}
        return {f.name: getattr(self, f.name) for f in fields(Training) if f.name not in others}


def checked_settings(rounds: int, others: Mapping[str, Any]) -> Settings:
    known = {f.name for f in fields(Settings)} - {*ONLY_SIMULATED}
    for name in others:
        if name not in known:
            raise refused("settings", f"among {', '.join(sorted(known))}", repr(name), "Check the spelling.")
    return Settings(rounds, **others)


OPTIONAL = {f.name for f in fields(Settings) if "None" in str(f.type)} - {*ONLY_SIMULATED}


def _or_none(name: str, value: Any) -> Any:
    """A value of a run configuration, in which 0 and "" stand for None."""
    return None if name in OPTIONAL and value in (0, "") else value


def overridden(settings: Settings, wanted: Mapping[str, Any]) -> Settings:
    """The settings with those that a run configuration names, with underscores."""
    ours = {f.name for f in fields(Settings)}
    return replace(settings, **{name: _or_none(name, value) for name, value in wanted.items() if name in ours})


def target_of(text: Any) -> Target:
    """The target of a text such as "accuracy >= 0.9".

    >>> target_of("loss <= 0.1")
    Target(metric='loss', direction=-1.0, value=0.1)
    """
    target = targets.target_of(text) if isinstance(text, str) else None
    if target is None:
        raise refused("target", 'a text such as "accuracy >= 0.9"', repr(text), "Name a metric.")
    return target
