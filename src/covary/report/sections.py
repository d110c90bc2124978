"""The sections of the report, as HTML."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from types import SimpleNamespace
from typing import Any

import numpy as np

from covary.report.story import Cell, Claim, Line, Row, Story, Table
from covary.targets import direction_of


def measured(line: Line, metric: str) -> bool:
    return metric in line.columns and bool(np.isfinite(line.columns[metric]).any())


def targets(lines: Sequence[Line], target: tuple[str, float] | None) -> str:
    """One row per line: rounds and bytes to the target, and the speed-up over SGD, or else over the slowest."""
    lines = [line for line in lines if target is not None and measured(line, target[0])]
    if target is None or not lines:
        return ""
    metric, value = target
    panels = list(dict.fromkeys(line.panel for line in lines))
    step_sizes = all("eta_l" in line.facts for line in lines)
    rows: list[Row] = []
    marked: set[int] = set()
    over: set[str] = set()
    for panel in panels:
        rivals = [line for line in lines if line.panel == panel]
        rounds = [_mean(line.rounds_to(metric, value)) for line in rivals]
        arrived = [mean for mean in rounds if mean is not None]
        sgd = [mean for line, mean in zip(rivals, rounds, strict=True) if line.name == "sgd"]
        base = sgd[0] if sgd else max(arrived, default=None)
        over.add("sgd" if sgd else "the slowest")
        for line, mean in zip(rivals, rounds, strict=True):
            if mean is not None and mean == min(arrived):
                marked.add(len(rows))
            own: Row = [(f"{line.facts['eta_l']:g}", line.facts["eta_l"])] if step_sizes else []
            name: Row = [panel, line.name] if len(panels) > 1 else [line.name]
            rows.append([*name, *own, *_counted(line, metric, value, mean, base)])
    header = [*(["problem"] if len(panels) > 1 else []), "line", *(["eta_l"] if step_sizes else [])]
    header += ["rounds", f"speed-up over {' or '.join(sorted(over))}", "bytes sent by then", f"best {metric}"]
    seeds = max(len(line.columns[metric]) for line in lines)
    note = f"Means over {seeds} seeds, with the smallest and the largest. " if seeds > 1 else ""
    note += "The fewest rounds of each problem are in bold."
    return table(Table(f"Rounds to {metric} {value:g}", header, rows, note), marked)


def _counted(line: Line, metric: str, value: float, mean: float | None, base: float | None) -> Row:
    """A line's rounds to the target, its speed-up, the bytes sent by then, and its best value."""
    known = line.columns[metric][np.isfinite(line.columns[metric])]
    best = float(known.max() if direction_of(metric) > 0 else known.min())
    reached: Row = [(f"{best:.4g}", best)]
    if mean is None:
        return [(f"not in {line.columns[metric].shape[1]}", None), ("", None), ("", None), *reached]
    seeds = [r for r in line.rounds_to(metric, value) if r is not None]
    spread = f" ({min(seeds)} to {max(seeds)})" if len(seeds) > 1 else ""
    sent = float(np.interp(mean, np.arange(1, len(line.sent) + 1), line.sent))
    return [
        (f"{mean:.0f}{spread}", mean),
        ("", None) if base is None else (f"{base / mean:.1f}×", base / mean),
        (_bytes(sent), sent) if sent else ("", None),
        *reached,
    ]


def _mean(rounds: Sequence[int | None]) -> float | None:
    known = [r for r in rounds if r is not None]
    return float(np.mean(known)) if len(known) == len(rounds) else None


def _bytes(count: float) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count:.0f} B"


def table(content: Table, marked: set[int] | frozenset[int] = frozenset()) -> str:
    """A table that sorts by a column when its heading is clicked."""
    columns = list(zip(*content.rows, strict=True)) or [()] * len(content.header)
    numeric = [any(isinstance(cell, tuple) and cell[1] is not None for cell in column) for column in columns]
    head = "".join(
        f'<th scope="col"{" class=number" if number else ""}><button type="button">{escape(name)}</button></th>'
        for name, number in zip(content.header, numeric, strict=True)
    )
    body = "".join(
        f"<tr{' class=best' if at in marked else ''}>{''.join(map(_cell, row, numeric))}</tr>"
        for at, row in enumerate(content.rows)
    )
    note = f'<p class="note">{escape(content.note)}</p>' if content.note else ""
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(content.title)}"><table class="sortable">'
        f"<caption>{escape(content.title)}</caption><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>{note}"
    )


def _cell(cell: Cell, numeric: bool) -> str:
    if isinstance(cell, str):
        return f"<td{' class=wide' if len(cell) > 40 else ''}>{escape(cell)}</td>"
    text, value = cell
    shown = escape(text).replace("\n", "<br>")
    value = "" if value is None or not math.isfinite(value) else value
    return f'<td{" class=number" if numeric else ""} data-value="{value}">{shown}</td>'


def claims(claims: Sequence[Claim]) -> str:
    if not claims:
        return ""
    kinds = {True: "holds", False: "fails", None: "open"}
    items = "".join(
        f'<li><span class="{kinds[claim.holds]}">{claim.verdict}</span>: {escape(claim.text)} '
        f'<span class="note">({escape(claim.evidence)})</span></li>'
        for claim in claims
    )
    return f"<ul>{items}</ul>"


def diagnosis(found: dict[str, Any]) -> str:
    """The verdict, the advice with its reasons, the constants, the trial, and the warnings."""
    from covary.report.diagnosis import constants_of  # imports Rich, which covary does not need otherwise

    advice = "".join(
        f'<tr><th scope="row">{name}</th><td>{escape(str(found[name]))}</td>'
        f"<td>{escape(str(found['reasons'].get(name, '')))}</td></tr>"
        for name in ("algorithm", "K", "eta_l", "eta_g")
    )
    known = {name: math.nan if value is None else value for name, value in found.items()}
    known |= {"useful_local_steps": math.inf if found["useful_local_steps"] is None else found["useful_local_steps"]}
    constants: list[Row] = [[name, value, text] for name, value, text in constants_of(SimpleNamespace(**known))]
    trial: list[Row] = []
    for name, rounds in found["measured"].items():
        scaled = found["predicted"].get(name)
        seen: Cell = ("not reached", None) if rounds is None else (f"{rounds:.3g}", float(rounds))
        trial.append([name, seen, ("", None) if scaled is None else (f"{scaled:.3g}", float(scaled))])
    cautions = "".join(f"<li>{escape(text)}</li>" for text in found.get("warnings", []))
    return (
        f'<h3>{escape(found["title"])}</h3><p class="verdict">{escape(found["reasons"]["scaffold"])}</p>'
        f'<div class="scroll" tabindex="0" role="region" aria-label="Advice"><table><caption>Recommended</caption>'
        f"<tbody>{advice}</tbody></table></div>"
        + table(Table("Measured", ["constant", "value", "meaning"], constants))
        + table(Table(f"Rounds to {found['goal']}", ["algorithm", "in the trial", "by Table 1, scaled"], trial))
        + (f"<h3>Warnings</h3><ul>{cautions}</ul>" if cautions else "")
    )


def clients(shown: dict[str, Any]) -> str:
    """A small label histogram for each client."""
    counts, names, labels = shown["counts"], shown.get("names"), shown.get("labels")
    highest = max(max(row) for row in counts) or 1
    wide = len(counts[0])
    figures = []
    for client, row in enumerate(counts):
        name = str(names[client]) if names else f"client {client}"
        text = ", ".join(f"{labels[k] if labels else k}: {n:,}" for k, n in enumerate(row) if n)
        bars = "".join(
            f'<rect x="{k + 0.1:g}" y="{1 - n / highest:.4f}" width="0.8" height="{n / highest:.4f}"/>'
            for k, n in enumerate(row)
            if n
        )
        figures.append(
            f'<figure><svg viewBox="0 0 {wide} 1" preserveAspectRatio="none" role="img" '
            f'aria-label="{escape(name)}, {sum(row):,} examples by label: {escape(text)}">'
            f"<title>{escape(text)}</title>{bars}</svg>"
            f"<figcaption>{escape(name)} <small>{sum(row):,}</small></figcaption></figure>"
        )
    more = f" The first {len(counts)} are shown." if shown["clients"] > len(counts) else ""
    about = f"{shown['clients']:,} clients, {shown['examples']:,} examples; one bar per label ({wide} labels).{more}"
    return (
        f'<h3>{escape(shown["title"])}</h3><p class="note">{escape(about)}</p>'
        f'<div class="clients">{"".join(figures)}</div>'
    )


def configuration(story: Story) -> str:
    rows = {**story.facts, **({"ended": story.ended} if story.ended else {}), **story.settings}
    body = "".join(
        f'<tr><th scope="row">{escape(str(name))}</th><td>{escape(str(value))}</td></tr>'
        for name, value in rows.items()
        if value is not None and name != "command"
    )
    again = f'<div><pre>{escape(story.command)}</pre><button type="button" class="copy">Copy the command</button></div>'
    return (
        f"<h3>{escape(story.name)}</h3>"
        + (f"<p>The command of this run:</p>{again}" if story.command else "")
        + f"<details><summary>All settings</summary><table><tbody>{body}</tbody></table></details>"
    )
