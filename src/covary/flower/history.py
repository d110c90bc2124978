"""A deployed run's history, in simulation's form: one row a round, written once."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from covary.flower.journal import Ledger
from covary.flower.log import log
from covary.flower.settings import Settings, target_of
from covary.runs.folder import RunFolder
from covary.targets import Target

NESTED = ("uploads", "by_node")  # records of single nodes
NOT_MEASURED = (
    *("round", "epoch", "asked", "cohort", "left_out", "evaluated", "bytes_up", "bytes_down", "seconds"),
    *NESTED,
)


def is_metric(name: str, value: Any) -> bool:
    if name in (*NOT_MEASURED, "drift") or not re.fullmatch(r"[\w.@/-]{1,64}", name):
        return False
    return isinstance(value, float) and math.isfinite(value)


def measured(row: Mapping[str, Any]) -> list[str]:
    return [name for name, value in row.items() if name not in NOT_MEASURED and isinstance(value, float)]


def columns(rows: list[dict[str, Any]]) -> dict[str, np.ndarray]:
    """The history in simulation's form: one array a column, cohorts padded with -1, NaN where nothing was measured."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    widest = max((len(row["cohort"]) for row in rows), default=0)
    columns = {}
    for name in names:
        if name == "cohort":
            columns[name] = np.array([row[name] + [-1] * (widest - len(row[name])) for row in rows])
        elif name in NESTED:
            columns[name] = np.empty(len(rows), object)
            columns[name][:] = [row.get(name) for row in rows]
        else:
            columns[name] = np.array([math.nan if row.get(name) is None else row[name] for row in rows])
    return columns


class Record:
    """The rows so far, on the disk and in memory."""

    def __init__(self, folder: Path, ledger: Ledger, settings: Settings):
        self.folder, self.ledger, self.settings = RunFolder(folder), ledger, settings
        self.rows = self._rows_so_far()
        self.warned = False  # that the target is not measured

    def uploads(self, epoch: int) -> list[dict[str, Any]]:
        """The records of the uploads of an epoch."""
        return [each for row in self.rows if row["epoch"] == epoch for each in row.get("uploads", ())]

    def not_counted(self) -> str:
        """Whose uploads were too large, and in how many rounds of this epoch."""
        rounds: dict[int, int] = {}
        rows = [row for row in self.rows if row["epoch"] == self.ledger.epoch]
        for row in rows:
            for number in {i for record in row.get("uploads", ()) for i in record["left_out"]}:
                rounds[number] = rounds.get(number, 0) + 1
        names = {member.number: name for name, member in self.ledger.members.items()}
        left_out = [f"{names.get(i, i)} in {count} of {len(rows)} rounds" for i, count in sorted(rounds.items())]
        return f"Left out because their uploads were too large: {', '.join(left_out)}." if left_out else ""

    def finish(self, measure: Callable[[], dict[str, Any]]) -> bool:
        """Write the row of the last round, measured if that is due, unless it is written. True at the target."""
        s, row = self.settings, dict(self.ledger.row)
        due = bool(s.eval_every) and (row["round"] % s.eval_every == 0 or row["round"] == s.rounds)
        if self.rows and self.rows[-1]["round"] == row["round"]:
            row = self.rows[-1]
        else:
            if due:
                row |= measure()
            self.folder.append(row, durable=True)
            self.rows.append(row)
            figures = "  ".join(f"{name} {row[name]:.4g}" for name in measured(row))
            log.info(
                f"round {row['round']}/{s.rounds}  {len(row['cohort'])} of {row['asked']} replied  {figures}  "
                f"{row['bytes_up']:,} bytes uploaded  {row.get('seconds', 0):.1f} s"
            )
        if s.target is None:
            return False
        target = target_of(s.target)
        name = target.metric
        if due and row.get(name) is None and not self.warned:
            self.warned = True
            found = ", ".join(sorted(set(measured(row)) - {"drift"})) or "nothing"
            log.warning("The target is for %s, which is not measured. The nodes measure %s.", name, found)
        return self._met(row, target)

    def _met(self, row: dict[str, Any], target: Target) -> bool:
        """Whether the mean meets the target, and so do the values of more than half of the nodes."""
        name = target.metric
        if row.get(name) is None or not target.met(row[name]):
            return False
        reports = row.get("by_node", {}).get(name)
        if reports is None:  # measured by the server
            return True
        agree = sum(target.met(report) for _, report in reports)
        if 2 * agree > row["evaluated"]:
            return True
        nodes = f"only {agree} of the {row['evaluated']} nodes"
        log.warning(f"The mean {name} meets the target, but {nodes} meet it. More than half must.")
        return False

    def _rows_so_far(self) -> list[dict[str, Any]]:
        if not self.folder.results.is_file():
            return []
        self.folder.drop_torn_line()
        rows = self.folder.read() if self.folder.results.stat().st_size else []
        kept = [row for row in rows if row["round"] <= self.ledger.round]
        if len(kept) < len(rows):  # an older checkpoint was resumed
            self.folder.results.unlink()
            for row in kept:
                self.folder.append(row, durable=True)
        return kept
