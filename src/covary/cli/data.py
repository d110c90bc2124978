"""`covary data`: fetch data sets, and see how clients divide them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from covary.cli.common import console
from covary.data import datasets, partition
from covary.data.download import ARCHIVE, fetch_emnist
from covary.errors import CovaryError, refused

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
    dataset: Annotated[str, typer.Argument(help="digits, emnist, fashion-mnist or heart-disease.")] = "digits",
    root: Annotated[Path | None, typer.Option(help="Folder or file of a data set that is not built in.")] = None,
    clients: Annotated[int | None, typer.Option(help="Number of clients N. [default: 20]")] = None,
    similarity: Annotated[float | None, typer.Option(help="The paper's i.i.d. share, 0 to 1. [default: 0]")] = None,
    alpha: Annotated[float | None, typer.Option(help="Dirichlet concentration instead.")] = None,
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
    if similarity is not None and alpha is not None:
        raise CovaryError("--similarity and --alpha are two ways to divide the data. Give one of them.")
    divided, how = _divided(dataset, root, clients, similarity, alpha, seed)
    counts = divided.label_counts()
    title = f"{dataset}, {how}: {divided.n_clients} clients, {divided.n_examples:,} examples"
    console.print(histogram_table(title, counts))
    save_histograms(out, counts, title)
    console.print(f"Picture: {out}", soft_wrap=True)


def _divided(
    dataset: str, root: Path | None, clients: int | None, similarity: float | None, alpha: float | None, seed: int
) -> tuple[Any, str]:
    """The data set divided as asked, and how in words."""
    from covary.experiments.common import load_emnist

    if dataset == "heart-disease":
        if (clients, similarity, alpha) != (None, None, None):
            raise CovaryError("The hospitals are the clients here: leave out --clients, --similarity and --alpha.")
        train, _ = datasets.heart_disease(root or "fed-heart-disease.npz")
        return partition.by_group(*train), "by hospital"
    if dataset == "digits":
        x, y = datasets.digits()[0]
    elif dataset == "emnist":
        x, y = load_emnist(root or Path("data"), paper_white=False).train
    elif dataset == "fashion-mnist":
        x, y = datasets.fashion_mnist(root or datasets.FASHION_MNIST)[0]
    else:
        allowed = "digits, emnist, fashion-mnist or heart-disease"
        raise refused("DATASET", allowed, dataset, "Try: covary data show digits.")
    clients = 20 if clients is None else clients
    if alpha is not None:
        return partition.dirichlet(x, y, clients, alpha, seed), f"Dirichlet with alpha = {alpha:g}"
    similarity = 0.0 if similarity is None else similarity
    return partition.by_similarity(x, y, clients, similarity, seed), f"{100 * similarity:g} % similarity"
