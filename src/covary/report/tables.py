"""Tables for the terminal."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from rich.table import Table
from rich.text import Text

from covary.report.story import Claim

BLOCKS = " ▁▂▃▄▅▆▇█"


def rounds_table(
    title: str, rows: Sequence[str], columns: Mapping[str, Mapping[str, float]], limit: int, baseline: str
) -> Table:
    """Rounds to the target, one row per algorithm, with the speed-up over the baseline as in the paper.

    `columns` maps a column's heading to the rounds of each algorithm (infinite if not reached within `limit`).
    """
    table = Table(title=title, title_justify="left")
    table.add_column("algorithm")
    for heading in columns:
        table.add_column(heading, justify="right")
    for row in rows:
        cells = [_cell(of[row], of[baseline], min(of.values()), limit) for of in columns.values()]
        table.add_row(row, *cells)
    return table


def _cell(rounds: float, baseline: float, best: float, limit: int) -> str:
    if math.isinf(rounds):
        return f"{limit}+"
    speed_up = f" [dim]({baseline / rounds:.1f}×)[/dim]" if math.isfinite(baseline) else ""
    return f"[bold green]{rounds:.0f}[/bold green]{speed_up}" if rounds == best else f"{rounds:.0f}{speed_up}"


def plain_table(title: str, header: Sequence[str], body: Sequence[Sequence[str]]) -> Table:
    """A table of texts."""
    table = Table(title=title, title_justify="left")
    for name in header:
        table.add_column(name)
    for row in body:
        table.add_row(*(Text(cell) for cell in row))
    return table


def claims_table(claims: Sequence[Claim]) -> Table:
    """The paper's claims, checked against the measurements."""
    table = Table(title="The paper's claims, checked against the measurements", title_justify="left", show_lines=True)
    table.add_column("claim")
    table.add_column("measured")
    table.add_column("")
    for claim in claims:
        colour = {True: "green", False: "red", None: "yellow"}[claim.holds]
        table.add_row(Text(claim.text), Text(claim.evidence), Text(claim.verdict, colour))
    return table


def sweep_table(tried: Any, title: str) -> Table:
    """One row per point of the grid: means over the seeds, the best point in green."""
    table = Table(title=title, title_justify="left")
    for name in tried.points[0]:
        table.add_column(name, justify="right")
    if tried.target:
        table.add_column(f"rounds to {tried.target[0]} {tried.target[-1]:g}", justify="right")
    for name in tried.metrics:
        table.add_column(f"best {name}", justify="right")
    table.add_column("ended")
    best, rounds = tried.best(), tried.mean_rounds()
    for p, point in enumerate(tried.points):
        rows = tried.table[p * len(tried.seeds) : (p + 1) * len(tried.seeds)]
        cells = [f"{value:g}" for value in point.values()]
        if tried.target:
            cells.append("—" if math.isinf(rounds[p]) else f"{rounds[p]:.1f}")
        for name in tried.metrics:
            seen = [row[f"best_{name}"] for row in rows if row[f"best_{name}"] is not None]
            cells.append(f"{np.mean(seen):.4g}" if seen else "—")
        endings = [row["outcome"] for row in rows]
        cells.append(", ".join(f"{endings.count(ending)} {ending}" for ending in dict.fromkeys(endings)))
        table.add_row(*cells, style="bold green" if p == best else "")
    return table


def histogram_table(
    title: str, counts: np.ndarray, names: Sequence[str] | None = None, labels: Sequence[str] | None = None
) -> Table:
    """One row per client: its number of examples, and one bar per label, relative to the largest of all clients."""
    table = Table(title=title, title_justify="left")
    table.add_column("client", justify="right")
    table.add_column("examples", justify="right")
    kinds = f"labels {', '.join(labels)}" if labels else f"labels 0 to {counts.shape[1] - 1}"
    table.add_column(Text(kinds), overflow="fold")
    heights = np.ceil((len(BLOCKS) - 1) * counts / counts.max()).astype(int)
    for client, (row, height) in enumerate(zip(counts, heights, strict=True)):
        table.add_row(names[client] if names else str(client), f"{row.sum():,}", "".join(BLOCKS[h] for h in height))
    return table
