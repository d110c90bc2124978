"""`covary diagnose`: whether SCAFFOLD will help, and with which settings."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from covary.cli import common, problems
from covary.cli.terminal import Terminal
from covary.errors import InvalidInput, refused
from covary.runs.folder import RunFolder

if TYPE_CHECKING:
    from covary.theory.diagnosis import Diagnosis
    from covary.theory.trial import Check

FULL = (1, 2, 5, 12, 25, 50, 100, 200)


def diagnose(
    context: typer.Context,
    dataset: problems.Dataset = "digits",
    root: problems.Root = None,
    clients: problems.Clients = None,
    similarity: problems.Similarity = None,
    alpha: problems.Alpha = None,
    client_column: problems.ClientColumn = None,
    label: problems.Label = None,
    test: problems.Test = None,
    ignore: problems.Ignore = None,
    hidden: common.Hidden = 0,
    rounds: Annotated[int, typer.Option(help="The number of rounds you plan to train for.")] = 100,
    clients_per_round: Annotated[
        float | None,
        typer.Option(
            help="Clients per round: a number, a fraction, or 0 for all. \\[default: 0.2; 0 for heart-disease and CSV]"
        ),
    ] = None,
    local_steps: Annotated[int | None, typer.Option(help="Local steps K, if fixed.")] = None,
    max_local_steps: Annotated[int, typer.Option(help="The largest K to consider.")] = 100,
    batch_size: common.Batch = None,
    weights: common.Weights = "uniform",
    target: Annotated[float | None, typer.Option(help="Target test accuracy.")] = None,
    target_loss: Annotated[float | None, typer.Option(help="Target training loss, instead of an accuracy.")] = None,
    trial_rounds: Annotated[int, typer.Option(help="Rounds of the trial.")] = 30,
    seed: problems.Seed = 0,
    check: Annotated[
        bool, typer.Option("--check", help="Also check the advice with a full sweep (needs a target).")
    ] = False,
    out: common.Out = Path("runs"),
    show: common.Open = False,
    as_json: common.Json = False,
    quiet: common.Quiet = False,
) -> None:
    """Measure how different the clients are, and recommend an algorithm, K and step-sizes.

    DATASET is digits, emnist, fashion-mnist, heart-disease or a CSV file. This takes a minute on digits.
    For your own model, call covary.diagnose(problem) in Python.

    Example: covary diagnose digits --similarity 0.1 --target 0.95

    Example: covary diagnose patients.csv --client-column hospital --label outcome
    """
    from covary.report.diagnosis import save_diagnosis
    from covary.theory.diagnosis import check_advice
    from covary.theory.diagnosis import diagnose as run_diagnosis

    terminal = Terminal(as_json, quiet)
    aim = _target(target, target_loss)
    if check and aim is None:
        raise InvalidInput("--check counts rounds to a target. Add --target 0.9 (accuracy) or --target-loss 0.5.")
    RunFolder.reject_unwritable(out)
    of = problems.divided(context, alpha, seed)
    problem = of.problem(hidden)
    for note in of.notes:
        terminal.say(note, style="dim")
    options: dict[str, Any] = {**of.sampling(clients_per_round, batch_size), "weights": weights}
    title = f"{of.title}: {problem.n_clients} clients, {'2-layer network' if hidden else 'logistic regression'}"
    checked = None
    try:
        with terminal.progress("") as progress:

            def say(text: str) -> None:
                progress.update(what=text)

            found = run_diagnosis(
                problem,
                rounds,
                local_steps=local_steps,
                seed=seed,
                target=aim,
                max_local_steps=max_local_steps,
                trial_rounds=trial_rounds,
                say=say,
                **options,
            )
            if check:
                steps = [K for K in FULL if max_local_steps >= K]
                checked = check_advice(found, problem, aim, steps, say=say, **options)
    except KeyboardInterrupt:
        terminal.say("Stopped. Nothing is saved: diagnose writes its results at the end.")
        raise typer.Exit(130) from None
    folder = RunFolder.create("diagnose", out)
    folder.settle(common.settings_of(context))
    common.describe(folder, context)
    folder.describe(problem=of.title, clients=[of.described()])
    record = {"kind": "diagnosis", "title": title, **found.as_dict()}
    if checked is not None:
        record["check"] = checked.as_dict()
    folder.append(record)
    save_diagnosis(folder.path / "diagnosis.png", found, title)
    terminal.answer(record | common.places(folder))
    _show(terminal, found, checked, title)
    terminal.written("Picture", folder.path / "diagnosis.png")
    terminal.written("Raw results", folder.results)
    common.report(folder, terminal, show)
    folder.close()


def _show(terminal: Terminal, found: Diagnosis, checked: Check | None, title: str) -> None:
    from covary.report.diagnosis import check_table, diagnosis_panel

    terminal.show(diagnosis_panel(found, title))
    if checked is not None:
        terminal.show(check_table(found, checked))
        agrees = "as predicted" if checked.as_predicted else "contrary to the prediction"
        said = (
            f"The advised settings need {checked.ratio:.2f} times the rounds of the best of {checked.cells} cells; "
            f"SCAFFOLD {'beats' if checked.beats else 'does not beat'} FedAvg, {agrees}."
        )
        reached = math.isfinite(checked.best.rounds)
        terminal.show(said if reached else "No cell reached the target, so the advice cannot be checked.")


def _target(target: float | None, target_loss: float | None) -> tuple[str, float] | None:
    if target is not None and target_loss is not None:
        raise InvalidInput("--target and --target-loss are two targets. Give one of them.")
    if target is not None and not 0 < target <= 1:
        raise refused("--target", "an accuracy in (0, 1]", target, "Try 0.9.")
    return ("accuracy", target) if target is not None else ("loss", target_loss) if target_loss is not None else None
