"""Plots, drawn without a display."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

# Okabe and Ito's colours, told apart with any colour vision; line styles tell them apart in print.
STYLES = {
    "sgd": ("#000000", "--"),
    "fedavg": ("#D55E00", "-"),
    "fedprox": ("#E69F00", "-."),
    "scaffold": ("#0072B2", "-"),
}


def save_curves(
    path: Path, panels: Mapping[str, Mapping[str, np.ndarray]], metric: str, target: float, title: str
) -> None:
    """One panel per key, one curve of `metric` by round per algorithm, with the target as a thin line.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     file = Path(folder) / "curves.png"
    ...     save_curves(file, {"0 %": {"sgd": np.linspace(0, 1, 9)}}, "accuracy", 0.9, "An example")
    ...     file.stat().st_size > 0
    True
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(1.2 + 3.6 * len(panels), 3.8), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for ax, (name, curves) in zip(axes, panels.items(), strict=True):
        for algorithm, values in curves.items():
            colour, line = STYLES.get(algorithm, ("#009E73", ":"))
            rounds = np.arange(1, len(values) + 1)
            ax.plot(rounds, values, line, color=colour, label=algorithm, linewidth=1.8, alpha=0.9)
        ax.axhline(target, color="#888888", linewidth=0.8)
        ax.set_title(name, fontsize=10)
        ax.set_xlabel("communication rounds")
        ax.set_xscale("log")
        ax.xaxis.set_major_formatter("{x:g}")
        ax.set_ylim(0, 1)
        ax.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel(metric)
    axes[-1].legend(frameon=False, loc="lower right")
    axes[0].annotate(
        f"target {target:g}", (1, target), textcoords="offset points", xytext=(0, -11), fontsize=8, color="#555555"
    )
    figure.suptitle(title, fontsize=11)
    figure.savefig(path, dpi=150)
