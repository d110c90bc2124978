"""The version, the imports and the public names of a release."""

import os
import re
import subprocess
import sys

import yaml
from helpers import ROOT

import covary as cv


def test_one_version_everywhere():
    newest = re.search(r"## \[(\d.*?)\] - (\d{4}-\d\d-\d\d)", (ROOT / "CHANGELOG.md").read_text())
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert newest[1] == citation["version"] == cv.__version__
    assert newest[2] == str(citation["date-released"])


def test_importing_covary_imports_no_heavy_package():
    heavy = [
        "jax",
        "numpy",
        "matplotlib",
        "sklearn",
        "pandas",
        "torch",
        "flwr",
        "mlflow",
        "wandb",
        "tensorboardX",
        "flax",
        "typer",
        "rich",
    ]
    code = f"import sys, covary; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_modules_are_attributes_and_what_jax_has_read_does_not_stay_in_the_environment():
    code = """
import importlib, os, covary as cv
importlib.reload(cv)
print([getattr(cv, name).__name__ for name in ("errors", "algorithms", "data", "problem", "report", "simulate")])
print([name for name in os.environ if name.startswith("JAX_")])
import jax
print(len(jax.devices()) == len(os.sched_getaffinity(0)))
print(sorted({"sys", "Any", "importlib"} & set(dir(cv))))
"""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("JAX_", "XLA_"))}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=clean)
    modules = [f"covary.{name}" for name in ("errors", "algorithms", "data", "problem", "report")]
    assert done.stdout.splitlines() == [str([*modules, "simulate"]), "[]", "True", "[]"]


def test_every_public_name_exists_and_has_a_docstring():
    for name in cv.__all__:
        assert getattr(cv, name).__doc__, name
