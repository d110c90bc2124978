"""Plots, drawn without a display."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

# Okabe and Ito's colours, which work with colour blindness; line styles distinguish the curves in print.
STYLES = {
    "sgd": ("#000000", "--"),
    "fedavg": ("#D55E00", "-"),
    "fedprox": ("#E69F00", "-."),
    "scaffold": ("#0072B2", "-"),
}


def new_figure(width: float, height: float) -> Any:
    """An empty figure, drawn in memory. Matplotlib is imported here, not with covary."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def save_curves(
    path: Path, panels: Mapping[str, Mapping[str, np.ndarray]], metric: str, target: float, title: str
) -> None:
    """One panel per key, with one curve of `metric` per algorithm (the mean over seeds, and their range as a band).

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     file = Path(folder) / "curves.png"
    ...     save_curves(file, {"0 %": {"sgd": np.linspace(0, 1, 9)[None]}}, "accuracy", 0.9, "An example")
    ...     file.stat().st_size > 0
    True
    """
    figure = new_figure(1.2 + 3.6 * len(panels), 3.8)
    axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for ax, (name, curves) in zip(axes, panels.items(), strict=True):
        for algorithm, values in curves.items():
            colour, line = STYLES.get(algorithm, ("#009E73", ":"))
            rounds = np.arange(1, values.shape[1] + 1)
            ax.plot(rounds, values.mean(axis=0), line, color=colour, label=algorithm, linewidth=1.6)
            ax.fill_between(rounds, values.min(axis=0), values.max(axis=0), color=colour, alpha=0.12, linewidth=0)
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


def save_histograms(path: Path, counts: np.ndarray, title: str) -> None:
    """A map of the number of examples per label (across) and client (down).

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     file = Path(folder) / "clients.png"
    ...     save_histograms(file, np.eye(4, dtype=int), "Four clients with one label each")
    ...     file.stat().st_size > 0
    True
    """
    n_clients, n_labels = counts.shape
    figure = new_figure(min(12.0, 3 + 0.2 * n_labels), min(12.0, 2 + 0.15 * n_clients))
    ax = figure.subplots()
    image = ax.imshow(counts, aspect="auto", cmap="viridis", interpolation="nearest")
    figure.colorbar(image, label="examples")
    ax.set_xlabel("label")
    ax.set_ylabel("client")
    ax.set_title(title, fontsize=10)
    figure.savefig(path, dpi=150)
