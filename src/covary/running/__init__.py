"""What every runtime shares: the plan of a run, its state, its history and its checkpoints. Nothing here needs JAX."""
