"""The version, the imports and the public names of a release."""

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


def test_every_public_name_exists_and_has_a_docstring():
    for name in cv.__all__:
        assert getattr(cv, name).__doc__, name
