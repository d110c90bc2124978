"""Experiments: each file is a plain description of what is run."""
