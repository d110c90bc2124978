"""What the commands share: options that mean the same everywhere, and the run folder around each."""

from __future__ import annotations

import contextlib
import datetime
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from covary import algorithms
from covary.algorithm import Algorithm
from covary.checks import whole
from covary.cli.problems import Divided
from covary.cli.terminal import Terminal, open_in_browser
from covary.errors import CovaryError, refused
from covary.runs import machine
from covary.runs.folder import RunFolder

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


def algorithm_names() -> list[str]:
    return list(ALGORITHMS)


Name = Annotated[str, typer.Argument(help="One of: " + ", ".join(ALGORITHMS) + ".", autocompletion=algorithm_names)]
Rounds = Annotated[int, typer.Option(help="Communication rounds.")]
PerRound = Annotated[
    float | None,
    typer.Option(help="Clients a round: a number, a fraction, or 0 for all. \\[default: 0.2; of hospitals, all]"),
]
Steps = Annotated[int | None, typer.Option(help="Steps K of each client.")]
Epochs = Annotated[int | None, typer.Option(help="Passes over the local data instead. \\[default: 5]")]
Batch = Annotated[
    float | None,
    typer.Option(
        help="Examples a batch, a fraction in (0, 1), or 0 for all. \\[default: 0.2; 0 where a client has under 5]"
    ),
]
Hidden = Annotated[int, typer.Option(help="Hidden units of a 2-layer network; 0: logistic regression.")]
WarmStart = Annotated[bool, typer.Option("--warm-start", help="Set c_i = g_i(x^0) first (scaffold).")]
Weights = Annotated[str, typer.Option(help="uniform or examples.")]
Target = Annotated[float | None, typer.Option(help="Stop at this test accuracy.")]
Out = Annotated[Path, typer.Option(help="Where to make the run folder.")]
Checkpoint = Annotated[Path | None, typer.Option(help="This run folder instead; the same command goes on with it.")]
Resume = Annotated[bool, typer.Option("--resume", help="Refuse to begin anew: --checkpoint must hold a run.")]
Every = Annotated[int, typer.Option(help="Rounds between two checkpoints.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object, and nothing else on standard output.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing but errors, and JSON if asked for.")]
Open = Annotated[bool, typer.Option("--open", help="Open the report in a browser when it is done.")]
# Options that may change when a run goes on:
NOT_OF_THE_RUN = (
    "checkpoint",
    "resume",
    "checkpoint_every",
    "out",
    "data",
    "root",
    "as_json",
    "quiet",
    "show",
    "track",
)
TRAINING = (
    "rounds",
    "clients_per_round",
    "local_steps",
    "local_epochs",
    "batch_size",
    "warm_start",
    "weights",
    "target",
    "checkpoint_every",
)
REPORT = "report.html"


@contextlib.contextmanager
def run_folder(
    context: typer.Context, terminal: Terminal, name: str, out: Path, checkpoint: Path | None, resume: bool, show: bool
) -> Iterator[RunFolder]:
    """The folder of a command's results, checkpoints and report: a new one, or the one given, which may hold a run to
    go on with. When the command is stopped, the user is told how to go on; when it is refused, nothing is left behind.
    """
    if resume and checkpoint is None:
        raise CovaryError("--resume needs --checkpoint DIR: the folder of the run to go on with.")
    if resume and checkpoint is not None and not RunFolder(checkpoint).begun:
        raise CovaryError(f"{checkpoint} holds no run to go on with. Leave --resume out to begin one there.")
    folder = RunFolder.create(name, out) if checkpoint is None else RunFolder.open(checkpoint)
    try:
        folder.settle(settings_of(context))
        describe(folder, context)
        with terminal.warned():
            yield folder
        report(folder, terminal, show)
    except KeyboardInterrupt:
        if folder.begun:
            goes_on = f"{command_of(context)} --checkpoint {shlex.quote(str(folder.path))} --resume"
            terminal.say(f"Stopped. Saved in {folder.path}. To go on:\n{goes_on}")
        else:
            terminal.say("Stopped. Nothing was done yet.")
        raise typer.Exit(130) from None
    finally:
        folder.close()


def describe(folder: RunFolder, context: typer.Context) -> None:
    """Keep what the report tells of how and where a command ran."""
    begun, versions = folder.about().get("started", _now()), machine.versions("covary", "jax")
    folder.describe(command=command_of(context), started=begun, ended=None, device=machine.device(), **versions)


def ended(folder: RunFolder) -> None:
    """The work in a folder is done."""
    folder.describe(ended=_now())


def report(folder: RunFolder, terminal: Terminal, show: bool) -> None:
    """Write the page of a folder whose work is done, and say where it is."""
    from covary.report.page import write_page

    ended(folder)
    with folder.writing():
        write_page([folder.path], folder.path / REPORT)
    terminal.written("Report", folder.path / REPORT)
    if show:
        open_in_browser(folder.path / REPORT)


def places(folder: RunFolder) -> dict[str, str]:
    """Where a program finds what was written."""
    return {"folder": str(folder.path), "report": str(folder.path / REPORT)}


def settings_of(context: typer.Context) -> dict[str, Any]:
    """What a command's results depend on."""
    given = {key: value for key, value in context.params.items() if key not in NOT_OF_THE_RUN}
    return {"command": context.info_name, **given}


def command_of(context: typer.Context) -> str:
    """The command as it was given, but for where its results go."""
    words = ["covary", str(context.info_name)]
    for parameter in context.command.params:
        name, source = str(parameter.name), context.get_parameter_source(str(parameter.name))
        value = context.params.get(name)
        skipped = ("checkpoint", "resume", "out", "as_json", "quiet", "show")
        if name in skipped or value in (None, []) or source is None or source.name == "DEFAULT":
            continue
        option = [] if parameter.param_type_name == "argument" else [parameter.opts[0]]
        for each in value if isinstance(value, list | tuple) else [value]:
            flag = option if each else parameter.secondary_opts[:1]
            words += flag if isinstance(each, bool) else [*option, str(each)]
    return shlex.join(words)


def _now() -> str:
    return f"{datetime.datetime.now():%Y-%m-%d %H:%M:%S}"


def factory_of(name: str) -> Callable[..., Algorithm]:
    if name not in ALGORITHMS:
        raise refused("ALGORITHM", f"one of {', '.join(ALGORITHMS)}", name, "Try: covary run scaffold.")
    return ALGORITHMS[name]


def training(context: typer.Context, of: Divided) -> dict[str, Any]:
    """The options of a training run, as `simulate` and `sweep` take them."""
    options = {name: context.params[name] for name in TRAINING}
    target = options["target"]
    if target is not None and not 0 < target <= 1:
        raise refused("--target", "an accuracy in (0, 1]", target, "Try 0.95.")
    for name in ("rounds", "checkpoint_every"):
        whole(f"--{name.replace('_', '-')}", options[name], 1)
    if options["local_steps"] is None and options["local_epochs"] is None:
        options["local_epochs"] = 5
    options |= of.sampling(options["clients_per_round"], options["batch_size"])
    return options | {"target": None if target is None else ("accuracy", target)}
