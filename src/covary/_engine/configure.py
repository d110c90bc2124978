"""JAX's settings for covary, made before JAX first computes and without importing it."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import sys
from pathlib import Path

from covary.runs.machine import cores, cpu_lines

KEPT_AFTER = 0.2  # seconds that a program takes to compile, from which on it is kept between processes


def configure() -> None:
    """Let JAX use every core and keep its programs, where the user has not said otherwise.

    XLA runs a CPU device's programs one after the other, and spreads a small matrix product badly over cores: one
    device a core, each with its own clients, is the faster way. Called when covary is imported, because JAX fixes both
    when it first computes. Where JAX is not imported yet, it reads its defaults from the environment later. A user's
    own settings, by environment or by `jax.config`, stand.
    """
    folder = cache_folder()
    by_flags = "host_platform_device_count" in os.environ.get("XLA_FLAGS", "")
    if "jax" not in sys.modules:
        if not by_flags:
            os.environ.setdefault("JAX_NUM_CPU_DEVICES", str(cores()))
        if folder is not None and "JAX_COMPILATION_CACHE_DIR" not in os.environ:
            os.environ["JAX_COMPILATION_CACHE_DIR"] = str(folder)
            os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", str(KEPT_AFTER))
        return
    import jax

    if getattr(jax.config, "jax_num_cpu_devices", None) == -1 and not by_flags:
        with contextlib.suppress(RuntimeError):  # JAX has been used already
            jax.config.update("jax_num_cpu_devices", cores())
    if getattr(jax.config, "jax_compilation_cache_dir", "") is None and folder is not None:
        jax.config.update("jax_compilation_cache_dir", str(folder))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", KEPT_AFTER)


@functools.cache
def cache_folder() -> Path | None:
    """A folder of the user's for what is costly to find out, kept apart by processor; None where it cannot be made."""
    with contextlib.suppress(OSError):
        about = os.uname().machine if hasattr(os, "uname") else ""
        about += "".join(sorted(set(cpu_lines("flags", "model name", "Features"))))
        home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        folder = home / "covary" / f"xla-{hashlib.sha256(about.encode()).hexdigest()[:12]}"
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK):
            return folder
    return None
