"""Ways to divide one data set among clients."""

from __future__ import annotations

from typing import Any

import numpy as np

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
    x, y = np.asarray(x), np.asarray(y)
    n = len(y)
    if len(x) != n:
        raise refused("x and y", "of one length", f"{len(x)} and {n}", "Each row of x has its label in y.")
    if not isinstance(n_clients, int | np.integer) or not 1 <= n_clients <= n:
        raise refused("n_clients", f"between 1 and the {n} examples", n_clients, "Every client needs an example.")
    if not isinstance(similarity, int | float | np.number) or not 0 <= similarity <= 1:
        raise refused("similarity", "between 0 and 1", similarity, "The paper's 10 % is similarity=0.1.")

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
