"""Ways to divide one data set among clients."""

from __future__ import annotations

from typing import Any

import numpy as np

from covary.checks import array, positive, whole
from covary.data.federated import FederatedData
from covary.errors import refused


def by_similarity(x: Any, y: Any, n_clients: int, similarity: float, seed: int = 0) -> FederatedData:
    """The paper's s% similarity: each client gets s% i.i.d. data and the rest by sorting according to label.

    Client sizes differ by at most one; no example is lost or given twice.

    Args:
        x, y: the examples and their labels.
        n_clients: how many clients to divide them among.
        similarity: the i.i.d. share, from 0 (sorted by label) to 1 (i.i.d.).
        seed: decides which examples are dealt at random.

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
    ends = np.arange(n_clients + 1) * n // n_clients  # where client i's data would end in one long row
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
    """Deal the examples at random: all clients alike. Sizes differ by at most one.

    >>> import numpy as np, covary as cv
    >>> cv.partition.iid(np.zeros((7, 2)), np.zeros(7, int), n_clients=2)
    FederatedData(2 clients, 7 examples, 3 to 4 each)
    """
    return by_similarity(x, y, n_clients, similarity=1.0, seed=seed)


def dirichlet(x: Any, y: Any, n_clients: int, alpha: float, seed: int = 0) -> FederatedData:
    """Divide each label's examples among the clients in proportions drawn from a Dirichlet distribution.

    Small `alpha`: each label lives on few clients, and sizes vary widely. Large `alpha`: all clients alike. A client
    that would come out empty gets one example of the client that then has most.

    Args:
        x, y: the examples and their labels.
        n_clients: how many clients to divide them among.
        alpha: the concentration, above 0.
        seed: decides proportions and examples.

    >>> import numpy as np, covary as cv
    >>> data = cv.partition.dirichlet(np.zeros((100, 2)), np.arange(100) % 5, n_clients=10, alpha=0.3)
    >>> data.n_clients, data.n_examples
    (10, 100)

    Reference: Yurochkin et al. 2019; Hsu, Qi and Brown 2019.
    """
    x, y = _pair(x, y, n_clients, seed)
    positive("alpha", alpha)
    if alpha > 1e6:
        raise refused("alpha", "at most 1e6", alpha, "Clients are all alike there: use iid.")
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
    """Natural clients: one for each value of `groups` (a hospital, a writer), in ascending order of the values.

    >>> import numpy as np, covary as cv
    >>> data = cv.partition.by_group(np.arange(5), np.zeros(5, int), groups=["b", "a", "b", "c", "a"])
    >>> [data.client(i)[0].tolist() for i in range(3)]
    [[1, 4], [0, 2], [3]]
    """
    x, y = _pair(x, y, n_clients=1)
    groups = array("groups", groups)
    if groups.shape != y.shape[:1]:
        raise refused(
            "groups", f"one value for each of the {len(y)} examples", f"shape {groups.shape}", "See by_group."
        )
    try:
        _, owner, sizes = np.unique(groups, return_inverse=True, return_counts=True)
    except TypeError as error:
        raise refused("groups", "values that can be sorted", str(error), "Use all numbers or all texts.") from None
    order = np.argsort(owner, kind="stable")
    return FederatedData((x[order], y[order]), sizes)


def _pair(x: Any, y: Any, n_clients: Any, seed: Any = 0) -> tuple[np.ndarray, np.ndarray]:
    x, y = array("x", x), array("y", y)
    whole("seed", seed, 0, most=2**32 - 1)
    if x.ndim == 0 or y.ndim == 0 or len(x) != len(y):
        raise refused(
            "x and y", "of one length", f"shapes {x.shape} and {y.shape}", "Each row of x has its label in y."
        )
    if y.ndim != 1 or (y.dtype.kind == "f" and np.isnan(y).any()):
        raise refused(
            "y", "one label a row, none of them NaN", f"shape {y.shape}, dtype {y.dtype}", "Use y.argmax(1), say."
        )
    if isinstance(n_clients, bool) or not isinstance(n_clients, int | np.integer) or not 1 <= n_clients <= len(y):
        raise refused("n_clients", f"between 1 and the {len(y)} examples", n_clients, "Every client needs an example.")
    return x, y
