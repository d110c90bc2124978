"""What the commands share: the console, progress bars, and options that mean the same everywhere."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from covary import algorithms
from covary.algorithm import Algorithm
from covary.errors import refused

console = Console(highlight=False)
ALGORITHMS: dict[str, Callable[..., Algorithm]] = {
    "sgd": algorithms.sgd,
    "fedavg": algorithms.fedavg,
    "fedprox": algorithms.fedprox,
    "scaffold": algorithms.scaffold,
    "dane": algorithms.dane,
    "vrl_sgd": algorithms.vrl_sgd,
    "feddyn": algorithms.feddyn,
    "mime": algorithms.mime,
}

Name = Annotated[str, typer.Argument(help="One of: " + ", ".join(ALGORITHMS) + ".")]
Rounds = Annotated[int, typer.Option(help="Communication rounds.")]
Clients = Annotated[int, typer.Option(help="Number of clients N.")]
Similarity = Annotated[float, typer.Option(help="I.i.d. share of each client's data, 0 to 1.")]
PerRound = Annotated[float, typer.Option(help="Clients a round: a number, or a fraction in (0, 1).")]
Steps = Annotated[int | None, typer.Option(help="Steps K of each client.")]
Epochs = Annotated[int | None, typer.Option(help="Passes over the local data instead. \\[default: 5]")]
Batch = Annotated[float, typer.Option(help="Examples a batch, a fraction in (0, 1), or 0 for all.")]
Hidden = Annotated[int, typer.Option(help="Hidden units of a 2-layer network; 0: logistic regression.")]
WarmStart = Annotated[bool, typer.Option("--warm-start", help="Set c_i = g_i(x^0) first (scaffold).")]
Weights = Annotated[str, typer.Option(help="uniform or examples.")]
Target = Annotated[float | None, typer.Option(help="Stop at this test accuracy.")]
Out = Annotated[Path, typer.Option(help="Where to make the run folder.")]


def bar(unit: str, quiet: bool = False) -> Progress:
    """A progress bar that goes away when the work is done."""
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn(unit))
    return Progress(*columns, TimeElapsedColumn(), console=console, transient=True, disable=quiet)


def factory_of(name: str) -> Callable[..., Algorithm]:
    if name not in ALGORITHMS:
        raise refused("ALGORITHM", f"one of {', '.join(ALGORITHMS)}", name, "Try: covary run scaffold.")
    return ALGORITHMS[name]


def training(
    clients_per_round: float,
    local_steps: int | None,
    local_epochs: int | None,
    batch_size: float,
    warm_start: bool,
    weights: str,
    target: float | None,
) -> dict[str, Any]:
    """The options of a training run, as `simulate` and `sweep` take them."""
    if target is not None and not 0 < target <= 1:
        raise refused("--target", "an accuracy in (0, 1]", target, "Try 0.95.")
    return {
        "clients_per_round": number_or_fraction(clients_per_round),
        "local_steps": local_steps,
        "local_epochs": 5 if local_epochs is None and local_steps is None else local_epochs,
        "batch_size": number_or_fraction(batch_size) if batch_size != 0 else None,
        "warm_start": warm_start,
        "weights": weights,
        "target": None if target is None else ("accuracy", target),
    }


def number_or_fraction(value: float) -> int | float:
    return int(value) if float(value).is_integer() else value
