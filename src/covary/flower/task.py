"""What a server asks of a node, as it travels, and what a node's work takes from it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from covary.algorithm import Algorithm, Exchange
from covary.checks import flag, whole
from covary.draws import Draw
from covary.flower.refusals import NotCovarys, UnknownAlgorithm


class Task(NamedTuple):
    """What is asked of a node besides the vectors: the facts of an order.

    A question to a node that is not a member yet leaves the defaults.
    """

    algorithm: dict[str, Any]  # name, numbers, options
    training: dict[str, Any]  # local_steps, local_epochs, batch_size
    seed: int
    round: int
    trip: int = 1  # the number of the exchange in its round, under the name that it has on the wire
    warm: bool = False  # it belongs to the warm start
    steps: int | None = None  # K, if the server computes from it what option II does not send
    number: int = 0  # i
    cohort: int = 0  # nodes that are asked in this exchange

    @classmethod
    def read(cls, facts: Any) -> Task:
        """The task of an order, which is rejected unless its numbers are valid."""
        try:
            task = cls(**facts)
            for name, least, most in (("seed", 0, 2**32 - 1), ("round", 0, 2**31 - 1), ("trip", 1, 8)):
                whole(name, getattr(task, name), least, most)
            for name in ("number", "cohort"):
                whole(name, getattr(task, name), 0)
            flag("warm", task.warm)
            if task.steps is not None:
                whole("steps", task.steps, 1)
        except (TypeError, ValueError) as error:
            raise NotCovarys(f"the task is not covary's ({error})") from None
        return task

    def build(self, factories: Iterable[Callable[..., Algorithm]]) -> Algorithm:
        """The algorithm that is named, with its numbers checked as always."""
        known = {factory.__name__: factory for factory in factories}
        name = self.algorithm["name"]
        if name not in known:
            raise UnknownAlgorithm(f"the server names the algorithm {name!r}; this node knows {', '.join(known)}")
        return known[name](**self.algorithm["numbers"], **self.algorithm["options"])

    @property
    def which(self) -> Which:
        return Which(self.trip, self.warm, self.steps)

    @property
    def draw(self) -> Draw:
        return Draw(self.seed, self.round, self.trip, self.number)


class Which(NamedTuple):
    """Which of an algorithm's exchanges is asked for."""

    number: int  # from 1
    warm: bool
    steps: int | None

    def of(self, algorithm: Algorithm) -> Exchange:
        """The exchange itself.

        >>> import covary as cv
        >>> Which(2, False, None).of(cv.fedavg(0.1))
        Traceback (most recent call last):
        covary.flower.refusals.NotCovarys: fedavg has no exchange 2
        """
        exchanges = (algorithm.warm_start,) if self.warm else algorithm.trips(self.steps)
        if self.number > len(exchanges) or (found := exchanges[self.number - 1]) is None:
            raise NotCovarys(f"{algorithm.name} has no {'warm start' if self.warm else f'exchange {self.number}'}")
        return found


class Work(NamedTuple):
    """What a node computes for an order."""

    algorithm: Algorithm
    which: Which
    training: dict[str, Any]
    draw: Draw

    @property
    def exchange(self) -> Exchange:
        return self.which.of(self.algorithm)
