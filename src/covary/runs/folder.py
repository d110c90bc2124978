"""The run folder: results as JSON lines, checkpoints, pictures and the report."""

from __future__ import annotations

import contextlib
import datetime
import json
import math
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from covary.errors import CovaryError, InvalidInput
from covary.runs.files import Damaged, content_of, held, reject_links, replace

LARGEST = 2**30  # bytes of a results file


class RunFolder:
    """The folder of one command's results. `results.jsonl` grows by whole lines.

    A folder that is created or opened is locked against other processes until it is closed.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as parent:
    ...     folder = RunFolder.create("compare", parent)
    ...     folder.append({"algorithm": "scaffold", "rounds": 29})
    ...     folder.results.read_text()
    '{"algorithm": "scaffold", "rounds": 29}\\n'
    """

    def __init__(self, path: Path):
        self.path = path
        self.results = path / "results.jsonl"
        self.checkpoint = path / "checkpoint"
        self._settings = path / "run.json"
        self._about = path / "about.json"
        self._made: list[Path] = []  # the folders that this object created
        self._hold = contextlib.ExitStack()

    @classmethod
    def create(cls, command: str, parent: str | Path = "runs") -> RunFolder:
        """A new folder under `parent`, named after the time and the command."""
        made = [Path(parent)] if not Path(parent).exists() else []
        stem = f"{datetime.datetime.now():%Y%m%d-%H%M%S}-{command}"
        for attempt in range(1, 1000):
            path = Path(parent) / (stem if attempt == 1 else f"{stem}-{attempt}")
            try:
                path.mkdir(parents=True)
            except FileExistsError:
                continue
            except OSError as error:
                raise InvalidInput(
                    f"A run folder cannot be created in {parent} ({error}). Choose another parent with --out."
                ) from None
            folder = cls(path)
            folder._made = [path, *made]
            folder._hold.enter_context(held(path))
            return folder
        raise InvalidInput(f"{parent} already has 1,000 run folders named {stem}. Choose another parent with --out.")

    @classmethod
    def open(cls, path: Path) -> RunFolder:
        """The folder at this path, created if it does not exist."""
        folder = cls(path)
        folder._made = [] if os.path.lexists(path) else [path]
        with contextlib.ExitStack() as hold:
            hold.enter_context(held(path))
            for parent, *_ in os.walk(path):
                reject_links(Path(parent))
            folder._hold = hold.pop_all()
        return folder

    @property
    def started(self) -> bool:
        """Whether there is something to resume."""
        try:
            parts = self.path.glob("*/results.jsonl") if self._settings.exists() else ()
            return self.results.exists() or any(parts) or any(self.checkpoint.rglob("*.safetensors"))
        except OSError:
            return False

    def settle(self, settings: Mapping[str, Any]) -> None:
        """Save the settings of the results. A folder with results of other settings is an error."""
        settings = json.loads(json.dumps(plain(dict(settings)), default=str))
        if not self._settings.exists():
            if self.started:
                raise InvalidInput(f"{self.path} holds results of another program. Choose another folder.")
            with self.writing():
                replace(self._settings, json.dumps(settings).encode())
            return
        try:
            then = json.loads(content_of(self._settings, 2**20))
            apart = [name for name in {**then, **settings} if then.get(name) != settings.get(name)]
        except (ValueError, TypeError, RecursionError) as error:
            raise Damaged(f"{self._settings} is damaged ({error}). Start again in another folder.") from None
        if apart:
            changes = "; ".join(f"{name} was {then.get(name)} and is {settings.get(name)}" for name in apart)
            raise InvalidInput(
                f"{self.path} holds another run: {changes}. Use the options it was started with, or another folder."
            )
        if self.results.exists():
            self.drop_torn_line()

    def settings(self) -> dict[str, Any]:
        """The settings that `settle` saved; empty if there are none."""
        return self._object(self._settings)

    def about(self) -> dict[str, Any]:
        """The facts that `describe` saved."""
        return self._object(self._about)

    def describe(self, **facts: Any) -> None:
        """Save facts for the report: the machine, the clients, when it ended."""
        known = {**self.about(), **facts}
        with self.writing():
            replace(self._about, json.dumps(plain(known), default=str).encode())

    def _object(self, path: Path) -> dict[str, Any]:
        if not path.is_file():
            return {}
        try:
            found = json.loads(content_of(path, 2**24))
        except (ValueError, RecursionError) as error:
            raise Damaged(f"{path} is damaged ({error}). Start again in another folder.") from None
        if not isinstance(found, dict):
            raise Damaged(f"{path} has unexpected contents. Start again in another folder.")
        return found

    def close(self) -> None:
        """Unlock the folder. A new folder without results is removed."""
        if self._made and not self.started:
            shutil.rmtree(self.path, ignore_errors=True)
            for parent in self._made[1:]:
                with contextlib.suppress(OSError):  # the parent is no longer empty
                    parent.rmdir()
        self._hold.close()

    @staticmethod
    def reject_unwritable(parent: Path) -> None:
        """Raise an error if no folder can be created in the parent, before long work begins."""
        nearest = next(path for path in (parent.absolute(), *parent.absolute().parents) if path.exists())
        if not nearest.is_dir() or not os.access(nearest, os.W_OK):
            raise InvalidInput(f"A run folder cannot be created in {parent}. Choose another parent with --out.")

    def read(self) -> list[dict[str, Any]]:
        """The records so far, without a last line that a crash truncated."""
        if not self.results.is_file():
            raise InvalidInput(
                f"{self.path} is not a run folder: it has no results.jsonl. Pass a folder that covary made."
            )
        try:
            lines = content_of(self.results, LARGEST).decode().split("\n")[:-1]
            records = [json.loads(line) for line in lines]
        except (ValueError, RecursionError) as error:
            raise Damaged(f"{self.results} is damaged ({error}). Start again in another folder.") from None
        if not all(isinstance(record, dict) for record in records):
            raise Damaged(f"{self.results} has unexpected contents. Start again in another folder.")
        if not records:
            raise InvalidInput(f"{self.results} is empty. Start again in another folder.")
        return records

    def drop_torn_line(self) -> None:
        """Remove a last line that a crash truncated, before more lines are appended."""
        content = content_of(self.results, LARGEST)
        whole = content.rfind(b"\n") + 1
        if whole < len(content):
            with self.writing(), self.results.open("r+b") as file:
                file.truncate(whole)

    def append(self, record: dict[str, Any], durable: bool = False) -> None:
        """Add a line. A durable line is on the disk when this returns."""
        with self.writing(), self.results.open("a", encoding="utf-8") as file:
            file.write(_line(record))
            if durable:
                file.flush()
                os.fsync(file.fileno())

    def cut(self, count: int) -> None:
        """Keep only the first `count` lines."""
        if self.results.exists():
            lines = content_of(self.results, LARGEST).splitlines(keepends=True)
            if len(lines) > count:
                with self.writing():
                    replace(self.results, b"".join(lines[:count]))

    def rewrite(self, records: Iterable[dict[str, Any]]) -> None:
        """Replace all lines atomically."""
        with self.writing():
            replace(self.results, "".join(map(_line, records)).encode())

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Turn a failed write into an error that says what is saved and what to do."""
        try:
            yield
        except OSError as error:
            raise CovaryError(
                f"{self.path} cannot be written to ({error.strerror}). The results so far are saved. Free some space, "
                "or copy the folder to another disk and resume the copy."
            ) from error


def _line(record: dict[str, Any]) -> str:
    return json.dumps(plain(record), allow_nan=False) + "\n"


def plain(value: Any) -> Any:
    """NumPy values as JSON values; a value that was not measured (NaN) becomes null."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, np.ndarray):
        return plain(value.tolist())
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, np.generic):
        return plain(value.item())
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
