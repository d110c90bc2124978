"""`covary reproduce`: the paper's figure and tables, measured again."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Annotated

import typer

from covary.checks import whole
from covary.cli.common import Checkpoint, Out, Resume, bar, console, run_folder, settings_of
from covary.errors import refused
from covary.report.folder import RunFolder


def reproduce(
    context: typer.Context,
    experiment: Annotated[str, typer.Argument(help="fig3, table3, table4, table5 or all.")],
    data: Annotated[Path, typer.Option(help="Folder with EMNIST's official files.")] = Path("data"),
    quick: Annotated[bool, typer.Option("--quick", help="Smaller data and fewer rounds, the same code.")] = False,
    pixels: Annotated[str, typer.Option(help="paper-white, ink, or auto: what lands nearest to the paper.")] = "auto",
    seeds: Annotated[int | None, typer.Option(help="How many seeds. \\[default: 3; quick: 1]")] = None,
    out: Out = Path("runs"),
    checkpoint: Checkpoint = None,
    resume: Resume = False,
) -> None:
    """Reproduce a figure or table of the SCAFFOLD paper, and check its claims on what is measured.

    The tables need EMNIST: covary data emnist --root data. Without a GPU use --quick. Stopped by Ctrl-C or a crash, it
    goes on where it was: with Ctrl-C it says by which command.

    Example: covary reproduce table3 --data data --quick
    """
    from covary.experiments.reproduce import EXPERIMENTS

    if experiment != "all" and experiment not in EXPERIMENTS:
        raise refused("EXPERIMENT", f"one of {', '.join(EXPERIMENTS)}, all", experiment, "Try: covary reproduce fig3.")
    if pixels not in ("auto", "paper-white", "ink"):
        raise refused("--pixels", "auto, paper-white or ink", pixels, "Leave it out for what is nearest to the paper.")
    if seeds is not None:
        whole("--seeds", seeds, 1)
    options = [*(["--quick"] if quick else []), *(["--pixels", pixels] if pixels != "auto" else [])]
    options += [] if seeds is None else ["--seeds", str(seeds)]
    paper_white = None if pixels == "auto" else pixels == "paper-white"

    def one(name: str, folder: RunFolder) -> None:
        command = " ".join(["covary reproduce", name, *([] if name == "fig3" else ["--data", "DIR", *options])])
        _reproduce(name, data, folder, command, quick, paper_white, seeds)

    with run_folder(context, f"reproduce-{experiment}", out, checkpoint, resume) as folder:
        if experiment != "all":
            one(experiment, folder)
            return
        for name in EXPERIMENTS:
            with contextlib.closing(RunFolder.open(folder.path / name)) as part:
                part.settle(settings_of(context) | {"experiment": name})
                one(name, part)


def _reproduce(
    name: str, data: Path, folder: RunFolder, command: str, quick: bool, paper_white: bool | None, seeds: int | None
) -> None:
    from covary.experiments.reproduce import cells_of, outcome, quick_note, run_figure, run_table, write_up
    from covary.report.tables import claims_table, plain_table

    if name == "fig3":
        run_figure(folder, command)
    else:
        with bar("cells") as progress:
            task = progress.add_task("reading EMNIST", total=cells_of(name, quick))

            def log(cell: str, number: int, values: dict[str, float]) -> None:
                progress.update(task, description=f"{cell}: round {number}, {values['running']:g} runs going on")

            for number in run_table(name, data, folder, command, quick, paper_white, seeds, log):
                progress.update(task, completed=number)
    result = outcome(folder)
    console.print(plain_table(f"{name}: {result.header['data']}", *result.table))
    if result.header.get("quick"):
        console.print(quick_note(result), style="yellow")
    console.print(claims_table(result.claims))
    console.print(f"{result.seconds:.0f} s on {result.header['device']}, compilation included")
    with folder.writing():
        written = write_up(result, folder.path)
    for path in written:
        console.print(f"Written: {path}", soft_wrap=True)
