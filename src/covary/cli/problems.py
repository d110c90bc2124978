"""The data sets that commands know by name, and a user's own CSV file, divided among clients."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import typer

from covary.errors import InvalidInput, refused

if TYPE_CHECKING:
    from covary.data.federated import FederatedData
    from covary.problem import Problem

NAMES = ("digits", "emnist", "fashion-mnist", "heart-disease")
KNOWN = f"{', '.join(NAMES[:-1])} or {NAMES[-1]}"


def known_names() -> list[str]:
    return list(NAMES)


Dataset = Annotated[str, typer.Argument(help=f"{KNOWN}, or a CSV file.", autocompletion=known_names)]
Data = Annotated[str, typer.Option("--data", help=f"{KNOWN}, or a CSV file.", autocompletion=known_names)]
Root = Annotated[Path | None, typer.Option(help="Folder or file of a data set that does not come with covary.")]
Clients = Annotated[int | None, typer.Option(help="Number of clients N. \\[default: 20]")]
Similarity = Annotated[
    float | None, typer.Option(help="The i.i.d. share of each client's data, 0 to 1. \\[default: 0]")
]
Alpha = Annotated[float | None, typer.Option(help="Dirichlet concentration, instead of a similarity.")]
ClientColumn = Annotated[str | None, typer.Option(help="The column that names the client of each row (CSV).")]
Label = Annotated[str | None, typer.Option(help="The column to predict (CSV).")]
Test = Annotated[Path | None, typer.Option(help="A CSV file of test rows. \\[default: a fifth of each client's rows]")]
Ignore = Annotated[list[str] | None, typer.Option(help="A column to ignore (CSV); may be repeated.")]
Seed = Annotated[int, typer.Option(help="Random seed.")]

Pair = tuple[np.ndarray, np.ndarray]


@dataclass(frozen=True)
class Divided:
    """Training examples divided among clients, with test examples."""

    data: FederatedData
    test: Pair
    title: str  # the data set, and how it is divided
    natural: bool = False  # the data names its clients, such as hospitals
    clients: list[str] | None = None  # their names
    labels: list[str] | None = None
    notes: list[str] = field(default_factory=list)

    def problem(self, hidden: int) -> Problem:
        """Logistic regression on the data, or a network with so many hidden units."""
        from covary.models import logistic_regression, mlp
        from covary.problem import supervised

        x, y = self.data.examples
        features, classes = int(np.prod(x.shape[1:])), int(max(y.max(), self.test[1].max())) + 1
        classes = max(classes, len(self.labels or []))
        model = mlp(features, hidden, classes) if hidden else logistic_regression(features, classes)
        return supervised(model, self.data, self.test)

    def sampling(self, clients_per_round: float | None, batch_size: float | None) -> dict[str, int | float | None]:
        """Clients per round and examples per batch: as given, or a default that suits the data."""
        if clients_per_round is None:
            clients_per_round = 0 if self.natural else 0.2
        if batch_size is None:
            batch_size = 0.2 if self.data.sizes.min() >= 5 else 0
        return {"clients_per_round": _count(clients_per_round), "batch_size": _count(batch_size)}

    def described(self) -> dict[str, Any]:
        """The label counts of each client, for the report."""
        from covary.report.story import clients_of

        return clients_of(self.data, self.title) | {"names": self.clients, "labels": self.labels}


def _count(value: float) -> int | float | None:
    """A whole number, a fraction, or None for all where it is 0."""
    return None if value == 0 else int(value) if float(value).is_integer() else value


def divided(context: typer.Context, alpha: float | None = None, seed: int = 0) -> Divided:
    """The data set that a command's options name, its training examples divided as they ask, and the test examples."""
    from covary.data import datasets, partition

    dataset, root, clients, similarity = (context.params[n] for n in ("dataset", "root", "clients", "similarity"))
    columns = {name: context.params[name] or None for name in ("client_column", "label", "test", "ignore")}
    if similarity is not None and alpha is not None:
        raise InvalidInput("--similarity and --alpha are two ways to divide the data. Give one of them.")
    named = columns["client_column"] or columns["label"]
    if dataset not in NAMES and (Path(dataset).suffix or Path(dataset).exists() or named):
        if (root, clients, similarity, alpha) != (None, None, None, None):
            raise InvalidInput(
                "The clients of a CSV file come from its client column. Leave out --root, --clients, --similarity and "
                "--alpha."
            )
        return _table(dataset, **columns)
    if any(columns.values()):
        raise InvalidInput(
            f"--client-column, --label, --test and --ignore need a CSV file, but the data set is {dataset}. Name the "
            "file: covary run --data FILE.csv."
        )
    if dataset == "heart-disease":
        if (clients, similarity, alpha) != (None, None, None):
            raise InvalidInput(
                "The clients of heart-disease are its hospitals. Leave out --clients, --similarity and --alpha."
            )
        train, tested = datasets.heart_disease(root or "fed-heart-disease.npz")
        return Divided(partition.by_group(*train), tested, "heart-disease, by hospital", natural=True)
    (x, y), tested = _images(dataset, root)
    clients = 20 if clients is None else clients
    if alpha is not None:
        title = f"{dataset}, Dirichlet with alpha = {alpha:g}"
        return Divided(partition.dirichlet(x, y, clients, alpha, seed), tested, title)
    similarity = 0.0 if similarity is None else similarity
    title = f"{dataset}, {100 * similarity:g} % similarity"
    return Divided(partition.by_similarity(x, y, clients, similarity, seed), tested, title)


def _images(dataset: str, root: str | Path | None) -> tuple[Pair, Pair]:
    from covary.data import datasets
    from covary.experiments.common import load_emnist

    if dataset == "digits":
        return datasets.digits()
    if dataset == "emnist":
        emnist = load_emnist(root or Path("data"), paper_white=False)
        return emnist.train, emnist.test
    if dataset == "fashion-mnist":
        return datasets.fashion_mnist(root or datasets.FASHION_MNIST)
    raise refused("DATASET", f"{KNOWN}, or a CSV file", dataset, "Try digits, which needs no download.")


def _table(
    dataset: str, client_column: str | None, label: str | None, test: str | None, ignore: list[str] | None
) -> Divided:
    from covary.data import datasets, partition

    if Path(dataset).exists() and (client_column is None or label is None):
        raise InvalidInput(
            f"{dataset} is a CSV file. Name its client column and its label column, for example "
            "--client-column hospital --label outcome."
        )
    table = datasets.table(dataset, client_column or "", label or "", test, ignore or [])
    title = f"{Path(dataset).name}, by {client_column}"
    data = partition.by_group(*table.train)
    return Divided(data, table.test, title, True, table.clients, table.labels, table.notes)
