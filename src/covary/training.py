"""The settings of a run, checked once, for simulate, sweep and Flower alike."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np

from covary.checks import flag, whole
from covary.errors import InvalidInput, refused
from covary.targets import target_of


class LocalWork(NamedTuple):
    """The settings of a client's work: how many steps, on which batches."""

    local_steps: int | None = None
    local_epochs: int | None = None
    batch_size: int | float | None = None


@dataclass(frozen=True)
class Training:
    """The settings of a run, as `covary.simulate` describes them.

    >>> Training(rounds=10, local_steps=5, clients_per_round=0)
    Traceback (most recent call last):
    covary.errors.InvalidInput: clients_per_round must be a number of clients of at least 1, a fraction in (0, 1), or
    None for all; got 0. Try 0.2, as in the paper.
    """

    least_eval_every: ClassVar[int] = 1

    rounds: int
    clients_per_round: int | float | None = None
    local_steps: int | None = None
    local_epochs: int | None = None
    batch_size: int | float | None = None
    seed: int = 0
    warm_start: bool = False
    weights: str = "uniform"
    target: tuple[str, float] | tuple[str, str, float] | str | None = None
    average: str | float | None = None
    eval_every: int = 1
    precision: str | None = None

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Self:
        """The settings among a function's arguments, by name: `Training.of(locals())`."""
        return cls(**{field.name: given[field.name] for field in fields(cls) if field.name in given})

    def __post_init__(self) -> None:
        whole("rounds", self.rounds, 1)
        whole("eval_every", self.eval_every, self.least_eval_every)
        whole("seed", self.seed, 0, most=2**32 - 1)
        flag("warm_start", self.warm_start)
        check_clients_per_round(self.clients_per_round)
        check_batch_size(self.batch_size)
        if self.local_steps is not None and self.local_epochs is not None:
            raise InvalidInput(
                f"local_steps={self.local_steps} and local_epochs={self.local_epochs} exclude each other: one fixes K, "
                "the other the passes over the local data. Give one of them."
            )
        for name in ("local_steps", "local_epochs"):
            if getattr(self, name) is not None:
                whole(name, getattr(self, name), 1)
        check_weights(self.weights)
        target_of(self.target)
        average = self.average
        if not (average is None or (isinstance(average, str) and average == "uniform") or _is_fraction(average)):
            fix = "The theorems for convex f use mu K eta_l eta_g / 2."
            raise refused("average", '"uniform" or a number in (0, 1)', repr(average), fix)
        if self.precision is not None and not (isinstance(self.precision, str) and self.precision == "bfloat16"):
            raise refused("precision", '"bfloat16" or None', repr(self.precision), "None keeps the model's own.")

    @property
    def local(self) -> LocalWork:
        """The settings of a client's work."""
        return LocalWork(self.local_steps, self.local_epochs, self.batch_size)

    @property
    def by_examples(self) -> bool:
        """Whether clients weigh by their number of examples."""
        return self.weights == "examples"

    @property
    def decay(self) -> float:
        """The decay of the weights w_r in the running average; 1 is the uniform mean."""
        return 1 - float(self.average) if isinstance(self.average, float) else 1.0

    def facts(self) -> dict[str, Any]:
        """The settings for JSON. Settings with the same meaning have the same form, so checkpoints can be compared."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        values = {name: value.item() if isinstance(value, np.generic) else value for name, value in values.items()}
        if self.local_steps is None and self.local_epochs is None:
            values["local_epochs"] = 1
        return values | {"target": list(self.target) if isinstance(self.target, tuple) else self.target}


def check_clients_per_round(value: Any) -> None:
    """Reject a value that is neither a number nor a fraction of clients."""
    if value is None or _is_fraction(value) or (_is_whole(value) and value >= 1):
        return
    allowed = "a number of clients of at least 1, a fraction in (0, 1), or None for all"
    raise refused("clients_per_round", allowed, repr(value), "Try 0.2, as in the paper.")


def check_batch_size(value: Any) -> None:
    """Reject a value that is neither a number nor a fraction of examples."""
    if value is None or _is_fraction(value) or (_is_whole(value) and value >= 1):
        return
    allowed = "a number of examples of at least 1, a fraction in (0, 1), or None for full batches"
    raise refused("batch_size", allowed, repr(value), "The paper uses 0.2 of the local data.")


def check_weights(value: Any) -> None:
    """Refuse what is no way to weigh clients."""
    if not isinstance(value, str) or value not in ("uniform", "examples"):
        raise refused("weights", '"uniform" or "examples"', repr(value), "The paper's f is the uniform mean.")


def _is_fraction(value: Any) -> bool:
    return isinstance(value, float | np.floating) and bool(0 < value < 1)


def _is_whole(value: Any) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)
