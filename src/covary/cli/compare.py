"""`covary compare`: four algorithms on handwritten digits, the first command a new user runs."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from covary.checks import whole
from covary.cli import common
from covary.cli.terminal import Terminal, best_text
from covary.errors import refused
from covary.runs.folder import RunFolder


def compare(
    context: typer.Context,
    rounds: Annotated[int, typer.Option(help="Maximum rounds per run.")] = 300,
    target: Annotated[float, typer.Option(help="Test accuracy to reach.")] = 0.95,
    seeds: Annotated[int, typer.Option(help="Seeds to average over.")] = 3,
    out: common.Out = Path("runs"),
    checkpoint: common.Checkpoint = None,
    resume: common.Resume = False,
    show: common.Open = False,
    as_json: common.Json = False,
    quiet: common.Quiet = False,
) -> None:
    """Compare SGD, FedAvg, FedProx and SCAFFOLD on handwritten digits, each with its step-size tuned.

    There are 20 clients with 0, 10 and 100 % similarity, 20 % of them sampled per round, and 5 local epochs of 5 steps.
    This is the paper's setup on a data set that needs no download.
    Ctrl-C saves the run and prints the command that resumes it.
    After a crash, the same command with --checkpoint DIR resumes it.

    Example: covary compare --seeds 1 --rounds 100
    """
    from covary.experiments.common import Budget
    from covary.experiments.digits import CASES, SIMILARITIES, digits_problem
    from covary.experiments.digits import compare as cells
    from covary.experiments.folder import save_cell, saved_cells
    from covary.report.story import clients_of

    terminal = Terminal(as_json, quiet)
    if not 0 < target <= 1:
        raise refused("--target", "an accuracy in (0, 1]", target, "Try 0.95.")
    whole("--rounds", rounds, 1)
    budget = Budget(clients=20, rounds=rounds, seeds=tuple(range(whole("--seeds", seeds, 1))), step_sizes=7)
    with common.run_folder(context, terminal, "compare", out, checkpoint, resume, show) as folder:
        shown = ((f"digits, {100 * s:g} % similarity", digits_problem(budget.clients, s).data) for s in SIMILARITIES)
        folder.describe(problem="digits", clients=[clients_of(data, title) for title, data in shown])
        header = {"kind": "header", "data": "digits", "target": target, "budget": asdict(budget)}
        done = saved_cells(folder, header, ("data", "target", "budget"))
        with terminal.progress("cells", len(CASES), len(done)) as progress:

            def log(cell: str, number: int, values: dict[str, float]) -> None:
                progress.within(", ".join(cell.split(", ")[:2]), number, rounds, best_text(values))

            todo = [case for case in CASES if case not in done]
            for number, (cell, curves) in enumerate(cells(todo, budget, target, log, folder.checkpoint), 1 + len(done)):
                save_cell(folder, cell, curves=curves)
                progress.update(number, str(cell.case))
        _show(terminal, folder, budget, target)


def _show(terminal: Terminal, folder: RunFolder, budget: Any, target: float) -> None:
    from covary.experiments.digits import COMPARED, SIMILARITIES
    from covary.experiments.folder import cell_from
    from covary.report.plots import save_curves
    from covary.report.tables import rounds_table

    rounds: dict[str, dict[str, float]] = {f"{100 * s:g} % similarity": {} for s in SIMILARITIES}
    curves: dict[str, dict[str, Any]] = {heading: {} for heading in rounds}
    answer: list[dict[str, Any]] = []
    for record in folder.read()[1:]:
        cell, accuracy = cell_from(record), np.array(record["curves"]["accuracy"], float)
        heading, algorithm = f"{100 * cell.case.similarity:g} % similarity", cell.case.algorithm
        rounds[heading][algorithm] = cell.mean_rounds
        curves[heading][algorithm] = accuracy
        found = {"eta_l": cell.eta_l, "rounds": cell.rounds, "mean_rounds": cell.mean_rounds, "accuracy": cell.accuracy}
        answer.append({"algorithm": algorithm, "similarity": cell.case.similarity, **found})
    setup = f"{budget.clients} clients, 20 % sampled, 5 local epochs"
    seeds = f"mean of {len(budget.seeds)} seeds" if len(budget.seeds) > 1 else "one seed"
    title = f"Rounds to {target:g} test accuracy on digits ({setup}; {seeds})"
    terminal.show(rounds_table(title, list(COMPARED), rounds, budget.rounds, baseline="sgd"))
    terminal.show("[dim](n×): speed-up over SGD. eta_l tuned for each cell, eta_g = 1. Green: fewest rounds.[/dim]")
    picture = folder.path / "curves.png"
    with folder.writing():
        save_curves(picture, curves, "test accuracy", target, f"Logistic regression on digits: {setup}")
    terminal.written("Picture", picture)
    terminal.written("Raw results", folder.results)
    terminal.answer({"data": "digits", "target": target, "cells": answer, **common.places(folder)})
