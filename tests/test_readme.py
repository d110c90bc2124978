"""Every Python block of the README and of the pages runs."""

import re

import numpy as np
import pytest
from helpers import ROOT

import covary as cv

NAMES = ("README.md", "docs/scale.md", "docs/deploy.md", "docs/choose-an-algorithm.md", "docs/nothing-lost.md")
PAGES = [(ROOT / name).read_text() for name in NAMES]
BLOCKS = [block for page in PAGES for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL)]


IDS = [
    "own-model",
    "sweep",
    "add-an-algorithm",
    "stream",
    "server",
    "client",
    "load",
    "diagnose",
    "rates",
    "checkpoint",
]


@pytest.mark.parametrize("block", BLOCKS, ids=IDS)
def test_block_runs(block, capsys):
    names = {}
    exec(block, names)
    assert capsys.readouterr().out
    if "fedavgm" in names:
        run = cv.simulate(names["fedavgm"](0.05, beta=0.5), cv.quadratics([[[1.0]]], [[-2.0]]), 200, local_steps=3)
        np.testing.assert_allclose(run.x, [2.0], atol=1e-6)
    elif "run" in names and "loss" in names["run"].history:
        assert names["run"].history["loss"][-1] < names["run"].history["loss"][0]
