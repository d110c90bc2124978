"""The folder that `covary node` puts on PYTHONPATH, for its one file."""
