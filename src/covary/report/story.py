"""Stories: the contents of a run folder in one form for all commands, for the report to draw."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from covary.errors import CovaryError, InvalidInput
from covary.runs.folder import RunFolder
from covary.targets import Target, direction_of

Cell = str | tuple[str, float | None]  # a text, and the number to sort by where there is one
Row = list[Cell]
HIDDEN = ("round", "cohort", "bytes_up", "bytes_down")  # columns of a history that are not drawn as curves


@dataclass(frozen=True)
class Line:
    """The curves of one algorithm: each column by round, for every seed."""

    name: str
    panel: str  # lines of one panel are of the same problem and can be compared
    columns: dict[str, np.ndarray]  # (seeds, rounds), NaN if not measured
    facts: dict[str, Any] = field(default_factory=dict)  # the settings that distinguish it from other lines

    @property
    def metrics(self) -> list[str]:
        return [name for name in self.columns if name not in HIDDEN]

    @property
    def sent(self) -> np.ndarray:
        """Bytes sent up and down by the end of each round, as a mean over the seeds."""
        each = sum((self.columns[name] for name in ("bytes_up", "bytes_down") if name in self.columns), np.zeros(1))
        return np.cumsum(np.nanmean(np.atleast_2d(each), axis=0))

    def rounds_to(self, metric: str, value: float) -> list[int | None]:
        """For each seed, the first round that reaches the value."""
        if metric not in self.columns:
            return [None]
        target = Target(metric, direction_of(metric), value)
        first = [target.first_met(curve) for curve in self.columns[metric]]
        return [None if at is None else at + 1 for at in first]


@dataclass(frozen=True)
class Table:
    """A table."""

    title: str
    header: list[str]
    rows: list[Row]
    note: str = ""


@dataclass(frozen=True)
class Claim:
    """A statement of the paper, and whether it holds for the measurements."""

    text: str
    holds: bool | None  # None: not decided by the measurements
    evidence: str

    @property
    def verdict(self) -> str:
        return {True: "holds", False: "does not hold", None: "not decided"}[self.holds]


@dataclass(frozen=True)
class Story:
    """The contents of one run folder: title, settings, curves, tables, clients, claims or a diagnosis."""

    name: str
    title: str
    command: str
    settings: dict[str, Any]
    facts: dict[str, Any]
    ended: str | None
    outcome: str = ""  # a note on how it ended, such as a divergence
    lines: list[Line] = field(default_factory=list)
    target: tuple[str, float] | None = None
    clients: list[dict[str, Any]] = field(default_factory=list)  # label counts from `clients_of`
    tables: list[Table] = field(default_factory=list)
    claims: list[Claim] = field(default_factory=list)
    diagnosis: dict[str, Any] | None = None


class NoReport(CovaryError):
    """The folder belongs to a command that has no report."""


def read(path: Path) -> list[Story]:
    """The stories of a folder: one, or one per part if the command made several.

    >>> read(Path("no-such-folder"))
    Traceback (most recent call last):
    covary.errors.InvalidInput: no-such-folder is not a run folder: it has no results.jsonl. Pass a folder that covary
    made, such as one under runs/.
    """
    parts = [] if (path / "results.jsonl").is_file() else sorted(path.glob("*/results.jsonl"))
    if (path / "about.json").is_file() and parts:
        return [story for part in parts for story in read(part.parent)]
    folder = RunFolder(path)
    about, settings = folder.about(), folder.settings()
    if not folder.results.is_file() and not about:
        raise InvalidInput(
            f"{path} is not a run folder: it has no results.jsonl. Pass a folder that covary made, such as one under "
            "runs/."
        )
    records = folder.read() if folder.results.exists() and folder.results.stat().st_size else []
    read_story = READERS.get(str(settings.get("command")))
    if read_story is None:
        raise NoReport(f"{path} has no report: it is not a run folder of {', '.join(READERS)}.")
    try:
        story = read_story(records, about, settings)
        shown = [_checked(clients) for clients in about.get("clients") or []]
    except (KeyError, IndexError, TypeError, ValueError, AttributeError, OverflowError) as error:
        if isinstance(error, CovaryError):
            raise
        raise InvalidInput(f"{path} has unexpected contents ({error!r}). Run the command again.") from None
    facts = {name: about[name] for name in ("started", "covary", "jax", "device") if name in about}
    return [
        Story(
            name=path.resolve().name,
            command=str(about.get("command", "")),
            settings=settings,
            facts=facts,
            ended=about.get("ended"),
            clients=shown,
            **story,
        )
    ]


def of_run(records: list[dict[str, Any]], about: dict[str, Any], settings: dict[str, Any]) -> dict[str, Any]:
    algorithm, problem = str(about.get("algorithm", settings["algorithm"])), str(about.get("problem", "digits"))
    columns = {name: _numbers([[r.get(name) for r in records]]) for name in (records[0] if records else {})}
    target, diverged = settings.get("target"), about.get("diverged")
    return {
        "title": f"{settings['algorithm']} on {problem}",
        "outcome": f"Diverged in round {diverged}: the step-size is too large." if diverged else "",
        "lines": [Line(str(settings["algorithm"]), problem, columns, {"algorithm": algorithm, **settings})],
        "target": None if target is None else ("accuracy", float(target)),
    }


def of_sweep(records: list[dict[str, Any]], about: dict[str, Any], settings: dict[str, Any]) -> dict[str, Any]:
    problem, lines = str(about.get("problem", "digits")), {}
    for row in records:
        point = ", ".join(f"{name} = {row[name]:g}" for name in about["grid"])
        lines.setdefault(point, []).append(row["curves"])
    target = settings.get("target")
    return {
        "title": f"{settings['algorithm']} on {problem}: {len(records)} runs",
        "tables": [_members(records, about["grid"])] if records else [],
        "lines": [
            Line(f"{settings['algorithm']}, {point}", problem, _stacked(seeds), {"point": point})
            for point, seeds in lines.items()
        ],
        "target": None if target is None else ("accuracy", float(target)),
    }


def _members(records: list[dict[str, Any]], grid: list[str]) -> Table:
    """Every run of a sweep: its point, its seed, how it ended, and its best values."""
    best = [name for name in records[0] if name.startswith("best_")]
    rows: list[Row] = []
    for record in records:
        row: Row = [(f"{record[name]:g}", float(record[name])) for name in grid]
        row += [(str(record["seed"]), float(record["seed"])), (str(record["rounds"]), float(record["rounds"]))]
        row += [str(record["outcome"])]
        row += [("", None) if record[name] is None else (f"{record[name]:.4g}", float(record[name])) for name in best]
        rows.append(row)
    header = [*grid, "seed", "rounds", "ended", *(name.replace("_", " ") for name in best)]
    return Table("Every run", header, rows)


def of_compare(records: list[dict[str, Any]], about: dict[str, Any], settings: dict[str, Any]) -> dict[str, Any]:
    lines = []
    for record in records[1:]:
        setting = record["setting"]
        panel = f"digits, {100 * setting['similarity']:g} % similarity"
        columns = {name: _numbers(curves) for name, curves in record["curves"].items()}
        lines.append(Line(str(setting["algorithm"]), panel, columns, {"eta_l": record["eta_l"]}))
    return {
        "title": "Four algorithms on digits",
        "lines": lines,
        "target": ("accuracy", float(settings["target"])),
    }


def of_reproduce(records: list[dict[str, Any]], about: dict[str, Any], settings: dict[str, Any]) -> dict[str, Any]:
    def of(kind: str) -> list[dict[str, Any]]:
        return [record for record in records if record.get("kind") == kind]

    header, cells, curves, outcomes = records[0] if records else {}, of("cell"), of("curve"), of("outcome")
    tables = [_table(outcome, str(header["data"])) for outcome in outcomes]
    return {
        "title": str(header.get("title", settings["experiment"])),
        "lines": [Line(str(c["name"]), str(c["panel"]), {"loss": _numbers([c["f"]])}) for c in curves],
        "tables": [*tables, _cells(cells)] if cells else tables,
        "claims": [_claim(**claim) for outcome in outcomes for claim in outcome["claims"]],
    }


def _table(outcome: dict[str, Any], title: str) -> Table:
    """The table of a complete experiment."""
    header = [str(name) for name in outcome["header"]]
    rows: list[Row] = [[(str(text), _leading_number(str(text))) for text in row] for row in outcome["rows"]]
    if any(len(row) != len(header) for row in rows):
        raise ValueError("a row of the wrong length")
    return Table(title, header, rows, str(outcome["note"]))


def _claim(text: Any, holds: Any, evidence: Any) -> Claim:
    if holds not in (True, False, None):
        raise ValueError("a claim that neither holds nor fails")
    return Claim(str(text), holds, str(evidence))


def _cells(records: list[dict[str, Any]]) -> Table:
    """Every cell of a table, with its tuned step-size."""
    rows: list[Row] = []
    for record in records:
        name = record.get("name") or ", ".join(map(str, record["setting"].values()))  # version 0.1.0 wrote no name
        eta_l, seconds, accuracy = float(record["eta_l"]), float(record["seconds"]), fmean(record["accuracy"])
        rounds = None if None in record["rounds"] else fmean(record["rounds"])
        rows.append(
            [
                str(name),
                (f"{eta_l:g}", eta_l),
                ("not reached" if rounds is None else f"{rounds:.1f}", rounds),
                (f"{accuracy:.4f}", accuracy),
                (f"{seconds:.1f}", seconds),
            ]
        )
    header = ["cell", "eta_l", "rounds to the target", "best test accuracy", "seconds"]
    return Table("Every cell, with its tuned step-size", header, rows)


def of_diagnose(records: list[dict[str, Any]], about: dict[str, Any], settings: dict[str, Any]) -> dict[str, Any]:
    return {"title": f"Diagnosis of {records[0]['title']}", "diagnosis": records[0]}


Reader = Callable[[list[dict[str, Any]], dict[str, Any], dict[str, Any]], dict[str, Any]]
READERS: dict[str, Reader] = {
    "run": of_run,
    "sweep": of_sweep,
    "compare": of_compare,
    "reproduce": of_reproduce,
    "diagnose": of_diagnose,
}


def clients_of(data: Any, title: str, most: int = 100) -> dict[str, Any]:
    """The label histograms of a federated data set's first clients, for `RunFolder.describe`.

    >>> import numpy as np, covary as cv
    >>> data = cv.partition.by_similarity(np.zeros((6, 1)), np.array([2, 0, 1, 2, 1, 0]), n_clients=3, similarity=0.0)
    >>> clients_of(data, "three clients")["counts"]
    [[2, 0, 0], [0, 2, 0], [0, 0, 2]]
    """
    counts = np.asarray(data.label_counts())
    return {"title": title, "clients": len(counts), "examples": int(counts.sum()), "counts": counts[:most].tolist()}


def _checked(clients: dict[str, Any]) -> dict[str, Any]:
    """The output of `clients_of`, read from a file; any other form is an error."""
    counts = np.array(clients["counts"])
    if counts.ndim != 2 or counts.size == 0 or counts.dtype.kind not in "iu" or counts.min() < 0:
        raise ValueError("label counts in an unknown form")
    for name, length in (("names", clients["clients"]), ("labels", counts.shape[1])):
        if clients.get(name) is not None and not len(clients[name]) >= min(
            length, len(counts) if name == "names" else length
        ):
            raise ValueError(f"a wrong number of {name}")
    return {**clients, "clients": int(clients["clients"]), "examples": int(clients["examples"])}


def _numbers(rows: Sequence[Sequence[Any]]) -> np.ndarray:
    """Rows of numbers, with NaN for null."""
    return np.array([[math.nan if value is None else float(value) for value in row] for row in rows], float)


def _stacked(seeds: list[dict[str, list[Any]]]) -> dict[str, np.ndarray]:
    """The curves of several seeds, padded with NaN to the longest."""
    longest = max(len(curve) for curves in seeds for curve in curves.values())
    padded = {
        name: [[*curves.get(name, []), *[None] * (longest - len(curves.get(name, [])))] for curves in seeds]
        for name in seeds[0]
    }
    return {name: _numbers(rows) for name, rows in padded.items()}


def _leading_number(text: str) -> float | None:
    digits = text.split()[0].rstrip("+×%").replace(",", "").replace("k", "000") if text.split() else ""
    try:
        return float(digits)
    except ValueError:
        return None
