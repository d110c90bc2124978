"""What the engine compiles: the program, what it reads, and what it changes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from covary._engine.devices import Place
from covary._engine.plan import Layout, Plan


@dataclass(frozen=True)
class Program:
    """What a compiled program depends on besides the shapes of its arguments."""

    recipe: Any  # of the algorithm
    plan: Plan
    loss: Callable[[Any, Any], Any]
    metrics: Callable[[Any, Any], dict[str, Any]] | None
    evaluated: tuple[str, ...]  # "loss" and the metrics, or the metrics alone
    unravel: Callable[[Any], Any]
    chunk: int  # most rounds in one call
    eval_every: int
    average: bool
    place: Place  # the devices, and how many clients at once on each
    precision: str | None = None  # of the products, where it is not the model's own
    resident: bool = True  # all clients' states are on the devices; else a call brings its cohort's
    streamed: bool = False  # a call brings its cohort's data too
    divisible: bool = True  # the loss over all data is the mean of the losses of its parts


class Target(NamedTuple):
    """What ends a run: the metric's place in `Program.evaluated`, +1 to rise or -1 to fall, and the value."""

    index: Any
    direction: Any
    value: Any


class World(NamedTuple):
    """What a program reads and never changes."""

    examples: Any
    evaluated_on: Any
    example_weights: Any  # of each example in f, or None where they are all the same
    layout: Layout
    target: Target
    decay: Any  # of the weights w_r in the running average; 1 is the uniform mean


class State(NamedTuple):
    """What a program changes."""

    round: Any  # rounds done
    server: Any
    clients: Any  # each field with a leading axis over the N clients, or over the cohort where they live elsewhere
    average: Any  # the paper's weighted output, and the sum of its weights in units of the newest
    average_mass: Any
    reached: Any
    diverged: Any
    scale: Any  # the largest number that any control had in any round: what rounding is measured by


Records = dict[str, Any]
Rounds = Callable[..., tuple[State, Records]]
