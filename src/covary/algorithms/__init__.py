"""The algorithms, one file each, with the same equations in the docstring and in the code."""

from covary.algorithms.dane import dane
from covary.algorithms.fedavg import fedavg
from covary.algorithms.feddyn import feddyn
from covary.algorithms.fedprox import fedprox
from covary.algorithms.mime import mime
from covary.algorithms.scaffold import scaffold
from covary.algorithms.sgd import sgd
from covary.algorithms.vrl_sgd import vrl_sgd

__all__ = ["dane", "fedavg", "feddyn", "fedprox", "mime", "scaffold", "sgd", "vrl_sgd"]
