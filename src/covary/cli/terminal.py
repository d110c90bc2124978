"""Where a command speaks: results on standard output, progress and warnings on standard error."""

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

from covary.errors import DivergenceWarning
from covary.runs.folder import plain
from covary.trackers import TrackerWarning

SECONDS = 10.0  # between two lines of progress, where there is no terminal to draw on


class Terminal:
    """One look for all commands; `--quiet` leaves errors alone, `--json` one object on standard output."""

    def __init__(self, as_json: bool = False, quiet: bool = False):
        self.as_json, self.quiet = as_json, quiet
        self.out = Console(highlight=False, quiet=quiet or as_json)
        self.err = Console(highlight=False, quiet=quiet, stderr=True)

    def show(self, *things: Any, **style: Any) -> None:
        """Tables and sentences for a person."""
        for thing in things:
            self.out.print(thing, soft_wrap=isinstance(thing, str), **style)

    def written(self, what: str, path: Path) -> None:
        self.out.print(f"{what}: {path}", soft_wrap=True, markup=False)

    def answer(self, record: dict[str, Any]) -> None:
        """The same for a program."""
        if self.as_json:
            typer.echo(json.dumps(plain(record), allow_nan=False, default=str))

    def say(self, text: str, **style: Any) -> None:
        """What is no result."""
        self.err.print(text, soft_wrap=True, markup=False, **style)

    @contextlib.contextmanager
    def progress(self, unit: str, total: int | None = None, done: int = 0) -> Iterator[Bar | Lines]:
        """How far the work is: a bar that goes away when it is done, or lines where there is no terminal."""
        if not self.err.is_terminal or self.quiet:
            yield Lines(self, unit, total)
            return
        rest = Column(ratio=1, no_wrap=True, overflow="ellipsis")  # on a narrow terminal the words give way
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
        """covary's own warnings as sentences for the user; those of libraries are for programmers."""
        from covary._engine.checkpoint import CheckpointWarning

        ours = (DivergenceWarning, CheckpointWarning, TrackerWarning)

        def show(message: Any, category: type[Warning], *rest: Any, **more: Any) -> None:
            if issubclass(category, ours):
                self.say(str(message), style="yellow")

        with warnings.catch_warnings():
            for category in ours:
                warnings.simplefilter("always", category)
            warnings.showwarning = show
            yield


class Speed(ProgressColumn):
    """How many a second."""

    def render(self, task: Task) -> Text:
        speed = task.finished_speed or task.speed
        return Text(f"{speed:,.3g}/s" if speed and task.fields["unit"] == "rounds" else "", style="dim")


class Bar:
    """Progress on a terminal: the whole, and below it the part under way."""

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
    """Progress where there is no terminal: a line for every tenth of the work, and now and then in between."""

    def __init__(self, terminal: Terminal, unit: str, total: int | None):
        self.terminal, self.unit, self.total = terminal, unit, total
        self.began = self.last = time.monotonic()
        self.first: int | None = None  # what was done before
        self.tenth, self.what = -1, ""

    def update(self, done: int | None = None, what: str | None = None) -> None:
        self.what = self.what if what is None else what
        if self.total is None or done is None:
            if what:
                self.terminal.say(what)
            return
        tenth, now = 10 * done // max(self.total, 1), time.monotonic()
        if self.first is None:  # before it lies the compilation
            self.first, self.began = done, now
        recent = now - self.last < (SECONDS if tenth == self.tenth else 1)
        if recent and self.tenth >= 0 and done < self.total:
            return
        self.tenth, self.last = tenth, now
        fresh, spent = done - self.first, now - self.began
        pace = f", {fresh / spent:,.3g} {self.unit}/s" if self.unit == "rounds" and fresh and spent > 0 else ""
        left = f", {spent * (self.total - done) / fresh:.0f} s left" if fresh and done < self.total else ""
        told = f"{self.what}: " if self.what else ""
        self.terminal.say(f"{told}{done} of {self.total} {self.unit}{pace}{left}")

    def within(self, name: str, done: int, total: int, what: str) -> None:
        now = time.monotonic()
        if now - self.last >= SECONDS:
            self.last = now
            self.terminal.say(f"{name}: round {done} of {total}, {what}")


def in_words(values: dict[str, float]) -> str:
    """Metrics of a round in a few words; those that were not measured are left out.

    >>> in_words({"loss": 0.25, "accuracy": float("nan"), "drift": 1.0})
    'loss 0.25'
    """
    from covary.problem import ENGINE_COLUMNS

    hidden = {*ENGINE_COLUMNS, "running"} - {"loss"}
    shown = {name: value for name, value in values.items() if name not in hidden and not math.isnan(value)}
    return "  ".join(f"{name} {value:.4g}" for name, value in shown.items())


def best(values: dict[str, float]) -> str:
    """The best so far of several runs in a few words: the loss only where there is nothing else.

    >>> best({"running": 4.0, "loss": 0.25, "accuracy": 0.9})
    'best accuracy 0.9  4 runs'
    """
    own = {name: value for name, value in values.items() if name not in ("loss", "running")}
    seen = in_words(own or values)
    return f"{f'best {seen}  ' if seen else ''}{values['running']:g} runs"


def open_in_browser(page: Path | str) -> None:
    """Open a page, where somebody sits in front of a screen."""
    screen = sys.platform in ("darwin", "win32") or os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")
    if screen and sys.stderr.isatty():
        webbrowser.open(page if isinstance(page, str) else page.resolve().as_uri())
