"""`covary bench`: time covary, the bare matrix products, PyTorch and other simulators in one run."""
