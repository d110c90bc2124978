"""Tables for the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.table import Table


def rounds_table(
    title: str, rows: Sequence[str], columns: Mapping[str, Mapping[str, float | None]], limit: int, baseline: str
) -> Table:
    """Rounds to the target, one row an algorithm, with the speed-up over the baseline as the paper prints it.

    `columns` maps a column's heading to the rounds of each algorithm (None: not reached within `limit`).
    """
    table = Table(title=title, title_justify="left")
    table.add_column("algorithm")
    for heading in columns:
        table.add_column(heading, justify="right")
    for row in rows:
        cells = []
        for rounds_of in columns.values():
            best = min((value for value in rounds_of.values() if value is not None), default=None)
            cells.append(_cell(rounds_of[row], rounds_of[baseline], best, limit))
        table.add_row(row, *cells)
    return table


def _cell(rounds: float | None, baseline: float | None, best: float | None, limit: int) -> str:
    if rounds is None:
        return f"{limit}+"
    speed_up = f" [dim]({baseline / rounds:.1f}×)[/dim]" if baseline is not None else ""
    return f"[bold green]{rounds:g}[/bold green]{speed_up}" if rounds == best else f"{rounds:g}{speed_up}"
