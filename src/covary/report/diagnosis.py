"""A diagnosis on the terminal and as a picture."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Group
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from covary.report.plots import STYLES, new_figure

COLOURS = {name: colour for name, (colour, _) in STYLES.items()}
COLOURS |= {"mime": "#009E73", "feddyn": "#CC79A7", "dane": "#56B4E9"}

if TYPE_CHECKING:
    from covary.theory.diagnosis import Diagnosis
    from covary.theory.trial import Check


def diagnosis_panel(d: Diagnosis, title: str) -> Panel:
    """The verdict, the advice with its reasons, the constants, and the warnings.

    >>> import covary as cv
    >>> found = cv.diagnose(cv.lower_bound(G=10.0), x0=1.0, trial_rounds=5, local_steps=4, algorithms=())
    >>> diagnosis_panel(found, "two clients").title
    'two clients'
    """
    advice = Table(box=None, show_header=False, padding=(0, 1))
    advice.add_column(style="bold", no_wrap=True)
    advice.add_column(style="bold green", no_wrap=True)
    advice.add_column(overflow="fold")
    for name, value in (
        ("algorithm", d.algorithm),
        ("K", str(d.K)),
        ("eta_l", f"{d.eta_l:g}"),
        ("eta_g", f"{d.eta_g:g}"),
    ):
        advice.add_row(name, value, Text(d.reasons[name]))
    constants = Table(box=None, show_header=False, padding=(0, 1))
    constants.add_column(style="bold", no_wrap=True)
    constants.add_column(justify="right", no_wrap=True)
    constants.add_column(style="dim", overflow="fold")
    for name, value, meaning in constants_of(d):
        constants.add_row(name, value, meaning)
    parts: list[Any] = [
        Text(d.verdict, style="bold"),
        Text(),
        Text("Recommended", style="underline"),
        advice,
        Text(),
        Text("Measured", style="underline"),
        constants,
    ]
    if d.warnings:
        parts += [Text(), Text("Warnings", style="underline")]
        parts += [Text(f"• {text}", style="yellow") for text in d.warnings]
    return Panel(Group(*parts), title=title, title_align="left", padding=(1, 2))


def constants_of(d: Any) -> list[tuple[str, str, str]]:
    """Name, value and meaning of every constant of a diagnosis, or of an object with the same fields."""

    def with_error(value: float, se: float) -> str:
        return f"{value:.3g}" + (f" ± {se:.2g}" if se > 0.0005 * abs(value) else "")

    strongly = d.convex and d.mu - d.mu_se > 1e-4 * d.beta
    mu = with_error(d.mu, d.mu_se) if strongly or not d.convex else f"below {max(d.mu, 0.0):.2g}"
    curved = "f is strongly convex" if strongly else "f looks convex" if d.convex else "f is not convex here"
    sigma = "—" if math.isnan(d.sigma) else with_error(d.sigma, d.sigma_se)
    return [
        ("beta", with_error(d.beta, d.beta_se), "smoothness: largest curvature of a client's loss"),
        ("mu", mu, f"lowest curvature: {curved}"),
        ("delta", with_error(d.delta, d.delta_se), "Hessian dissimilarity: limits the useful local steps"),
        (
            "beta/delta",
            f"{d.useful_local_steps:.3g}",
            "useful local steps by Theorem IV, from the constants at the start",
        ),
        ("G", with_error(d.G, d.G_se), "gradient dissimilarity near the end: causes FedAvg's drift"),
        ("B", f"{d.B:.3g}", "growth of the dissimilarity with the gradient"),
        ("sigma", sigma, "noise of a minibatch's gradient within a client"),
        ("safe eta_l", f"{d.eta_l_safe:.2g}", "bound of Theorem III or I, proved for SCAFFOLD, FedAvg and SGD"),
    ]


def save_diagnosis(path: Path, d: Diagnosis, title: str) -> None:
    """The constants, and the measured and predicted rounds of each algorithm.

    >>> import tempfile, covary as cv
    >>> found = cv.diagnose(cv.lower_bound(G=10.0), x0=1.0, trial_rounds=5, local_steps=4, algorithms=())
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_diagnosis(Path(folder) / "diagnosis.png", found, "two clients")
    ...     (Path(folder) / "diagnosis.png").stat().st_size > 0
    True
    """
    from matplotlib.ticker import LogLocator, NullFormatter

    figure = new_figure(10, 4.2)
    left, right = figure.subplots(1, 2, width_ratios=[1, 1.35])
    _draw_constants(left, d)
    _draw_trial(right, d)
    for ax in (left, right):
        ax.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0), numticks=9))
        ax.xaxis.set_major_formatter("{x:g}")
        ax.xaxis.set_minor_formatter(NullFormatter())
        ax.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title, fontsize=11)
    figure.savefig(path, dpi=150)


def _draw_constants(ax: Any, d: Diagnosis) -> None:
    """The constants that differ from 0 by more than two standard errors: others cannot be drawn on a log axis."""
    constants = [
        ("β", d.beta, d.beta_se),
        ("δ", d.delta, d.delta_se),
        ("μ", d.mu, d.mu_se),
        ("G", d.G, d.G_se),
        ("σ", d.sigma, d.sigma_se),
    ]
    shown = [row for row in constants if math.isfinite(row[1]) and row[1] > 2 * row[2]]
    for at, (name, value, se) in enumerate(reversed(shown)):
        colour = STYLES["scaffold"][0] if name in "βδμ" else STYLES["fedavg"][0]
        reach = [[min(se, 0.99 * value)], [se]]
        ax.errorbar(value, at, xerr=reach, fmt="o", color=colour, capsize=3, markersize=7)
        ax.annotate(f"{value:.3g}", (value, at), textcoords="offset points", xytext=(0, 8), ha="center", fontsize=8)
    ax.set_yticks(range(len(shown)), [name for name, _, _ in reversed(shown)])
    ax.set_xscale("log")
    ax.margins(x=0.25, y=0.2)
    ax.set_title("constants, with standard errors", fontsize=10)
    ax.set_xlabel("curvature (β δ μ), gradient (G σ)")


def _draw_trial(ax: Any, d: Diagnosis) -> None:
    names = sorted(d.measured, key=lambda name: d.measured[name] * d.trials[name].trips)
    for at, name in enumerate(names):
        exchanges = d.trials[name].trips
        measured, predicted = exchanges * d.measured[name], d.predicted.get(name)
        colour = COLOURS.get(name, "#999999")
        if math.isfinite(measured):
            ax.barh(at, measured, height=0.55, color=colour)
            text = f"{measured:.3g}" + (f" ({d.measured[name]:.3g} rounds of {exchanges})" if exchanges > 1 else "")
        else:
            measured = len(d.trials[name].curve)
            ax.barh(at, measured, height=0.55, color="white", edgecolor=colour, hatch="///", linewidth=0.8)
            text = f"not in {measured}"
        ax.annotate(text, (measured, at), textcoords="offset points", xytext=(8, -3), fontsize=8)
        if predicted is not None and math.isfinite(predicted):
            ax.plot(exchanges * predicted, at, "D", markerfacecolor="white", markeredgecolor="#333333", markersize=6)
    ax.set_yticks(range(len(names)), names)
    ax.set_ylim(len(names) - 0.4, -0.6)
    ax.set_xscale("log")
    ax.set_xlim(left=0.7)
    ax.margins(x=0.3)
    ax.set_xlabel(f"exchanges to {d.goal}")
    ax.set_title("measured (bars) and Table 1, scaled (diamonds)", fontsize=10)


def check_table(d: Diagnosis, found: Check) -> Table:
    """The advised settings and the best cells of the full sweep."""
    table = Table(title="The advice compared with a full sweep, with other seeds", title_justify="left")
    for name in ("", "K", "eta_l", "eta_g", "rounds"):
        table.add_column(name, justify="left" if not name else "right")
    own = d.trials["scaffold"]
    table.add_row("SCAFFOLD as advised", str(own.K), f"{own.eta_l:g}", f"{own.eta_g:g}", f"{found.advised:.3g}")
    for name, best in (("SCAFFOLD's best cell", found.best), ("FedAvg's best cell", found.fedavg)):
        table.add_row(name, str(best.K), f"{best.eta_l:g}", f"{best.eta_g:g}", f"{best.rounds:.3g}")
    return table
