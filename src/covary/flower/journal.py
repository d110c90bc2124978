"""The protocol that keeps `c = mean(c_i)` through lost messages, crashes and restarts. Nothing here knows Flower.

Presumed abort. A client's new state is *pending*, on its disk, before its upload is sent. The server counts the
upload, saves this together with the new x and c, and names the token of the upload in its next order to the client.
Only then does the pending state become the client's own; an order that names the token before it makes the
client drop it. So a client's state and the server's c always contain the same uploads, whatever fails, and when.

A client that can do neither has lost its state. The mean of the c_i cannot be repaired then, and a new *epoch* begins:
the server's c and every client's c_i start again from zero.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

import numpy as np

from covary.errors import CovaryError
from covary.flower.refusals import NotFinite, SharedState, Stale, StateLost
from covary.running.plan import client_weights
from covary.runs.files import Content

Arrays = dict[str, np.ndarray]
FORMAT = 1
BLANK = {"format": FORMAT, "seq": -1, "epoch": -1, "committed": "", "pending": "", "scale": 0.0, "owner": ""}
TEMPORARY = "node-"  # how the names of nodes without a registered key begin: a restart changes them


class Disk(Protocol):
    """Where a journal is kept: `covary.runs.files.File`, or memory in tests."""

    def read(self) -> Content | None: ...

    def write(self, arrays: Mapping[str, np.ndarray], facts: Mapping[str, Any]) -> None: ...


class Order(NamedTuple):
    """What the protocol adds to a request to one client."""

    job: str
    epoch: int
    seq: int  # larger than any before it
    token: str  # names the upload that answers this order
    counted: str  # the token of this client's last upload that the server counted; "" if there is none in this epoch
    member: str = ""  # who the client is, as the server knows it


class ClientJournal:
    """A client's state on its disk: committed, and pending until the server has counted the upload."""

    def __init__(self, disk: Disk):
        self.disk = disk
        arrays, facts = disk.read() or ({}, BLANK)
        check_format(facts)
        self.seq, self.epoch = facts["seq"], facts["epoch"]
        self.token, self.pending_token = facts["committed"], facts["pending"]
        self.owner: str = facts.get("owner", "")  # whose state this is
        self.scale: float = facts["scale"]  # the largest norm of a committed state in this epoch, to judge rounding by
        self.committed = _part(arrays, "committed.")
        self.pending = _part(arrays, "pending.")

    def begin(self, order: Order, start: Callable[[], Arrays]) -> Arrays:
        """The state to work from, settled by what the server has counted. Nothing is written yet."""
        if self.owner and order.member != self.owner and not order.member.startswith(TEMPORARY):
            raise SharedState(f"this folder holds the state of {self.owner}, and the order is for {order.member}")
        if order.seq <= self.seq:
            raise Stale(f"order {order.seq} came after {self.seq}")
        if order.epoch < self.epoch:  # of a newer server, but from an older checkpoint
            raise StateLost(f"the server is in epoch {order.epoch}, this disk in epoch {self.epoch}", self.epoch)
        committed, token = self.committed, self.token
        pending, pending_token = self.pending, self.pending_token
        if order.epoch > self.epoch:
            committed, token, pending_token, self.scale = start(), "", "", 0.0
        if pending_token and order.counted == pending_token:
            committed, token = pending, pending_token
        elif order.counted != token:
            wanted, found = order.counted or "(none)", token or "(none)"
            raise StateLost(f"the server has counted upload {wanted}, and this disk has {found}", self.epoch)
        self.committed, self.token, self.epoch = committed, token, order.epoch
        return committed

    def prepare(self, order: Order, pending: Arrays) -> None:
        """Put the new state on the disk, pending; the upload may be sent when this returns."""
        if not all(np.isfinite(array).all() for array in pending.values()):
            raise NotFinite("the new state is not finite: the step-size is too large for this node's data")
        self.scale = max([self.scale, *(norm(array) for array in self.committed.values())])
        facts = {
            "format": FORMAT,
            "seq": order.seq,
            "epoch": order.epoch,
            "committed": self.token,
            "pending": order.token,
            "scale": self.scale,
            "owner": order.member,
        }
        arrays = {f"committed.{name}": array for name, array in self.committed.items()}
        arrays |= {f"pending.{name}": array for name, array in pending.items()}
        self.disk.write(arrays, facts)
        self.seq, self.pending, self.pending_token, self.owner = order.seq, pending, order.token, order.member

    def state(self, epoch: int, counted: str) -> Arrays | None:
        """The state that the server has counted, for an audit; None if there is none in this epoch."""
        if epoch == self.epoch and counted and counted == self.pending_token:
            return self.pending
        if epoch == self.epoch and counted == self.token:
            return self.committed
        if counted:
            raise StateLost(f"the server has counted upload {counted}, which is not on this disk")
        return None


class Member(NamedTuple):
    """A client as the server knows it."""

    number: int  # i, which decides its batches
    size: int  # examples, when it joined
    steps: int  # K_i
    counted: str = ""
    absent: int = 0  # rounds in a row in which it was not online


class Ledger:
    """The server's state on its disk: x, c, the members, and which uploads are counted in them.

    Every method that changes what clients must agree with writes the change to the disk before it returns, so that a
    crash cannot contradict what is sent after it.
    """

    def __init__(self, disk: Disk, arrays: Arrays, facts: dict[str, Any]):
        self.disk, self.arrays = disk, arrays
        self.job: str = facts["job"]
        self.fence: int = facts["fence"]
        self.epoch: int = facts["epoch"]
        self.round: int = facts["round"]  # rounds done
        self.exchanges_done: int = facts["trip"]  # of the round after it
        self.cohort: list[str] = facts["cohort"]  # of that round, once its first exchange is counted
        self.warm: list[str] = facts["warm"]  # those whose controls a warm start has set
        self.members = {name: Member(*fields) for name, fields in facts["members"].items()}
        self.settings: dict[str, Any] = facts["settings"]
        self.partial: dict[str, Any] = facts["partial"]  # what is known of that round, for the history
        self.row: dict[str, Any] = facts["row"]  # what is known of the last round done
        self._sent = 0

    @classmethod
    def create(cls, disk: Disk, arrays: Arrays, settings: dict[str, Any]) -> Ledger:
        """A new job."""
        facts = {"job": secrets.token_hex(16), "fence": 0, "epoch": 0, "round": 0, "trip": 0, "cohort": [], "warm": []}
        ledger = cls(disk, arrays, facts | {"members": {}, "settings": settings, "partial": {}, "row": {}})
        ledger._take_over()
        return ledger

    @classmethod
    def resume(cls, disk: Disk) -> Ledger:
        """The job as its last server left it. If that server is still alive, its orders are stale from now on."""
        found = disk.read()
        if found is None:
            raise CovaryError("There is no checkpoint to resume. Start without resume, or give the folder of one.")
        arrays, facts = found
        check_format(facts)
        ledger = cls(disk, arrays, facts)
        ledger._take_over()
        return ledger

    def _take_over(self) -> None:
        self.fence = max(self.fence + 1, int(1000 * time.time()))  # above that of any server that was started earlier
        self.write()

    def write(self) -> None:
        facts: dict[str, Any] = {"format": FORMAT, "trip": self.exchanges_done}
        facts |= {name: getattr(self, name) for name in ("job", "fence", "epoch", "round", "cohort", "warm")}
        facts |= {name: getattr(self, name) for name in ("members", "settings", "partial", "row")}
        self.disk.write(self.arrays, facts)

    def order(self, name: str) -> Order:
        """The next order for a member."""
        self._sent += 1
        seq = self.fence * 2**20 + self._sent
        return Order(self.job, self.epoch, seq, secrets.token_hex(8), self.members[name].counted, name)

    def count(self, tokens: Mapping[str, str], arrays: Arrays, **position: Any) -> None:
        """Count these members' uploads, which the new arrays contain, and move on to a position in the rounds."""
        for name, token in tokens.items():
            self.members[name] = self.members[name]._replace(counted=token)
        self.arrays = arrays
        for name, value in position.items():
            setattr(self, name, value)
        self.write()

    def reset(self, arrays: Arrays, leaving: tuple[str, ...] = (), after: int = -1) -> None:
        """Start an epoch later than any known one: reset all clients' states, and remove the members that leave."""
        stay = [name for name in self.members if name not in leaving]
        self.members = {name: self.members[name]._replace(counted="", number=i) for i, name in enumerate(stay)}
        self.arrays, self.epoch = arrays, max(self.epoch, after) + 1
        self.exchanges_done, self.cohort, self.warm = 0, [], []
        self.write()

    def join(self, newcomers: Mapping[str, Member], arrays: Arrays, new_epoch: bool = False) -> None:
        """Add new members, whose states are zero. The arrays have c scaled to the mean over all.

        Where scaling does not give that mean, a new epoch begins.
        """
        self.members |= newcomers
        if new_epoch:
            self.reset(arrays)
        else:
            self.arrays = arrays
            self.write()

    def weights(self, by_examples: bool) -> dict[str, float]:
        """p_i of every member."""
        p = client_weights(np.array([member.size for member in self.members.values()]), by_examples)
        return {name: float(p[k]) for k, name in enumerate(self.members)}


def norm(array: np.ndarray) -> float:
    return float(np.linalg.norm(array.astype(np.float64)))


def _part(arrays: Arrays, prefix: str) -> Arrays:
    return {name.removeprefix(prefix): array for name, array in arrays.items() if name.startswith(prefix)}


def check_format(facts: Mapping[str, Any]) -> None:
    if facts.get("format") != FORMAT:
        raise CovaryError(
            f"The journal has format {facts.get('format')}, and this version of covary reads format {FORMAT}. "
            "Use the version that wrote it."
        )
