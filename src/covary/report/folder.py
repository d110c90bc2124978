"""The run folder: raw results as JSON lines, written as they come, and the pictures made from them."""

from __future__ import annotations

import datetime
import json
import math
import os
from pathlib import Path
from typing import Any

import numpy as np

from covary.errors import CovaryError


class RunFolder:
    """A folder for one command's results. Each line of `results.jsonl` is whole as soon as it is appended.

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

    @classmethod
    def create(cls, command: str, parent: str | Path = "runs") -> RunFolder:
        """A new folder under `parent`, named after the time and the command."""
        stem = f"{datetime.datetime.now():%Y%m%d-%H%M%S}-{command}"
        for attempt in range(1, 1000):
            path = Path(parent) / (stem if attempt == 1 else f"{stem}-{attempt}")
            try:
                path.mkdir(parents=True)
            except FileExistsError:
                continue
            except OSError as error:
                raise CovaryError(
                    f"A run folder cannot be made in {parent} ({error}). Choose another with --out."
                ) from None
            return cls(path)
        raise CovaryError(f"1,000 run folders named {stem} exist already in {parent}. Choose another with --out.")

    @staticmethod
    def refuse_unwritable(parent: Path) -> None:
        """Refuse a parent in which no folder can be made, before long work begins."""
        nearest = next(path for path in (parent.absolute(), *parent.absolute().parents) if path.exists())
        if not nearest.is_dir() or not os.access(nearest, os.W_OK):
            raise CovaryError(f"A run folder cannot be made in {parent}. Choose another place with --out.")

    def read(self) -> list[dict[str, Any]]:
        """The records so far; a last line cut off by a crash is left out."""
        if not self.results.is_file():
            raise CovaryError(
                f"{self.path} is not a run folder: it has no results.jsonl. Pass a folder that covary made."
            )
        try:
            records = [json.loads(line) for line in self.results.read_text(encoding="utf-8").split("\n")[:-1]]
        except ValueError as error:
            raise CovaryError(f"{self.results} is damaged ({error}). Start anew in another folder.") from None
        if not records:
            raise CovaryError(f"{self.results} is empty. Start anew in another folder.")
        return records

    def drop_torn_line(self) -> None:
        """Cut off a last line that a crash left without its end, before more is appended."""
        content = self.results.read_bytes()
        whole = content.rfind(b"\n") + 1
        if whole < len(content):
            with self.results.open("r+b") as file:
                file.truncate(whole)

    def append(self, record: dict[str, Any], durable: bool = False) -> None:
        """Add a line; a durable one is on the disk when this returns."""
        with self.results.open("a", encoding="utf-8") as file:
            file.write(json.dumps(plain(record), allow_nan=False) + "\n")
            if durable:
                file.flush()
                os.fsync(file.fileno())


def plain(value: Any) -> Any:
    """NumPy to JSON; a value that was not measured (NaN) is null."""
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
