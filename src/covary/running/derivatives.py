"""What a runtime measures for `covary.theory`: gradients and Hessian-vector products of a problem's clients."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import numpy as np


class Parts(NamedTuple):
    """One or more functions, each a weighted mean of examples' losses, divided into parts that fit into memory."""

    rows: np.ndarray  # (parts, length): rows of the data
    share: np.ndarray | None  # the weight of each row in its function; None if a function is the loss of its only part
    first: np.ndarray  # the first part of each function, and one past the last part

    @property
    def functions(self) -> int:
        return len(self.first) - 1


class Basis(Protocol):
    """The orthonormal vectors of Lanczos' method on several matrices, in arrays of the runtime: (matrices, d)."""

    first: Any  # the start, normalised
    steps: int  # the most vectors of each matrix
    roundoff: float  # the length, relative to the matrix, below which a vector is nothing but rounding

    def add(self, v: Any, w: Any) -> tuple[Any, np.ndarray, np.ndarray]:
        """Append v. Returns w without its part in the span of the basis, v·w, and the length of what is left of w."""
        ...

    def unit(self, w: Any, lengths: np.ndarray) -> Any:
        """Vectors divided by their lengths; 0 where a length is 0."""
        ...

    def combined(self, mix: np.ndarray) -> Any:
        """Sums of the first vectors: (matrices, vectors, sums) -> (matrices, sums, d)."""
        ...


class Derivatives(Protocol):
    """Losses and derivatives of a problem's functions, part by part, without d×d matrices.

    V, and what is returned for it, are arrays of the runtime. Everything else is in NumPy.
    """

    start: np.ndarray  # the initial point
    divisible: bool  # whether the loss of a batch is the mean of its examples' losses

    def survey(self, x: np.ndarray, parts: Parts, p: np.ndarray, centre: np.ndarray) -> tuple[np.ndarray, ...]:
        """For each function the loss, ‖∇f_i‖² and ‖∇f_i - centre‖²; and the mean of the gradients weighted by p."""
        ...

    def responses(
        self, x: np.ndarray, v: np.ndarray, parts: Parts, p: np.ndarray, centre: np.ndarray
    ) -> tuple[np.ndarray, ...]:
        """For each function ‖∇²f_i v‖² and ‖∇²f_i v - centre‖²; and the mean of the products weighted by p."""
        ...

    def gradients(self, x: np.ndarray, parts: Parts) -> np.ndarray:
        """∇f_i(x) of all functions: (functions, d)."""
        ...

    def own_products(self, x: np.ndarray, V: Any, parts: Parts) -> Any:
        """∇²f_i(x) v_i, with one vector per function."""
        ...

    def common_products(self, x: np.ndarray, V: Any, parts: Parts, p: np.ndarray) -> Any:
        """∇²f(x) v for each of the vectors, where f is the mean of the functions, weighted by p if they are several."""
        ...

    def square_deviations(self, x: np.ndarray, rows: np.ndarray, centres: np.ndarray) -> np.ndarray:
        """‖∇l_j(x) - centre‖² of single examples, one row of examples per centre."""
        ...

    def vectors(self, values: np.ndarray) -> Any:
        """Values in an array of the runtime, in the precision of the start."""
        ...

    def basis(self, start: Any, steps: int) -> Basis:
        """An empty basis with room for so many vectors, but at most d."""
        ...
