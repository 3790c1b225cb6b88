"""The library's imports, read from its syntax: files, folders as rooms, floors.

    python tests/helpers/import_graph.py  # the counts that test_structure.py states

An import inside of a function is one like any other; what stands under TYPE_CHECKING is none.
"""

from __future__ import annotations

import ast
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2] / "src" / "tilewise"
Graph = dict[str, set[str]]


def paths() -> dict[str, Path]:
    """The files by their names below the package, without .py. A folder whose name is no
    identifier holds no module.
    """
    found = {path.relative_to(ROOT).with_suffix(""): path for path in sorted(ROOT.rglob("*.py"))}
    return {
        name.as_posix(): path
        for name, path in found.items()
        if all(part.isidentifier() for part in name.parts)
    }


FILES = paths()


def statements(tree: ast.AST):
    """The imports of a tree that take place."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node
        elif not (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)):
            yield from statements(node)
        else:
            yield from (x for part in node.orelse for x in statements(ast.Module([part], [])))


def file_of(parts: list[str]) -> str | None:
    """The file of a module, if it is one."""
    name = "/".join(parts)
    package = "/".join([*parts, "__init__"])
    return name if name in FILES else package if package in FILES else None


def imports(name: str, for_types: bool = False) -> set[str]:
    """The files that a file imports; with `for_types` those under TYPE_CHECKING, too."""
    folder, found = name.split("/")[:-1], set()
    tree = ast.parse(FILES[name].read_text(encoding="utf-8"))
    for node in ast.walk(tree) if for_types else statements(tree):
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
