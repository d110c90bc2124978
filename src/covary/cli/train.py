"""`covary run` and `covary sweep`: one algorithm on handwritten digits, once or over a grid."""

from __future__ import annotations

import inspect
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from covary.checks import whole
from covary.cli import common
from covary.cli.common import bar, console, factory_of
from covary.errors import CovaryError, refused


def run(
    context: typer.Context,
    algorithm: common.Name,
    eta_l: Annotated[float, typer.Option(help="Local step-size.")] = 0.3,
    eta_g: Annotated[float | None, typer.Option(help="Global step-size.")] = None,
    mu: Annotated[float | None, typer.Option(help="Proximal strength (fedprox, dane).")] = None,
    alpha: Annotated[float | None, typer.Option(help="Regulariser (feddyn).")] = None,
    eta: Annotated[float | None, typer.Option(help="Weight of the global gradient (dane).")] = None,
    option: Annotated[str | None, typer.Option(help="Control variate, I or II (scaffold).")] = None,
    rounds: common.Rounds = 100,
    clients: common.Clients = 20,
    similarity: common.Similarity = 0.0,
    clients_per_round: common.PerRound = 0.2,
    local_steps: common.Steps = None,
    local_epochs: common.Epochs = None,
    batch_size: common.Batch = 0.2,
    hidden: common.Hidden = 0,
    warm_start: common.WarmStart = False,
    weights: common.Weights = "uniform",
    target: common.Target = None,
    seed: Annotated[int, typer.Option(help="Seed of everything random.")] = 0,
    out: common.Out = Path("runs"),
    checkpoint: common.Checkpoint = None,
    checkpoint_every: common.Every = 100,
    resume: common.Resume = False,
) -> None:
    """Run one algorithm on handwritten digits and show how it goes.

    Stopped by Ctrl-C or a crash, it goes on where it was: with Ctrl-C it says by which command.

    Example: covary run scaffold --eta-l 1 --rounds 50 --similarity 0.1
    """
    from covary.experiments.digits import digits_problem
    from covary.simulate import simulate

    given = {"eta_l": eta_l, "eta_g": eta_g, "mu": mu, "alpha": alpha, "eta": eta, "option": option}
    chosen = _build(algorithm, given)
    problem = digits_problem(clients, similarity, hidden)
    options = common.training(clients_per_round, local_steps, local_epochs, batch_size, warm_start, weights, target)
    options |= {"checkpoint_every": whole("--checkpoint-every", checkpoint_every, 1)}
    started, begun = time.perf_counter(), False
    with (
        common.run_folder(context, f"run-{algorithm}", out, checkpoint, resume) as folder,
        bar("rounds") as progress,
    ):
        task = progress.add_task("compiling", total=rounds)

        def log(number: int, values: dict[str, float]) -> None:
            nonlocal begun
            if not begun:
                folder.cut(number - 1)  # rounds after the checkpoint are done again
                begun = True
            folder.append({"round": number, **values})
            what = f"{algorithm}  loss {values['loss']:.4f}  accuracy {values['accuracy']:.4f}"
            progress.update(task, completed=number, description=what)

        result = simulate(chosen, problem, rounds=rounds, seed=seed, log=log, checkpoint=folder.checkpoint, **options)
        folder.rewrite(_records(result.history))  # a line that a power failure took is there again
    told = f"{chosen}: {result.rounds} rounds in {time.perf_counter() - started:.1f} s"
    if result.rounds:
        told += f", loss {result.history['loss'][-1]:.4f}, test accuracy {result.history['accuracy'][-1]:.4f}"
    console.print(told, soft_wrap=True)
    if result.reached:
        console.print(f"Reached test accuracy {target:g} in round {result.reached}.")
    console.print(f"Rounds: {folder.results}", soft_wrap=True)
    if result.diverged:
        raise typer.Exit(1)


def sweep(
    context: typer.Context,
    algorithm: common.Name,
    eta_l: Annotated[str, typer.Option(help="Local step-sizes, separated by commas.")] = "0.03,0.1,0.3,1,3",
    eta_g: Annotated[str | None, typer.Option(help="Global step-sizes, likewise.")] = None,
    seeds: Annotated[int, typer.Option(help="How many seeds.")] = 3,
    rounds: common.Rounds = 100,
    clients: common.Clients = 20,
    similarity: common.Similarity = 0.0,
    clients_per_round: common.PerRound = 0.2,
    local_steps: common.Steps = None,
    local_epochs: common.Epochs = None,
    batch_size: common.Batch = 0.2,
    hidden: common.Hidden = 0,
    warm_start: common.WarmStart = False,
    weights: common.Weights = "uniform",
    target: common.Target = None,
    race: Annotated[bool, typer.Option("--race", help="Stop when the best is certain (needs --target).")] = False,
    out: common.Out = Path("runs"),
    checkpoint: common.Checkpoint = None,
    checkpoint_every: common.Every = 100,
    resume: common.Resume = False,
) -> None:
    """Try every combination of step-sizes and seeds on handwritten digits, as one compiled program.

    Stopped by Ctrl-C or a crash, it goes on where it was: with Ctrl-C it says by which command.

    Example: covary sweep scaffold --eta-l 0.1,1,10 --target 0.95
    """
    from covary.experiments.digits import digits_problem
    from covary.report.tables import sweep_table
    from covary.sweep import sweep as swept

    factory = factory_of(algorithm)
    grid = {"eta_l": _numbers("--eta-l", eta_l)}
    if eta_g is not None:
        grid["eta_g"] = _numbers("--eta-g", eta_g)
    problem = digits_problem(clients, similarity, hidden)
    options = common.training(clients_per_round, local_steps, local_epochs, batch_size, warm_start, weights, target)
    whole("--rounds", rounds, 1)
    whole("--seeds", seeds, 1)
    options |= {"checkpoint_every": whole("--checkpoint-every", checkpoint_every, 1), "race": race}
    started = time.perf_counter()
    with common.run_folder(context, f"sweep-{algorithm}", out, checkpoint, resume) as folder, bar("rounds") as progress:
        task = progress.add_task("compiling", total=rounds)

        def log(number: int, values: dict[str, float]) -> None:
            progress.update(task, completed=number, description=f"{algorithm}  {values['running']:g} runs going on")

        options |= {"log": log, "checkpoint": folder.checkpoint}
        tried = swept(factory, problem, grid, list(range(seeds)), rounds=rounds, **options)
        folder.rewrite(tried.table)
    seconds = time.perf_counter() - started
    console.print(sweep_table(tried, f"{algorithm} on digits: {len(tried.table)} runs in {seconds:.1f} s"))
    console.print(f"Raw results: {folder.results}", soft_wrap=True)


def _records(history: dict[str, np.ndarray]) -> Iterator[dict[str, Any]]:
    """A history as the lines that were written while it grew."""
    names = [name for name, column in history.items() if column.ndim == 1 and name != "round"]
    for at, number in enumerate(history["round"]):
        yield {"round": int(number), **{name: float(history[name][at]) for name in names}}


def _build(name: str, given: dict[str, Any]) -> Any:
    """The algorithm with the options that were given; one that it does not have is refused."""
    factory = factory_of(name)
    parameters = inspect.signature(factory).parameters
    given = {key: value for key, value in given.items() if value is not None}
    for key in given:
        if key not in parameters:
            own = ", ".join("--" + p.replace("_", "-") for p in parameters)
            raise CovaryError(f"--{key.replace('_', '-')} is not an option of {name}. Its options are {own}.")
    return factory(**given)


def _numbers(option: str, text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise refused(option, "numbers separated by commas", repr(text), "Try 0.1,0.3,1.") from None
