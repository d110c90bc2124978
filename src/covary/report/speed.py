"""The plot of `covary bench`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from covary.report.plots import new_figure

COVARY, OTHERS, GRID_LINES = "#0072B2", "#999999", "#DDDDDD"


def save_speed(path: Path, records: list[dict[str, Any]]) -> None:
    """One panel per workload (milliseconds per round), and one for how the time per round grows, if measured.

    >>> import tempfile
    >>> rows = [{"what": "round", "workload": "W1", "who": who, "seconds": s} for who, s in (("covary", 1), ("us", 2))]
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_speed(Path(folder) / "speed.png", rows)
    ...     (Path(folder) / "speed.png").stat().st_size > 0
    True
    """
    rounds = [r for r in records if r["what"] == "round" and r["seconds"]]
    panels = [("round", name) for name in dict.fromkeys(r["workload"] for r in rounds)]
    panels += [(what, what) for what in ("clients", "linear") if any(r["what"] == what for r in records)]
    if not panels:
        return
    most = max([len({r["who"] for r in rounds if r["workload"] == name}) for _, name in panels], default=4)
    figure = new_figure(1 + 4.2 * len(panels), max(3.2, 0.8 + 0.36 * most))
    for ax, (what, name) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        if what == "round":
            _bars(ax, name, [r for r in rounds if r["workload"] == name])
        else:
            (_clients if what == "clients" else _linear)(ax, [r for r in records if r["what"] == what])
        ax.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)


def _bars(ax: Any, name: str, rows: list[dict[str, Any]]) -> None:
    rows = sorted(rows, key=lambda r: -r["seconds"])
    values = [1000 * r["seconds"] for r in rows]
    colours = [COVARY if r["who"].startswith("covary") else OTHERS for r in rows]
    ax.barh([r["who"] for r in rows], values, color=colours, height=0.7)
    for at, value in enumerate(values):
        label = f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
        ax.annotate(label, (value, at), textcoords="offset points", xytext=(4, -3), fontsize=8)
    ax.set_xlim(0, 1.15 * max(values))
    ax.set_xlabel("milliseconds per round (less is better)")
    ax.set_title(name, fontsize=10)
    ax.tick_params(labelsize=8)


def _clients(ax: Any, rows: list[dict[str, Any]]) -> None:
    ax.semilogx([r["N"] for r in rows], [1000 * r["seconds"] for r in rows], "o-", color=COVARY)
    ax.set_ylim(0, 1500 * max(r["seconds"] for r in rows))
    ax.grid(color=GRID_LINES)
    ax.set_xlabel("clients N")
    ax.set_ylabel("milliseconds per round")
    ax.set_title(f"S = {rows[-1]['S']}, states and data on disk", fontsize=10)


def _linear(ax: Any, rows: list[dict[str, Any]]) -> None:
    for name, style in (("S", ("o", COVARY)), ("K", ("s", "#D55E00")), ("d", ("^", "#009E73"))):
        points = [(r["value"], r["seconds"]) for r in rows if r["in"] == name]
        if points:
            x, y = np.array(points).T
            label = f"{name} from {x[0]:,.0f} to {x[-1]:,.0f}: slope {slope(x, y):.2f}"
            ax.loglog(x / x[0], y / y[0], marker=style[0], color=style[1], label=label, linewidth=1.2)
    from matplotlib.ticker import FixedLocator, NullLocator

    ticks = [1, 2, 4, 8]
    ax.loglog(ticks, ticks, color=OTHERS, linewidth=0.8, label="proportional: slope 1")
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_locator(FixedLocator(ticks))
        axis.set_major_formatter("{x:g}")
        axis.set_minor_locator(NullLocator())
    ax.set_xlabel("size, relative to the smallest")
    ax.set_ylabel("time per round, relative to the smallest")
    ax.legend(frameon=False, fontsize=8)
    ax.set_title("How a round grows with S, K and d", fontsize=10)


def slope(x: Any, y: Any) -> float:
    """The slope of log y over log x: 1 if y is proportional to x.

    >>> round(slope([1, 2, 4], [3, 6, 12]), 2)
    1.0
    """
    return float(np.polyfit(np.log(x), np.log(y), 1)[0])
