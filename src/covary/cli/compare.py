"""`covary compare`: the first thing a new user runs."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from covary.checks import whole
from covary.cli.common import Out, bar, console
from covary.errors import refused
from covary.report.folder import RunFolder


def compare(
    rounds: Annotated[int, typer.Option(help="Most rounds of a run.")] = 300,
    target: Annotated[float, typer.Option(help="Test accuracy to reach.")] = 0.95,
    seeds: Annotated[int, typer.Option(help="Seeds to average over.")] = 3,
    out: Out = Path("runs"),
) -> None:
    """Compare SGD, FedAvg, FedProx and SCAFFOLD on handwritten digits, each with its step-size tuned.

    20 clients of 0, 10 and 100 % similarity, 20 % of them sampled a round, 5 epochs of 5 steps: the paper's setup on a
    data set that needs no download.

    Example: covary compare --seeds 1 --rounds 100
    """
    from covary.experiments.common import Budget
    from covary.experiments.digits import SETTINGS
    from covary.experiments.digits import compare as cells

    if not 0 < target <= 1:
        raise refused("--target", "an accuracy in (0, 1]", target, "Try 0.95.")
    whole("--rounds", rounds, 1)
    budget = Budget(clients=20, rounds=rounds, seeds=tuple(range(whole("--seeds", seeds, 1))), step_sizes=7)
    folder = RunFolder.create("compare", out)
    folder.append({"kind": "header", "data": "digits", "target": target, "budget": asdict(budget)})
    results = []
    try:
        with bar("cells") as progress:
            task = progress.add_task("compiling", total=len(SETTINGS))

            def log(cell: str, number: int, values: dict[str, float]) -> None:
                progress.update(task, description=f"{cell}: round {number}, {values['running']:g} runs going on")

            for cell, curves in cells(budget, target, log):
                folder.append({"kind": "cell", **asdict(cell), "curves": curves})
                results.append((cell, curves["accuracy"]))
                progress.advance(task)
    except KeyboardInterrupt:
        console.print(f"\nStopped. The cells that were done are in {folder.results}.")
        raise typer.Exit(130) from None
    _show(results, budget, target, folder)


def _show(results: list[Any], budget: Any, target: float, folder: RunFolder) -> None:
    from covary.experiments.digits import ALGORITHMS, SIMILARITIES
    from covary.report.plots import save_curves
    from covary.report.tables import rounds_table

    rounds: dict[str, dict[str, float]] = {f"{100 * s:g} % similarity": {} for s in SIMILARITIES}
    curves: dict[str, dict[str, Any]] = {heading: {} for heading in rounds}
    for cell, accuracy in results:
        heading, algorithm = f"{100 * cell.setting.similarity:g} % similarity", cell.setting.algorithm
        rounds[heading][algorithm] = cell.mean_rounds
        curves[heading][algorithm] = accuracy
    setup = f"{budget.clients} clients, 20 % sampled, 5 local epochs"
    seeds = f"mean of {len(budget.seeds)} seeds" if len(budget.seeds) > 1 else "one seed"
    title = f"Rounds to {target:g} test accuracy on digits ({setup}; {seeds})"
    console.print(rounds_table(title, list(ALGORITHMS), rounds, budget.rounds, baseline="sgd"))
    console.print("[dim](n×): speed-up over SGD. eta_l tuned for each cell, eta_g = 1. Green: fewest rounds.[/dim]")
    picture = folder.path / "curves.png"
    save_curves(picture, curves, "test accuracy", target, f"Logistic regression on digits: {setup}")
    console.print(f"Curves: {picture}\nRaw results: {folder.results}", soft_wrap=True)
