"""Every block of code on every page runs: ```python in a fresh namespace, ```sh in bash with the installed `covary`.

Blocks marked ```console or ```text are not run: they show output, or need several machines, a download, root or
minutes. What they show is covered elsewhere: `covary compare`, `run`, `sweep` and Ctrl-C by test_cli.py and
test_checkpoint.py, `diagnose` by test_diagnose.py, `reproduce` by test_reproduce.py, downloads by test_datasets.py,
deployment by test_flower_processes.py, several hosts by test_engine.py.
"""

import doctest
import functools
import importlib.util
import inspect
import os
import re
import subprocess
import sys

import numpy as np
import pytest
from helpers import DATA, HANGS, ROOT, optimum, plain_server, quadratic_gradients, random_quadratics

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
        timeout=HANGS,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout


@pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])
def test_every_kind_of_block_is_known(page):
    kinds = {language for language, _ in FENCED.findall(page.read_text())}
    assert kinds <= {"python", "sh", "console", "text", "toml"}
    assert page.read_text().count("\n```") == 2 * len(FENCED.findall(page.read_text()))


@functools.cache
def smoothed():
    """The example of docs/add-an-algorithm.md, which passes what that page asks of an algorithm."""
    page = (ROOT / "docs" / "add-an-algorithm.md").read_text()
    (block,) = [text for name, text in FENCED.findall(page) if name == "python" and "def smoothed" in text]
    names = {}
    exec(block, names)
    return names["smoothed"]


A, b = random_quadratics(N=6, d=4, G=2.0)
QUADRATICS = cv.quadratics(A, b)


def on_quadratics(algorithm, rounds, **how):
    return cv.simulate(algorithm, QUADRATICS, rounds, local_steps=5, **how)


@pytest.mark.parametrize("warm_start", [False, True])
def test_the_added_algorithm_ends_at_the_optimum_and_keeps_its_invariant(warm_start):
    run = on_quadratics(smoothed()(0.05, rho=0.5), 1500, clients_per_round=3, warm_start=warm_start)
    np.testing.assert_allclose(run.x, optimum(A, b), atol=1e-8)
    assert run.history["control_error"].max() < 1e-12


def test_the_added_algorithm_reduces_to_scaffold_and_to_fedavg():
    one, its = (
        on_quadratics(a, 20, clients_per_round=3) for a in (smoothed()(0.1, 1.0, 1.5), cv.scaffold(0.1, eta_g=1.5))
    )
    np.testing.assert_allclose(one.x, its.x, atol=1e-12)
    np.testing.assert_allclose(one.server.c, its.server.c, atol=1e-12)
    np.testing.assert_allclose(one.clients.c_i, its.clients.c_i, atol=1e-12)
    zero, its = (on_quadratics(a, 20, clients_per_round=3) for a in (smoothed()(0.1, 0.0), cv.fedavg(0.1)))
    np.testing.assert_allclose(zero.x, its.x, atol=1e-12)
    assert not zero.clients.c_i.any()


def test_the_added_algorithm_runs_as_it_is_written():
    algorithm = smoothed()(0.1, rho=0.3)
    run = on_quadratics(algorithm, 15, clients_per_round=3)
    server, clients = plain_server(
        algorithm, quadratic_gradients(A, b), np.zeros(4), run.history["cohort"], K=5, equal=True
    )
    np.testing.assert_allclose(run.x, server.x, atol=1e-10)
    np.testing.assert_allclose(run.server.c, server.c, atol=1e-10)
    np.testing.assert_allclose(run.clients.c_i, [client.c_i for client in clients], atol=1e-10)


def test_the_added_algorithm_needs_no_compilation_for_other_numbers(compilations):
    on_quadratics(smoothed()(0.1, rho=0.5), 3, clients_per_round=3)
    compilations.clear()
    on_quadratics(smoothed()(0.2, rho=0.7), 3, clients_per_round=3)
    assert compilations == []


def test_formulas_of_docstrings_become_plain_text():
    spec = importlib.util.spec_from_file_location("docstrings", ROOT / "docs" / "docstrings.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert doctest.testmod(module) == (0, 1)
    for name in cv.algorithms.__all__:
        text = module.as_markdown(inspect.cleandoc(getattr(cv, name).__doc__))
        assert "←" in text or "≈" in text
        assert "\\" not in text
        assert "$" not in text
    assert module.as_markdown("Args:\n    x, y: both. More.\n") == "Args:\n    x: both. More.\n    y: both.\n"
