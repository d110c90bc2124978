"""What the engine compiles: the program, and what it reads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from covary._engine.devices import Place
from covary._engine.evaluate import Evaluation
from covary._engine.local import LocalProgram
from covary.running.plan import Layout, Plan
from covary.running.state import State


@dataclass(frozen=True)
class Program:
    """What compiled rounds depend on besides the shapes of their arguments."""

    recipe: Any  # of the algorithm
    plan: Plan
    local: LocalProgram
    evaluation: Evaluation
    place: Place
    chunk: int  # most rounds in one call
    eval_every: int
    average: bool
    resident: bool  # all clients' states are on the devices; else a call brings its cohort's
    streamed: bool  # a call brings its cohort's data too
    deep: bool  # a step costs so much more than measuring it that measured and unmeasured rounds share one program


class Roster(NamedTuple):
    """What differs from client to client: one row for each of the N clients, or for each of a cohort."""

    offset: Any  # where the client's examples begin
    p: Any  # weights; those of all clients sum to 1
    layout: Layout


class TargetAt(NamedTuple):
    """What ends a run: the metric's index in `Evaluation.names`, +1 to rise or -1 to fall, and the value."""

    index: Any
    direction: Any
    value: Any


NEVER = TargetAt(0, 1.0, float("inf"))  # so that runs with and without a target share a program


class World(NamedTuple):
    """What a program reads and never changes."""

    examples: Any  # (n, ...), or (slots, max_size, ...) of a cohort where data is streamed
    tested_on: Any  # what metrics are measured on
    frozen: Any  # the model's parameters that are not trained, by path; None where all are
    example_weights: Any  # (n,): of each example in f, or None where they are all the same
    roster: Roster
    target: TargetAt
    decay: Any  # of the weights w_r in the running average; 1 is the uniform mean


Records = dict[str, Any]
Rounds = Callable[..., tuple[State, Records]]
