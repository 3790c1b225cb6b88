"""The library's own files as text and as syntax, each read and parsed once a process."""

import ast
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2] / "src" / "tilewise"
FILES = {path.relative_to(ROOT).as_posix(): path for path in sorted(ROOT.rglob("*.py"))}


@cache
def text_of(name: str) -> str:
    return FILES[name].read_text("utf-8")


@cache
def tree_of(name: str) -> ast.Module:
    return ast.parse(text_of(name))


@cache
def nodes_of(name: str) -> list[ast.AST]:
    """All nodes of its tree: to walk it costs ten times what a look at them does."""
    return list(ast.walk(tree_of(name)))
