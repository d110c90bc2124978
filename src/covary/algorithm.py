"""The contract: what an algorithm is, and nothing about how it is run.

Everything an algorithm touches is a flat vector in R^d. Its states, downloads and uploads are NamedTuples of
vectors, so that a field's name (`x`, `c`, `dy`, `dc`, `c_i`) is its name in the paper, in the client store and on the
wire. Its functions use arithmetic operators only (zeros are `0 * x`), so that one file runs on JAX, NumPy and PyTorch.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ParamSpec, Protocol

from covary.checks import is_traced

Gradient = Callable[[Any], Any]
"""y -> a gradient at y: of one minibatch (`grad`) or over all the client's data (`full_grad`)."""


class Broadcast(Protocol):
    """The download to every client of the cohort, from the server's state."""

    def __call__(self, server: Any, /) -> Any: ...


class Start(Protocol):
    """The local state before the first step, from the download and the client's state."""

    def __call__(self, down: Any, client: Any, full_grad: Gradient, /) -> Any: ...


class Step(Protocol):
    """The local state after one more step; `grad` is the gradient of this step's minibatch."""

    def __call__(self, local: Any, down: Any, client: Any, grad: Gradient, /) -> Any: ...


class Finish(Protocol):
    """The upload and the client's new state, after K steps."""

    def __call__(self, local: Any, down: Any, client: Any, full_grad: Gradient, K: Any, /) -> tuple[Any, Any]: ...


class Aggregate(Protocol):
    """The server's new state, from the weighted mean of the uploads and the fraction |S| / N that replied."""

    def __call__(self, server: Any, mean_up: Any, fraction: Any, /) -> Any: ...


class Init(Protocol):
    """A state before the first round, a NamedTuple, from the initial model x."""

    def __call__(self, x: Any, /) -> Any: ...


@dataclass(frozen=True)
class Exchange:
    """One download to the sampled clients and one upload back: all that crosses the wire.

    `down` has a field `x`, and `local` a field `y` where the client moves a local model. Without a `step` the clients
    take no local steps in this exchange. `aggregate` sees only the mean of the uploads, which makes every algorithm
    ready for secure aggregation.
    """

    broadcast: Broadcast
    start: Start
    finish: Finish
    aggregate: Aggregate
    step: Step | None = None
    together: bool = False  # clients follow one direction that the cohort formed, so weights sum to one


@dataclass(frozen=True)
class Algorithm:
    """A federated algorithm as a record of pure functions. Build one with a factory such as `covary.scaffold`."""

    name: str
    init_server: Init  # its first field is x
    init_client: Init  # possibly without fields
    exchanges: tuple[Exchange, ...]
    # The same exchanges with smaller uploads, if every client takes the same number K of steps.
    with_equal_steps: Callable[[int], tuple[Exchange, ...]] | None = None
    warm_start: Exchange | None = None  # sets each client's control variate from its gradient at x^0
    invariant: tuple[str, str] | None = None  # (server field, client field): the first is always the mean of the second
    lockstep: bool = False  # needs every client in every round, all with the same K
    # Set by `factory`: the numbers it was called with, and how to rebuild the algorithm with others.
    numbers: Mapping[str, Any] = field(default_factory=dict, compare=False)
    recipe: tuple[Callable[..., Algorithm], tuple[tuple[str, Any], ...]] | None = None

    def trips(self, steps: int | None) -> tuple[Exchange, ...]:
        """The exchanges of one round, given the number of steps all clients take (None where they differ)."""
        if steps is None or self.with_equal_steps is None:
            return self.exchanges
        return self.with_equal_steps(steps)

    def __str__(self) -> str:
        options = dict(self.recipe[1]) if self.recipe else {}
        return f"{self.name}({', '.join(f'{k}={v!r}' for k, v in {**self.numbers, **options}.items())})"


P = ParamSpec("P")


def factory(**checks: Callable[[str, Any], None]) -> Callable[[Callable[P, Algorithm]], Callable[P, Algorithm]]:
    """Mark a function as an algorithm factory and name the check for each of its numbers.

    The factory checks its numbers, and stores them with a way to rebuild the algorithm. The engine
    passes them to its compiled program as arguments, so another step-size needs no new compilation.
    """

    def decorate(build: Callable[P, Algorithm]) -> Callable[P, Algorithm]:
        signature = inspect.signature(build)

        @functools.wraps(build)
        def checked(*args: P.args, **kwargs: P.kwargs) -> Algorithm:
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            for name, check in checks.items():
                check(name, bound.arguments[name])
            numbers = {k: _plain(v) for k, v in bound.arguments.items() if k in checks}
            options = tuple((k, v) for k, v in bound.arguments.items() if k not in checks)
            bound.arguments.update(numbers)
            return replace(build(*bound.args, **bound.kwargs), numbers=numbers, recipe=(build, options))

        return checked

    return decorate


def _plain(value: Any) -> Any:
    return value if is_traced(value) else float(value)


def rebuild(
    recipe: Algorithm | tuple[Callable[..., Algorithm], tuple[tuple[str, Any], ...]], numbers: Mapping[str, Any]
) -> Algorithm:
    """The algorithm of a recipe with (possibly traced) numbers; a hand-made algorithm is its own recipe."""
    if isinstance(recipe, Algorithm):
        return recipe
    build, options = recipe
    return build(**numbers, **dict(options))
