"""The rooms of the package: every module has one, imports point down, and there is no cycle."""

import re

import pytest
import rooms
from helpers import ROOT

GRAPH = rooms.modules()


def test_every_module_is_in_a_room():
    assert rooms.strangers(GRAPH) == []


@pytest.mark.parametrize("room", rooms.LEVEL)
def test_imports_point_down(room):
    assert rooms.upward(GRAPH, room) == []


def test_no_imports_in_a_cycle():
    assert rooms.cycles(GRAPH) == []
    assert rooms.cycles(rooms.rooms(GRAPH)) == []


def test_the_map_names_every_module():
    """CONTRIBUTING has a row for each room, with its modules in backticks."""
    rows = [line for line in (ROOT / "CONTRIBUTING.md").read_text().splitlines() if line.startswith("| `")]
    for module in GRAPH.keys() - {"covary", "covary.__main__"}:
        _, room, *inner = module.split(".")
        own = [row for row in rows if re.search(rf"`{room}(/|`)", row.split("|")[1])]
        assert own, f"the map has no row for {room}"
        for name in inner:
            assert any(re.search(rf"`{name}/?`", row) for row in own), f"the map does not name {module}"


@pytest.fixture
def package(tmp_path):
    """A package with an import of each forbidden kind."""
    files = {
        "__init__.py": "from covary.simulate import simulate\n",
        "simulate.py": "def simulate():\n    from covary import __version__\n",
        "errors.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import covary.checks\n",
        "checks.py": "from covary import errors, simulate\n",
        "runs/__init__.py": "",
        "runs/files.py": "from . import folder\n",
        "runs/folder.py": "def read():\n    from .files import replace\n",
        "cellar.py": "",
    }
    for name, text in files.items():
        (tmp_path / "covary" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "covary" / name).write_text(text)
    return rooms.modules(tmp_path / "covary")


def test_imports_are_found_wherever_they_are(package):
    assert package == {
        "covary": {"covary.simulate"},
        "covary.simulate": {"covary"},
        "covary.errors": {"covary.checks"},
        "covary.checks": {"covary.errors", "covary"},  # covary.simulate is the function that the package has
        "covary.runs": set(),
        "covary.runs.files": {"covary.runs.folder"},
        "covary.runs.folder": {"covary.runs.files"},
        "covary.cellar": set(),
    }


def test_violations_are_reported(package):
    said = rooms.wrong(package)
    assert "covary.cellar is in no room" in said
    assert "covary.errors imports covary.checks" in said
    assert "covary.simulate imports covary" in said
    assert "a cycle: covary.runs.files imports covary.runs.folder imports covary.runs.files" in said
    assert "a cycle: checks imports errors imports checks" in said
