"""Data sets, ready to be partitioned. Images stay unsigned bytes; the models scale them inside the step."""

from __future__ import annotations

import math
import zipfile
import zlib
from functools import cache
from importlib.resources import files
from pathlib import Path

import numpy as np

from covary.checks import flag
from covary.checks import path as checked_path
from covary.data.idx import Official, read_pair
from covary.data.table import Table, table
from covary.errors import InvalidInput, refused

__all__ = ["Table", "digits", "emnist", "emnist_cut", "fashion_mnist", "heart_disease", "table"]

Labelled = tuple[np.ndarray, np.ndarray]
EMNIST_CLASSES = {"byclass": 62, "bymerge": 47, "balanced": 47, "letters": 26, "digits": 10, "mnist": 10}
LARGEST_ARRAY = 2**26  # bytes; the hospitals' largest has 96 thousand
FASHION_MNIST = "/usr/share/datasets/fashion-mnist"  # where Debian's package puts it


def digits() -> tuple[Labelled, Labelled]:
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


def emnist(root: str | Path, split: str = "byclass", paper_white: bool = False) -> tuple[Labelled, Labelled]:
    """EMNIST's official training and test files of a split, upright, 28x28 unsigned bytes, checked by sha256.

    Args:
        root: the folder with the official `emnist-SPLIT-{train,test}-{images-idx3,labels-idx1}-ubyte.gz`.
        split: "byclass" (62 classes), "bymerge", "balanced" (47), "letters" (26, numbered from 0), "digits" or "mnist".
        paper_white: False: ink is 255 and paper is 0, as in the files. True: inverted, as in the federated EMNIST of
            TensorFlow Federated. A linear model is then much worse conditioned.

    >>> import covary as cv
    >>> cv.datasets.emnist("/no/such/folder", "mnist")
    Traceback (most recent call last):
    covary.errors.InvalidInput: /no/such/folder/emnist-mnist-train-images-idx3-ubyte.gz is missing. Fetch it with:
    covary data emnist --root /no/such/folder --split mnist

    Reference: Cohen, Afshar, Tapson and van Schaik 2017.
    """
    return _emnist_part(root, split, "train", paper_white), _emnist_part(root, split, "test", paper_white)


def emnist_cut(root: str | Path, paper_white: bool = False) -> tuple[Labelled, Labelled]:
    """EMNIST's official ByClass test file cut in two: 97,523 examples to train and 18,800 to test, 62 classes.

    Use it without the 173 MB training file. An accuracy on this cut is not an accuracy on the official split.

    >>> import covary as cv
    >>> cv.datasets.emnist_cut("/no/such/folder")
    Traceback (most recent call last):
    covary.errors.InvalidInput: /no/such/folder/emnist-byclass-test-images-idx3-ubyte.gz is missing. Fetch it with:
    covary data emnist --root /no/such/folder --split byclass
    """
    x, y = _emnist_part(root, "byclass", "test", paper_white)
    order = np.random.default_rng(7).permutation(len(y))
    test, train = order[:18_800], order[18_800:]
    return (x[train], y[train]), (x[test], y[test])


def fashion_mnist(root: str | Path = FASHION_MNIST) -> tuple[Labelled, Labelled]:
    """Fashion-MNIST: 60,000 images of clothes to train and 10,000 to test, 28x28 unsigned bytes, 10 classes.

    Args:
        root: the folder with the official four `.gz` files; by default where Debian's package installs them.

    >>> import covary as cv
    >>> cv.datasets.fashion_mnist("/no/such/folder")
    Traceback (most recent call last):
    covary.errors.InvalidInput: /no/such/folder/train-images-idx3-ubyte.gz is missing. On Debian:
    apt-get install dataset-fashion-mnist. Elsewhere put the four official files into one folder and pass it as root.

    Reference: Xiao, Rasul and Vollgraf 2017.
    """
    fix = (
        "On Debian: apt-get install dataset-fashion-mnist. "
        "Elsewhere put the four official files into one folder and pass it as root."
    )
    root = checked_path("root", root)
    train, test = (
        read_pair(root / f"{part}-images-idx3-ubyte.gz", root / f"{part}-labels-idx1-ubyte.gz", fix)
        for part in ("train", "t10k")
    )
    return train, test


def heart_disease(path: str | Path) -> tuple[tuple[np.ndarray, np.ndarray, np.ndarray], Labelled]:
    """UCI Heart Disease, 920 patients of four hospitals: `(x, y, hospital)` to train and `(x, y)` to test.

    13 features; y is 1 for disease. A fifth of each hospital's patients is held out for testing. Missing values become
    the training median of their feature, and features are standardised with the training mean and deviation.

    Args:
        path: an `.npz` file with `X` (NaN: missing), `y` (0 to 4) and `site` (0 to 3).

    >>> import covary as cv
    >>> cv.datasets.heart_disease("no-such-file.npz")
    Traceback (most recent call last):
    covary.errors.InvalidInput: no-such-file.npz is missing. Pass the .npz file of the four hospitals,
    with X, y and site.

    Reference: Janosi, Steinbrunn, Pfisterer and Detrano 1988, UCI Machine Learning Repository (CC BY 4.0).
    """
    fix = "Pass the .npz file of the four hospitals, with X, y and site."
    path = checked_path("path", path)
    if not path.is_file():
        raise InvalidInput(f"{path} is {'a folder' if path.is_dir() else 'missing'}. {fix}")
    try:
        x, y, site = _arrays(path, "X", "y", "site")
    except (OSError, ValueError, TypeError, KeyError, EOFError, MemoryError, zipfile.BadZipFile, zlib.error) as error:
        raise InvalidInput(f"{path} cannot be read ({error}). {fix}") from None
    if x.ndim != 2 or x.dtype.kind != "f" or y.shape != site.shape or len(x) != len(y) or len(y) == 0:
        raise InvalidInput(f"{path} has X of {x.dtype} {x.shape}, y of {y.shape} and site of {site.shape}. {fix}")
    rng = np.random.default_rng(0)
    shuffled = rng.permutation(len(y))
    test = np.concatenate([rows[: len(rows) // 5] for s in np.unique(site) for rows in [shuffled[site[shuffled] == s]]])
    train = np.setdiff1d(np.arange(len(y)), test)
    absent = np.isnan(x[train]).all(axis=0)  # a feature without any training value becomes 0
    median = np.where(absent, 0, np.nanmedian(np.where(absent, 0, x[train]), axis=0))
    x = np.where(np.isnan(x), median, x).astype(np.float32)
    mean, deviation = x[train].mean(axis=0), x[train].std(axis=0)
    x = (x - mean) / np.where(deviation > 0, deviation, 1)
    y = (y > 0).astype(np.int32)
    return (x[train], y[train], site[train]), (x[test], y[test])


def _arrays(path: Path, *names: str) -> list[np.ndarray]:
    """Arrays of an `.npz` file. An array that unpacks to more than `LARGEST_ARRAY` bytes is an error."""

    def read(archive: zipfile.ZipFile, name: str) -> np.ndarray:
        with archive.open(f"{name}.npy") as file:
            version = np.lib.format.read_magic(file)
            header = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}[version]
            shape, _, dtype = header(file)
            if math.prod(shape) * dtype.itemsize > LARGEST_ARRAY:
                raise ValueError(f"{name} unpacks to more than {LARGEST_ARRAY:,} bytes")
            file.seek(0)
            return np.lib.format.read_array(file, allow_pickle=False)

    with zipfile.ZipFile(path) as archive:
        return [read(archive, name) for name in names]


@cache
def official_emnist() -> dict[str, Official]:
    """sha256 and size of the 24 official files, by name."""
    lines = (files("covary.data") / "emnist.sha256").read_text().splitlines()
    return {name: Official(digest, int(size)) for digest, size, name in (line.split() for line in lines)}


def _emnist_part(root: str | Path, split: str, part: str, paper_white: bool) -> Labelled:
    if not isinstance(split, str) or split not in EMNIST_CLASSES:
        raise refused(
            "split", f"one of {', '.join(EMNIST_CLASSES)}", repr(split), "The paper uses byclass, with 62 classes."
        )
    flag("paper_white", paper_white)
    stem = checked_path("root", root) / f"emnist-{split}-{part}"
    fix = f"Fetch it with: covary data emnist --root {root} --split {split}"
    images, labels = (Path(f"{stem}-{kind}-ubyte.gz") for kind in ("images-idx3", "labels-idx1"))
    x, y = read_pair(images, labels, fix, official_emnist())
    x = x.swapaxes(1, 2)  # the official files are transposed
    return np.ascontiguousarray(255 - x if paper_white else x), y - (split == "letters")
