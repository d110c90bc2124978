"""A node's own folder: its control variates, job by job, and how many orders and jobs it has had."""

from __future__ import annotations

import contextlib
import hashlib
import re
import secrets
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from covary.flower.journal import ClientJournal, Order
from covary.flower.limits import Limits
from covary.flower.refusals import BeyondLimit, NoState, NotCovarys
from covary.flower.task import Draw
from covary.runs.files import Damaged, File, held

BUSY = 600.0  # seconds to wait for a process that is still working on an earlier order
DAY = 86_400.0
JOB = re.compile("[0-9a-f]{32}")


class StateFolder:
    """What a node keeps between orders. Only its user can read it: the folder has mode 0700, and the files 0600.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as here:
    ...     state = StateFolder(Path(here) / "state", Limits(most_jobs=1))
    ...     state.admit("0" * 32)
    ...     state.admit("1" * 32)
    Traceback (most recent call last):
    covary.flower.refusals.BeyondLimit: most_jobs: this node allows 1; the server asks for 2. Raise it to allow more.
    """

    def __init__(self, path: Path, limits: Limits):
        self.path, self.limits = path, limits
        self.account = File(path / "account", private=True)

    def admit(self, job: str | None) -> None:
        """Count an order, before any work. It is rejected when the owner's limits are used up."""
        if job is not None and not JOB.fullmatch(job):
            raise NotCovarys(f"{job!r} is not the name of a job")
        with self._counts() as counts:
            counts["orders"] += 1
            _within("most_orders", counts["orders"], self.limits.most_orders)
            if job is not None and job not in counts["jobs"]:
                counts["jobs"].append(job)
                _within("most_jobs", len(counts["jobs"]), self.limits.most_jobs)
                self._prune()

    def ready(self) -> None:
        """Reject a folder that cannot be written to, before the first order."""
        with self._counts():
            pass

    def private(self, draw: Draw) -> Draw:
        """The draw with a seed and a number that only this node knows."""
        with self._counts() as counts:
            secret = counts["secret"]
        digest = hashlib.sha256(f"{secret} {draw.seed} {draw.client}".encode()).digest()
        seed, client = (int.from_bytes(part) for part in (digest[:4], digest[4:8]))
        return draw._replace(seed=seed, client=client >> 1)

    @contextlib.contextmanager
    def journal(self, order: Order) -> Iterator[ClientJournal]:
        """This job's journal, locked against other processes. A damaged one is put aside: its state is lost."""
        folder = self.path / order.job
        with held(folder, BUSY, private=True):
            file = File(folder / "journal", private=True)
            try:
                journal = ClientJournal(file)
            except Damaged:
                file.path.replace(file.path.with_name("journal.damaged"))
                journal = ClientJournal(file)
            yield journal

    @contextlib.contextmanager
    def _counts(self) -> Iterator[dict[str, Any]]:
        """The counts of orders and jobs, saved again if nothing is raised."""
        with held(self.path, BUSY, private=True):
            found = self.account.read()
            counts = {"orders": 0, "jobs": [], "secret": secrets.token_hex(16)} if found is None else dict(found[1])
            before = {**counts, "jobs": list(counts["jobs"])}
            yield counts
            if found is None or counts != before:
                self.account.write({}, counts)

    def _prune(self) -> None:
        """Delete the states of jobs that have had no orders for too long."""
        oldest = time.time() - DAY * self.limits.keep_days
        for folder in self.path.iterdir():
            journal = folder / "journal"
            if JOB.fullmatch(folder.name) and journal.is_file() and journal.stat().st_mtime < oldest:
                shutil.rmtree(folder)


def _within(limit: str, came: int, most: int) -> None:
    if came > most:
        raise BeyondLimit(limit, f"{most:,}", f"{came:,}", "Raise it to allow more.")


def state_folder(state: str | Path | None, config: Any, limits: Limits) -> StateFolder:
    """The node's folder: the app's, or the one its node configuration names."""
    folder = state if state is not None else config.get("state")
    if not isinstance(folder, str | Path):
        raise NoState(
            "this node has no folder for its state. Start it with --node-config 'state=\"/some/folder\"', a different "
            "one for each node, or pass state=... to the client app"
        )
    return StateFolder(Path(folder), limits)
