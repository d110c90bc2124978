"""`covary data`: fetch data sets, and see how clients divide them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from covary.cli import problems
from covary.cli.common import console
from covary.data import datasets
from covary.data.download import ARCHIVE, fetch_emnist
from covary.errors import refused

app = typer.Typer(no_args_is_help=True, help="Fetch data sets, and see how clients divide them.")


@app.command()
def emnist(
    root: Annotated[Path, typer.Option(help="Folder for the files.")],
    split: Annotated[str, typer.Option(help="byclass, bymerge, balanced, letters, digits or mnist.")] = "byclass",
    url: Annotated[str, typer.Option(help="Where the official archive is.")] = ARCHIVE,
) -> None:
    """Download EMNIST's official files (an archive of about 540 MB) and check them.

    A download that was stopped goes on where it was. Example: covary data emnist --root data
    """
    if split not in datasets.EMNIST_CLASSES:
        raise refused("--split", f"one of {', '.join(datasets.EMNIST_CLASSES)}", split, "The paper's is byclass.")
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    try:
        with Progress(*columns, TimeRemainingColumn(), console=console, transient=True) as progress:
            task = progress.add_task("connecting", total=None)
            for step in fetch_emnist(root, split, datasets.official_emnist(), url):
                progress.update(task, description=step.what, completed=step.done, total=step.total)
    except KeyboardInterrupt:
        console.print("\nStopped. Run the same command again: it goes on from there.")
        raise typer.Exit(130) from None
    console.print(f"EMNIST {split} is complete and checked in {root}.", soft_wrap=True)


@app.command()
def show(
    dataset: problems.Dataset = "digits",
    root: problems.Root = None,
    clients: problems.Clients = None,
    similarity: problems.Similarity = None,
    alpha: problems.Alpha = None,
    seed: Annotated[int, typer.Option(help="Seed of the partition.")] = 0,
    out: Annotated[Path, typer.Option(help="Where to save the picture.")] = Path("clients.png"),
) -> None:
    """Draw the label histogram of every client, to see how different they are.

    Example: covary data show digits --clients 20 --similarity 0.1
    """
    from covary.report.plots import save_histograms
    from covary.report.tables import histogram_table

    if out.suffix != ".png" or not out.parent.is_dir():
        raise refused("--out", "a .png file in a folder that exists", out, "Try --out clients.png.")
    data, _, how = problems.divided(dataset, root, clients, similarity, alpha, seed)
    counts = data.label_counts()
    title = f"{dataset}, {how}: {data.n_clients} clients, {data.n_examples:,} examples"
    console.print(histogram_table(title, counts))
    save_histograms(out, counts, title)
    console.print(f"Picture: {out}", soft_wrap=True)
