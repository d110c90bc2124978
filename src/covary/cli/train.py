"""`covary run` and `covary sweep`: one algorithm on a data set or a CSV file, once or over a grid."""

from __future__ import annotations

import contextlib
import inspect
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import typer

from covary import trackers
from covary.checks import whole
from covary.cli import common, problems
from covary.cli.common import factory_of
from covary.cli.terminal import Bar, Lines, Terminal, best_text, metrics_text
from covary.errors import InvalidInput, refused
from covary.runs.folder import RunFolder

if TYPE_CHECKING:
    from covary.sweep import Sweep


def run(
    context: typer.Context,
    algorithm: common.Name = "scaffold",
    eta_l: Annotated[float, typer.Option(help="Local step-size.")] = 0.3,
    eta_g: Annotated[float | None, typer.Option(help="Global step-size.")] = None,
    mu: Annotated[float | None, typer.Option(help="Strength of the proximal term (fedprox, dane).")] = None,
    alpha: Annotated[float | None, typer.Option(help="Strength of the regulariser (feddyn).")] = None,
    eta: Annotated[float | None, typer.Option(help="Weight of the global gradient (dane).")] = None,
    option: Annotated[str | None, typer.Option(help="Control variate, I or II (scaffold).")] = None,
    rounds: common.Rounds = 100,
    dataset: problems.Data = "digits",
    root: problems.Root = None,
    client_column: problems.ClientColumn = None,
    label: problems.Label = None,
    test: problems.Test = None,
    ignore: problems.Ignore = None,
    clients: problems.Clients = None,
    similarity: problems.Similarity = None,
    clients_per_round: common.PerRound = None,
    local_steps: common.Steps = None,
    local_epochs: common.Epochs = None,
    batch_size: common.Batch = None,
    hidden: common.Hidden = 0,
    warm_start: common.WarmStart = False,
    weights: common.Weights = "uniform",
    target: common.Target = None,
    seed: problems.Seed = 0,
    track: Annotated[str | None, typer.Option(help="Also log to tensorboard, mlflow or wandb.")] = None,
    out: common.Out = Path("runs"),
    checkpoint: common.Checkpoint = None,
    checkpoint_every: common.Every = 100,
    resume: common.Resume = False,
    show: common.Open = False,
    as_json: common.Json = False,
    quiet: common.Quiet = False,
) -> None:
    """Run one algorithm on handwritten digits, another data set or your own CSV file, and write a report.

    ALGORITHM is sgd, fedavg, fedprox, scaffold, dane, vrl_sgd, feddyn or mime.
    A CSV file needs a column that names the client of each row.
    Ctrl-C saves the run and prints the command that resumes it.
    After a crash, the same command with --checkpoint DIR resumes it.

    Example: covary run scaffold --eta-l 1 --rounds 50 --similarity 0.1

    Example: covary run --data patients.csv --client-column hospital --label outcome
    """
    from covary.simulate import simulate

    terminal = Terminal(as_json, quiet)
    given = {"eta_l": eta_l, "eta_g": eta_g, "mu": mu, "alpha": alpha, "eta": eta, "option": option}
    chosen = _build(algorithm, given)
    tracker = _tracker(track)
    of = problems.divided(context)
    problem = of.problem(hidden)
    options = common.training(context, of)
    for note in of.notes:
        terminal.say(note, style="dim")
    started, trimmed = time.perf_counter(), False
    with common.run_folder(context, terminal, f"run-{algorithm}", out, checkpoint, resume, show) as folder:
        folder.describe(algorithm=str(chosen), problem=of.title, clients=[of.described()])
        with terminal.progress("rounds", rounds) as progress, tracker(folder, progress, str(chosen), context) as also:
            progress.update(what="preparing")

            def log(number: int, values: dict[str, float]) -> None:
                nonlocal trimmed
                if not trimmed:
                    folder.cut(number - 1)  # rounds after the checkpoint are repeated
                    trimmed = True
                folder.append({"round": number, **values})
                progress.update(number, f"{algorithm}  {metrics_text(values)}")
                if also is not None:
                    also(number, values)

            options |= {"log": log, "checkpoint": folder.checkpoint}
            result = simulate(chosen, problem, **options)
            folder.rewrite(_records(result.history))  # restores lines that a power failure cut off
        seconds = time.perf_counter() - started
        last = {name: float(v[-1]) for name, v in result.history.items() if v.ndim == 1 and len(v) and name != "round"}
        last |= {name: int(result.history[name].sum()) for name in ("bytes_up", "bytes_down") if name in last}
        folder.describe(reached=result.reached, diverged=result.diverged)
        ended = f", loss {last['loss']:.4f}, test accuracy {last['accuracy']:.4f}" if result.rounds else ""
        terminal.show(f"{chosen} on {of.title}: {result.rounds} rounds in {seconds:.1f} s{ended}", markup=False)
        if result.reached:
            terminal.show(f"Reached test accuracy {target:g} in round {result.reached}.")
        terminal.written("Rounds", folder.results)
        answer = {"algorithm": str(chosen), "data": of.title, "rounds": result.rounds, "seconds": seconds, **last}
        answer |= {"reached": result.reached, "diverged": result.diverged}
        terminal.answer(answer | common.places(folder))
    if result.diverged:
        raise typer.Exit(1)


def sweep(
    context: typer.Context,
    algorithm: common.Name = "scaffold",
    eta_l: Annotated[str, typer.Option(help="Local step-sizes, separated by commas.")] = "0.03,0.1,0.3,1,3",
    eta_g: Annotated[str | None, typer.Option(help="Global step-sizes, separated by commas.")] = None,
    seeds: Annotated[int, typer.Option(help="Number of seeds.")] = 3,
    rounds: common.Rounds = 100,
    dataset: problems.Data = "digits",
    root: problems.Root = None,
    client_column: problems.ClientColumn = None,
    label: problems.Label = None,
    test: problems.Test = None,
    ignore: problems.Ignore = None,
    clients: problems.Clients = None,
    similarity: problems.Similarity = None,
    clients_per_round: common.PerRound = None,
    local_steps: common.Steps = None,
    local_epochs: common.Epochs = None,
    batch_size: common.Batch = None,
    hidden: common.Hidden = 0,
    warm_start: common.WarmStart = False,
    weights: common.Weights = "uniform",
    target: common.Target = None,
    race: Annotated[
        bool, typer.Option("--race", help="Stop as soon as the best point is certain (needs --target).")
    ] = False,
    out: common.Out = Path("runs"),
    checkpoint: common.Checkpoint = None,
    checkpoint_every: common.Every = 100,
    resume: common.Resume = False,
    show: common.Open = False,
    as_json: common.Json = False,
    quiet: common.Quiet = False,
) -> None:
    """Run every combination of step-sizes and seeds on a data set, as one compiled program.

    ALGORITHM is sgd, fedavg, fedprox, scaffold, dane, vrl_sgd, feddyn or mime.
    Ctrl-C saves the sweep and prints the command that resumes it.
    After a crash, the same command with --checkpoint DIR resumes it.

    Example: covary sweep scaffold --eta-l 0.1,1,10 --target 0.95
    """
    from covary.report.tables import sweep_table
    from covary.sweep import sweep as swept

    terminal = Terminal(as_json, quiet)
    factory = factory_of(algorithm)
    grid = {"eta_l": _numbers("--eta-l", eta_l)}
    if eta_g is not None:
        grid["eta_g"] = _numbers("--eta-g", eta_g)
    of = problems.divided(context)
    problem = of.problem(hidden)
    options: dict[str, Any] = common.training(context, of) | {"race": race}
    whole("--seeds", seeds, 1)
    for note in of.notes:
        terminal.say(note, style="dim")
    started = time.perf_counter()
    with common.run_folder(context, terminal, f"sweep-{algorithm}", out, checkpoint, resume, show) as folder:
        folder.describe(problem=of.title, grid=list(grid), clients=[of.described()])
        with terminal.progress("rounds", rounds) as progress:
            progress.update(what="preparing")

            def log(number: int, values: dict[str, float]) -> None:
                progress.update(number, f"{algorithm}  {best_text(values)}")

            options |= {"log": log, "checkpoint": folder.checkpoint, "measure_loss": True}
            tried = swept(factory, problem, grid, list(range(seeds)), **options)
        folder.rewrite(_with_curves(tried))
        seconds = time.perf_counter() - started
        terminal.show(sweep_table(tried, f"{algorithm} on {of.title}: {len(tried.table)} runs in {seconds:.1f} s"))
        terminal.written("Raw results", folder.results)
        lost = all(row["outcome"] == "diverged" for row in tried.table)
        chosen = None if lost else tried.points[tried.best()]
        answer = {"algorithm": algorithm, "data": of.title, "seconds": seconds, "best": chosen, "table": tried.table}
        terminal.answer(answer | common.places(folder))
    if lost:
        terminal.say("Every run diverged. Try smaller step-sizes.", style="yellow")
        raise typer.Exit(1)


def _with_curves(tried: Sweep) -> Iterator[dict[str, Any]]:
    """The rows of a sweep, each with the curves of its run."""
    for at, row in zip(np.ndindex(len(tried.points), len(tried.seeds)), tried.table, strict=True):
        yield {**row, "curves": {name: curve[at][: row["rounds"]] for name, curve in tried.curves.items()}}


def _tracker(name: str | None) -> Callable[..., Any]:
    """A function that opens the tracker once the run folder exists. An unknown name is an error at once."""
    if name is None:
        return lambda *_: contextlib.nullcontext()
    if name not in ("tensorboard", "mlflow", "wandb"):
        raise refused("--track", "tensorboard, mlflow or wandb", name, "Leave it out to log to the run folder alone.")

    def opened(folder: RunFolder, progress: Bar | Lines, algorithm: str, context: typer.Context) -> Any:
        progress.update(what=f"opening {name}")
        if name == "tensorboard":
            return trackers.tensorboard(folder.path / "tensorboard")
        return getattr(trackers, name)(params={**common.settings_of(context), "algorithm": algorithm})

    return opened


def _records(history: dict[str, np.ndarray]) -> Iterator[dict[str, Any]]:
    """A history as the lines that were written during the run."""
    names = [name for name, column in history.items() if column.ndim == 1 and name != "round"]
    for at, number in enumerate(history["round"]):
        yield {"round": int(number), **{name: float(history[name][at]) for name in names}}


def _build(name: str, given: dict[str, Any]) -> Any:
    """The algorithm with the given options; an option that it does not have is an error."""
    factory = factory_of(name)
    parameters = inspect.signature(factory).parameters
    given = {key: value for key, value in given.items() if value is not None}
    for key in given:
        if key not in parameters:
            own = ", ".join("--" + p.replace("_", "-") for p in parameters)
            raise InvalidInput(f"--{key.replace('_', '-')} is not an option of {name}. Its options are {own}.")
    return factory(**given)


def _numbers(option: str, text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise refused(option, "numbers separated by commas", repr(text), "Try 0.1,0.3,1.") from None
