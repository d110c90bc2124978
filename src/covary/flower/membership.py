"""The members of a run: nodes that are admitted, lose their state, or leave."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from flwr.app import Message, RecordDict

from covary.checks import whole
from covary.errors import CovaryError
from covary.flower.deployment import Deployment
from covary.flower.journal import Member
from covary.flower.log import log
from covary.flower.messages import Question, ask, identity
from covary.flower.refusals import OtherSteps, Stale, StateLost
from covary.flower.watch import WatchedGrid

LOSSES = 3  # losses of a member's state before it is no longer asked
FIRST_WAIT, LONGEST_WAIT = 60.0, 3600.0  # seconds before a node that was not admitted is asked again


class Wait(NamedTuple):
    """When a node that was not admitted is asked again."""

    until: float
    seconds: float


class Membership:
    """The members of one run, while its server runs."""

    def __init__(self, grid: WatchedGrid, run: Deployment):
        self.grid, self.run = grid, run
        self.waiting: dict[str, Wait] = {}  # nodes that are not members
        self.stale: set[str] = set()  # members that have followed a newer server
        self.newest = -1  # the newest epoch that a member has seen
        self.lost: set[str] = set()  # members that have lost their state in this round
        self.losses: Counter[str] = Counter()  # of each member's state, while this server runs

    # Messages

    def ask(self, question: Question, nodes: Mapping[str, int]) -> dict[str, Any]:
        """Each node's reply, as the question reads it. Rejected orders are recorded."""
        return ask(self.grid, question, nodes, self.run.settings.round_timeout, self.note_rejection)

    def note_rejection(self, name: str, facts: dict[str, Any]) -> None:
        """Handle a node's rejection of an order."""
        ledger, why, member = self.run.ledger, facts["refused"], self.run.ledger.members.get(name)
        if why == Stale.__name__:
            self.stale.add(name)
        if why == OtherSteps.__name__ and member is not None and not self.run.algorithm.lockstep:
            ledger.members[name] = member._replace(steps=whole("steps", facts.get("steps"), 1))
            ledger.write()
        if why == StateLost.__name__ and member is not None:
            epoch = whole("epoch", facts.get("epoch"), -1, most=2**62)
            known = member.counted or epoch >= ledger.epoch
            if not known or not self.run.keeps_state:
                raise CovaryError("it reports losing a state that the server never counted")
            self.newest = max(self.newest, epoch)
            self.lost.add(name)

    # Who is online

    def meet(self) -> dict[str, int]:
        """The members that are online, when there are enough; new nodes are admitted first."""
        ledger, lockstep = self.run.ledger, self.run.algorithm.lockstep
        deadline, announced = time.monotonic() + self.run.settings.patience, False
        while True:
            nodes, now = {identity(info): info.node_id for info in self.grid.get_nodes()}, time.monotonic()
            strangers = {
                name: node
                for name, node in nodes.items()
                if name not in ledger.members and (name not in self.waiting or self.waiting[name].until <= now)
            }
            if strangers:
                self._admit(strangers)
            online = {name: node for name, node in nodes.items() if name in ledger.members}
            least = len(ledger.members) if lockstep else self.run.settings.min_replies
            needed = max(least, self.run.settings.min_clients if not ledger.round else 1)
            if len(online) >= needed:
                return online
            if not announced:
                log.info("%d nodes are online; waiting for %d.", len(online), needed)
                announced = True
            if time.monotonic() > deadline:
                self._end_waiting(online, needed)
                return online
            time.sleep(0.5)

    def _end_waiting(self, online: dict[str, int], needed: int) -> None:
        """When the time is up: a lockstep algorithm can drop the absent members; otherwise the run ends."""
        settings = self.run.settings
        absent = tuple(name for name in self.run.ledger.members if name not in online)
        if self.run.algorithm.lockstep and settings.forget_after is not None and online and absent:
            self.new_epoch(f"{', '.join(absent)} did not come back", absent)
            return
        refused = f" {len(self.waiting)} nodes were asked but not admitted: see the log above." if self.waiting else ""
        raise CovaryError(
            f"{len(online)} nodes are online after {settings.patience:g} s, and {needed} are needed.{refused} Check "
            "that the nodes are running and registered. The rounds that were counted are saved: start again with "
            "resume=true."
        )

    # Who joins

    def _admit(self, strangers: dict[str, int]) -> None:
        """Ask nodes that are not members for their examples and steps, and make members of those that fit."""
        for name in strangers:
            seconds = min(2 * self.waiting[name].seconds, LONGEST_WAIT) if name in self.waiting else FIRST_WAIT
            self.waiting[name] = Wait(time.monotonic() + seconds, seconds)
        found = self._question(strangers)
        if not found:
            return
        run, ledger = self.run, self.run.ledger
        first = len(ledger.members)
        newcomers = {name: Member(first + k, size, steps) for k, (_, name, size, steps) in enumerate(found)}
        steps = {member.steps for member in newcomers.values()}
        if run.algorithm.lockstep and len(steps) > 1 and not first:
            raise CovaryError(
                f"{run.algorithm.name} needs the same number of local steps on all clients; they take from "
                f"{min(steps)} to {max(steps)}. Use local_steps, or scaffold."
            )
        for name in newcomers:
            del self.waiting[name]
        self._join(newcomers)

    def _question(self, strangers: dict[str, int]) -> list[tuple[Any, str, int, int]]:
        """Partition, name, examples and steps of the nodes that fit, in the order in which they are numbered."""
        run = self.run
        buffers = sorted(run.buffers)

        def read(name: str, message: Message, facts: dict[str, Any]) -> tuple[Any, str, int, int]:
            size, steps = whole("size", facts.get("size"), 1), whole("steps", facts.get("steps"), 1)
            if facts.get("buffers") != buffers:
                raise CovaryError(f"its buffers are {facts.get('buffers')}, and the server's are {buffers}")
            known = {member.steps for member in run.ledger.members.values()}
            if run.algorithm.lockstep and known - {steps}:
                raise CovaryError(f"it takes {steps} steps, and {run.algorithm.name} needs the same on all clients")
            partition = facts.get("partition")
            return partition if isinstance(partition, int) else math.inf, name, size, steps

        content = run.content(RecordDict(), {"task": run.task(run.ledger.round)._asdict()})
        return sorted(self.ask(Question("query", dict.fromkeys(strangers, content), read), strangers).values())

    def _join(self, newcomers: dict[str, Member]) -> None:
        """Add new members to the ledger, with c as the mean over one more client each, whose c_i is zero."""
        run, ledger = self.run, self.run.ledger
        arrays, invariant = dict(ledger.arrays), run.algorithm.invariant
        if invariant is not None:
            field = f"server.{invariant[0]}"
            old, new = (self._mass(group) for group in (ledger.members, ledger.members | newcomers))
            arrays[field] = arrays[field] * arrays[field].dtype.type(old / new)
        new_epoch = bool(ledger.members and invariant is None and run.keeps_state)
        if new_epoch:
            arrays = run.without_controls()
        ledger.join(newcomers, arrays, new_epoch=new_epoch)
        log.info("%s joined: there are %d members.", ", ".join(newcomers), len(ledger.members))
        if new_epoch:
            log.info("Epoch %d begins: the states of %s depend on all members.", ledger.epoch, run.algorithm.name)
        weights = run.weights()
        heaviest = max(weights, key=lambda name: weights[name])
        if run.settings.by_examples and len(weights) > 1 and weights[heaviest] > 0.5:
            log.warning("%s has %.0f%% of the weight, by its own count of examples.", heaviest, 100 * weights[heaviest])

    def _mass(self, members: Mapping[str, Member]) -> float:
        """The sum of members' weights before they are normalised."""
        return float(sum(member.size if self.run.settings.by_examples else 1 for member in members.values()))

    # Who loses its state, and who leaves

    def settle_losses(self) -> None:
        """Start a new epoch if members lost their state in this round; drop members that keep losing it."""
        lost = sorted(self.lost)
        if not lost:
            return
        self.losses.update(lost)
        out = tuple(name for name in lost if self.losses[name] > LOSSES)
        for name in out:  # each new epoch resets all control variates
            self.waiting[name] = Wait(math.inf, math.inf)
            log.warning("%s has lost its state more than %d times and is not asked again.", name, LOSSES)
        self.new_epoch(f"{', '.join(lost)} lost control variates", out)

    def count_absences(self, online: Iterable[str]) -> None:
        """Note which members were online in a round. It is saved when the round is counted."""
        members = self.run.ledger.members
        for name, member in members.items():
            members[name] = member._replace(absent=0 if name in online else member.absent + 1)

    def forget(self) -> None:
        """Drop the members that have been absent for `forget_after` rounds."""
        ledger, limit = self.run.ledger, self.run.settings.forget_after
        gone = tuple(name for name, m in ledger.members.items() if limit is not None and m.absent >= limit)
        if gone and self.run.keeps_state:
            self.new_epoch(f"{', '.join(gone)} left for good", gone)
        elif gone:
            ledger.reset(ledger.arrays, gone)
            log.info("%s left for good: there are %d members.", ", ".join(gone), len(ledger.members))

    def new_epoch(self, why: str, leaving: tuple[str, ...] = ()) -> None:
        """Set c and every c_i to zero: the mean cannot be repaired when one of its terms is unknown."""
        ledger = self.run.ledger
        ledger.reset(self.run.without_controls(), leaving, self.newest)
        log.info("Epoch %d begins: %s. All control variates start again from zero.", ledger.epoch, why)
