"""Problems: N clients, each with a function f_i, the mean of a loss over the client's examples."""

from __future__ import annotations

import functools
import inspect
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from types import FunctionType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from covary.checks import non_negative, positive
from covary.data.federated import FederatedData
from covary.errors import CovaryError, InvalidInput, refused
from covary.runs import machine

ENGINE_COLUMNS = ("round", "loss", "cohort", "drift", "control_error", "control_change", "bytes_up", "bytes_down")


@dataclass(frozen=True)
class Split:
    """Which of a model's parameters are trained. Both parts are dicts by path."""

    tree: Any  # of all params
    paths: tuple[str, ...]
    trained: tuple[bool, ...]

    def part(self, params: Any, trained: bool) -> dict[str, Any]:
        """The trained parameters, or the others."""
        leaves = zip(self.paths, self.trained, jax.tree.leaves(params), strict=True)
        return {path: leaf for path, is_trained, leaf in leaves if is_trained == trained}

    def join(self, trained: dict[str, Any], frozen: dict[str, Any]) -> Any:
        """All parameters, in the model's own form."""
        return jax.tree.unflatten(self.tree, [(trained if path in trained else frozen)[path] for path in self.paths])


class Held:
    """Arrays that a function of the model's needs besides its arguments; hashable, by identity."""

    def __init__(self, arrays: Any):
        self.arrays = arrays


@dataclass(frozen=True)
class ModelFunction:
    """A model's loss or metrics, `(params, batch, key) -> ...`. Without a key nothing in it is random.

    With frozen parameters, `params` are the trained ones, and the function must hold the others when it is called, as
    it must hold a model's buffers. A compiled program is named after the function that holds neither, and gets them as
    arguments.
    """

    function: Callable[..., Any]
    draws: bool = False  # whether it takes a key
    split: Split | None = None
    to_buffers: Callable[[Any], Any] | None = None  # from a vector, if it takes buffers
    frozen: Held | None = None
    buffers: Held | None = None

    def __call__(self, params: Any, batch: Any, key: Any = None) -> Any:
        result = self._called(params, batch, key, None if self.buffers is None else self.buffers.arrays)
        return result[0] if self.to_buffers is not None and isinstance(result, tuple) else result

    def stepping(self, params: Any, batch: Any, key: Any, buffers: Any) -> tuple[Any, Any]:
        """The loss and the new buffers, as a vector."""
        value, new = self._called(params, batch, key, buffers)
        return value, ravel_pytree(new)[0].astype(buffers.dtype)

    def _called(self, params: Any, batch: Any, key: Any, buffers: Any) -> Any:
        more: dict[str, Any] = {"key": key} if self.draws else {}
        if self.split is not None:
            assert self.frozen is not None
            params = self.split.join(params, self.frozen.arrays)
        if self.to_buffers is not None:
            more["buffers"] = self.to_buffers(buffers)
        return self.function(params, batch, **more)

    def holding(self, frozen: Any = None, buffers: Any = None) -> ModelFunction:
        """The same with what it needs of frozen parameters and of buffers (a vector), or with neither."""
        return replace(
            self,
            frozen=None if self.split is None or frozen is None else Held(frozen),
            buffers=None if self.to_buffers is None or buffers is None else Held(buffers),
        )


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

    @property
    def held(self) -> tuple[Any, Any]:
        """What its functions hold: frozen parameters, and buffers at the start."""
        return self.frozen, self.buffers

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

    @cached_property
    def metric_names(self) -> tuple[str, ...]:
        if self.metrics is None or (self.data.streamed and self.test is None):
            return ()  # a metric need not be a mean, so it cannot be measured on streamed data
        return tuple(jax.eval_shape(self.metrics, *self.shapes))

    @cached_property
    def shapes(self) -> tuple[Any, Any]:
        """The shapes of the model's params and of a small batch."""
        return _shape_of_params(self.init), _rows(self.data.examples, 2)

    @cached_property
    def means(self) -> frozenset[str]:
        """The metrics that return one number per example, of which the mean is meant."""
        if self.metrics is None:
            return frozenset()
        values = jax.eval_shape(self.metrics, *self.shapes)
        return frozenset(name for name, value in values.items() if value.shape)

    @cached_property
    def _losses_of_few(self) -> list[tuple[float, float, np.ndarray]]:
        """The loss of a few examples, of the same examples repeated, and of each alone: near the start, and farther."""
        some = np.unique(np.linspace(0, self.data.n_examples - 1, 16).astype(int))
        few = jax.tree.map(lambda a: np.asarray(a[some]), self.data.examples)
        compiled = _compiled_losses(self.loss.holding())
        found = [compiled(self.held, self._near_start(0, noise), few) for noise in (0.01, 0.1)]
        return [(float(once), float(twice), np.asarray(each)) for once, twice, each in found]

    def _near_start(self, seed: int, noise: float) -> Any:
        """The model's initial params, moved by noise."""
        draws = noise * np.random.default_rng(seed).normal(size=2**16)
        return jax.tree.map(lambda a: a + np.resize(draws, a.shape).astype(a.dtype), self._initial(0))

    def _initial(self, seed: int) -> Any:
        """The model's initial params, in NumPy."""
        key = jax.random.fold_in(jax.random.key(seed), 0)
        return jax.tree.map(np.asarray, self._compiled_init(key))

    @cached_property
    def _compiled_init(self) -> Callable[[Any], Any]:
        shared = isinstance(self.init, FunctionType)  # a method is compiled for this problem, and freed with it
        return _compiled_init(self.init) if shared else jax.jit(self.init)

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
        if (one_by_one or (self.loss.draws and self.buffers is None)) and self.mixes_examples:
            raise InvalidInput(
                "loss(params, batch) must be the mean of its examples' own losses here, because batches differ in "
                "size, data is streamed, or the loss takes a key. On the first examples it is not. Make each "
                "example's loss independent of the others (BatchNorm is not), or give every client the same number "
                "of examples in memory."
            )

    def start(self, x0: Any, seed: int) -> tuple[np.ndarray, Callable[[Any], Any]]:
        """The flat starting point (from `x0`, or from `init` with the seed) and the function from it back to params."""
        size = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(_shape_of_params(self.init)))
        if size > machine.host_memory() / 4:
            came, room = f"{size / 2**30:,.1f} GiB", f"{machine.host_memory() / 2**30:,.1f} GiB"
            fix = "Use a smaller model: a round needs memory for several copies of it."
            raise refused("init(key)", f"at most a quarter of this machine's {room}", came, fix)
        params = self._initial(seed)
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

    init, split, frozen = _as_it_is_now(model.init), None, None
    if trainable is not None:
        init, split, frozen = _trained_only(init, trainable)
    params, batch = _shape_of_params(init), _rows(data.examples, 2)
    buffers, to_buffers = _buffers_of(model)
    takes = functools.partial(_takes, model.loss)
    own = ModelFunction(_as_it_is_now(model.loss), takes("key"), split, to_buffers).holding(frozen, buffers)
    loss = _trace("loss", own, params, batch)
    if own.draws:
        _trace("loss", own, params, batch, jax.random.key(0))
    if to_buffers is not None:
        _check_new_buffers(own, params, batch)
    if getattr(loss, "shape", None) != () or not jnp.issubdtype(loss.dtype, jnp.floating):
        came = f"shape {loss.shape}, dtype {loss.dtype}" if hasattr(loss, "shape") else type(loss).__name__
        raise refused(
            "loss(params, batch)", "one real number", came, "Return the mean over the batch with jnp.mean(...)."
        )
    metrics = getattr(model, "metrics", None)
    if metrics is not None and not callable(metrics):
        raise refused("model.metrics", "a method", type(metrics).__name__, "Leave it out, or return a dict of numbers.")
    if metrics is not None:
        reads = to_buffers if _takes(metrics, "buffers") else None
        metrics = ModelFunction(_as_it_is_now(metrics), split=split, to_buffers=reads).holding(frozen, buffers)
        values = _trace("metrics", metrics, params, batch)
        _check_metrics(values, 2)
        _check_metrics(_trace("metrics", metrics, params, _rows(data.examples, 3)), 3)
        for name in values:
            if name in ENGINE_COLUMNS or name.startswith("average_"):
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
    return jax.jit(init)


@functools.lru_cache(maxsize=64)
def _compiled_losses(bare: ModelFunction) -> Callable[[Any, Any, Any], tuple[Any, Any, Any]]:
    """`(held, params, batch) -> loss of the batch, of the batch repeated, of each example`."""

    @jax.jit
    def losses(held: Any, params: Any, batch: Any) -> tuple[Any, Any, Any]:
        loss = bare.holding(*held)
        twice = jax.tree.map(lambda a: jnp.concatenate([a, a]), batch)
        each = jax.vmap(lambda example: loss(params, jax.tree.map(lambda a: a[None], example)))(batch)
        return loss(params, batch), loss(params, twice), each

    return losses


@dataclass(frozen=True)
class _TrainedOnly:
    """The trained part of what a model's `init` returns."""

    init: Callable[[Any], Any]
    split: Split

    def __call__(self, key: Any) -> dict[str, Any]:
        return self.split.part(self.init(key), trained=True)


def _trained_only(init: Callable[[Any], Any], trainable: Any) -> tuple[_TrainedOnly, Split, dict[str, Any]]:
    """The `init` of the trained parameters, which these are, and the others' values."""
    shapes = _trace("init", init, jax.random.key(0))
    paths = list(by_path(shapes))
    allowed = "a function of a path that returns a bool, or bools nested like the params"
    some = ", ".join(map(repr, paths[:5])) + (f" and {len(paths) - 5} more" if len(paths) > 5 else "")
    if callable(trainable) and jax.tree_util.treedef_is_leaf(jax.tree.structure(trainable)):
        chosen = [trainable(path) for path in paths]
    else:
        try:
            spread = jax.tree.map(lambda flag, part: jax.tree.map(lambda _: flag, part), trainable, shapes)
        except (TypeError, ValueError, KeyError) as error:
            raise refused("trainable", allowed, f"{type(trainable).__name__} ({error})", f"Paths: {some}.") from None
        chosen = jax.tree.leaves(spread)
    for path, flag in zip(paths, chosen, strict=True):
        if not isinstance(flag, bool | np.bool_):
            raise refused("trainable", allowed, f"{flag!r} for {path!r}", f"Paths: {some}.")
    if not any(chosen):
        raise refused("trainable", "true for at least one parameter", "none selected", f"Paths: {some}.")
    split = Split(jax.tree.structure(shapes), tuple(paths), tuple(map(bool, chosen)))
    frozen = split.part(init(jax.random.fold_in(jax.random.key(0), 0)), trained=False)
    for path, leaf in frozen.items():
        if jnp.issubdtype(leaf.dtype, jax.dtypes.extended):
            fix = "Keep random keys out of the params; a loss gets one as its argument."
            raise refused(f"params[{path!r}]", "an array of numbers", f"dtype {leaf.dtype}", fix)
    return _TrainedOnly(init, split), split, jax.tree.map(np.asarray, frozen)


def _check_metrics(values: Any, rows: int) -> None:
    """Reject what is not a dict of numbers, or of one number per row."""
    leaves = jax.tree.leaves(values)
    named = isinstance(values, dict) and all(isinstance(name, str) for name in values) and len(leaves) == len(values)
    if named and all(np.shape(leaf) in ((), (rows,)) and leaf.dtype.kind != "c" for leaf in leaves):
        return
    came = _described(values=values) if leaves else repr(values)
    allowed = "a dict of single numbers, or of arrays with one number per example"
    raise refused("metrics(params, batch)", allowed, came, "Return {'accuracy': ...}, for example.")


def by_path(tree: Any) -> dict[str, Any]:
    """The arrays of a tree, in order, by their paths.

    >>> by_path({"layers": [{"w": 1.0}, {"w": 2.0}]})
    {'layers/0/w': 1.0, 'layers/1/w': 2.0}
    """
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    names = [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in leaves]
    if len(set(names)) < len(names):
        same = next(name for name, count in Counter(names).items() if count > 1)
        raise refused("paths of arrays", "different", f"{same!r} twice", "Use names without slashes.")
    return dict(zip(names, (leaf for _, leaf in leaves), strict=True))


def _rounding(once: float, each: np.ndarray) -> float:
    """By how much losses may differ that are the same."""
    return 1e-3 * max(abs(once), 1e-3 * np.abs(each).max())


def _buffers_of(model: Any) -> tuple[np.ndarray | None, Callable[[Any], Any] | None]:
    """A model's buffers at the start, as a vector, and the function back to its own form."""
    has, takes = hasattr(model, "init_buffers"), _takes(model.loss, "buffers")
    if has != takes:
        came = "init_buffers alone" if has else "loss(params, batch, *, buffers) alone"
        fix = "init_buffers(key) returns the buffers at the start; the loss returns (value, new buffers)."
        raise refused("model", "one with both init_buffers and a loss that takes buffers, or neither", came, fix)
    if not has:
        return None, None
    buffers = jax.tree.map(np.asarray, jax.jit(model.init_buffers)(jax.random.key(0)))
    leaves = jax.tree_util.tree_leaves_with_path(buffers)
    if not leaves:
        raise refused("init_buffers(key)", "a tree with at least one array", repr(buffers), "Leave it out instead.")
    for path, leaf in leaves:
        name = f"buffers{jax.tree_util.keystr(path)}"
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            raise refused(name, "real numbers", f"dtype {leaf.dtype}", "Keep counters out of the buffers.")
        if not np.isfinite(leaf).all():
            raise refused(name, "finite", "NaN or infinity in it", "Check how it is initialised.")
    vector, to_buffers = ravel_pytree(buffers)
    return np.asarray(vector), to_buffers


def _check_new_buffers(loss: ModelFunction, params: Any, batch: Any) -> None:
    """Reject a loss that does not return buffers of the form that it gets."""
    assert loss.buffers is not None
    assert loss.to_buffers is not None
    result = jax.eval_shape(lambda p, b, v: loss._called(p, b, None, v), params, batch, loss.buffers.arrays)
    old, fix = loss.to_buffers(loss.buffers.arrays), "Return the new value of every buffer, in the form it came in."
    allowed = "(value, buffers), with the buffers in the form of init_buffers"
    if not (isinstance(result, tuple) and len(result) == 2):
        raise refused("loss(params, batch, *, buffers)", allowed, type(result).__name__, fix)
    if jax.tree.structure(result[1]) != jax.tree.structure(old):
        raise refused("loss(params, batch, *, buffers)", allowed, f"{jax.tree.structure(result[1])}", fix)
    for (path, new), was in zip(jax.tree_util.tree_leaves_with_path(result[1]), jax.tree.leaves(old), strict=True):
        if np.shape(new) != np.shape(was) or not jnp.issubdtype(new.dtype, jnp.floating):
            name, came = f"buffers{jax.tree_util.keystr(path)}", f"{new.dtype} {new.shape}"
            raise refused(f"{name} of the loss", f"real numbers of shape {np.shape(was)}", came, fix)


def _takes(function: Callable[..., Any], name: str) -> bool:
    """Whether a function takes an argument of that name, without a default or with None."""
    try:
        found = inspect.signature(function).parameters.get(name)
    except (TypeError, ValueError):  # built in, without a signature
        return False
    if found is None or found.kind not in (found.KEYWORD_ONLY, found.POSITIONAL_OR_KEYWORD):
        return False
    return found.default is found.empty or found.default is None


def _as_it_is_now(function: Any) -> Any:
    """The function, or a new wrapper of a method: programs are cached by their functions, and an object can change."""
    return function if function is None or isinstance(function, FunctionType) else functools.partial(function)


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


def _shape_of_params(init: Callable[[Any], Any]) -> Any:
    params = _trace("init", init, jax.random.key(0))
    leaves = jax.tree_util.tree_leaves_with_path(params)
    if not leaves:
        raise refused("init(key)", "a tree with at least one array", params, "Return the model's parameters.")
    for path, leaf in leaves:
        if not hasattr(leaf, "dtype"):
            came = type(leaf).__name__
            raise refused(
                f"params{jax.tree_util.keystr(path)}", "an array", came, "Keep functions and strings out of params."
            )
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            raise refused(
                f"params{jax.tree_util.keystr(path)}",
                "real numbers",
                f"dtype {leaf.dtype}",
                "Keep counters out of params.",
            )
    return params


def _rows(examples: Any, count: int) -> Any:
    """The shapes of a small batch."""
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct((count, *a.shape[1:]), jnp.asarray(a[:0]).dtype), examples)


def _trace(name: str, function: Callable[..., Any], *args: Any) -> Any:
    """The shapes that a user's function returns. An error inside it gets a note with the arguments."""
    try:
        return jax.eval_shape(function, *args)
    except CovaryError:
        raise
    except Exception as error:
        named = {"key": args[0]} if len(args) == 1 else dict(zip(("params", "batch", "key"), args, strict=False))
        error.add_note(f"covary called the model's {name} with {_described(**named)}")
        if isinstance(function, ModelFunction) and function.draws and len(args) == 2:
            error.add_note("The key is None where the loss is measured: switch dropout and other noise off there.")
        elif name == "loss" and re.search(r"\b(rngs?|prng|key)\b", str(error), re.IGNORECASE):
            error.add_note("A loss that draws random numbers takes a key: loss(params, batch, *, key).")
        raise


def _described(**trees: Any) -> str:
    """Name, dtype and shape of at most five arrays.

    >>> _described(params={"w": jax.ShapeDtypeStruct((3, 2), np.dtype("float32"))}, batch=(np.zeros(4),))
    "params['w'] float32 (3, 2), batch[0] float64 (4,)"
    """
    leaves = [
        f"{name}{jax.tree_util.keystr(path)} {getattr(leaf, 'dtype', type(leaf).__name__)} {np.shape(leaf)}"
        for name, tree in trees.items()
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    ]
    return ", ".join(leaves[:5]) + (f" and {len(leaves) - 5} more arrays" if len(leaves) > 5 else "")
