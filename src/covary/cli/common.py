"""What the commands share: the console, progress bars, and options that mean the same everywhere."""

from __future__ import annotations

import contextlib
import shlex
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from covary import algorithms
from covary.algorithm import Algorithm
from covary.checkpoint import CheckpointWarning
from covary.errors import CovaryError, DivergenceWarning, refused
from covary.report.folder import RunFolder

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
Checkpoint = Annotated[Path | None, typer.Option(help="This run folder instead; the same command goes on with it.")]
Resume = Annotated[bool, typer.Option("--resume", help="Refuse to begin anew: --checkpoint must hold a run.")]
Every = Annotated[int, typer.Option(help="Rounds between two checkpoints.")]
NOT_OF_THE_RUN = ("checkpoint", "resume", "checkpoint_every", "out", "data")  # options that may change when it goes on


def bar(unit: str, quiet: bool = False) -> Progress:
    """A progress bar that goes away when the work is done."""
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn(unit))
    return Progress(*columns, TimeElapsedColumn(), console=console, transient=True, disable=quiet)


@contextlib.contextmanager
def run_folder(
    context: typer.Context, name: str, out: Path, checkpoint: Path | None, resume: bool
) -> Iterator[RunFolder]:
    """The folder of a command's results and checkpoints: a new one, or the one given, which may hold a run to go on
    with. When the command is stopped, the user is told how to go on; when it is refused, nothing is left behind."""
    if resume and checkpoint is None:
        raise CovaryError("--resume needs --checkpoint DIR: the folder of the run to go on with.")
    if resume and checkpoint is not None and not RunFolder(checkpoint).begun:
        raise CovaryError(f"{checkpoint} holds no run to go on with. Leave --resume out to begin one there.")
    folder = RunFolder.create(name, out) if checkpoint is None else RunFolder.open(checkpoint)
    try:
        folder.settle(settings_of(context))
        with _warnings_shown():
            yield folder
    except KeyboardInterrupt:
        told = "Nothing was done yet."
        if folder.begun:
            told = f"Saved in {folder.path}. To go on:\n{_command(context, folder.path)}"
        console.print(f"\nStopped. {told}", soft_wrap=True, markup=False)
        raise typer.Exit(130) from None
    finally:
        folder.close()


def settings_of(context: typer.Context) -> dict[str, Any]:
    """What a command's results depend on."""
    given = {key: value for key, value in context.params.items() if key not in NOT_OF_THE_RUN}
    return {"command": context.info_name, **given}


@contextlib.contextmanager
def _warnings_shown() -> Iterator[None]:
    """Warnings of covary's own as lines for the user, not as a programmer's."""
    usual = warnings.showwarning

    def show(message: Any, category: type[Warning], *rest: Any, **more: Any) -> None:
        if issubclass(category, DivergenceWarning | CheckpointWarning):
            console.print(str(message), style="yellow", markup=False, soft_wrap=True)
        else:
            usual(message, category, *rest, **more)

    with warnings.catch_warnings():
        for category in (DivergenceWarning, CheckpointWarning):
            warnings.simplefilter("always", category)
        warnings.showwarning = show
        yield


def _command(context: typer.Context, folder: Path) -> str:
    """The command that goes on with a folder: the options that were given, and where."""
    words = ["covary", str(context.info_name)]
    for parameter in context.command.params:
        name, source = str(parameter.name), context.get_parameter_source(str(parameter.name))
        value = context.params.get(name)
        if name in ("checkpoint", "resume", "out") or value is None or source is None or source.name == "DEFAULT":
            continue
        option = [] if parameter.param_type_name == "argument" else [parameter.opts[-1]]
        words += option if value is True else [*option, str(value)]
    return shlex.join([*words, "--checkpoint", str(folder), "--resume"])


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
