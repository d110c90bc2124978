"""What a run changes: the state of its server and its clients, and how far it is."""

from __future__ import annotations

from typing import Any, NamedTuple


class Control(NamedTuple):
    """How far a run is, and whether it has ended."""

    round: Any  # rounds done
    reached: Any
    diverged: Any


class Accounts(NamedTuple):
    """What is kept beside the algorithm's own state."""

    average: Any  # (d,): the paper's weighted output
    average_mass: Any  # the sum of its weights, in units of the newest
    scale: Any  # the largest number that any control had in any round: what rounding is measured by


class State(NamedTuple):
    """What rounds change."""

    server: Any  # the algorithm's
    clients: Any  # the algorithm's, fields of shape (N, d), or (S, d) where they live outside the devices
    control: Control
    accounts: Accounts
