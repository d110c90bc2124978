"""The proof: `c = mean(c_i)`, from the server's checkpoint and the clients' own disks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from covary.errors import InvalidInput, refused
from covary.flower.journal import ClientJournal, Ledger, check_format
from covary.flower.journal import norm as norm_of
from covary.flower.refusals import StateLost
from covary.runs.files import File


@dataclass(frozen=True)
class Audit:
    """What an audit found."""

    round: int
    epoch: int
    members: int
    norms: dict[str, float]  # ‖c_i‖ of every member that was counted; the others' are zero
    missing: tuple[str, ...]  # members whose state is on none of the given disks
    norm: float  # ‖c‖
    gap: float  # ‖c - sum p_i c_i‖, without the missing
    rounding: float  # the most that rounding explains: 100 units in the last place of the largest c_i, times √rounds

    @property
    def holds(self) -> bool:
        """Whether nothing is missing and the gap is rounding only."""
        return not self.missing and self.gap <= self.rounding


def audit(checkpoint: str | Path, states: Iterable[str | Path]) -> Audit:
    """Compare the server's control variate with those on the clients' disks, while nothing is running.

    Args:
        checkpoint: the server's folder.
        states: the nodes' folders.

    >>> from covary.flower import audit
    >>> audit("/no/such/folder", [])
    Traceback (most recent call last):
    covary.errors.InvalidInput: There is no checkpoint in /no/such/folder. Give the server's checkpoint folder.
    """
    states, found = list(states), File(Path(checkpoint) / "ledger").read()
    if found is None:
        raise InvalidInput(f"There is no checkpoint in {checkpoint}. Give the server's checkpoint folder.")
    check_format(found[1])
    ledger = Ledger(File(Path(checkpoint) / "ledger"), *found)
    if not ledger.settings["invariant"]:
        raise InvalidInput(f"{ledger.settings['algorithm']} has no control variates to audit.")
    server_field, client_field = ledger.settings["invariant"]
    c = ledger.arrays[f"server.{server_field}"]
    for state in states:
        if not Path(state).is_dir():
            raise refused("states", "the nodes' state folders", str(state), "There is no such folder.")
    disks = (File(Path(state) / ledger.job / "journal") for state in states)
    journals = [ClientJournal(disk) for disk in disks if disk.path.is_file()]
    total, norms, missing = np.zeros(c.shape, np.float64), {}, []
    for name, p in ledger.weights(ledger.settings["weights"] == "examples").items():
        counted = ledger.members[name].counted
        if not counted:
            continue
        c_i = next(
            (v for v in (_control(j, ledger.epoch, counted, client_field) for j in journals) if v is not None), None
        )
        if c_i is None:
            missing.append(name)
            continue
        norms[name] = norm_of(c_i)
        total += p * c_i.astype(np.float64)
    gap, norm = norm_of(c - total), norm_of(c)
    scale = max([norm, *norms.values(), *(j.scale for j in journals if j.epoch == ledger.epoch)])
    rounding = float(100 * np.finfo(c.dtype).eps * np.sqrt(max(1, ledger.round)) * scale)
    return Audit(ledger.round, ledger.epoch, len(ledger.members), norms, tuple(missing), norm, gap, rounding)


def _control(journal: ClientJournal, epoch: int, counted: str, field: str) -> np.ndarray | None:
    try:
        state = journal.state(epoch, counted)
    except StateLost:
        return None
    return None if state is None else state[field]
