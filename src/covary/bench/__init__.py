"""`covary bench`: our round beside the floor of the hardware, PyTorch, and other simulators, in one run."""
