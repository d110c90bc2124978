"""The machine's devices: which there are, and how arrays are shared out over them."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import platform
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from covary.checks import whole
from covary.errors import refused
from covary.runs.machine import cores, device_memory, host_memory

AXIS = "devices"


@dataclass(frozen=True)
class Place:
    """The devices that share a cohort, and the number of clients that each works on at the same time."""

    devices: tuple[Any, ...]
    width: int


def configure() -> None:
    """Let JAX use every core and remember its programs, where the user has not said otherwise.

    XLA runs a CPU device's programs one after the other, and spreads a small matrix product badly over cores: one
    device a core, each with its own clients, is the faster way. Called when covary is imported, because JAX fixes both
    when it first computes; a user's own settings, by environment or by `jax.config`, stand.
    """
    settings: Any = jax.config
    if settings.jax_num_cpu_devices == -1 and "host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
        with contextlib.suppress(RuntimeError):  # JAX has been used already
            jax.config.update("jax_num_cpu_devices", cores())
    if settings.jax_compilation_cache_dir is None and cache_folder() is not None:
        jax.config.update("jax_compilation_cache_dir", str(cache_folder()))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)


@functools.cache
def cache_folder() -> Path | None:
    """A folder of the user's for what is costly to find out, kept apart by processor; None where it cannot be made."""
    with contextlib.suppress(OSError):
        about = platform.processor() + platform.machine()
        if Path("/proc/cpuinfo").is_file():
            lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
            about += "".join(sorted({line for line in lines if line.startswith(("flags", "model name", "Features"))}))
        home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        folder = home / "covary" / f"xla-{hashlib.sha256(about.encode()).hexdigest()[:12]}"
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK):
            return folder
    return None


@functools.lru_cache(maxsize=64)
def mesh(devices: tuple[Any, ...]) -> Mesh:
    return Mesh(np.array(devices), (AXIS,))


def sharded(function: Callable[..., Any], place: Place, in_specs: Any, out_specs: Any) -> Callable[..., Any]:
    """The function as run by every device on its shares of the arguments."""
    grid = mesh(place.devices)
    return jax.shard_map(function, mesh=grid, in_specs=in_specs, out_specs=out_specs, check_vma=False)


def lay_out(place: Place, tree: Any, spec: PartitionSpec | None = None) -> Any:
    """Arrays sent to the devices: whole to each, or in the shares of a spec. On several hosts each sends its own."""
    if len(place.devices) == 1:
        return jax.device_put(tree, place.devices[0])
    sharding = NamedSharding(mesh(place.devices), spec or PartitionSpec())

    def send(array: Any) -> Any:
        if jax.process_count() == 1:
            return jax.device_put(array, sharding)
        whole_array = np.asarray(array)
        return jax.make_array_from_callback(whole_array.shape, sharding, lambda index: whole_array[index])

    return jax.tree.map(send, tree)


def to_host(tree: Any) -> Any:
    """Arrays brought back, also those whose shares lie on several hosts."""

    def fetch(array: Any) -> np.ndarray:
        if isinstance(array, jax.Array) and not array.is_fully_addressable and not array.is_fully_replicated:
            from jax.experimental import multihost_utils

            return np.asarray(multihost_utils.process_allgather(array, tiled=True))
        return np.asarray(array)

    return jax.tree.map(fetch, tree)


def agreed(value: int) -> int:
    """The first host's value, where several run together: clocks differ, and what they decide must not."""
    if jax.process_count() == 1:
        return value
    from jax.experimental import multihost_utils

    return int(multihost_utils.broadcast_one_to_all(np.asarray(value, np.int32)))


def available(count: int | None) -> tuple[Any, ...]:
    """The first `count` devices, of all hosts where there are several; all of them by default."""
    everything = jax.devices()
    if count is not None:
        whole("devices", count, 1)
        if count > len(everything):
            raise refused("devices", f"at most {len(everything)}", count, "That many are here; see jax.devices().")
        if jax.process_count() > 1 and count != len(everything):
            fix = "Start fewer processes instead, or leave devices out."
            raise refused("devices", f"all {len(everything)} when several hosts run together", count, fix)
    return tuple(everything[: count or len(everything)])


def memory(device: bool = True) -> int:
    """Bytes that a device can hold, or the host where the device does not say or is not meant."""
    return device_memory() if device else host_memory()
