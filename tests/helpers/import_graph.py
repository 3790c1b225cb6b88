"""The library's imports, read from its syntax: files, folders as rooms, floors.

    PYTHONPATH=tests python -m helpers.import_graph  # the counts that test_structure.py states

An import inside of a function is one like any other; what stands under TYPE_CHECKING is none.
"""

from __future__ import annotations

import ast
from functools import cache
from graphlib import TopologicalSorter

from . import sources

Graph = dict[str, set[str]]
# Without .py. A folder whose name is no identifier holds no module
FILES = [
    name
    for name in (x.removesuffix(".py") for x in sources.FILES)
    if all(part.isidentifier() for part in name.split("/"))
]


def statements(file: str) -> list:
    """The imports of a file that take place."""
    hidden = {
        x
        for node in sources.nodes_of(file)
        if isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING"
        for part in node.body
        for x in ast.walk(part)
    }
    kinds = ast.Import | ast.ImportFrom
    return [x for x in sources.nodes_of(file) if isinstance(x, kinds) and x not in hidden]


def file_of(parts: list[str]) -> str | None:
    """The file of a module, if it is one."""
    name = "/".join(parts)
    package = "/".join([*parts, "__init__"])
    return name if name in FILES else package if package in FILES else None


def imports(name: str, for_types: bool = False) -> set[str]:
    """The files that a file imports; with `for_types` those under TYPE_CHECKING, too."""
    folder, found = name.split("/")[:-1], set()
    file = f"{name}.py"
    for node in sources.nodes_of(file) if for_types else statements(file):
        if not isinstance(node, ast.Import | ast.ImportFrom):
            continue
        if isinstance(node, ast.Import):
            modules = [alias.name.split(".") for alias in node.names]
            found |= {file_of(module[1:]) for module in modules if module[0] == "tilewise"}
            continue
        module = node.module.split(".") if node.module else []
        if node.level:
            base = folder[: len(folder) - node.level + 1] + module
        elif module[0] == "tilewise":
            base = module[1:]
        else:
            continue
        found |= {file_of([*base, alias.name]) or file_of(base) for alias in node.names}
    return found - {None, name}


@cache
def files() -> Graph:
    """What each file imports."""
    return {name: imports(name) for name in FILES}


def rooms(folder: str = "") -> Graph:
    """What the files and folders of a folder import of each other."""
    start = f"{folder}/" if folder else ""
    found: Graph = {}
    for name, others in files().items():
        if name.startswith(start):
            room = name.removeprefix(start).split("/")[0]
            beside = {x.removeprefix(start).split("/")[0] for x in others if x.startswith(start)}
            found.setdefault(room, set()).update(beside - {room})
    return found


def folders() -> list[str]:
    """All of them, the package itself first."""
    return sorted({name.rpartition("/")[0] for name in FILES})


def in_order(graph: Graph) -> list[str]:
    """Each after what it imports; graphlib.CycleError where that cannot be."""
    return list(TopologicalSorter(graph).static_order())


def counts(folder: str) -> tuple[int, int, int]:
    """Rooms, floors (the longest chain of imports) and arrows."""
    graph, floor = rooms(folder), {}
    for room in in_order(graph):
        floor[room] = 1 + max((floor[x] for x in graph[room]), default=0)
    return len(graph), max(floor.values()), sum(map(len, graph.values()))


if __name__ == "__main__":
    for folder in ("", "distributed", "kernels", "kernels/hopper"):
        print(f'    "{folder}": {counts(folder)},')
