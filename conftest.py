"""All tests run in float64, where exactness is claimed to 1e-10; float32 is JAX's and the command line's default.

Eight CPU devices stand in for eight accelerators, and programs are kept in a folder of the tests' own.
"""

import os
from pathlib import Path

# Most of the tests' time is compilation: XLA is told to save on passes that make programs faster.
FLAGS = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {FLAGS}"

import jax  # noqa: E402

worker = os.environ.get("PYTEST_XDIST_WORKER", "main")
os.environ["XDG_CACHE_HOME"] = str(Path(__file__).parent / ".pytest_cache" / "programs" / worker)
jax.config.update("jax_enable_x64", True)
jax.config.update("jax_num_cpu_devices", 8)
