"""The report: one self-contained HTML file, made from run folders."""

from __future__ import annotations

import datetime
import json
import math
from collections.abc import Mapping, Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from covary.checks import path as checked_path
from covary.errors import refused
from covary.report.sections import claims, clients, configuration, diagnosis, measured, table, targets
from covary.report.story import Line, NoReport, Story, read
from covary.runs.files import replace

if TYPE_CHECKING:
    from covary.simulate import Run

MOST_POINTS = 1500  # of a curve
KNOWN = {"sgd": 0, "fedavg": 1, "fedprox": 2, "scaffold": 3, "mime": 4, "feddyn": 5, "dane": 6, "vrl_sgd": 7}
ABOUT = {
    "accuracy": ("Test accuracy", "The share of test examples that the server's model x classifies correctly."),
    "loss": ("Training loss", "f(x), the mean of the clients' losses at the server's model."),
    "drift": (
        "Client drift",
        "E_r of the paper: the mean squared distance of the local models y_i from x within a round.",
    ),
    "control_change": (
        "Control change",
        "The mean of ‖c_i⁺ − c_i‖² over the cohort: how much the control variates change in the round.",
    ),
    "control_error": (
        "‖c − mean c_i‖",
        "The distance of the server's control variate from the mean of the clients'. It is due to rounding alone.",
    ),
}
WORSE_WHEN_LARGE = ("loss", "drift", "control_change", "control_error")


def write_page(folders: Sequence[Path], path: Path, target: float | None = None) -> None:
    """Write the report of one or several run folders to a file.

    >>> import tempfile
    >>> from covary.runs.folder import RunFolder
    >>> with tempfile.TemporaryDirectory() as parent:
    ...     folder = RunFolder.create("run-sgd", parent)
    ...     folder.settle({"command": "run", "algorithm": "sgd", "target": None})
    ...     folder.append({"round": 1, "loss": 2.0, "accuracy": 0.5})
    ...     write_page([folder.path], folder.path / "report.html")
    ...     (folder.path / "report.html").read_text().startswith("<!doctype html>")
    True
    """
    replace(path, page(folders, target).encode())


def write_report(path: str | Path, runs: Mapping[str, Run], target: tuple[str, float] | None = None) -> None:
    """Write a report of runs from `simulate` to one HTML file that needs no network.

    Args:
        path: the file.
        runs: names and runs. Give runs of the same algorithm different names.
        target: the target that rounds are counted to, such as ("accuracy", 0.9); by default 95 % of the best accuracy.

    >>> import tempfile, covary as cv
    >>> problem = cv.lower_bound(G=10)
    >>> runs = {a.name: cv.simulate(a, problem, 20, local_steps=5, x0=1.0) for a in (cv.fedavg(0.1), cv.scaffold(0.1))}
    >>> cv.write_report(tempfile.mkdtemp() + "/report.html", runs, target=("loss", 1e-3))
    """
    from covary.simulate import Run  # brings JAX, which a page of run folders does not need

    place = checked_path("path", path)
    if not isinstance(runs, Mapping) or not runs or not all(isinstance(run, Run) for run in runs.values()):
        raise refused("runs", "a dict of names and Runs", repr(runs)[:80], 'Try {"scaffold": run}.')
    if target is not None and not _is_target(target, runs):
        raise refused("target", "a column of every run's history and a value", target, 'Try ("loss", 0.1).')
    lines = [
        Line(
            str(name),
            "",
            {key: column[None] for key, column in run.history.items() if column.ndim == 1 and column.dtype != object},
        )
        for name, run in runs.items()
    ]
    settings = {str(name): str(run.algorithm) for name, run in runs.items()}
    title = " and ".join(settings) if len(settings) < 3 else f"{len(settings)} runs"
    story = Story(title, title, "", settings, {}, f"{datetime.datetime.now():%Y-%m-%d %H:%M:%S}", lines=lines)
    try:
        replace(place, _html([story], target, None).encode())
    except OSError as error:
        raise refused("path", "a file that can be written", f"{place} ({error.strerror})", "Choose another.") from None


def _is_target(target: Any, runs: Mapping[str, Run]) -> bool:
    if not isinstance(target, tuple) or len(target) != 2 or not isinstance(target[1], int | float | np.number):
        return False
    return all(target[0] in run.history and run.history[target[0]].ndim == 1 for run in runs.values())


def page(folders: Sequence[Path], target: float | None = None, version: str | None = None) -> str:
    """The report of one or several run folders. With a `version`, the page asks its server for updates."""
    stories, left_out = stories_of(folders)
    if not stories:
        raise left_out[0]
    return _html(stories, None if target is None else ("accuracy", target), version)


def stories_of(folders: Sequence[Path]) -> tuple[list[Story], list[NoReport]]:
    """The stories of the folders, and an error for each folder without one."""
    stories, left_out = [], []
    for folder in folders:
        try:
            stories += read(folder)
        except NoReport as error:
            left_out.append(error)
    return stories, left_out


def _html(stories: Sequence[Story], target: tuple[str, float] | None, version: str | None) -> str:
    lines = _named(stories)
    target = _target(stories, lines, target)
    sections = [
        ("targets", "Rounds to the target", targets(lines, target)),
        ("results", "Results", "".join(table(content) for story in stories for content in story.tables)),
        ("claims", "The paper's claims", claims([claim for story in stories for claim in story.claims])),
        ("diagnosis", "Diagnosis", "".join(diagnosis(s.diagnosis) for s in stories if s.diagnosis)),
        ("curves", "Curves", _file("plots.html") if lines else ""),
        ("clients", "Clients", "".join(clients(shown) for shown in _once(stories))),
        ("configuration", "Configuration", "".join(map(configuration, stories))),
    ]
    sections = [(anchor, heading, content) for anchor, heading, content in sections if content]
    long = any(line.columns[name].shape[1] >= 100 for line in lines for name in line.metrics)
    data = {"version": version, "log_x": long, "metrics": _metrics(lines, target), "panels": _panels(lines)}
    title = stories[0].title if len(stories) == 1 else f"{len(stories)} runs"
    parts = {
        "title": escape(title),
        "lead": escape(_lead(stories)),
        "contents": "".join(f'<li><a href="#{anchor}">{heading}</a></li>' for anchor, heading, _ in sections),
        "body": "\n".join(
            f'<section id="{anchor}" aria-labelledby="{anchor}-heading">'
            f'<h2 id="{anchor}-heading">{heading}</h2>{content}</section>'
            for anchor, heading, content in sections
        ),
        "footer": "Made by covary. SCAFFOLD: Karimireddy et al., ICML 2020. This page loads nothing from the network.",
        "data": json.dumps(data, allow_nan=False).replace("<", "\\u003c"),
        "style": _file("page.css"),
        "script": _file("page.js"),
    }
    html = _file("page.html")
    first, *rest = html.split("{{")
    return first + "".join(parts[name] + text for name, text in (piece.split("}}", 1) for piece in rest))


def _file(name: str) -> str:
    return (files("covary.report") / "web" / name).read_text(encoding="utf-8")


def _named(stories: Sequence[Story]) -> list[Line]:
    """All lines, with different names within each panel: by the settings that differ, or by the folder."""
    everyone = [(story, line) for story in stories for line in story.lines if line.metrics]
    named = []
    for story, line in everyone:
        name = line.name
        rivals = [(s, other) for s, other in everyone if (other.panel, other.name) == (line.panel, name)]
        if len(rivals) > 1:
            shared = [key for key in line.facts if all(key in other.facts for _, other in rivals)]
            apart = [key for key in shared if len({str(other.facts[key]) for _, other in rivals}) > 1]
            marks = [f"{key} = {line.facts[key]}" for key in apart if key not in ("algorithm", "command")][:3]
            name = f"{name}, {', '.join(marks)}" if marks else name
            same = [s for s, other in rivals if all(other.facts[key] == line.facts[key] for key in apart)]
            name = f"{name} ({story.name})" if len(same) > 1 else name
        taken = sum(other.panel == line.panel and other.name.startswith(name) for other in named)
        twice = any((other.panel, other.name) == (line.panel, name) for other in named)
        named.append(Line(f"{name}, {taken + 1}" if twice else name, line.panel, line.columns, line.facts))
    return named


def _target(
    stories: Sequence[Story], lines: Sequence[Line], target: tuple[str, float] | None
) -> tuple[str, float] | None:
    """The target that rounds are counted to: the given one, else the runs' highest, else 95 % of the best accuracy."""
    if target is not None:
        return target
    own = [story.target for story in stories if story.target is not None]
    if own:
        return max(own, key=lambda target: target[1])
    reached = [np.nanmax(line.columns["accuracy"]) for line in lines if measured(line, "accuracy")]
    return ("accuracy", math.floor(95 * max(reached)) / 100) if reached else None


def _once(stories: Sequence[Story]) -> list[dict[str, Any]]:
    """The clients of all stories, without repeating a data set."""
    everyone = [shown for story in stories for shown in story.clients]
    return list({json.dumps([shown["title"], shown["counts"]]): shown for shown in everyone}.values())


def _lead(stories: Sequence[Story]) -> str:
    if len(stories) > 1:
        return "; ".join(story.title for story in stories)
    (story,) = stories
    state = f"Ended {story.ended}." if story.ended else "Still running or interrupted: results so far."
    return " ".join(part for part in (story.outcome, state, str(story.facts.get("device", ""))) if part)


def _metrics(lines: Sequence[Line], target: tuple[str, float] | None) -> list[dict[str, Any]]:
    """The curves to draw: accuracy, the user's own metrics, then covary's other columns."""
    seen = [name for line in lines for name in line.metrics if measured(line, name)]
    own = [name for name in dict.fromkeys(seen) if name not in ABOUT]
    names = [name for name in ("accuracy", *own, *list(ABOUT)[1:]) if name in seen]
    return [
        {
            "key": name,
            "title": ABOUT.get(name, (name, ""))[0],
            "about": ABOUT.get(name, ("", ""))[1],
            "log": name in WORSE_WHEN_LARGE,
            "target": target[1] if target is not None and target[0] == name else None,
        }
        for name in names
    ]


def _panels(lines: Sequence[Line]) -> list[dict[str, Any]]:
    headings, styles = list(dict.fromkeys(line.panel for line in lines)), _styles(lines)
    return [
        {
            "heading": heading if len(headings) > 1 else "",
            "lines": [
                {"name": line.name, **styles[line.name], **_curves(line)} for line in lines if line.panel == heading
            ],
        }
        for heading in headings
    ]


def _styles(lines: Sequence[Line]) -> dict[str, dict[str, int]]:
    """A colour and a dash for each name. An algorithm has the same colour on every page, and its runs differ in their
    dashes. With one algorithm only, or with too many runs of one, each run gets its own colour."""
    names = list(dict.fromkeys(line.name for line in lines))
    families: dict[str, list[str]] = {}
    for name in names:
        families.setdefault(_family(name), []).append(name)
    own = set(families) <= set(KNOWN) and max(map(len, families.values()), default=0) <= 4
    if own and (len(families) > 1 or len(names) == 1):
        dashes = {name: at for family in families.values() for at, name in enumerate(family)}
        alone = {"sgd": 1} if families.get("sgd") == ["sgd"] else {}
        return {name: {"style": KNOWN[_family(name)], "dash": alone.get(name, dashes[name])} for name in names}
    return {name: {"style": (3 + 5 * at) % 8, "dash": at // 8 % 4} for at, name in enumerate(names)}


def _family(name: str) -> str:
    """The algorithm that a line's name begins with."""
    return name.split(",")[0].split(" (")[0]


def _curves(line: Line) -> dict[str, Any]:
    """Points for the page: at most `MOST_POINTS`, with five digits."""
    rounds = max(values.shape[1] for values in line.columns.values())
    at = np.unique(np.linspace(0, rounds - 1, min(rounds, MOST_POINTS)).round().astype(int))
    values = {}
    for name in line.metrics:
        if measured(line, name):
            own = line.columns[name]
            seen = np.isfinite(own).any(axis=0)
            mean, low, high = (np.full(own.shape[1], np.nan) for _ in range(3))
            mean[seen], low[seen], high[seen] = (f(own[:, seen], axis=0) for f in (np.nanmean, np.nanmin, np.nanmax))
            values[name] = {"mean": _short(mean[at])}
            if len(own) > 1:
                values[name] |= {"low": _short(low[at]), "high": _short(high[at])}
    sent = line.sent
    return {
        "round": (at + 1).tolist(),
        "sent": _short(sent[at] if len(sent) == rounds else np.full(len(at), np.nan)),
        "values": values,
    }


def _short(values: np.ndarray) -> list[float | None]:
    return [float(f"{value:.5g}") if math.isfinite(value) else None for value in values]
