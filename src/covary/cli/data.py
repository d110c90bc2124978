"""`covary data`: download data sets, and show how they are divided among clients."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from covary.cli import problems
from covary.cli.common import Json, Quiet
from covary.cli.terminal import Terminal
from covary.data import datasets
from covary.data.download import ARCHIVE, fetch_emnist
from covary.errors import refused

app = typer.Typer(no_args_is_help=True, help="Download data sets, and show how they are divided among clients.")


@app.command()
def emnist(
    root: Annotated[Path, typer.Option(help="Folder for the files.")],
    split: Annotated[str, typer.Option(help="byclass, bymerge, balanced, letters, digits or mnist.")] = "byclass",
    url: Annotated[str, typer.Option(help="Where the official archive is.")] = ARCHIVE,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Download EMNIST's official files (an archive of about 540 MB) and check them.

    The same command resumes an interrupted download. Example: covary data emnist --root data
    """
    if split not in datasets.EMNIST_CLASSES:
        raise refused("--split", f"one of {', '.join(datasets.EMNIST_CLASSES)}", split, "The paper's is byclass.")
    terminal = Terminal(as_json, quiet)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    steps, last = fetch_emnist(root, split, datasets.official_emnist(), url), ""
    try:
        with Progress(*columns, TimeRemainingColumn(), console=terminal.err, transient=True) as progress:
            task = progress.add_task("connecting", total=None)
            for step in steps:
                progress.update(task, description=step.what, completed=step.done, total=step.total)
                if not terminal.err.is_terminal and step.what != last:
                    last = step.what
                    terminal.say(last)
    except KeyboardInterrupt:
        terminal.say("Stopped. The same command resumes the download.")
        raise typer.Exit(130) from None
    terminal.show(f"EMNIST {split} is complete in {root}; all checksums match.", markup=False)
    terminal.answer({"split": split, "root": str(root)})


@app.command()
def show(
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
    seed: Annotated[int, typer.Option(help="Seed of the partition.")] = 0,
    out: Annotated[Path, typer.Option(help="Where to save the picture.")] = Path("clients.png"),
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Draw the label histogram of every client, to show how different the clients are.

    DATASET is digits, emnist, fashion-mnist, heart-disease or a CSV file.

    Example: covary data show digits --clients 20 --similarity 0.1
    """
    from covary.report.plots import save_histograms
    from covary.report.tables import histogram_table

    if out.suffix != ".png" or not out.parent.is_dir():
        raise refused("--out", "a .png file in a folder that exists", out, "Try --out clients.png.")
    terminal = Terminal(as_json, quiet)
    of = problems.divided(context, alpha, seed)
    for note in of.notes:
        terminal.say(note, style="dim")
    counts = of.data.label_counts()
    title = f"{of.title}: {of.data.n_clients} clients, {of.data.n_examples:,} examples"
    terminal.show(histogram_table(title, counts, of.clients, of.labels))
    save_histograms(out, counts, title)
    terminal.written("Picture", out)
    named = {"names": of.clients, "labels": of.labels, "notes": of.notes, "picture": str(out)}
    terminal.answer({"data": of.title, "counts": counts, **named})
