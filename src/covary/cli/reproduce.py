"""`covary reproduce`: measure the paper's figure and tables again."""

from __future__ import annotations

import contextlib
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from covary.checks import whole
from covary.cli import common
from covary.cli.terminal import Terminal, best_text
from covary.errors import refused
from covary.runs.folder import RunFolder


def reproduce(
    context: typer.Context,
    experiment: Annotated[
        str,
        typer.Argument(
            help="fig3, table3, table4, table5 or all.",
            autocompletion=lambda: ["fig3", "table3", "table4", "table5", "all"],
        ),
    ],
    data: Annotated[Path, typer.Option(help="Folder with EMNIST's official files.")] = Path("data"),
    quick: Annotated[bool, typer.Option("--quick", help="Smaller data and fewer rounds, the same code.")] = False,
    pixels: Annotated[str, typer.Option(help="paper-white, ink, or auto: whichever is closest to the paper.")] = "auto",
    seeds: Annotated[int | None, typer.Option(help="Number of seeds. \\[default: 3; quick: 1]")] = None,
    out: common.Out = Path("runs"),
    checkpoint: common.Checkpoint = None,
    resume: common.Resume = False,
    show: common.Open = False,
    as_json: common.Json = False,
    quiet: common.Quiet = False,
) -> None:
    """Reproduce a figure or table of the SCAFFOLD paper, and check the paper's claims against the measurements.

    EXPERIMENT is fig3, table3, table4, table5 or all.
    The tables need EMNIST: covary data emnist --root data. Without a GPU use --quick.
    Ctrl-C saves the run and prints the command that resumes it.
    After a crash, the same command with --checkpoint DIR resumes it.

    Example: covary reproduce table3 --data data --quick
    """
    from covary.experiments.reproduce import EXPERIMENTS

    if experiment != "all" and experiment not in EXPERIMENTS:
        raise refused("EXPERIMENT", f"one of {', '.join(EXPERIMENTS)}, all", experiment, "Try: covary reproduce fig3.")
    if pixels not in ("auto", "paper-white", "ink"):
        raise refused("--pixels", "auto, paper-white or ink", pixels, "Leave it out for the closest to the paper.")
    if seeds is not None:
        whole("--seeds", seeds, 1)
    options = [*(["--quick"] if quick else []), *(["--pixels", pixels] if pixels != "auto" else [])]
    options += [] if seeds is None else ["--seeds", str(seeds)]
    paper_white = None if pixels == "auto" else pixels == "paper-white"

    terminal = Terminal(as_json, quiet)

    def one(name: str, folder: RunFolder) -> dict[str, Any]:
        command = " ".join(["covary reproduce", name, *([] if name == "fig3" else ["--data", "DIR", *options])])
        return _reproduce(terminal, name, data, folder, command, quick, paper_white, seeds)

    with common.run_folder(context, terminal, f"reproduce-{experiment}", out, checkpoint, resume, show) as folder:
        if experiment != "all":
            terminal.answer(one(experiment, folder) | common.places(folder))
            return
        answers = []
        for name in EXPERIMENTS:
            with contextlib.closing(RunFolder.open(folder.path / name)) as part:
                part.settle(common.settings_of(context) | {"experiment": name})
                common.describe(part, context)
                answers.append(one(name, part))
                common.ended(part)
        terminal.answer({"experiments": answers, **common.places(folder)})


def _reproduce(
    terminal: Terminal,
    name: str,
    data: Path,
    folder: RunFolder,
    command: str,
    quick: bool,
    paper_white: bool | None,
    seeds: int | None,
) -> dict[str, Any]:
    from covary.experiments.reproduce import (
        cells_of,
        how_long,
        most_rounds,
        outcome,
        quick_note,
        run_figure,
        run_table,
        write_up,
    )
    from covary.report.tables import claims_table, plain_table

    if name == "fig3":
        run_figure(folder, command)
    else:
        with terminal.progress("cells", cells_of(name, quick)) as progress:
            progress.update(what=name)

            def log(cell: str, number: int, values: dict[str, float]) -> None:
                most = most_rounds(name, quick)
                progress.within(cell, number, most, best_text(values))

            for number in run_table(name, data, folder, command, quick, paper_white, seeds, log):
                progress.update(number)
    result = outcome(folder)
    terminal.show(plain_table(f"{name}: {result.header['data']}", *result.table))
    if result.header.get("quick"):
        terminal.show(quick_note(result), style="yellow")
    terminal.show(claims_table(result.claims))
    terminal.show(how_long(result))
    with folder.writing():
        written = write_up(result, folder.path)
    for path in written:
        terminal.written("Wrote", path)
    columns, rows = result.table
    claims = [{**asdict(claim), "verdict": claim.verdict} for claim in result.claims]
    return {"experiment": name, "columns": columns, "rows": rows, "claims": claims, "seconds": result.seconds}
