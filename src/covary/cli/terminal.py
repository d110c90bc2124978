"""What a command prints: results on standard output, progress and warnings on standard error."""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
import time
import warnings
import webbrowser
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    Task,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Column
from rich.text import Text

from covary.cli import compiling
from covary.errors import CheckpointWarning, DivergenceWarning
from covary.runs.folder import plain
from covary.trackers import TrackerWarning

SECONDS = 10.0  # between two lines of progress, without a terminal


class Terminal:
    """The output of all commands. `--quiet` prints only errors, `--json` prints one object on standard output."""

    def __init__(self, as_json: bool = False, quiet: bool = False):
        self.as_json, self.quiet = as_json, quiet
        self.out = Console(highlight=False, quiet=quiet or as_json)
        self.err = Console(highlight=False, quiet=quiet, stderr=True)

    def show(self, *things: Any, **style: Any) -> None:
        """Print tables and sentences for a person."""
        for thing in things:
            self.out.print(thing, soft_wrap=isinstance(thing, str), **style)

    def written(self, what: str, path: Path) -> None:
        self.out.print(f"{what}: {path}", soft_wrap=True, markup=False)

    def answer(self, record: dict[str, Any]) -> None:
        """Print the result as JSON, for a program."""
        if self.as_json:
            typer.echo(json.dumps(plain(record), allow_nan=False, default=str))

    def say(self, text: str, **style: Any) -> None:
        """Print a message that is not part of the result, on standard error."""
        self.err.print(text, soft_wrap=True, markup=False, **style)

    @contextlib.contextmanager
    def progress(self, unit: str, total: int | None = None, done: int = 0) -> Iterator[Bar | Lines]:
        """Show progress: a bar that disappears at the end, or lines if there is no terminal."""
        lines = not self.err.is_terminal or self.quiet
        compiling.follow(self.say if lines and not self.quiet else None)
        if lines:
            yield Lines(self, unit, total)
            return
        rest = Column(ratio=1, no_wrap=True, overflow="ellipsis")  # the column that shrinks on a narrow terminal
        what = TextColumn("{task.description}", markup=False, table_column=rest)
        columns = (
            SpinnerColumn(),
            what,
            BarColumn(bar_width=16),
            MofNCompleteColumn(),
            TextColumn("{task.fields[unit]}"),
        )
        times = (Speed(), TimeRemainingColumn(compact=True))
        with Progress(*columns, *times, console=self.err, transient=True, expand=True) as progress:
            yield Bar(progress, unit, total, done)

    @contextlib.contextmanager
    def warned(self) -> Iterator[None]:
        """Print covary's own warnings as sentences, and hide those of libraries."""
        own = (DivergenceWarning, CheckpointWarning, TrackerWarning)

        def show(message: Any, category: type[Warning], *rest: Any, **more: Any) -> None:
            if issubclass(category, own):
                self.say(str(message), style="yellow")

        with warnings.catch_warnings():
            for category in own:
                warnings.simplefilter("always", category)
            warnings.showwarning = show
            yield


class Speed(ProgressColumn):
    """Rounds per second; before the first round ends, what is compiled, or how long it has taken."""

    def render(self, task: Task) -> Text:
        if text := compiling.NOW.text():
            return Text(text, style="dim")
        speed = task.finished_speed or task.speed
        if task.fields["unit"] != "rounds":
            return Text("")
        spent = task.elapsed or 0
        return Text(f"{speed:,.3g}/s" if speed else f"{spent:.0f} s" if spent > 2 else "", style="dim")


class Bar:
    """Progress on a terminal: a bar for all work, and one for the current part."""

    def __init__(self, progress: Progress, unit: str, total: int | None, done: int):
        self.progress = progress
        self.whole = progress.add_task("", total=total, completed=done, unit=unit)
        self.part: Any = None
        self.name = ""

    def update(self, done: int | None = None, what: str | None = None) -> None:
        self.progress.update(self.whole, completed=done, description=what if self.part is None else "")

    def within(self, name: str, done: int, total: int, what: str) -> None:
        if name != self.name:
            if self.part is not None:
                self.progress.remove_task(self.part)
            self.part, self.name = self.progress.add_task("", total=total, unit="rounds"), name
        self.progress.update(self.part, completed=done, description=f"{name}  {what}")


class Lines:
    """Progress without a terminal: one line per tenth of the work, and one every few seconds in between."""

    def __init__(self, terminal: Terminal, unit: str, total: int | None):
        self.terminal, self.unit, self.total = terminal, unit, total
        self.began = self.last = time.monotonic()
        self.first: int | None = None  # rounds done when the first update came
        self.tenth, self.what = -1, ""

    def update(self, done: int | None = None, what: str | None = None) -> None:
        self.what = self.what if what is None else what
        if self.total is None or done is None:
            if what:
                self.terminal.say(what)
            return
        tenth, now = 10 * done // max(self.total, 1), time.monotonic()
        if self.first is None:  # the pace leaves out what came before, such as compilation
            self.first, self.began = done, now
        recent = now - self.last < (SECONDS if tenth == self.tenth else 1)
        if recent and self.tenth >= 0 and done < self.total:
            return
        self.tenth, self.last = tenth, now
        fresh, spent = done - self.first, now - self.began
        pace = f", {fresh / spent:,.3g} {self.unit}/s" if self.unit == "rounds" and fresh and spent > 0 else ""
        left = f", {spent * (self.total - done) / fresh:.0f} s left" if fresh and done < self.total else ""
        name = f"{self.what}: " if self.what else ""
        self.terminal.say(f"{name}{done} of {self.total} {self.unit}{pace}{left}")

    def within(self, name: str, done: int, total: int, what: str) -> None:
        now = time.monotonic()
        if now - self.last >= SECONDS:
            self.last = now
            self.terminal.say(f"{name}: round {done} of {total}, {what}")


def metrics_text(values: dict[str, float]) -> str:
    """The metrics of a round as text, without those that were not measured.

    >>> metrics_text({"loss": 0.25, "accuracy": float("nan"), "drift": 1.0})
    'loss 0.25'
    """
    from covary.running.job import COLUMNS

    not_shown = {*COLUMNS, "running"} - {"loss"}
    shown = {name: value for name, value in values.items() if name not in not_shown and not math.isnan(value)}
    return "  ".join(f"{name} {value:.4g}" for name, value in shown.items())


def best_text(values: dict[str, float]) -> str:
    """The best metrics so far of several runs as text; the loss only if there is no other metric.

    >>> best_text({"running": 4.0, "loss": 0.25, "accuracy": 0.9})
    'best accuracy 0.9  4 runs'
    """
    own = {name: value for name, value in values.items() if name not in ("loss", "running")}
    seen = metrics_text(own or values)
    return f"{f'best {seen}  ' if seen else ''}{values['running']:g} runs"


def open_in_browser(page: Path | str) -> None:
    """Open a page in a browser, if the command runs in a terminal on a machine with a screen."""
    screen = sys.platform in ("darwin", "win32") or os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")
    if screen and sys.stderr.isatty():
        webbrowser.open(page if isinstance(page, str) else page.resolve().as_uri())
