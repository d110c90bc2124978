"""The server's log: progress, nodes left out and the end of a run, each message with its level."""

from __future__ import annotations

import logging
import sys
import traceback


class Console(logging.Handler):
    """Prints progress as it is, and warnings and errors with their level.

    It writes to what `sys.stdout` is at that moment, which Flower replaces while an app runs.
    """

    def emit(self, record: logging.LogRecord) -> None:
        level = f"{record.levelname}: " if record.levelno > logging.INFO else ""
        try:
            sys.stdout.write(f"{level}{self.format(record)}\n")
            sys.stdout.flush()
        except Exception:  # as the handlers of `logging` do
            self.handleError(record)


log = logging.getLogger("covary.flower")
if not log.handlers:
    log.addHandler(Console())
    log.setLevel(logging.INFO)


def shown(text: object, most: int = 300) -> str:
    r"""What a node sent, fit for a terminal: one line, without control characters.

    >>> shown("two\nlines")
    'two\\nlines'
    """
    return str(text)[:most].encode("unicode_escape").decode("ascii")


def log_bug(name: str, error: Exception) -> None:
    """Log an error of covary's own, met while it read a node's reply, with the traceback.

    The text of the error may quote the reply, so each line is made fit for a terminal.
    """
    lines = "".join(traceback.format_exception(error)).splitlines()
    log.error(
        "covary failed to read the reply of %s, which is not counted. This is a bug in covary: please report it.\n%s",
        name,
        "\n".join(shown(line) for line in lines),
    )
