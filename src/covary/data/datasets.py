"""Data sets, ready to be partitioned."""

from __future__ import annotations

import numpy as np


def digits() -> tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]:
    """scikit-learn's 8x8 handwritten digits, part of its package: 1,437 to train and 360 to test, pixels in [0, 1].

    >>> import covary as cv
    >>> (x, y), (x_test, y_test) = cv.datasets.digits()
    >>> x.shape, y_test.shape
    ((1437, 64), (360,))
    """
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    x, y = (np.asarray(part) for part in load_digits(return_X_y=True))
    train, test = train_test_split(np.arange(len(y)), test_size=0.2, random_state=0, stratify=y)
    x = (x / 16).astype(np.float32)
    return (x[train], y[train]), (x[test], y[test])
