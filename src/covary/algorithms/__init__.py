"""The algorithms, one file each, with the same equations in the docstring and in the code."""

from __future__ import annotations

from collections.abc import Callable

from covary.algorithm import Algorithm
from covary.algorithms.dane import dane
from covary.algorithms.fedavg import fedavg
from covary.algorithms.feddyn import feddyn
from covary.algorithms.fedprox import fedprox
from covary.algorithms.mime import mime
from covary.algorithms.scaffold import scaffold
from covary.algorithms.sgd import sgd
from covary.algorithms.vrl_sgd import vrl_sgd

ALGORITHMS: dict[str, Callable[..., Algorithm]] = {  # by the names that commands and files have for them
    "sgd": sgd,
    "fedavg": fedavg,
    "fedprox": fedprox,
    "scaffold": scaffold,
    "dane": dane,
    "vrl_sgd": vrl_sgd,
    "feddyn": feddyn,
    "mime": mime,
}

__all__ = ["dane", "fedavg", "feddyn", "fedprox", "mime", "scaffold", "sgd", "vrl_sgd"]
