"""What covary makes of a user's model: functions that take keys, frozen parameters and buffers, traced and checked."""

from __future__ import annotations

import contextlib
import functools
import inspect
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import FunctionType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from covary.errors import CovaryError, refused

# For programs that run once, by platform: XLA saves on the passes and the tuning of kernels that make them fast.
FEW_PASSES = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
QUICKLY = {"cpu": FEW_PASSES, "gpu": FEW_PASSES | {"xla_gpu_autotune_level": 0}}


def compiled_quickly(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, compiled for few calls."""
    return jax.jit(function, compiler_options=QUICKLY.get(jax.default_backend()))


def compiled_on_cpu(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same on the CPU, which compiles a model's `init` faster than a GPU, if JAX is configured with it.

    >>> compiled_on_cpu(lambda x: 2 * x)(jnp.ones(2)).tolist()
    [2.0, 2.0]
    """
    if _cpu() is None:
        return compiled_quickly(function)
    compiled = jax.jit(function, compiler_options=QUICKLY["cpu"])

    return lambda *args: compiled(*jax.device_put(args, _cpu()))


def on_cpu() -> contextlib.AbstractContextManager[Any]:
    """The CPU as JAX's device inside, if JAX is configured with it."""
    return contextlib.nullcontext() if _cpu() is None else jax.default_device(_cpu())


def _cpu() -> Any:
    with contextlib.suppress(RuntimeError):
        return jax.local_devices(backend="cpu")[0]
    return None


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

    With a precision, parameters and examples are rounded to it before the call, and the value is in float32 or wider. A
    function that takes the precision as an argument does this itself. Buffers and keys are never rounded.
    """

    function: Callable[..., Any]
    draws: bool = False  # whether it takes a key
    split: Split | None = None
    to_buffers: Callable[[Any], Any] | None = None  # from a vector, if it takes buffers
    frozen: Held | None = None
    buffers: Held | None = None
    rounds_itself: bool = False  # whether it takes a precision
    precision: str | None = None  # None is that of the parameters

    def __call__(self, params: Any, batch: Any, key: Any = None) -> Any:
        result = self.called(params, batch, key, None if self.buffers is None else self.buffers.arrays)
        value = result[0] if self.to_buffers is not None and isinstance(result, tuple) else result
        return value if self.precision is None else value.astype(jnp.promote_types(value.dtype, jnp.float32))

    def stepping(self, params: Any, batch: Any, key: Any, buffers: Any) -> tuple[Any, Any]:
        """The loss and the new buffers, as a vector."""
        value, new = self.called(params, batch, key, buffers)
        value = value.astype(jnp.promote_types(value.dtype, jnp.float32))
        leaves = [leaf.reshape(-1).astype(buffers.dtype) for leaf in jax.tree.leaves(new)]
        return value, jnp.concatenate(leaves)

    def called(self, params: Any, batch: Any, key: Any, buffers: Any) -> Any:
        more: dict[str, Any] = {"key": key} if self.draws else {}
        if self.split is not None:
            assert self.frozen is not None
            params = self.split.join(params, self.frozen.arrays)
        if self.rounds_itself:
            more["precision"] = self.precision
        elif self.precision is not None:
            params, batch = rounded((params, batch), self.precision)
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


def rounded(tree: Any, precision: str) -> Any:
    """A tree with its real numbers in another precision.

    >>> tree = rounded({"w": jnp.array([1.001]), "label": jnp.array([3])}, "bfloat16")
    >>> tree["w"].dtype.name, tree["w"].tolist(), tree["label"].dtype.kind
    ('bfloat16', [1.0], 'i')
    """
    return jax.tree.map(lambda a: a.astype(precision) if jnp.issubdtype(a.dtype, jnp.floating) else a, tree)


@dataclass(frozen=True)
class _TrainedOnly:
    """The trained part of what a model's `init` returns."""

    init: Callable[[Any], Any]
    split: Split

    def __call__(self, key: Any) -> dict[str, Any]:
        return self.split.part(self.init(key), trained=True)


def trained_only(init: Callable[[Any], Any], trainable: Any) -> tuple[_TrainedOnly, Split, dict[str, Any]]:
    """The `init` of the trained parameters, which these are, and the others' values."""
    shapes = traced("init", init, jax.random.key(0))
    paths = list(by_path(shapes))
    allowed = "a function of a path that returns a bool, or bools nested like the params"
    some = ", ".join(map(repr, paths[:5])) + (f" and {len(paths) - 5} more" if len(paths) > 5 else "")
    if callable(trainable) and jax.tree_util.treedef_is_leaf(jax.tree.structure(trainable)):
        chosen = [trainable(path) for path in paths]
    else:
        try:
            spread = jax.tree.map(lambda flag, part: jax.tree.map(lambda _: flag, part), trainable, shapes)
        except (TypeError, ValueError, KeyError):
            came = f"a {type(trainable).__name__} that is nested differently"
            raise refused("trainable", allowed, came, f"Paths: {some}.") from None
        chosen = jax.tree.leaves(spread)
    flags: list[Any] = list(chosen)
    chosen = [flag.item() if hasattr(flag, "item") and not np.ndim(flag) else flag for flag in flags]
    for path, flag in zip(paths, chosen, strict=True):
        if not isinstance(flag, bool | np.bool_):
            raise refused("trainable", allowed, f"{flag!r} for {path!r}", f"Paths: {some}.")
    if not any(chosen):
        raise refused("trainable", "true for at least one parameter", "none selected", f"Paths: {some}.")
    split = Split(jax.tree.structure(shapes), tuple(paths), tuple(map(bool, chosen)))
    frozen = split.part(compiled_on_cpu(init)(jax.random.fold_in(jax.random.key(0), 0)), trained=False)
    for path, leaf in frozen.items():
        if jnp.issubdtype(leaf.dtype, jax.dtypes.extended):
            fix = "Keep random keys out of the params; a loss gets one as its argument."
            raise refused(f"params[{path!r}]", "an array of numbers", f"dtype {leaf.dtype}", fix)
    return _TrainedOnly(init, split), split, jax.tree.map(np.asarray, frozen)


def check_metrics(values: Any, rows: int) -> None:
    """Reject what is not a dict of numbers, or of one number per row."""
    leaves = jax.tree.leaves(values)
    named = isinstance(values, dict) and all(isinstance(name, str) for name in values)
    numbers = named and all(hasattr(value, "dtype") for value in values.values())
    if numbers and all(np.shape(leaf) in ((), (rows,)) and leaf.dtype.kind != "c" for leaf in leaves):
        return
    came = described(values=values) if leaves else repr(values)
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


@dataclass(frozen=True)
class FromVector:
    """From a vector to a model's buffers, each in its own shape and type."""

    tree: Any
    forms: tuple[tuple[tuple[int, ...], Any], ...]

    def __call__(self, vector: Any) -> Any:
        vector, leaves, at = jnp.asarray(vector), [], 0  # JAX's arrays, as a model may change them in place
        for shape, dtype in self.forms:
            size = int(np.prod(shape))
            leaves.append(vector[at : at + size].reshape(shape).astype(dtype))
            at += size
        return jax.tree.unflatten(self.tree, leaves)


def buffers_at_start(model: Any, params: Any) -> tuple[np.ndarray | None, FromVector | None]:
    """A model's buffers at the start, as a vector, and the function back to its own form."""
    has = getattr(model, "init_buffers", None) is not None
    if has != takes(model.loss, "buffers"):
        came = "init_buffers alone" if has else "loss(params, batch, *, buffers) alone"
        fix = "init_buffers(key) returns the buffers at the start; the loss returns (value, new buffers)."
        raise refused("model", "one with both init_buffers and a loss that takes buffers, or neither", came, fix)
    if not has:
        return None, None
    traced("init_buffers", model.init_buffers, jax.random.key(0))
    buffers = compiled_on_cpu(model.init_buffers)(jax.random.key(0))
    leaves = jax.tree_util.tree_leaves_with_path(buffers)
    if not leaves:
        raise refused("init_buffers(key)", "a tree with at least one array", repr(buffers), "Leave it out instead.")
    for path, leaf in leaves:
        name = f"buffers{jax.tree_util.keystr(path)}"
        if leaf.dtype not in (jnp.float32, jnp.float64):
            fix = "Keep counters out of the buffers, and statistics exact."
            raise refused(name, "real numbers in float32 or float64", f"dtype {leaf.dtype}", fix)
        if leaf.dtype.itemsize > jnp.result_type(*jax.tree.leaves(params)).itemsize:
            fix = "They are summed in the params' type: use float32 params, or the same type for both."
            raise refused(name, "of a type no wider than the params'", f"dtype {leaf.dtype}", fix)
        if not np.isfinite(leaf).all():
            raise refused(name, "finite", "NaN or infinity in it", "Check how it is initialised.")
    forms = tuple((leaf.shape, leaf.dtype) for _, leaf in leaves)
    vector = np.concatenate([np.ravel(leaf) for _, leaf in leaves])
    return vector, FromVector(jax.tree.structure(buffers), forms)


def check_new_buffers(loss: ModelFunction, params: Any, batch: Any) -> None:
    """Reject a loss that does not return buffers of the form that it gets."""
    assert loss.buffers is not None
    assert loss.to_buffers is not None
    result = jax.eval_shape(lambda p, b, v: loss.called(p, b, None, v), params, batch, loss.buffers.arrays)
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


def takes(function: Callable[..., Any], name: str) -> bool:
    """Whether a function takes an argument of that name, without a default or with None."""
    try:
        found = inspect.signature(function).parameters.get(name)
    except (TypeError, ValueError):  # built in, without a signature
        return False
    if found is None or found.kind not in (found.KEYWORD_ONLY, found.POSITIONAL_OR_KEYWORD):
        return False
    return found.default is found.empty or found.default is None


def as_it_is_now(function: Any) -> Any:
    """The function, or a new wrapper of a method: programs are cached by their functions, and an object can change."""
    return function if function is None or isinstance(function, FunctionType) else functools.partial(function)


def shape_of_params(init: Callable[[Any], Any]) -> Any:
    params = traced("init", init, jax.random.key(0))
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


def rows_of(examples: Any, count: int) -> Any:
    """The shapes of a small batch."""
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct((count, *a.shape[1:]), jnp.asarray(a[:0]).dtype), examples)


def traced(name: str, function: Callable[..., Any], *args: Any) -> Any:
    """The shapes that a user's function returns. An error inside it gets a note with the arguments."""
    try:
        return jax.eval_shape(function, *args)
    except CovaryError:
        raise
    except Exception as error:
        named = {"key": args[0]} if len(args) == 1 else dict(zip(("params", "batch", "key"), args, strict=False))
        error.add_note(f"covary called the model's {name} with {described(**named)}")
        if isinstance(function, ModelFunction) and function.draws and len(args) == 2:
            error.add_note("The key is None where the loss is measured: switch dropout and other noise off there.")
        elif name == "loss" and re.search(r"\b(rngs?|prng|key)\b", str(error), re.IGNORECASE):
            error.add_note("A loss that draws random numbers takes a key: loss(params, batch, *, key).")
        raise


def described(**trees: Any) -> str:
    """Name, dtype and shape of at most five arrays.

    >>> described(params={"w": jax.ShapeDtypeStruct((3, 2), np.dtype("float32"))}, batch=(np.zeros(4),))
    "params['w'] float32 (3, 2), batch[0] float64 (4,)"
    """
    leaves = [
        f"{name}{jax.tree_util.keystr(path)} {getattr(leaf, 'dtype', type(leaf).__name__)} {np.shape(leaf)}"
        for name, tree in trees.items()
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    ]
    return ", ".join(leaves[:5]) + (f" and {len(leaves) - 5} more arrays" if len(leaves) > 5 else "")
