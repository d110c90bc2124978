"""Problems: N clients, each with a function f_i, the mean of a loss over the client's examples."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from types import FunctionType
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from covary.checks import non_negative, positive
from covary.data.federated import FederatedData
from covary.errors import InvalidInput, refused
from covary.model_functions import (
    ModelFunction,
    Split,
    as_it_is_now,
    buffers_at_start,
    check_metrics,
    check_new_buffers,
    compiled_on_cpu,
    compiled_quickly,
    on_cpu,
    rows_of,
    shape_of_params,
    takes,
    traced,
    trained_only,
)
from covary.running.job import COLUMNS
from covary.runs import machine

NOISES = (0.01, 0.1)  # by which the start is moved to see how a loss behaves


@dataclass(frozen=True, eq=False)
class Problem:
    """The problem to minimise: f(x) = sum_i p_i f_i(x), with f_i the mean loss over client i's examples."""

    init: Callable[[Any], Any]  # (key) -> params, those that are trained
    loss: ModelFunction
    metrics: ModelFunction | None  # returns a dict of scalars
    data: FederatedData
    test: Any = None
    split: Split | None = None  # where some parameters are frozen
    frozen: dict[str, Any] | None = None  # these, by path
    buffers: np.ndarray | None = None  # at the start, as a vector

    engine: ClassVar[str] = "covary._engine.runtime"  # the module that runs it

    @property
    def held(self) -> tuple[Any, Any]:
        """What its functions hold: frozen parameters, and buffers at the start."""
        return self.frozen, self.buffers

    def without_metrics(self) -> Problem:
        """The same problem, of which only the loss is measured."""
        return replace(self, metrics=None)

    def complete(self, trained: Any) -> Any:
        """The model's params, with the frozen ones among them."""
        return trained if self.split is None else self.split.join(trained, self.frozen or {})

    def buffers_of(self, vector: Any) -> Any:
        """The model's buffers in its own form."""
        to_buffers = self.loss.to_buffers
        return None if to_buffers is None else jax.tree.map(np.asarray, to_buffers(vector))

    @property
    def n_clients(self) -> int:
        return self.data.n_clients

    @property
    def metric_names(self) -> tuple[str, ...]:
        if self.data.streamed and self.test is None:
            return ()  # a metric need not be a mean, so it cannot be measured on streamed data
        return tuple(self._metric_shapes)

    @cached_property
    def shapes(self) -> tuple[Any, Any]:
        """The shapes of the model's params and of a small batch."""
        return shape_of_params(self.init), rows_of(self.data.examples, 2)

    @property
    def means(self) -> frozenset[str]:
        """The metrics that return one number per example, of which the mean is meant."""
        return frozenset(name for name, value in self._metric_shapes.items() if value.shape)

    @cached_property
    def _metric_shapes(self) -> dict[str, Any]:
        return {} if self.metrics is None else jax.eval_shape(self.metrics, *self.shapes)

    @cached_property
    def _few(self) -> Any:
        """A few examples from all over the data."""
        some = np.unique(np.linspace(0, self.data.n_examples - 1, 16).astype(int))
        return jax.tree.map(lambda a: np.asarray(a[some]), self.data.examples)

    @cached_property
    def _losses_of_few(self) -> list[tuple[float, float, np.ndarray]]:
        """The loss of a few examples, of the same examples repeated, and of each alone: near the start, and farther."""
        compiled = _compiled_losses(self.loss.holding())
        found = [compiled(self.held, self._near_start(noise), self._few) for noise in NOISES]
        return [(float(once), float(twice), np.asarray(each)) for once, twice, each in found]

    def _near_start(self, noise: float) -> Any:
        """The model's initial params, moved by noise."""
        draws = noise * np.random.default_rng(0).normal(size=2**16)
        return jax.tree.map(lambda a: a + np.resize(draws, a.shape).astype(a.dtype), self._first_start)

    @cached_property
    def _first_start(self) -> Any:
        return self._initial(0)

    def _initial(self, seed: int) -> Any:
        """The model's initial params, in NumPy."""
        with on_cpu():
            key = jax.random.fold_in(jax.random.key(seed), 0)
        return jax.tree.map(np.asarray, self._compiled_init(key))

    @cached_property
    def _compiled_init(self) -> Callable[[Any], Any]:
        shared = isinstance(self.init, FunctionType)  # a method is compiled for this problem, and freed with it
        return _compiled_init(self.init) if shared else compiled_on_cpu(self.init)

    def lowered(self) -> str:
        """The loss and the metrics as XLA text. Two models with the same text are the same."""

        def text(function: ModelFunction, *key: Any) -> str:
            call = jax.jit(lambda held, *args: function.holding(*held)(*args))
            return call.lower(self.held, *self.shapes, *key).as_text()

        texts = [text(function) for function in (self.loss, self.metrics) if function is not None]
        return "".join(texts) + (text(self.loss, jax.random.key(0)) if self.loss.draws else "")

    @cached_property
    def mixes_examples(self) -> bool:
        """Whether the loss of a batch differs from the mean of its examples' losses, as with BatchNorm."""
        if self.buffers is not None:
            return True
        first, *others = self._losses_of_few
        seen = [first, *(losses for losses in others if np.isfinite(losses[0]))]
        return not all(abs(once - each.mean()) <= _rounding(once, each) for once, _, each in seen)

    def refuse_other_losses(self, one_by_one: bool) -> None:
        """Reject a loss that is not a mean over the batch and, if batches differ in size, one that mixes examples."""
        once, twice, each = self._losses_of_few[0]
        if not np.isfinite([once, twice]).all():
            raise InvalidInput(
                f"loss(params, batch) is {once} at the starting point. Check the scale of the data, init, and the loss "
                "for divisions by zero and logarithms of zero."
            )
        if abs(once - twice) > _rounding(once, each):
            raise InvalidInput(
                "loss(params, batch) must be the mean over the batch, but repeating the same examples changes it from "
                f"{once:.4g} to {twice:.4g}. Return jnp.mean(...), not a sum, so that gradients on batches and on all "
                "data have the same scale."
            )
        if one_by_one and self.buffers is not None:
            raise InvalidInput(
                "A model with buffers needs batches of one size, and here they differ, or data is streamed. Give every "
                "client the same number of examples, and use a batch_size that divides it. Or use LayerNorm or "
                "GroupNorm, which have no buffers."
            )
        if (one_by_one or (self.loss.draws and self.buffers is None)) and self.mixes_examples:
            raise InvalidInput(
                "loss(params, batch) must be the mean of its examples' own losses here, because batches differ in "
                "size, data is streamed, or the loss takes a key. On the first examples it is not. Make each "
                "example's loss independent of the others (BatchNorm is not), or give every client the same number "
                "of examples in memory."
            )

    def in_precision(self, precision: str | None) -> ModelFunction:
        """The loss as local steps compute it in a precision. One that is not finite in it is rejected."""
        if precision is None:
            return self.loss
        loss = replace(self.loss, precision=precision)
        try:
            traced("loss", loss, *self.shapes)
        except TypeError as error:
            error.add_note(
                f"With precision={precision!r}, the real numbers of params and batch are {precision}. A loss that "
                "takes `precision` as a keyword argument gets them as they are and does its own rounding."
            )
            raise
        compiled = _compiled_loss(loss.holding())
        for noise, (expected, _, _) in zip(NOISES, self._losses_of_few, strict=True):
            value = float(compiled(self.held, self._near_start(noise), self._few))
            if np.isfinite(expected) and not np.isfinite(value):
                raise InvalidInput(
                    f"loss(params, batch) is {value} near the starting point with precision={precision!r}, and "
                    f"{expected:.4g} without it. Leave precision out, or find what needs more digits (a logarithm of a "
                    "small difference, a division by one) and compute it in float32: x.astype(jnp.float32)."
                )
        return loss

    def start(self, x0: Any, seed: int) -> tuple[np.ndarray, Callable[[Any], Any]]:
        """The flat starting point (from `x0`, or from `init` with the seed) and the function from it back to params."""
        size = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(shape_of_params(self.init)))
        if size > machine.host_memory() / 4:
            came, room = f"{size / 2**30:,.1f} GiB", f"{machine.host_memory() / 2**30:,.1f} GiB"
            fix = "Use a smaller model: a round needs memory for several copies of it."
            raise refused("init(key)", f"at most a quarter of this machine's {room}", came, fix)
        params = self._first_start if seed == 0 else self._initial(seed)
        flat, unravel = ravel_pytree(params)
        x = np.asarray(flat)
        if not np.isfinite(x).all():
            raise refused("init(key)", "finite", "NaN or infinity in it", "Check the scale of the initial parameters.")
        if x0 is None:
            return x, unravel
        if self.split is not None and jax.tree.structure(x0) == self.split.tree:
            x0 = self._trained_part(self.split, x0)
        if jax.tree.structure(x0) == jax.tree.structure(params):
            shapes = [np.shape(leaf) for leaf in jax.tree.leaves(x0)]
            if shapes == [np.shape(leaf) for leaf in jax.tree.leaves(params)]:
                x0 = np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(x0)])
        try:
            flat = np.asarray(x0)
            flat = np.atleast_1d(flat).astype(x.dtype) if flat.dtype.kind in "biuf" else np.empty(0)
        except (TypeError, ValueError):
            flat = np.empty(0)
        if flat.shape != x.shape:
            came = f"shape {np.shape(x0)}" if hasattr(x0, "shape") or np.isscalar(x0) else type(x0).__name__
            raise refused(
                "x0", f"the model's params or a vector of {x.size} numbers", came, "Pass run.params, for example."
            )
        if not np.isfinite(flat).all():
            raise refused("x0", "finite", "NaN or infinity in it", "Start from finite parameters.")
        return flat, unravel

    def _trained_part(self, split: Split, params: Any) -> Any:
        """The trained ones of all parameters, whose others must be the frozen ones."""
        for path, leaf in split.part(params, trained=False).items():
            if not np.array_equal(leaf, (self.frozen or {})[path], equal_nan=True):
                fix = "Build the model with them: what is frozen comes from init."
                raise refused(f"x0[{path!r}]", "the model's own, as it is frozen", "other numbers", fix)
        return split.part(params, trained=True)


def supervised(
    model: Any,
    data: FederatedData,
    test: Any = None,
    *,
    trainable: Callable[[str], bool] | Any = None,
) -> Problem:
    """The problem of training a model on federated data.

    Args:
        model: any object with `init(key) -> params`, `loss(params, batch) -> scalar` (the mean over the batch) and,
            optionally, `metrics(params, batch) -> dict`. A metric is a scalar, measured on all test examples at once,
            or an array with one number per example, whose mean is measured. A loss with dropout or other noise is
            `loss(params, batch, *, key)`. In local steps it gets one example at a time, each with a key that is fixed
            by the seed, round, exchange, client, step and example. Where the loss is only measured, the key is None.
            A model with buffers, such as BatchNorm's statistics, has `init_buffers(key)`, and its loss is
            `loss(params, batch, *, buffers) -> (scalar, new buffers)`; `metrics` may take `buffers` too. The buffers
            of the cohort are averaged in every round.
        data: the clients' examples.
        test: a batch for the metrics. Without it they are measured on the training data, or not at all if that is
            streamed.
        trainable: which parameters are trained: a function of a parameter's path, such as "layers/0/weight", or
            booleans nested like the params. By default all are. The others are those of `init` with seed 0, whatever
            the seed of a run. They stay as they are, and are not part of x, c, the c_i or what is sent.

    >>> import covary as cv
    >>> (x, y), test = cv.datasets.digits()
    >>> data = cv.partition.by_similarity(x, y, n_clients=20, similarity=0.1)
    >>> problem = cv.supervised(cv.models.logistic_regression(64, 10), data, test)
    >>> problem.n_clients
    20
    """
    torch = sys.modules.get("torch")  # which is there if the model is one of its modules
    if torch is not None and isinstance(model, torch.nn.Module):
        fix = "Use covary.torch.supervised(module, loss, data)."
        raise refused("model", "a model in JAX", f"{type(model).__name__}, a torch.nn.Module", fix)
    if not isinstance(data, FederatedData):
        raise refused(
            "data", "a FederatedData", type(data).__name__, "Use covary.partition or FederatedData.from_clients."
        )
    for method in ("init", "loss"):
        if not callable(getattr(model, method, None)):
            raise refused("model", f"an object with a method {method}", type(model).__name__, "See covary.models.")
    check = getattr(model, "check", None)
    if test is not None:
        test = _checked_test(test, data.examples)
    if check is not None:
        check(data.examples)
        if test is not None:
            check(test)

    init, split, frozen = as_it_is_now(model.init), None, None
    if trainable is not None:
        init, split, frozen = trained_only(init, trainable)
    params, batch = shape_of_params(init), rows_of(data.examples, 2)
    buffers, to_buffers = buffers_at_start(model, params)
    own = ModelFunction(
        as_it_is_now(model.loss),
        draws=takes(model.loss, "key"),
        split=split,
        to_buffers=to_buffers,
        rounds_itself=takes(model.loss, "precision"),
    ).holding(frozen, buffers)
    loss = traced("loss", own, params, batch)
    if own.draws:
        traced("loss", own, params, batch, jax.random.key(0))
    if to_buffers is not None:
        check_new_buffers(own, params, batch)
    if getattr(loss, "shape", None) != () or not jnp.issubdtype(loss.dtype, jnp.floating):
        came = f"shape {loss.shape}, dtype {loss.dtype}" if hasattr(loss, "shape") else type(loss).__name__
        raise refused(
            "loss(params, batch)", "one real number", came, "Return the mean over the batch with jnp.mean(...)."
        )
    metrics = getattr(model, "metrics", None)
    if metrics is not None and not callable(metrics):
        raise refused("model.metrics", "a method", type(metrics).__name__, "Leave it out, or return a dict of numbers.")
    if metrics is not None:
        reads = to_buffers if takes(metrics, "buffers") else None
        metrics = ModelFunction(as_it_is_now(metrics), split=split, to_buffers=reads).holding(frozen, buffers)
        values = traced("metrics", metrics, params, batch)
        check_metrics(values, 2)
        check_metrics(traced("metrics", metrics, params, rows_of(data.examples, 3)), 3)
        for name in values:
            if name in COLUMNS or name.startswith("average_"):
                raise refused("metrics", "named differently from covary's columns", repr(name), "Choose another name.")
    return Problem(init, own, metrics, data, test, split, frozen, buffers)


def quadratics(A: Any, b: Any) -> Problem:
    """N quadratic clients, f_i(x) = ½ xᵀ A_i x + b_iᵀ x.

    Args:
        A: symmetric matrices, of shape (N, d, d).
        b: vectors, of shape (N, d).

    >>> import numpy as np, covary as cv
    >>> problem = cv.quadratics(A=np.stack([np.eye(2), 3 * np.eye(2)]), b=[[1.0, 0.0], [0.0, 1.0]])
    >>> run = cv.simulate(cv.scaffold(eta_l=0.1), problem, rounds=100, local_steps=5)
    >>> bool(np.allclose(run.x, [-0.25, -0.25], atol=1e-4))  # the solution of mean(A) x = -mean(b)
    True
    """
    try:
        A, b = np.asarray(A, float), np.asarray(b, float)
    except (TypeError, ValueError):
        raise refused(
            "A and b", "arrays of numbers", type(A).__name__, "Stack one matrix and one vector per client."
        ) from None
    if A.ndim != 3 or A.shape[1] != A.shape[2] or A.shape[0] == 0 or A.shape[1] == 0:
        raise refused("A", "of shape (N, d, d)", f"shape {A.shape}", "Stack one square matrix per client.")
    if b.shape != A.shape[:2]:
        raise refused("b", f"of shape {A.shape[:2]}", f"shape {b.shape}", "Stack one vector per client.")
    if not (np.isfinite(A).all() and np.isfinite(b).all()):
        raise refused("A and b", "finite", "NaN or infinity in them", "Check how they were computed.")
    if not np.allclose(A, A.swapaxes(1, 2)):
        i = int(np.flatnonzero(~np.isclose(A, A.swapaxes(1, 2)).all(axis=(1, 2)))[0])
        raise refused(
            "A",
            "symmetric matrices",
            f"an asymmetric A[{i}]",
            "Use (A + A.swapaxes(1, 2)) / 2, which gives the same f_i.",
        )
    d = b.shape[1]
    return Problem(_zeros(d), ModelFunction(_quadratic_loss), None, FederatedData((A, b), np.ones(len(b), int)))


def lower_bound(G: float, mu: float = 1.0) -> Problem:
    """The two clients of the paper's lower bound (Theorem II): f_1(x) = mu x² + G x and f_2(x) = -G x.

    Their mean is f(x) = ½ mu x², with its optimum at 0 for every G.

    Args:
        G: the gradient dissimilarity.
        mu: the strong convexity of f.

    >>> import covary as cv
    >>> cv.lower_bound(G=10.0).n_clients
    2

    Reference: Karimireddy et al. 2020, appendix, proof of Theorem II.
    """
    non_negative("G", G)
    positive("mu", mu)
    return quadratics(A=[[[2 * mu]], [[0.0]]], b=[[G], [-G]])


@functools.lru_cache(maxsize=64)
def _compiled_init(init: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return compiled_on_cpu(init)


@functools.lru_cache(maxsize=64)
def _compiled_loss(bare: ModelFunction) -> Callable[[Any, Any, Any], Any]:
    """`(held, params, batch) -> loss of the batch`."""
    return compiled_quickly(lambda held, *given: bare.holding(*held)(*given))


@functools.lru_cache(maxsize=64)
def _compiled_losses(bare: ModelFunction) -> Callable[[Any, Any, Any], tuple[Any, Any, Any]]:
    """`(held, params, batch) -> loss of the batch, of the batch repeated, of each example`."""

    @compiled_quickly
    def losses(held: Any, params: Any, batch: Any) -> tuple[Any, Any, Any]:
        loss = bare.holding(*held)
        twice = jax.tree.map(lambda a: jnp.concatenate([a, a]), batch)
        each = jax.vmap(lambda example: loss(params, jax.tree.map(lambda a: a[None], example)))(batch)
        return loss(params, batch), loss(params, twice), each

    return losses


def _rounding(once: float, each: np.ndarray) -> float:
    """By how much losses may differ that are the same."""
    return 1e-3 * max(abs(once), 1e-3 * np.abs(each).max())


def _checked_test(test: Any, examples: Any) -> Any:
    """The test batch as arrays. It must be nested like the training data and have finite values."""
    form = jax.tree.structure(examples)
    test = jax.tree.map(np.asarray, test)
    leaves = jax.tree.leaves(test)
    if jax.tree.structure(test) != form or any(leaf.ndim == 0 for leaf in leaves):
        raise refused(
            "test", f"a batch nested like the data, {form}", jax.tree.structure(test), "Pass (x, y), for example."
        )
    if len({len(leaf) for leaf in leaves}) > 1 or len(leaves[0]) == 0:
        shapes = ", ".join(str(leaf.shape) for leaf in leaves)
        raise refused(
            "test", "arrays of equal length with at least one row", f"shapes {shapes}", "Each row is one example."
        )
    for leaf, own in zip(leaves, jax.tree.leaves(examples), strict=True):
        if leaf.shape[1:] != own.shape[1:] or leaf.dtype.kind not in "biuf":
            came = f"shape {leaf.shape}, dtype {leaf.dtype}"
            raise refused(
                "test",
                f"numbers of shape (rows, {', '.join(map(str, own.shape[1:]))})",
                came,
                "Match the training data.",
            )
        if leaf.dtype.kind == "f" and not np.isfinite(leaf).all():
            row = int(np.flatnonzero(~np.isfinite(leaf.reshape(len(leaf), -1)).all(axis=1))[0])
            raise InvalidInput(f"test has NaN or infinity, first in row {row}. Drop or impute such values.")
    return test


@functools.lru_cache(maxsize=64)
def _zeros(d: int) -> Callable[[Any], Any]:
    return lambda key: jnp.zeros(d)


def _quadratic_loss(x: Any, batch: Any) -> Any:
    A, b = batch
    return jnp.mean(0.5 * jnp.einsum("d,nde,e->n", x, A, x) + b @ x)
