"""The rooms of covary, and which module imports which: `python tests/rooms.py` prints them, bottom to top.

Imports are read from the source, so that those inside functions and under TYPE_CHECKING count as well.
"""

from __future__ import annotations

import ast
import graphlib
from collections.abc import Iterator, Mapping
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src" / "covary"
LAYERS = (  # a module may import from its own layer and from those before it
    ("errors",),
    ("checks",),
    ("runs",),
    ("trees", "draws"),
    ("algorithm", "algorithms", "client"),
    ("data",),
    ("targets", "training"),
    ("running",),
    ("plain",),  # up to here without JAX: tests/test_without_jax.py
    ("model_functions", "models", "problem"),
    ("_engine", "torch"),
    ("simulate", "sweep", "trackers"),
    ("theory", "flower"),
    ("report",),
    ("experiments", "bench"),
    ("cli",),
    ("covary", "__main__"),  # the package itself, with its public names
)
ALONE = {  # rooms that may import these alone
    "algorithms": {"errors", "checks", "algorithm"},
    "trackers": {"errors", "checks"},
    # beside run folders, a report shows a `Run` and a `Diagnosis` that are handed to it
    "report": {"errors", "checks", "runs", "targets", "simulate", "theory"},
}
LEVEL = {room: level for level, rooms in enumerate(LAYERS) for room in rooms}
Graph = dict[str, set[str]]  # each module or room, and those that it imports


def room_of(module: str) -> str:
    """The room of a module: its first name within the package.

    >>> room_of("covary.runs.files"), room_of("covary.errors"), room_of("covary")
    ('runs', 'errors', 'covary')
    """
    return module.split(".")[1] if "." in module else module


def modules(source: Path = SOURCE) -> Graph:
    """Every module of a package, and the modules of the package that it imports."""
    trees = {_name(path, source): ast.parse(path.read_text(encoding="utf-8")) for path in sorted(source.rglob("*.py"))}
    packages = {_name(path, source) for path in source.rglob("__init__.py")}
    bound = {package: _bound(trees[package], trees) for package in packages}
    graph: Graph = {}
    for module, tree in trees.items():
        graph[module] = set()
        for base, name in _imports(tree, module, module in packages):
            inner = f"{base}.{name}"
            # a package may bind a name that one of its modules has too: the import is then from the package
            found = inner if inner in trees and name not in bound.get(base, ()) else base
            if found in trees and found != module:
                graph[module].add(found)
    return graph


def rooms(graph: Graph) -> Graph:
    """Every room, and the other rooms that its modules import."""
    found: Graph = {room_of(module): set() for module in graph}
    for module, imported in graph.items():
        found[room_of(module)] |= {room_of(other) for other in imported} - {room_of(module)}
    return found


def strangers(graph: Graph) -> list[str]:
    """Modules that no layer has a room for."""
    return sorted(module for module in graph if room_of(module) not in LEVEL)


def upward(graph: Graph, room: str) -> list[str]:
    """The imports of a room's modules that point to a higher layer."""
    allowed = ALONE.get(room, {other for other in LEVEL if LEVEL[other] <= LEVEL[room]}) | {room}
    wrong = ((m, other) for m, found in graph.items() if room_of(m) == room for other in found)
    return sorted(f"{module} imports {other}" for module, other in wrong if room_of(other) not in allowed)


def cycles(graph: Graph) -> list[str]:
    """Cycles of imports; each is opened at one place to find the next."""
    left, found = {node: sorted(graph[node]) for node in sorted(graph)}, []
    while True:
        try:
            graphlib.TopologicalSorter(left).prepare()
        except graphlib.CycleError as error:
            cycle = error.args[1][::-1]  # each imports the next
            left[cycle[0]].remove(cycle[1])
            found.append(" imports ".join(cycle))
        else:
            return found


def drawing(graph: Graph) -> Iterator[str]:
    """Lines of text: layers bottom to top, their rooms, and the modules of each with what they import."""
    within = rooms(graph)
    for level, layer in enumerate(LAYERS):
        for room in layer:
            if room not in within:
                continue
            yield f"{level:2}  {room:<14}{' '.join(sorted(within[room], key=_place))}".rstrip()
            own = [module for module in sorted(graph) if room_of(module) == room]
            for module in own if len(own) > 1 else []:
                shown = sorted(_short(other, room) for other in graph[module])
                yield f"      {_short(module, room):<14}{' '.join(shown)}".rstrip()


def _name(path: Path, source: Path) -> str:
    parts = [source.name, *path.relative_to(source).with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _bound(tree: ast.Module, trees: Mapping[str, ast.Module]) -> set[str]:
    """The names of a package's own file that are no modules: functions and classes, of its own or imported."""
    names = {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            names |= {a.asname or a.name for a in node.names if f"{node.module}.{a.name}" not in trees}
    return names


def _imports(tree: ast.Module, module: str, package: bool) -> Iterator[tuple[str, str]]:
    """(package or module, name) for every import; the name is empty in `import a.b`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            here = module.split(".")[: -(node.level - package) or None] if node.level else []
            base = ".".join([*here, *([node.module] if node.module else [])])
            yield from ((base, alias.name) for alias in node.names)


def _place(room: str) -> tuple[int, str]:
    return LEVEL.get(room, len(LAYERS)), room


def _short(module: str, room: str) -> str:
    """A module's name for a reader inside a room: its own modules have a dot in front, as in a relative import."""
    inner = module.removeprefix("covary.")
    return inner.removeprefix(room) or room if room_of(module) == room else inner


def wrong(graph: Graph) -> list[str]:
    """All violations of the order."""
    found = [f"{module} is in no room" for module in strangers(graph)]
    found += [line for room in LEVEL for line in upward(graph, room)]
    return found + [f"a cycle: {cycle}" for cycle in [*cycles(graph), *cycles(rooms(graph))]]


if __name__ == "__main__":
    graph = modules()
    lines = [*drawing(graph), "", *(wrong(graph) or ["Every import points down, and there is no cycle."])]
    print("\n".join(lines))  # noqa: T201
