"""Partitions: ways to divide one data set among clients."""

from __future__ import annotations

from typing import Any

import numpy as np

from covary.checks import array, positive, whole
from covary.data.federated import FederatedData
from covary.errors import refused


def by_similarity(x: Any, y: Any, n_clients: int, similarity: float, seed: int = 0) -> FederatedData:
    """The paper's s% similarity: s% of each client's data is i.i.d., the rest is sorted by label.

    Client sizes differ by at most one. Every example goes to exactly one client.

    Args:
        x, y: the examples and their labels.
        n_clients: the number of clients.
        similarity: the i.i.d. share, from 0 (sorted by label) to 1 (i.i.d.).
        seed: the random seed.

    >>> import numpy as np, covary as cv
    >>> data = cv.partition.by_similarity(np.zeros((6, 1)), np.array([2, 0, 1, 2, 1, 0]), n_clients=3, similarity=0.0)
    >>> [sorted(data.client(i)[1].tolist()) for i in range(3)]
    [[0, 0], [1, 1], [2, 2]]

    Reference: Karimireddy et al. 2020, section "Experiments", setup.
    """
    x, y = _pair(x, y, n_clients, seed)
    if not isinstance(similarity, int | float | np.number) or not 0 <= similarity <= 1:
        raise refused("similarity", "between 0 and 1", similarity, "The paper's 10 % is similarity=0.1.")

    n = len(y)
    shuffled = np.random.default_rng(seed).permutation(n)
    ends = np.arange(n_clients + 1) * n // n_clients  # where client i's data ends in the order of clients
    iid_ends = np.round(similarity * ends).astype(int)
    iid, rest = shuffled[: iid_ends[-1]], shuffled[iid_ends[-1] :]
    rest = rest[np.argsort(y[rest], kind="stable")]
    rest_ends = ends - iid_ends
    order = np.concatenate(
        [
            part
            for i in range(n_clients)
            for part in (iid[iid_ends[i] : iid_ends[i + 1]], rest[rest_ends[i] : rest_ends[i + 1]])
        ]
    )
    return FederatedData((x[order], y[order]), np.diff(ends))


def iid(x: Any, y: Any, n_clients: int, seed: int = 0) -> FederatedData:
    """A random partition: all clients have the same distribution. Sizes differ by at most one.

    >>> import numpy as np, covary as cv
    >>> cv.partition.iid(np.zeros((7, 2)), np.zeros(7, int), n_clients=2)
    FederatedData(2 clients, 7 examples, 3 to 4 each)
    """
    return by_similarity(x, y, n_clients, similarity=1.0, seed=seed)


def dirichlet(x: Any, y: Any, n_clients: int, alpha: float, seed: int = 0) -> FederatedData:
    """Divide each label's examples among the clients in proportions drawn from a Dirichlet distribution.

    With a small `alpha` each label is on few clients, and client sizes vary widely. With a large `alpha` all clients
    are alike. A client that would be empty gets one example of the largest client.

    Args:
        x, y: the examples and their labels.
        n_clients: the number of clients.
        alpha: the concentration, above 0.
        seed: the random seed.

    >>> import numpy as np, covary as cv
    >>> data = cv.partition.dirichlet(np.zeros((100, 2)), np.arange(100) % 5, n_clients=10, alpha=0.3)
    >>> data.n_clients, data.n_examples
    (10, 100)

    Reference: Yurochkin et al. 2019; Hsu, Qi and Brown 2019.
    """
    x, y = _pair(x, y, n_clients, seed)
    positive("alpha", alpha)
    if alpha > 1e6:
        raise refused("alpha", "at most 1e6", alpha, "Use partition.iid for clients that are all alike.")
    rng = np.random.default_rng(seed)
    owner = np.empty(len(y), int)
    for label in np.unique(y):
        rows = rng.permutation(np.flatnonzero(y == label))
        ends = np.round(np.cumsum(rng.dirichlet(np.full(n_clients, alpha))) * len(rows)).astype(int)
        owner[rows] = np.searchsorted(ends[:-1], np.arange(len(rows)), side="right")
    sizes = np.bincount(owner, minlength=n_clients)
    for client in np.flatnonzero(sizes == 0):
        giver = sizes.argmax()
        owner[np.flatnonzero(owner == giver)[0]] = client
        sizes[giver] -= 1
        sizes[client] += 1
    return by_group(x, y, owner)


def by_group(x: Any, y: Any, groups: Any) -> FederatedData:
    """Natural clients: one client per value of `groups` (a hospital, a writer), in ascending order of the values.

    >>> import numpy as np, covary as cv
    >>> data = cv.partition.by_group(np.arange(5), np.zeros(5, int), groups=["b", "a", "b", "c", "a"])
    >>> [data.client(i)[0].tolist() for i in range(3)]
    [[1, 4], [0, 2], [3]]
    """
    x, y = _pair(x, y, n_clients=1)
    groups = array("groups", groups)
    if groups.shape != y.shape[:1]:
        raise refused(
            "groups", f"one value for each of the {len(y)} examples", f"shape {groups.shape}", "Pass a 1-D array."
        )
    try:
        _, owner, sizes = np.unique(groups, return_inverse=True, return_counts=True)
    except TypeError as error:
        raise refused("groups", "values that can be sorted", str(error), "Use only numbers or only texts.") from None
    order = np.argsort(owner, kind="stable")
    return FederatedData((x[order], y[order]), sizes)


def _pair(x: Any, y: Any, n_clients: Any, seed: Any = 0) -> tuple[np.ndarray, np.ndarray]:
    x, y = array("x", x), array("y", y)
    whole("seed", seed, 0, most=2**32 - 1)
    if x.ndim == 0 or y.ndim == 0 or len(x) != len(y):
        raise refused(
            "x and y", "of equal length", f"shapes {x.shape} and {y.shape}", "Each row of x needs one label in y."
        )
    if y.ndim != 1 or (y.dtype.kind == "f" and np.isnan(y).any()):
        raise refused(
            "y", "one label per row, without NaN", f"shape {y.shape}, dtype {y.dtype}", "For one-hot y use y.argmax(1)."
        )
    if isinstance(n_clients, bool) or not isinstance(n_clients, int | np.integer) or not 1 <= n_clients <= len(y):
        raise refused("n_clients", f"between 1 and the {len(y)} examples", n_clients, "Every client needs an example.")
    return x, y
