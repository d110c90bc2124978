"""Every block of code on every page runs: ```python in a fresh namespace, ```sh in bash with the installed `covary`.

Blocks marked ```console or ```text are not run: they show output, or need several machines, a download, root or minutes. What
they show is covered elsewhere: `covary compare`, `run`, `sweep` and Ctrl-C by test_cli.py and test_checkpoint.py, `diagnose` by
test_diagnose.py, `reproduce` by test_reproduce.py, deployment by test_flower_processes.py and several hosts by test_engine.py.
"""

import os
import re
import subprocess
import sys

import numpy as np
import pytest
from helpers import DATA, ROOT, client_gradients, optimum, plain_server, random_quadratics

import covary as cv

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCED = re.compile(r"^```(\S*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
REAL_DATA = ("fed-heart-disease.npz",)


def blocks(language):
    """The blocks of a language, each known by its page and its number there."""
    found = {page: [text for name, text in FENCED.findall(page.read_text()) if name == language] for page in PAGES}
    return [
        pytest.param(text, id=f"{page.relative_to(ROOT)}-{number}")
        for page, texts in found.items()
        for number, text in enumerate(texts, start=1)
    ]


@pytest.fixture
def folder(request, tmp_path, monkeypatch):
    """A temporary working directory, with the real data that the block names."""
    for name in REAL_DATA:
        if name in request.node.callspec.params["block"]:
            if not (DATA / name).is_file():
                pytest.skip(f"{name} is not in {DATA}; set COVARY_DATA to a folder that has it")
            (tmp_path / name).symlink_to(DATA / name)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("block", blocks("python"))
def test_python_block_runs(block, folder, capsys):
    names = {}
    exec(block, names)
    assert capsys.readouterr().out
    if "fedavgm" in names:
        run = cv.simulate(names["fedavgm"](0.05, beta=0.5), cv.quadratics([[[1.0]]], [[-2.0]]), 200, local_steps=3)
        np.testing.assert_allclose(run.x, [2.0], atol=1e-6)
    elif "run" in names and "loss" in names["run"].history:
        losses = names["run"].history["loss"]
        assert losses[~np.isnan(losses)][-1] < losses[0]


@pytest.mark.parametrize("block", blocks("sh"))
def test_shell_block_runs(block, folder):
    own = {"PATH": f"{os.path.dirname(sys.executable)}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", block],
        cwd=folder,
        env=os.environ | own,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout


@pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])
def test_no_block_is_of_a_kind_that_is_overlooked(page):
    kinds = {language for language, _ in FENCED.findall(page.read_text())}
    assert kinds <= {"python", "sh", "console", "text", "toml"}
    assert page.read_text().count("\n```") == 2 * len(FENCED.findall(page.read_text()))
