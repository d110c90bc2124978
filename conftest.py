"""All tests run in float64, where exactness is claimed to 1e-10; float32 is JAX's and the command line's default.

Eight CPU devices stand in for eight accelerators, and programs are kept in a folder of the tests' own.
"""

import os
from pathlib import Path

import jax

worker = os.environ.get("PYTEST_XDIST_WORKER", "main")
os.environ["XDG_CACHE_HOME"] = str(Path(__file__).parent / ".pytest_cache" / "programs" / worker)
jax.config.update("jax_enable_x64", True)
jax.config.update("jax_num_cpu_devices", 8)
