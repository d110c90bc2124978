"""A grid whose calls time out. Flower's own grid retries for ever when the SuperLink is gone."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, wait
from typing import Any

from flwr.app import Message
from flwr.serverapp import Grid

from covary.errors import CovaryError

LEAST = 30.0  # seconds: a large model takes long on a slow line
POLL = 0.5  # seconds between two looks at a call; signals are handled between them


class WatchedGrid:
    """The calls that covary makes on a grid. Each is given up after `patience` seconds."""

    def __init__(self, grid: Grid, patience: float):
        self.grid, self.patience = grid, max(patience, LEAST)

    def get_nodes(self) -> list[Any]:
        return list(self._within(self.grid.get_nodes))

    def push_messages(self, messages: list[Message]) -> list[str]:
        return list(self._within(self.grid.push_messages, messages))

    def pull_messages(self, ids: Iterable[str]) -> list[Message]:
        return list(self._within(self.grid.pull_messages, ids))

    def _within(self, call: Callable[..., Any], *arguments: Any) -> Any:
        """What a call returns. A call that hangs is left behind in its thread, which ends with the process."""
        future: Future[Any] = Future()

        def run() -> None:
            try:
                future.set_result(call(*arguments))
            except BaseException as error:
                future.set_exception(error)

        threading.Thread(target=run, name=call.__name__, daemon=True).start()
        deadline = time.monotonic() + self.patience
        while not future.done() and time.monotonic() < deadline:
            wait([future], POLL)
        if future.done():
            return future.result()
        raise CovaryError(
            f"The SuperLink has not answered for {self.patience:g} s. The rounds that were counted are saved: start "
            "the SuperLink, and then this run again with resume=true."
        )
