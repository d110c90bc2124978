"""The oracle of a problem: gradients and Hessian-vector products of its clients, without d×d matrices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from covary._engine.convolutions import fast_on_cpu
from covary._engine.devices import on_device
from covary._engine.local import loss_at
from covary.checks import whole
from covary.errors import InvalidInput, refused
from covary.problem import Problem
from covary.running.plan import client_weights
from covary.training import check_weights

ROWS_AT_ONCE = 1024


class Parts(NamedTuple):
    """One or more functions, each a weighted mean of examples' losses, divided into parts that fit into memory."""

    rows: np.ndarray  # (parts, length): rows of the data
    share: np.ndarray | None  # the weight of each row in its function; None if a function is the loss of its only part
    first: np.ndarray  # the first part of each function, and one past the last part

    @property
    def functions(self) -> int:
        return len(self.first) - 1


class _Compiled(NamedTuple):
    survey: Any
    responses: Any
    gradients: Any
    own_products: Any
    common_products: Any
    square_deviations: Any


class Oracle:
    """The clients' functions f_i and their weighted mean f, on the device."""

    def __init__(self, problem: Problem, weights: str = "uniform", seed: int = 0, x0: Any = None):
        if not isinstance(problem, Problem):
            raise refused(
                "problem", "a Problem", type(problem).__name__, "Build one with covary.supervised, for example."
            )
        check_weights(weights)
        if problem.n_clients < 2:
            raise InvalidInput(
                "problem must have at least 2 clients; got 1. With one client, G and delta are 0, and every algorithm "
                "is SGD with K steps per round."
            )
        if problem.data.streamed:
            raise InvalidInput(
                "The constants are measured on data in memory, but this data set is streamed from its folder. Measure "
                "a sample of its clients: FederatedData.from_clients([data.client(i) for i in ...])."
            )
        whole("seed", seed, 0, most=2**32 - 1)
        problem.refuse_other_losses(one_by_one=len(set(problem.data.sizes.tolist())) > 1)
        self.problem, self.divisible = problem, not problem.mixes_examples
        self.p = client_weights(problem.data.sizes, weights == "examples")
        self.start, self.unravel = problem.start(x0, seed)
        if self.start.dtype.itemsize < 4:
            fix = "Its rounding hides curvatures. Measure the model in float32, and train in any precision."
            raise refused("params", "float32 or float64", str(self.start.dtype), fix)
        self.rng = np.random.default_rng(seed)
        self.cost = 0  # gradients of one example's loss so far; a Hessian-vector product counts two
        self.examples = on_device(problem.data), jax.device_put(problem.held)
        self._product = self._hessian_product()
        self.compiled = _Compiled(
            *(jax.jit(fast_on_cpu(getattr(self, f"_{name}"))) for name in _Compiled._fields)  # freed with this object
        )

    @classmethod
    def of(cls, problem: Any, weights: str, seed: int) -> Oracle:
        """The oracle of a problem. An oracle is returned as it is, so that measurements share compiled programs."""
        return problem if isinstance(problem, Oracle) else cls(problem, weights, seed)

    def at(self, x: Any) -> np.ndarray:
        """A point as a flat vector, from a vector or from params; None is the initial point."""
        if x is None:
            return self.start
        if hasattr(x, "shape") and np.shape(x) == self.start.shape:
            x = np.asarray(x, self.start.dtype)
            if not np.isfinite(x).all():
                raise refused("x", "finite", "NaN or infinity in it", "Choose a point at which the model is finite.")
            return x
        return self.problem.start(x, 0)[0]

    def some_clients(self, most: int) -> np.ndarray:
        """All clients, or a random sample of `most`."""
        N = self.problem.n_clients
        return np.arange(N) if most >= N else np.sort(self.rng.choice(N, most, replace=False))

    def clients(self, ids: np.ndarray) -> Parts:
        """The functions f_i of some clients."""
        sizes, offsets = self.problem.data.sizes[ids], self.problem.data.offsets[ids]
        if not self.divisible:  # then all clients have the same size
            return Parts(offsets[:, None] + np.arange(sizes[0]), None, np.arange(len(ids) + 1))
        length = int(min(ROWS_AT_ONCE, sizes.max(), max(16, 2 * np.median(sizes))))  # little padding for most clients
        counts = -(-sizes // length)
        first = np.concatenate([[0], np.cumsum(counts)])
        owner = np.repeat(np.arange(len(ids)), counts)
        place = (np.arange(first[-1]) - first[owner])[:, None] * length + np.arange(length)
        size = sizes[owner, None]
        rows = offsets[owner, None] + np.minimum(place, size - 1)
        return Parts(rows, (place < size) / size, first)

    def everyone(self, most: int | None = None) -> tuple[Parts, bool]:
        """f, and True; or, with more than `most` examples, f on a sample drawn from every client, and False."""
        data = self.problem.data
        if not self.divisible:
            return self.clients(np.arange(len(data.sizes))), True
        each = np.repeat(self.p / data.sizes, data.sizes)
        rows, complete = np.arange(data.n_examples), True
        if most is not None and data.n_examples > most:
            complete = False
            owner = np.repeat(np.arange(len(data.sizes)), data.sizes)
            quota = -(-data.sizes * most // data.n_examples)  # of each client
            shuffled = np.lexsort((self.rng.random(data.n_examples), owner))
            rows = shuffled[rows - data.offsets[owner] < quota[owner]]
            if len(rows) > 2 * most:  # far more clients than wanted examples
                rows = self.rng.choice(rows, most, replace=False)
            each = self.p[owner] / np.maximum(np.bincount(owner[rows], minlength=len(data.sizes)), 1)[owner]
        parts = -(-len(rows) // ROWS_AT_ONCE)
        length = -(-len(rows) // parts)
        share = np.pad(each[rows] / each[rows].sum(), (0, parts * length - len(rows)))
        rows = np.pad(rows, (0, parts * length - len(rows)))
        return Parts(rows.reshape(parts, length), share.reshape(parts, length), np.array([0, parts])), complete

    # The following methods process the parts one by one and add up their cost.

    def survey(self, x: np.ndarray, parts: Parts, p: np.ndarray, centre: Any) -> tuple[np.ndarray, ...]:
        """For each function the loss, ‖∇f_i‖² and ‖∇f_i - centre‖²; and the mean of the gradients weighted by p."""
        self.cost += _count(parts)
        return tuple(np.asarray(v) for v in self.compiled.survey(self.examples, x, parts, p.astype(x.dtype), centre))

    def responses(self, x: np.ndarray, v: Any, parts: Parts, p: np.ndarray, centre: Any) -> tuple[np.ndarray, ...]:
        """For each function ‖∇²f_i v‖² and ‖∇²f_i v - centre‖²; and the mean of the products weighted by p."""
        self.cost += 2 * _count(parts)
        found = self.compiled.responses(self.examples, x, v, parts, p.astype(x.dtype), centre)
        return tuple(np.asarray(value) for value in found)

    def own_products(self, x: Any, V: Any, parts: Parts) -> Any:
        """∇²f_i(x) v_i, with one vector per function."""
        self.cost += 2 * _count(parts)
        return self.compiled.own_products(self.examples, x, V, parts)

    def common_products(self, x: Any, V: Any, parts: Parts) -> Any:
        """∇²f(x) v for each of the vectors, where f is the mean of the functions."""
        self.cost += 2 * _count(parts) * len(V)
        return self.compiled.common_products(self.examples, x, V, parts)

    def square_deviations(self, x: Any, rows: np.ndarray, centres: Any) -> np.ndarray:
        """‖∇l_j(x) - centre‖² of single examples, one row of examples per centre."""
        self.cost += rows.size
        return np.asarray(self.compiled.square_deviations(self.examples, x, rows, centres))

    def gradients(self, x: Any, parts: Parts) -> Any:
        """∇f_i(x) of all functions: (functions, d)."""
        self.cost += _count(parts)
        return self.compiled.gradients(self.examples, x, parts)

    def _loss(self, examples: Any, rows: Any, share: Any) -> Callable[[Any], Any]:
        """y -> the loss of one part."""
        examples, held = examples
        batch = jax.tree.map(lambda leaf: leaf[rows], examples)
        loss = self.problem.loss.holding(*held)
        return lambda y: loss_at(loss, self.unravel(y), batch, share)

    def _summed(self, function: Callable[[Any], Any], examples: Any, parts: Any, i: Any, like: Any) -> Any:
        """The sum of `function` over the losses of the parts of function i."""
        if parts.share is None:
            return function(self._loss(examples, parts.rows[i], None))

        def add(k: Any, total: Any) -> Any:
            return total + function(self._loss(examples, parts.rows[k], parts.share[k].astype(like.dtype)))

        return jax.lax.fori_loop(parts.first[i], parts.first[i + 1], add, like)

    def _survey(self, examples: Any, x: Any, parts: Parts, p: Any, centre: Any) -> Any:
        def one(total: Any, i: Any) -> Any:
            zero = jnp.zeros((), x.dtype)
            f = self._summed(lambda loss: loss(x), examples, parts, i, zero)
            g = self._summed(lambda loss: jax.grad(loss)(x), examples, parts, i, 0 * x)
            return total + p[i] * g, (f, jnp.sum(g**2), jnp.sum((g - centre) ** 2))

        mean, (f, squares, deviations) = jax.lax.scan(one, 0 * x, jnp.arange(parts.functions))
        return f, squares, deviations, mean

    def _responses(self, examples: Any, x: Any, v: Any, parts: Parts, p: Any, centre: Any) -> Any:
        def one(total: Any, i: Any) -> Any:
            h = self._summed(lambda loss: self._product(jax.grad(loss), x, v), examples, parts, i, 0 * v)
            return total + p[i] * h, (jnp.sum(h**2), jnp.sum((h - centre) ** 2))

        mean, (squares, deviations) = jax.lax.scan(one, 0 * x, jnp.arange(parts.functions))
        return squares, deviations, mean

    def _gradients(self, examples: Any, x: Any, parts: Parts) -> Any:
        def one(i: Any) -> Any:
            return self._summed(lambda loss: jax.grad(loss)(x), examples, parts, i, 0 * x)

        return jax.lax.map(one, jnp.arange(parts.functions))

    def _own_products(self, examples: Any, x: Any, V: Any, parts: Parts) -> Any:
        def one(i: Any) -> Any:
            return self._summed(lambda loss: self._product(jax.grad(loss), x, V[i]), examples, parts, i, 0 * x)

        return jax.lax.map(one, jnp.arange(parts.functions))

    def _common_products(self, examples: Any, x: Any, V: Any, parts: Parts) -> Any:
        def all_vectors(loss: Any) -> Any:
            return jax.vmap(lambda v: self._product(jax.grad(loss), x, v))(V)

        if parts.functions == 1:
            return self._summed(all_vectors, examples, parts, 0, 0 * V)
        p = jnp.asarray(self.p, x.dtype)
        add = lambda i, total: total + p[i] * self._summed(all_vectors, examples, parts, i, 0 * V)  # noqa: E731
        return jax.lax.fori_loop(0, parts.functions, add, 0 * V)

    def _square_deviations(self, examples: Any, x: Any, rows: Any, centres: Any) -> Any:
        def one(given: Any) -> Any:
            row, centre = given

            def example(j: Any) -> Any:
                return jnp.sum((jax.grad(self._loss(examples, j[None], None))(x) - centre) ** 2)

            return jax.lax.map(example, row, batch_size=16)

        return jax.lax.map(one, (rows, centres))

    def _hessian_product(self) -> Callable[..., Any]:
        """A function that differentiates the gradient: forwards, or backwards if the loss allows only that."""
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
        raise InvalidInput(
            "loss(params, batch) must be twice differentiable, because beta, mu and delta are curvatures, but JAX "
            f"cannot differentiate its gradient ({str(reason).splitlines()[0]}). Make custom derivatives (custom_vjp, "
            "callbacks) differentiable."
        ) from reason


def _count(parts: Parts) -> int:
    return parts.rows.size if parts.share is None else int((np.asarray(parts.share) > 0).sum())
