"""Stopping on Ctrl-C and SIGTERM between chunks of rounds, so that the run can be saved."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any


class Interrupted(KeyboardInterrupt):
    """A run was stopped and saved. A call with the same arguments resumes it."""

    def __init__(self, folder: Path, round: int):
        self.folder, self.round = folder, round
        super().__init__(f"Stopped after round {round}. The run is saved in {folder}; the same call resumes it.")


class Interruption:
    """Whether the user asked to stop."""

    asked = False

    def requested(self) -> bool:
        return self.asked

    def stop(self, folder: Path, round: int) -> None:
        if self.asked:
            raise Interrupted(folder, round)


@contextlib.contextmanager
def interruptions() -> Iterator[Interruption]:
    """Remember the first Ctrl-C or SIGTERM; the second one stops the process. Only the main thread gets signals.

    A signal that the process ignores, as under `nohup`, stays ignored.
    """
    interruption = Interruption()
    if threading.current_thread() is not threading.main_thread():
        yield interruption
        return
    before: dict[int, Any] = {}

    def remember(number: int, frame: Any) -> None:
        interruption.asked = True
        for each, handler in before.items():
            signal.signal(each, handler)

    try:
        for number in (signal.SIGINT, signal.SIGTERM):
            if signal.getsignal(number) not in (signal.SIG_IGN, None):
                before[number] = signal.signal(number, remember)
        yield interruption
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
