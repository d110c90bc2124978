"""What the commands share: common options, and the run folder of each command."""

from __future__ import annotations

import contextlib
import datetime
import shlex
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any

import typer

from covary.algorithm import Algorithm
from covary.algorithms import ALGORITHMS
from covary.checks import whole
from covary.cli.problems import Divided
from covary.cli.terminal import Terminal, open_in_browser
from covary.errors import InvalidInput, refused
from covary.runs import machine
from covary.runs.folder import RunFolder
from covary.training import Training


def algorithm_names() -> list[str]:
    return list(ALGORITHMS)


Name = Annotated[str, typer.Argument(help="One of: " + ", ".join(ALGORITHMS) + ".", autocompletion=algorithm_names)]
Rounds = Annotated[int, typer.Option(help="Communication rounds.")]
PerRound = Annotated[
    float | None,
    typer.Option(
        help="Clients per round: a number, a fraction, or 0 for all. \\[default: 0.2; 0 for heart-disease and CSV]"
    ),
]
Steps = Annotated[int | None, typer.Option(help="Local steps K per round.")]
Epochs = Annotated[int | None, typer.Option(help="Local epochs per round, instead of local steps. \\[default: 5]")]
Batch = Annotated[
    float | None,
    typer.Option(
        help="Examples per batch, a fraction in (0, 1), or 0 for all. \\[default: 0.2; 0 if a client has under 5]"
    ),
]
Hidden = Annotated[int, typer.Option(help="Hidden units of a 2-layer network; 0 for logistic regression.")]
WarmStart = Annotated[bool, typer.Option("--warm-start", help="First set every c_i to g_i(x^0) (scaffold).")]
Weights = Annotated[str, typer.Option(help="Client weights: uniform or examples.")]
Target = Annotated[float | None, typer.Option(help="Stop at this test accuracy.")]
Out = Annotated[Path, typer.Option(help="Parent of the new run folder.")]
Checkpoint = Annotated[Path | None, typer.Option(help="Use this run folder; the same command resumes it.")]
Resume = Annotated[bool, typer.Option("--resume", help="Fail if there is nothing to resume in --checkpoint.")]
Every = Annotated[int, typer.Option(help="Rounds between checkpoints.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else to standard output.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print only errors, and JSON with --json.")]
Open = Annotated[bool, typer.Option("--open", help="Open the report in a browser at the end.")]
# Options that may differ when a run is resumed:
MAY_DIFFER = (
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
REPORT = "report.html"


@contextlib.contextmanager
def run_folder(
    context: typer.Context, terminal: Terminal, name: str, out: Path, checkpoint: Path | None, resume: bool, show: bool
) -> Iterator[RunFolder]:
    """The run folder of a command: a new one, or the one given, which may hold a run to resume.

    When the command is interrupted, it prints the command that resumes it. When it fails before any work is done, a
    new folder is removed again.
    """
    if resume and checkpoint is None:
        raise InvalidInput("--resume needs --checkpoint DIR, the run folder to resume.")
    if resume and checkpoint is not None and not RunFolder(checkpoint).started:
        raise InvalidInput(f"{checkpoint} holds no run to resume. Leave out --resume to start one there.")
    folder = RunFolder.create(name, out) if checkpoint is None else RunFolder.open(checkpoint)
    try:
        folder.settle(settings_of(context))
        describe(folder, context)
        with terminal.warned():
            yield folder
        report(folder, terminal, show)
    except KeyboardInterrupt:
        if folder.started:
            again = f"{command_of(context)} --checkpoint {shlex.quote(str(folder.path))} --resume"
            terminal.say(f"Stopped. The run is saved in {folder.path}. To resume it:\n{again}")
        else:
            terminal.say("Stopped. There is nothing to save yet.")
        raise typer.Exit(130) from None
    finally:
        folder.close()


def describe(folder: RunFolder, context: typer.Context) -> None:
    """Save how, when and on which machine a command runs, for the report."""
    started, versions = folder.about().get("started", _now()), machine.versions("covary", "jax")
    folder.describe(command=command_of(context), started=started, ended=None, device=machine.device(), **versions)


def ended(folder: RunFolder) -> None:
    """Record when the command ended."""
    folder.describe(ended=_now())


def report(folder: RunFolder, terminal: Terminal, show: bool) -> None:
    """Write the report of a finished run folder and print its path."""
    from covary.report.page import write_page

    ended(folder)
    with folder.writing():
        write_page([folder.path], folder.path / REPORT)
    terminal.written("Report", folder.path / REPORT)
    if show:
        open_in_browser(folder.path / REPORT)


def places(folder: RunFolder) -> dict[str, str]:
    """The paths that `--json` reports."""
    return {"folder": str(folder.path), "report": str(folder.path / REPORT)}


def settings_of(context: typer.Context) -> dict[str, Any]:
    """The options that a command's results depend on."""
    given = {key: value for key, value in context.params.items() if key not in MAY_DIFFER}
    return {"command": context.info_name, **given}


def command_of(context: typer.Context) -> str:
    """The command as it was typed, without the options for where and how results are shown."""
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
    names = (*(field.name for field in fields(Training)), "checkpoint_every")
    options = {name: context.params[name] for name in names if name in context.params}
    target = options["target"]
    if target is not None and not 0 < target <= 1:
        raise refused("--target", "an accuracy in (0, 1]", target, "Try 0.95.")
    for name in ("rounds", "checkpoint_every"):
        whole(f"--{name.replace('_', '-')}", options[name], 1)
    if options["local_steps"] is None and options["local_epochs"] is None:
        options["local_epochs"] = 5
    options |= of.sampling(options["clients_per_round"], options["batch_size"])
    return options | {"target": None if target is None else ("accuracy", target)}
