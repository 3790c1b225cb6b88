"""Counts of the library's syntax that tests/structure/test_counters.py limits.

PYTHONPATH=tests python -m helpers.counters  # what stands there now
"""

from __future__ import annotations

import ast
import re
from collections import Counter

from .sources import FILES, nodes_of, text_of, tree_of

FUNCTION = ast.FunctionDef | ast.AsyncFunctionDef
# Names of locals that do not say what they hold
VAGUE = set(
    """found given asked known told seen kept at here others rest read made word words these those
    side sides each own which both more what then""".split()
)
NO_SUBJECT = re.compile(r"(The same|Those|That of|That |So many|Of |As it|Such )")
# Classes with __call__, launch or again that only make the arguments of launches
ONLY_ARGUMENTS = {"Packed"}


def is_record(node: ast.ClassDef) -> bool:
    """A NamedTuple or a dataclass."""
    heads = [ast.unparse(x) for x in (*node.bases, *node.decorator_list)]
    return any("NamedTuple" in x or "dataclass" in x for x in heads)


def is_launching(node: ast.ClassDef) -> bool:
    """A class of kernels/ that starts kernels."""
    methods = {x.name for x in node.body if isinstance(x, FUNCTION)}
    return node.name not in ONLY_ARGUMENTS and bool(methods & {"__call__", "launch", "again"})


def asks_backends(node: ast.AST) -> bool:
    """A function that asks one backend after another."""
    inside = list(ast.walk(node))
    names = {x.id for x in inside if isinstance(x, ast.Name)}
    return "BACKENDS" in names and any(isinstance(x, ast.For) for x in inside)


def length(node: ast.FunctionDef) -> int:
    """Lines of a function without its signature and docstring."""
    body = node.body[1:] if ast.get_docstring(node) and len(node.body) > 1 else node.body
    return node.end_lineno - body[0].lineno + 1


def count() -> dict[str, float]:
    """All counters by name."""
    texts = {name: text_of(name) for name in FILES}
    sizes = {name: text.count("\n") for name, text in texts.items()}
    total, calls, records = Counter(), Counter(), {"host": [], "device": []}
    for name in texts:
        half = "device" if name.startswith(("kernels/", "tile/")) else "host"
        for node in nodes_of(name):
            if isinstance(node, ast.Call):
                stars = [x.value for x in node.args if isinstance(x, ast.Starred)]
                calls[getattr(node.func, "id", getattr(node.func, "attr", ""))] += 1
                total["splats"] += bool(stars)
                total["splats of a tuple"] += any(isinstance(x, ast.Tuple) for x in stars)
                total["keywords"] += len(node.keywords)
                total["arguments"] += len(node.keywords) + len(node.args)
            elif isinstance(node, ast.Name):
                total["vague locals"] += isinstance(node.ctx, ast.Store) and node.id in VAGUE
            elif isinstance(node, FUNCTION | ast.ClassDef):
                doc = ast.get_docstring(node)
                total["docstrings without a subject"] += bool(doc and NO_SUBJECT.match(doc))
                if isinstance(node, FUNCTION):
                    total["functions over 120 lines"] += length(node) > 120
                    total["dispatchers"] += not name.startswith("cli/") and asks_backends(node)
                    continue
                total["launching classes"] += name.startswith("kernels/") and is_launching(node)
                if is_record(node):
                    records[half].append(node.name)
    counts = {
        "lines": sum(sizes.values()),
        "files over 300 lines": sum(size > 300 for size in sizes.values()),
        "calls with *x": total["splats"],
        "calls with a tuple's *": total["splats of a tuple"],
        "arguments by keyword, percent": 100 * total["keywords"] / total["arguments"],
        "check files": sum(
            bool(re.match(r"(frontend|distributed)\b.*(check|/qkv|/scalars|/call_spec)", name))
            for name in texts
        ),
    }
    for half, names in records.items():
        counts[f"records, {half}"] = len(names)
        counts[f"records built at one place, {half}"] = sum(calls[x] == 1 for x in names)
    for feature in ("softcap", "sinks"):
        counts[f"files that name {feature}"] = sum(feature in x.lower() for x in texts.values())
    for name in (
        *("vague locals", "docstrings without a subject", "functions over 120 lines"),
        *("dispatchers", "launching classes"),
    ):
        counts[name] = total[name]
    files, lines = imported("frontend/attention.py")
    return counts | {"files attention() imports": files, "lines attention() imports": lines}


def imported(start: str) -> tuple[int, int]:
    """Files that are imported where a file is, at the top of files, without __init__.py, and their
    lines.
    """
    reached, waiting = set(), [start]
    while waiting:
        name = waiting.pop()
        if name in reached:
            continue
        reached.add(name)
        for node in tree_of(name).body:
            if isinstance(node, ast.ImportFrom) and node.level:
                base = name.split("/")[: -node.level]
                base += node.module.split(".") if node.module else []
                for alias in node.names:
                    one, parent = "/".join([*base, alias.name]), "/".join(base)
                    waiting += [x for x in (f"{one}.py", f"{parent}.py") if x in FILES][:1]
    return len(reached), sum(text_of(x).count("\n") for x in reached)


if __name__ == "__main__":
    for name, value in count().items():
        print(f"{name}: {value:.5g}")
