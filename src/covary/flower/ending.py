"""How a deployed run ended: written by its server, and read by `covary status`."""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from covary.errors import InvalidInput
from covary.flower.log import log
from covary.runs.files import Damaged, File, content_of, replace

NAME = "outcome.json"


@dataclass(frozen=True)
class Outcome:
    """Where a deployed run stands."""

    state: str  # "running", "reached", "stopped" or "killed"
    rounds_done: int
    rounds: int  # that were asked for
    why: str
    when: str  # when the state was written, in local time

    @property
    def reached(self) -> bool:
        """Whether the run is complete: it did all its rounds, or reached its target."""
        return self.state == "reached"

    def __str__(self) -> str:
        done = f"{self.rounds_done} of {max(self.rounds, self.rounds_done)} rounds are done"
        return f"{self.state}: {done} ({self.when}). {self.why}".strip()


def outcome(checkpoint: str | Path) -> Outcome:
    """The outcome of the last run whose server keeps its checkpoint in this folder.

    >>> from covary.flower import outcome
    >>> outcome("/no/such/folder")
    Traceback (most recent call last):
    covary.errors.InvalidInput: No run was started in /no/such/folder. Give the server's checkpoint folder.
    """
    folder = Path(checkpoint)
    try:
        written = json.loads(content_of(folder / NAME, 2**16))
        state, rounds = str(written["state"]), int(written["rounds"])
        why, when = str(written["why"]), str(written["when"])
        if state not in ("running", "reached", "stopped"):
            raise ValueError(state)
    except (FileNotFoundError, NotADirectoryError):
        raise InvalidInput(f"No run was started in {folder}. Give the server's checkpoint folder.") from None
    except (ValueError, KeyError, TypeError) as error:
        raise Damaged(f"{folder / NAME} is damaged ({error!r}). Remove it and resume the run.") from None
    found = File(folder / "ledger").read()
    done = 0 if found is None else int(found[1]["round"])
    if state == "running" and not _is_held(folder):
        return Outcome("killed", done, rounds, "The server was killed. Start it again with resume=true.", when)
    return Outcome(state, done, rounds, why, when)


@contextlib.contextmanager
def ending(folder: Path, rounds: int) -> Iterator[Callable[[str, str], None]]:
    """Record that a run is in progress, and at the end its outcome: from the body, or from the error it raised.

    The error gets the outcome as a note, so that this is the last line of Flower's log too.
    """
    _write(folder, "running", rounds, "")
    try:
        yield lambda state, why: _write(folder, state, rounds, why)
    except BaseException as error:
        asked = isinstance(error, (KeyboardInterrupt, SystemExit))
        why = "The server was asked to stop." if asked else str(error) or type(error).__name__
        _write(folder, "stopped", rounds, why)
        note = f"covary: stopped: {outcome(folder).rounds_done} of {rounds} rounds are done."
        log.error("%s %s", note, why)
        error.add_note(note)
        raise


def _write(folder: Path, state: str, rounds: int, why: str) -> None:
    when = f"{datetime.datetime.now():%Y-%m-%d %H:%M:%S}"
    replace(folder / NAME, json.dumps({"state": state, "rounds": rounds, "why": why, "when": when}).encode())


def _is_held(folder: Path) -> bool:
    """Whether a process holds the folder, without waiting and without holding it."""
    try:
        lock = os.open(folder / "lock", os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(lock)
    return False
