"""The machine that a run is on: its cores, memory and devices, and the versions of what is installed."""

from __future__ import annotations

import os
import platform
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any


def cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cpu_lines(*names: str) -> list[str]:
    """What Linux says of the processors: the lines that begin with one of these names."""
    about = Path("/proc/cpuinfo")
    lines = about.read_text(errors="replace").splitlines() if about.is_file() else []
    return [line for line in lines if line.startswith(names)]


def processor() -> str:
    """The processor's name."""
    for line in cpu_lines("model name"):
        return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def host_memory() -> int:
    """Bytes of the host's memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def device_memory() -> int:
    """Bytes that the first device can hold: JAX's, or PyTorch's in a process that uses PyTorch alone. The host's
    memory if the device does not report it."""
    torch: Any = sys.modules.get("torch")
    if torch is not None and sys.modules.get("jax") is None:
        return int(torch.cuda.mem_get_info()[1]) if torch.cuda.is_available() else host_memory()
    try:
        import jax
    except ImportError:
        return host_memory()
    stats = jax.local_devices()[0].memory_stats() or {}
    return int(stats.get("bytes_limit") or host_memory())


def device() -> str:
    """What JAX computes on: "2 × NVIDIA H200", or "CPU, 8 cores"."""
    import jax

    first, *others = jax.devices()
    return f"CPU, {cores()} cores" if first.platform == "cpu" else f"{1 + len(others)} × {first.device_kind}"


def versions(*packages: str) -> dict[str, str]:
    """The versions of Python and of those packages that are installed.

    >>> list(versions("numpy", "no-such-package"))
    ['python', 'numpy']
    """
    found = {"python": platform.python_version()}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
