"""What the measurements ask of a problem: gradients and Hessian-vector products of its clients, never a d×d matrix."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from covary.cohort import loss_at
from covary.errors import CovaryError, refused
from covary.problem import Problem

ROWS_AT_ONCE = 1024


class Parts(NamedTuple):
    """One or more functions, each a weighted mean of the losses of examples, cut into parts that fit into memory."""

    rows: np.ndarray  # (functions, parts, length): rows of the data
    share: np.ndarray | None  # what each counts, summing to 1; None: a function is the loss of its only part as it is


class Oracle:
    """The clients' functions f_i and their weighted mean f, on the device."""

    def __init__(self, problem: Problem, weights: str = "uniform", seed: int = 0, x0: Any = None):
        if not isinstance(problem, Problem):
            raise refused("problem", "a Problem", type(problem).__name__, "Build one with covary.supervised, say.")
        if weights not in ("uniform", "examples"):
            raise refused("weights", '"uniform" or "examples"', repr(weights), "The paper's f is the uniform mean.")
        if problem.n_clients < 2:
            raise CovaryError(
                "problem must have at least 2 clients; got 1. With one client there is nothing that could differ or "
                "drift: G and delta are 0, and every algorithm is SGD with K steps between messages."
            )
        if problem.data.streamed:
            raise CovaryError(
                "The constants are measured on data in memory, and this data set is streamed from its folder. Measure "
                "a sample of its clients that fits: FederatedData.from_clients([data.client(i) for i in ...])."
            )
        problem.refuse_other_losses(one_by_one=len(set(problem.data.sizes.tolist())) > 1)
        self.problem, self.divisible = problem, not problem.mixes_examples
        sizes = problem.data.sizes
        self.p = np.full(len(sizes), 1 / len(sizes)) if weights == "uniform" else sizes / sizes.sum()
        self.start, self.unravel = problem.start(x0, seed)
        self.rng = np.random.default_rng(seed)
        self.cost = 0  # gradients of one example's loss so far; a Hessian-vector product counts two
        self.examples = problem.data.on_device
        self._product = self._way_to_multiply()

    def at(self, x: Any) -> np.ndarray:
        """A point as a flat vector, from a vector or from params; None is the starting point."""
        if x is None:
            return self.start
        if hasattr(x, "shape") and np.shape(x) == self.start.shape:
            x = np.asarray(x, self.start.dtype)
            if not np.isfinite(x).all():
                raise refused("x", "finite", "NaN or infinity in it", "Measure where the model is finite.")
            return x
        return self.problem.start(x, 0)[0]

    def some_clients(self, most: int) -> np.ndarray:
        """All clients, or so many of them at random."""
        N = self.problem.n_clients
        return np.arange(N) if most >= N else np.sort(self.rng.choice(N, most, replace=False))

    def clients(self, ids: np.ndarray) -> Parts:
        """The functions f_i of some clients."""
        sizes, offsets = self.problem.data.sizes[ids], self.problem.data.offsets[ids]
        if not self.divisible:  # all of one size then
            return Parts(offsets[:, None, None] + np.arange(sizes[0]), None)
        parts = -(-int(sizes.max()) // ROWS_AT_ONCE)
        length = -(-int(sizes.max()) // parts)
        place = np.arange(parts * length)
        inside = place < sizes[:, None]
        rows = offsets[:, None] + np.minimum(place, sizes[:, None] - 1)
        share = inside / sizes[:, None]
        return Parts(rows.reshape(-1, parts, length), share.reshape(-1, parts, length))

    def everyone(self, most: int | None = None) -> tuple[Parts, bool]:
        """f itself or, of more than `most` examples, f of a sample drawn from every client; and whether it is whole."""
        data = self.problem.data
        if not self.divisible:
            return self.clients(np.arange(len(data.sizes))), True
        each = np.repeat(self.p / data.sizes, data.sizes)
        rows, whole = np.arange(data.n_examples), True
        if most is not None and data.n_examples > most:
            whole = False
            owner = np.repeat(np.arange(len(data.sizes)), data.sizes)
            quota = -(-data.sizes * most // data.n_examples)  # of each client
            shuffled = np.lexsort((self.rng.random(data.n_examples), owner))
            rows = shuffled[rows - data.offsets[owner] < quota[owner]]
            if len(rows) > 2 * most:  # more clients than examples wanted
                rows = self.rng.choice(rows, most, replace=False)
            each = self.p[owner] / np.maximum(np.bincount(owner[rows], minlength=len(data.sizes)), 1)[owner]
        parts = -(-len(rows) // ROWS_AT_ONCE)
        length = -(-len(rows) // parts)
        share = np.pad(each[rows] / each[rows].sum(), (0, parts * length - len(rows)))
        rows = np.pad(rows, (0, parts * length - len(rows)))
        return Parts(rows.reshape(1, parts, length), share.reshape(1, parts, length)), whole

    # Each of the following goes through the parts one by one and counts what it costs.

    def survey(self, x: np.ndarray, parts: Parts, p: np.ndarray, centre: Any) -> tuple[np.ndarray, ...]:
        """Of each function the loss, ‖∇f_i‖² and ‖∇f_i - centre‖²; and the mean of the gradients weighted by p."""
        self.cost += _count(parts)
        return tuple(np.asarray(v) for v in self._survey(self.examples, x, parts, p.astype(x.dtype), centre))

    def own_products(self, x: Any, V: Any, parts: Parts) -> Any:
        """∇²f_i(x) v_i, for each function its own vector."""
        self.cost += 2 * _count(parts)
        return self._own_products(self.examples, x, V, parts)

    def common_products(self, x: Any, V: Any, parts: Parts) -> Any:
        """∇²f(x) v for each of the vectors, f being the mean of the functions."""
        self.cost += 2 * _count(parts) * len(V)
        return self._common_products(self.examples, x, V, parts)

    def square_deviations(self, x: Any, rows: np.ndarray, centres: Any) -> np.ndarray:
        """‖∇l_j(x) - centre‖² of single examples, a row of them for each centre."""
        self.cost += rows.size
        return np.asarray(self._square_deviations(self.examples, x, rows, centres))

    def gradients(self, x: Any, parts: Parts) -> Any:
        """∇f_i(x), all of them: (functions, d)."""
        self.cost += _count(parts)
        return self._gradients(self.examples, x, parts)

    def _loss(self, examples: Any, rows: Any, share: Any) -> Callable[[Any], Any]:
        """y -> the loss of one part."""
        batch = jax.tree.map(lambda leaf: leaf[rows], examples)
        return lambda y: loss_at(self.problem.loss, self.unravel(y), batch, share)

    def _summed(self, function: Callable[[Callable[[Any], Any]], Any], examples: Any, parts: Any, like: Any) -> Any:
        """The sum over the parts of one function of what is done with each part's loss."""
        if parts.share is None:
            return function(self._loss(examples, parts.rows[0], None))

        def add(total: Any, part: Any) -> tuple[Any, None]:
            return total + function(self._loss(examples, part.rows, part.share.astype(like.dtype))), None

        return jax.lax.scan(add, like, parts)[0]

    @functools.partial(jax.jit, static_argnums=0)
    def _survey(self, examples: Any, x: Any, parts: Parts, p: Any, centre: Any) -> Any:
        def one(total: Any, given: Any) -> Any:
            own, weight = given
            f = self._summed(lambda loss: loss(x), examples, own, jnp.zeros((), x.dtype))
            g = self._summed(lambda loss: jax.grad(loss)(x), examples, own, 0 * x)
            return total + weight * g, (f, jnp.sum(g**2), jnp.sum((g - centre) ** 2))

        mean, (f, squares, deviations) = jax.lax.scan(one, 0 * x, (parts, p))
        return f, squares, deviations, mean

    @functools.partial(jax.jit, static_argnums=0)
    def _gradients(self, examples: Any, x: Any, parts: Parts) -> Any:
        return jax.lax.map(lambda own: self._summed(lambda loss: jax.grad(loss)(x), examples, own, 0 * x), parts)

    @functools.partial(jax.jit, static_argnums=0)
    def _own_products(self, examples: Any, x: Any, V: Any, parts: Parts) -> Any:
        def one(given: Any) -> Any:
            own, v = given
            return self._summed(lambda loss: self._product(jax.grad(loss), x, v), examples, own, 0 * v)

        return jax.lax.map(one, (parts, V))

    @functools.partial(jax.jit, static_argnums=0)
    def _common_products(self, examples: Any, x: Any, V: Any, parts: Parts) -> Any:
        def all_vectors(loss: Any) -> Any:
            return jax.vmap(lambda v: self._product(jax.grad(loss), x, v))(V)

        each = jax.lax.map(lambda own: self._summed(all_vectors, examples, own, 0 * V), parts)
        return each[0] if len(each) == 1 else jnp.tensordot(jnp.asarray(self.p, x.dtype), each, 1)

    @functools.partial(jax.jit, static_argnums=0)
    def _square_deviations(self, examples: Any, x: Any, rows: Any, centres: Any) -> Any:
        def one(given: Any) -> Any:
            row, centre = given

            def example(j: Any) -> Any:
                return jnp.sum((jax.grad(self._loss(examples, j[None], None))(x) - centre) ** 2)

            return jax.lax.map(example, row, batch_size=16)

        return jax.lax.map(one, (rows, centres))

    def _way_to_multiply(self) -> Callable[..., Any]:
        """How to differentiate the gradient: forwards, or backwards where the loss allows only that."""
        slope = jax.grad(self._loss(self.examples, np.arange(1), None))

        def forwards(gradient: Any, x: Any, v: Any) -> Any:
            return jax.jvp(gradient, (x,), (v,))[1]

        def backwards(gradient: Any, x: Any, v: Any) -> Any:
            return jax.vjp(gradient, x)[1](v)[0]

        for way in (forwards, backwards):
            try:
                jax.eval_shape(lambda v, way=way: way(slope, v, v), self.start)
            except Exception as error:
                reason = error
            else:
                return way
        raise CovaryError(
            "loss(params, batch) must be twice differentiable, because beta, mu and delta are curvatures; JAX cannot "
            f"differentiate its gradient ({str(reason).splitlines()[0]}). Give functions with a derivative of their "
            "own (custom_vjp, callbacks) a differentiable one."
        )


def _count(parts: Parts) -> int:
    return parts.rows.size if parts.share is None else int((np.asarray(parts.share) > 0).sum())
