"""The data sets that commands know by name, divided among clients."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from covary.data import datasets, partition
from covary.data.federated import FederatedData
from covary.errors import CovaryError, refused
from covary.models import logistic_regression, mlp
from covary.problem import Problem, supervised

Dataset = Annotated[str, typer.Argument(help="digits, emnist, fashion-mnist or heart-disease.")]
Root = Annotated[Path | None, typer.Option(help="Folder or file of a data set that is not built in.")]
Clients = Annotated[int | None, typer.Option(help="Number of clients N. \\[default: 20]")]
Similarity = Annotated[float | None, typer.Option(help="The paper's i.i.d. share, 0 to 1. \\[default: 0]")]
Alpha = Annotated[float | None, typer.Option(help="Dirichlet concentration instead.")]
Seed = Annotated[int, typer.Option(help="Seed of everything random.")]

Pair = tuple[np.ndarray, np.ndarray]


def divided(
    dataset: str, root: Path | None, clients: int | None, similarity: float | None, alpha: float | None, seed: int
) -> tuple[FederatedData, Pair, str]:
    """The training examples divided as asked, the test examples, and how in words."""
    from covary.experiments.common import load_emnist

    if similarity is not None and alpha is not None:
        raise CovaryError("--similarity and --alpha are two ways to divide the data. Give one of them.")
    if dataset == "heart-disease":
        if (clients, similarity, alpha) != (None, None, None):
            raise CovaryError("The hospitals are the clients here: leave out --clients, --similarity and --alpha.")
        train, test = datasets.heart_disease(root or "fed-heart-disease.npz")
        return partition.by_group(*train), test, "by hospital"
    if dataset == "digits":
        (x, y), test = datasets.digits()
    elif dataset == "emnist":
        emnist = load_emnist(root or Path("data"), paper_white=False)
        (x, y), test = emnist.train, emnist.test
    elif dataset == "fashion-mnist":
        (x, y), test = datasets.fashion_mnist(root or datasets.FASHION_MNIST)
    else:
        allowed = "digits, emnist, fashion-mnist or heart-disease"
        raise refused("DATASET", allowed, dataset, "Try digits, which needs no download.")
    clients = 20 if clients is None else clients
    if alpha is not None:
        return partition.dirichlet(x, y, clients, alpha, seed), test, f"Dirichlet with alpha = {alpha:g}"
    similarity = 0.0 if similarity is None else similarity
    return partition.by_similarity(x, y, clients, similarity, seed), test, f"{100 * similarity:g} % similarity"


def problem_of(data: FederatedData, test: Pair, hidden: int) -> Problem:
    """Logistic regression on the data, or a network with so many hidden units."""
    x, y = data.examples
    features, classes = int(np.prod(x.shape[1:])), int(max(y.max(), test[1].max())) + 1
    return supervised(mlp(features, hidden, classes) if hidden else logistic_regression(features, classes), data, test)
