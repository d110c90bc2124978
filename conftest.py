"""All tests run in float64, where exactness is claimed to 1e-10; float32 is JAX's and the command line's default."""

import jax

jax.config.update("jax_enable_x64", True)
