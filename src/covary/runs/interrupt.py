"""Stopping when asked: Ctrl-C and SIGTERM are heard between chunks of rounds, so that what was done can be saved."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any


class Interrupted(KeyboardInterrupt):
    """A run was stopped and saved; calling again with the same arguments goes on."""

    def __init__(self, folder: Path, round: int):
        self.folder, self.round = folder, round
        super().__init__(f"Stopped after round {round}, saved in {folder}. The same call goes on from there.")


class Interruption:
    """Whether someone asked to stop."""

    asked = False

    def heard(self) -> bool:
        return self.asked

    def stop(self, folder: Path, round: int) -> None:
        if self.asked:
            raise Interrupted(folder, round)


@contextlib.contextmanager
def interruptions() -> Iterator[Interruption]:
    """Remember the first Ctrl-C or SIGTERM; the second acts as ever. Only the main thread can hear them.

    A signal that the process was told to ignore, as `nohup` does, is ignored.
    """
    interruption = Interruption()
    if threading.current_thread() is not threading.main_thread():
        yield interruption
        return
    before: dict[int, Any] = {}

    def heard(number: int, frame: Any) -> None:
        interruption.asked = True
        for each, handler in before.items():
            signal.signal(each, handler)

    try:
        for number in (signal.SIGINT, signal.SIGTERM):
            if signal.getsignal(number) not in (signal.SIG_IGN, None):
                before[number] = signal.signal(number, heard)
        yield interruption
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
