"""The derivatives of a JAX problem, compiled, as `covary.running.derivatives.Derivatives` describes them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from covary._engine.convolutions import fast_on_cpu
from covary._engine.devices import on_device
from covary._engine.local import loss_at
from covary.errors import InvalidInput, refused
from covary.problem import Problem
from covary.running.derivatives import Parts


class _Compiled(NamedTuple):
    survey: Any
    responses: Any
    gradients: Any
    own_products: Any
    common_products: Any
    square_deviations: Any


class CompiledDerivatives:
    """Losses, gradients and Hessian-vector products, on the device."""

    def __init__(self, problem: Problem, x0: Any, seed: int):
        problem.refuse_other_losses(one_by_one=len(set(problem.data.sizes.tolist())) > 1)
        self.problem, self.divisible = problem, not problem.mixes_examples
        self.start, self.unravel = problem.start(x0, seed)
        if self.start.dtype.itemsize < 4:
            fix = "Its rounding hides curvatures. Measure the model in float32, and train in any precision."
            raise refused("params", "float32 or float64", str(self.start.dtype), fix)
        self.examples = on_device(problem.data), jax.device_put(problem.held)
        self._product = self._hessian_product()
        self.compiled = _Compiled(
            *(jax.jit(fast_on_cpu(getattr(self, f"_{name}"))) for name in _Compiled._fields)  # freed with this object
        )

    def survey(self, x: np.ndarray, parts: Parts, p: np.ndarray, centre: np.ndarray) -> tuple[np.ndarray, ...]:
        return tuple(np.asarray(v) for v in self.compiled.survey(self.examples, x, parts, p.astype(x.dtype), centre))

    def responses(
        self, x: np.ndarray, v: np.ndarray, parts: Parts, p: np.ndarray, centre: np.ndarray
    ) -> tuple[np.ndarray, ...]:
        found = self.compiled.responses(self.examples, x, v, parts, p.astype(x.dtype), centre)
        return tuple(np.asarray(value) for value in found)

    def gradients(self, x: np.ndarray, parts: Parts) -> np.ndarray:
        return np.asarray(self.compiled.gradients(self.examples, x, parts))

    def own_products(self, x: np.ndarray, V: Any, parts: Parts) -> Any:
        return self.compiled.own_products(self.examples, x, V, parts)

    def common_products(self, x: np.ndarray, V: Any, parts: Parts, p: np.ndarray) -> Any:
        return self.compiled.common_products(self.examples, x, V, parts, p.astype(x.dtype))

    def square_deviations(self, x: np.ndarray, rows: np.ndarray, centres: np.ndarray) -> np.ndarray:
        return np.asarray(self.compiled.square_deviations(self.examples, x, rows, centres))

    def vectors(self, values: np.ndarray) -> Any:
        return jnp.asarray(values, self.start.dtype)

    def basis(self, start: Any, steps: int) -> CompiledBasis:
        return CompiledBasis(start, steps)

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

    def _common_products(self, examples: Any, x: Any, V: Any, parts: Parts, p: Any) -> Any:
        def all_vectors(loss: Any) -> Any:
            return jax.vmap(lambda v: self._product(jax.grad(loss), x, v))(V)

        if parts.functions == 1:
            return self._summed(all_vectors, examples, parts, 0, 0 * V)
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


class CompiledBasis:
    """The vectors of Lanczos' method on the device, (steps, matrices, d)."""

    def __init__(self, start: Any, steps: int):
        self.first = start / jnp.linalg.norm(start, axis=1, keepdims=True)
        self.steps, self.roundoff = min(steps, start.shape[1]), 50 * float(jnp.finfo(start.dtype).eps)
        self._vectors, self._count = jnp.zeros((self.steps, *start.shape), start.dtype), 0

    def add(self, v: Any, w: Any) -> tuple[Any, np.ndarray, np.ndarray]:
        self._vectors, w, along, left = _added(self._vectors, self._count, v, w)
        self._count += 1
        return w, np.asarray(along, float), np.asarray(left, float)

    def unit(self, w: Any, lengths: np.ndarray) -> Any:
        some = jnp.asarray(lengths > 0)[:, None]
        return jnp.where(some, w / jnp.maximum(jnp.asarray(lengths, w.dtype)[:, None], 1e-30), 0)

    def combined(self, mix: np.ndarray) -> Any:
        vectors = self._vectors[: mix.shape[1]]
        return jnp.einsum("mks,kmd->msd", jnp.asarray(mix, vectors.dtype), vectors)


@functools.partial(jax.jit, donate_argnums=0)
def _added(basis: Any, k: Any, v: Any, w: Any) -> Any:
    """The basis with v, and the next direction, orthogonalised against all (twice, because of rounding)."""
    along = jnp.sum(v * w, axis=1)
    basis = basis.at[k].set(v)
    for _ in range(2):
        w = w - jnp.einsum("km,kmd->md", jnp.einsum("kmd,md->km", basis, w), basis)
    return basis, w, along, jnp.linalg.norm(w, axis=1)
