"""JAX's settings for covary, made before JAX first computes and without importing it."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import sys
from pathlib import Path

from covary.runs.machine import cores, cpu_lines

_SET: list[str] = []  # the environment variables that covary has set
KEPT_AFTER = 0.2  # seconds; programs that take longer to compile are cached for other processes


def configure() -> None:
    """Let JAX use every core and cache its programs, unless the user has set this otherwise.

    XLA runs the programs of a CPU device one after the other, and parallelises a small matrix product badly. One device
    per core, each with its own clients, is faster. This runs when covary is imported, because JAX fixes both settings
    when it first computes. If JAX is not imported yet, it reads them from the environment later. The user's own
    settings, in the environment or in `jax.config`, take precedence.
    """
    folder = cache_folder()
    by_flags = "host_platform_device_count" in os.environ.get("XLA_FLAGS", "")
    if sys.modules.get("jax") is None:
        wanted = {} if by_flags else {"JAX_NUM_CPU_DEVICES": str(cores())}
        if folder is not None and "JAX_COMPILATION_CACHE_DIR" not in os.environ:
            wanted |= {
                "JAX_COMPILATION_CACHE_DIR": str(folder),
                "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": str(KEPT_AFTER),
            }
        new = {name: value for name, value in wanted.items() if name not in os.environ}
        os.environ.update(new)
        _SET.extend(new)
        return
    import jax

    if getattr(jax.config, "jax_num_cpu_devices", None) == -1 and not by_flags:
        with contextlib.suppress(RuntimeError):  # JAX has been used already
            jax.config.update("jax_num_cpu_devices", cores())
    if getattr(jax.config, "jax_compilation_cache_dir", "") is None and folder is not None:
        jax.config.update("jax_compilation_cache_dir", str(folder))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", KEPT_AFTER)


def tidy_environment() -> None:
    """Remove covary's settings from the environment once JAX has read them: other programs are not meant."""
    if sys.modules.get("jax") is not None:
        while _SET:
            os.environ.pop(_SET.pop(), None)


@functools.cache
def cache_folder() -> Path | None:
    """The user's cache folder for this kind of processor; None if it cannot be created."""
    with contextlib.suppress(OSError):
        about = os.uname().machine if hasattr(os, "uname") else ""
        about += "".join(sorted(set(cpu_lines("flags", "model name", "Features"))))
        home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        folder = home / "covary" / f"xla-{hashlib.sha256(about.encode()).hexdigest()[:12]}"
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK):
            return folder
    return None
