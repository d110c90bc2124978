"""The paper's figure and tables as pictures."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from covary.experiments import table5
from covary.experiments.common import Outcome
from covary.report.plots import STYLES, new_figure

CURVES = {  # the colours that the paper's caption names
    ("fedavg", 2): ("#E69F00", "K = 2"),
    ("fedavg", 10): ("#D62728", "K = 10"),
    ("scaffold", 2): ("#56B4E9", "K = 2"),
    ("scaffold", 10): ("#0072B2", "K = 10"),
}


def draw(result: Outcome, title: str, path: Path) -> None:
    """Draw an `Outcome` of any experiment."""
    {"fig3": _fig3, "table3": _table3, "table4": _table4, "table5": _table5}[result.name](result, title, path)


def _fig3(result: Outcome, title: str, path: Path) -> None:
    """The paper's 2 × 3 panel: FedAvg above, SCAFFOLD below, G growing to the right, SGD dashed in each."""
    Gs = sorted({curve["G"] for curve in result.results})
    figure = new_figure(10, 5.6)
    axes = figure.subplots(2, len(Gs), sharex=True, sharey="col", squeeze=False)
    for row, name in enumerate(("fedavg", "scaffold")):
        for column, G in enumerate(Gs):
            ax = axes[row][column]
            for curve in (c for c in result.results if c["G"] == G and c["algorithm"] in ("sgd", name)):
                sgd = curve["algorithm"] == "sgd"
                colour, label = ("#000000", "SGD") if sgd else CURVES[name, curve["K"]]
                values = np.maximum(curve["f"], 1e-12)
                ax.semilogy(np.arange(1, len(values) + 1), values, "--" if sgd else "-", color=colour, label=label)
            ax.set_title(f"{'FedAvg' if row == 0 else 'SCAFFOLD'}, G = {G:g}", fontsize=10)
            ax.spines[["top", "right"]].set_visible(False)
            if row:
                ax.set_xlabel("communication rounds")
            if column == 0:
                ax.set_ylabel("f(x) - f*")
                ax.legend(frameon=False, fontsize=9)
    figure.suptitle(title, fontsize=11)
    figure.savefig(path, dpi=150)


def _table3(result: Outcome, title: str, path: Path) -> None:
    """One panel per similarity, epochs along the axis, one bar per algorithm; an arrow marks a bar beyond the limit."""
    cells = result.results
    limit = result.header["budget"]["rounds"]
    similarities = sorted({c.case.similarity for c in cells})
    epochs = sorted({c.case.local_epochs for c in cells if c.case.algorithm != "sgd"})
    figure = new_figure(11, 3.8)
    axes = figure.subplots(1, len(similarities), squeeze=False)[0]
    for ax, similarity in zip(axes, similarities, strict=True):
        own = {(c.case.algorithm, c.case.local_epochs): c.mean_rounds for c in cells if c.case.similarity == similarity}
        base = next(rounds for (algorithm, _), rounds in own.items() if algorithm == "sgd")
        top = 1.15 * max([r for r in own.values() if np.isfinite(r)] or [limit])
        ax.axhline(base, color=STYLES["sgd"][0], linestyle="--", linewidth=1, label="sgd")
        for place, algorithm in enumerate(("fedavg", "fedprox", "scaffold")):
            x = np.arange(len(epochs)) + 0.27 * (place - 1)
            heights = np.array([own[algorithm, e] for e in epochs])
            ax.bar(x, np.minimum(heights, top), 0.25, color=STYLES[algorithm][0], label=algorithm)
            for at, height in zip(x, heights, strict=True):
                text = f"{height:.0f}" if np.isfinite(height) else "↑"
                ax.annotate(text, (at, min(height, top)), ha="center", va="bottom", fontsize=7)
        ax.set_ylim(0, top * 1.08)
        ax.set_xticks(range(len(epochs)), [f"{e}" for e in epochs])
        ax.set_xlabel("local epochs")
        ax.set_title(f"{100 * similarity:g} % similarity", fontsize=10)
        ax.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("rounds to the target")
    axes[-1].legend(frameon=False, fontsize=9)
    figure.suptitle(title, fontsize=11)
    figure.savefig(path, dpi=150)


def _table4(result: Outcome, title: str, path: Path) -> None:
    """Rounds by the share of clients sampled, on log axes, with a line of slope 1 for a proportional slow-down."""
    cells = result.results
    similarities = sorted({c.case.similarity for c in cells})
    figure = new_figure(8.5, 3.8)
    axes = figure.subplots(1, len(similarities), squeeze=False)[0]
    for ax, similarity in zip(axes, similarities, strict=True):
        for algorithm in ("fedavg", "scaffold"):
            own = [c for c in cells if (c.case.similarity, c.case.algorithm) == (similarity, algorithm)]
            own = sorted((c.case.clients_per_round, c.mean_rounds) for c in own if np.isfinite(c.mean_rounds))
            if not own:
                continue
            shares, rounds = np.array(own).T
            if shares[0] > min(c.case.clients_per_round for c in cells):  # a smaller share did not reach the target
                ax.annotate(
                    "1k+ ▸", (100 * shares[0], rounds[0]), textcoords="offset points", xytext=(8, 0), fontsize=8
                )
            ax.loglog(100 * shares, rounds, "o-", color=STYLES[algorithm][0], label=algorithm)
            linear = rounds[-1] * shares[-1] / shares
            ax.loglog(
                100 * shares, linear, ":", color=STYLES[algorithm][0], linewidth=1, label="proportional slow-down"
            )
        ax.invert_xaxis()
        shares = sorted({c.case.clients_per_round for c in cells})
        ax.set_xticks([100 * share for share in shares], [f"{100 * share:g} %" for share in shares])
        ax.set_xticks([], minor=True)
        ax.set_yticks([10, 30, 100, 300, 1000], ["10", "30", "100", "300", "1,000"])
        ax.set_yticks([], minor=True)
        ax.set_xlabel("clients sampled each round")
        ax.set_title(f"{100 * similarity:g} % similarity", fontsize=10)
        ax.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("rounds to the target")
    if axes[0].lines:
        axes[0].legend(frameon=False, fontsize=8)
    figure.suptitle(title, fontsize=11)
    figure.savefig(path, dpi=150)


def _table5(result: Outcome, title: str, path: Path) -> None:
    cells = result.results
    figure = new_figure(6.5, 3.8)
    ax = figure.subplots()
    similarities = sorted({c.case.similarity for c in cells})
    algorithms = list(dict.fromkeys(c.case.algorithm for c in cells))
    for place, algorithm in enumerate(algorithms):
        own = [next(c for c in cells if (c.case.similarity, c.case.algorithm) == (s, algorithm)) for s in similarities]
        x = np.arange(len(similarities)) + 0.27 * (place - 1)
        means, spread = [c.mean_accuracy for c in own], [np.std(c.accuracy) for c in own]
        ax.errorbar(x, means, spread, fmt="o", markersize=9, color=STYLES[algorithm][0], label=algorithm, capsize=4)
        paper = [table5.PAPER[algorithm, s] for s in similarities]
        ax.plot(
            x,
            paper,
            "D",
            color="white",
            markeredgecolor=STYLES[algorithm][0],
            label=f"{algorithm}, the paper",
            zorder=5,
        )
    ax.set_xticks(range(len(similarities)), [f"{100 * s:g} % similarity" for s in similarities])
    ax.set_ylabel("best test accuracy")
    ax.legend(frameon=False, fontsize=8, loc="upper left")
    ax.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title, fontsize=11)
    figure.savefig(path, dpi=150)
