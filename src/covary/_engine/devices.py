"""The machine's devices, and how arrays are divided among them."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from covary.checks import whole
from covary.data.federated import FederatedData
from covary.errors import refused
from covary.problem import Problem

AXIS = "devices"


@dataclass(frozen=True)
class Place:
    """The devices that share a cohort, and the number of clients that each computes at once."""

    devices: tuple[Any, ...]
    width: int


@functools.lru_cache(maxsize=64)
def mesh(devices: tuple[Any, ...]) -> Mesh:
    return Mesh(np.array(devices), (AXIS,))


def sharded(function: Callable[..., Any], place: Place, in_specs: Any, out_specs: Any) -> Callable[..., Any]:
    """The function, run by every device on its share of the arguments."""
    grid = mesh(place.devices)
    return jax.shard_map(function, mesh=grid, in_specs=in_specs, out_specs=out_specs, check_vma=False)


def layout_of(place: Place, spec: PartitionSpec) -> NamedSharding:
    """How an array is divided among several devices."""
    return NamedSharding(mesh(place.devices), spec)


def lay_out(place: Place, tree: Any, spec: PartitionSpec | None = None) -> Any:
    """Send arrays to the devices: whole to each, or divided by a spec. Each of several hosts sends its own part."""
    if len(place.devices) == 1:
        return jax.device_put(tree, place.devices[0])
    sharding = layout_of(place, spec or PartitionSpec())

    def send(array: Any) -> Any:
        if jax.process_count() == 1:
            return jax.device_put(array, sharding)
        whole_array = np.asarray(array)
        return jax.make_array_from_callback(whole_array.shape, sharding, lambda index: whole_array[index])

    return jax.tree.map(send, tree)


def to_host(tree: Any) -> Any:
    """Fetch arrays from the devices, also arrays that are divided among several hosts."""

    def fetch(array: Any) -> np.ndarray:
        if isinstance(array, jax.Array) and not array.is_fully_addressable and not array.is_fully_replicated:
            from jax.experimental import multihost_utils

            return np.asarray(multihost_utils.process_allgather(array, tiled=True))
        return np.asarray(array)

    return jax.tree.map(fetch, tree)


def agreed(value: int) -> int:
    """The first host's value if several run together: clocks differ, but all hosts must decide alike."""
    if jax.process_count() == 1:
        return value
    from jax.experimental import multihost_utils

    return int(multihost_utils.broadcast_one_to_all(np.asarray(value, np.int32)))


def available(count: int | None) -> tuple[Any, ...]:
    """The first `count` devices of all hosts; by default all devices."""
    everything = jax.devices()
    if count is not None:
        whole("devices", count, 1)
        if count > len(everything):
            raise refused("devices", f"at most {len(everything)}", count, "jax.devices() lists them.")
        if jax.process_count() > 1 and count != len(everything):
            fix = "Start fewer processes instead, or leave devices out."
            raise refused("devices", f"all {len(everything)} when several hosts run together", count, fix)
    return tuple(everything[: count or len(everything)])


_ON_DEVICE: weakref.WeakKeyDictionary[FederatedData, Any] = weakref.WeakKeyDictionary()


def on_device(data: FederatedData) -> Any:
    """The examples as JAX arrays, sent to the device once. A value that does not fit JAX's types is an error."""

    def send(path: Any, array: np.ndarray) -> jax.Array:
        sent = jnp.asarray(array)
        if sent.dtype != array.dtype:
            narrow = np.dtype(sent.dtype)
            limits = np.finfo(narrow) if narrow.kind == "f" else np.iinfo(narrow)
            if array.size and (array.min() < limits.min or array.max() > limits.max):
                fix = "Scale the values, or enable JAX's 64-bit numbers (jax_enable_x64)."
                name = f"examples{jax.tree_util.keystr(path)}"
                raise refused(name, f"within {narrow}", f"values from {array.min():g} to {array.max():g}", fix)
        return sent

    if data not in _ON_DEVICE:
        _ON_DEVICE[data] = jax.tree_util.tree_map_with_path(send, data.examples)
    return _ON_DEVICE[data]


class Sent(NamedTuple):
    """The arrays of a problem on the devices."""

    examples: Any  # None where data is streamed
    tested_on: Any  # the test set, else the training examples
    frozen: Any  # parameters that are not trained


_SENT: weakref.WeakKeyDictionary[Problem, tuple[Any, Sent]] = weakref.WeakKeyDictionary()


def on_devices(problem: Problem, place: Place) -> Sent:
    """A problem's arrays, sent to the devices once."""
    devices, sent = _SENT.get(problem, (None, None))
    if sent is None or devices != place.devices:
        _SENT.pop(problem, None)  # only one copy: data can be large
        examples = None if problem.data.streamed else lay_out(place, on_device(problem.data))
        tested_on = examples if problem.test is None else lay_out(place, problem.test)
        sent = Sent(examples, tested_on, None if problem.frozen is None else lay_out(place, problem.frozen))
        _SENT[problem] = (place.devices, sent)
    return sent
