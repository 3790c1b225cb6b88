"""Real text that every machine with Python has: the Zen, docstrings and sources of the library."""

from __future__ import annotations

import ast
import codecs
import importlib.util
import re
import sysconfig
from pathlib import Path
from typing import NamedTuple

MODULES = (
    "heapq shutil statistics random textwrap threading tempfile zipfile bisect calendar fractions "
    "functools glob gzip difflib queue secrets sched shelve socket subprocess copy"
).split()
QUERIES = (
    "Copy a folder and everything inside it.",
    "Do not hide a failure from the user.",
    "The average of a list of numbers.",
    "Wait until the other thread has finished.",
    "Pick a winner at random.",
    "Wrap a long paragraph to fit the screen.",
)


class Sentence(NamedTuple):
    """A sentence and where it stands."""

    source: str
    text: str


def zen() -> list[str]:
    """The Zen of Python, as its module keeps it: in rot13."""
    found = importlib.util.find_spec("this")
    if found is None or not found.origin:
        return []
    tree = ast.parse(Path(found.origin).read_text(encoding="utf-8"))
    ciphers = [n.value for n in ast.walk(tree) if isinstance(n, ast.Constant)]
    ciphers = [text for text in ciphers if isinstance(text, str) and len(text) > 200]
    return [line for line in codecs.decode(ciphers[0], "rot13").splitlines()[2:] if line]


def docstrings() -> dict[str, str]:
    """The docstrings of MODULES and of their functions, by qualified name."""
    found = {}
    for module in MODULES:
        path = library() / f"{module}.py"
        if not path.exists():
            continue
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for prefix, node in _documented(tree, module):
            if text := ast.get_docstring(node):
                found[prefix] = text
    return found


def _documented(tree: ast.Module, module: str):
    yield module, tree
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
            yield f"{module}.{node.name}", node
        if isinstance(node, ast.ClassDef):
            for inner in node.body:
                if isinstance(inner, ast.FunctionDef) and not inner.name.startswith("_"):
                    yield f"{module}.{node.name}.{inner.name}", inner


def sentences(limit: int = 400) -> list[Sentence]:
    """The Zen's lines and the first sentence of each docstring."""
    found = [Sentence("the Zen of Python", line) for line in zen()]
    for name, text in docstrings().items():
        first = re.split(r"\n\s*\n|(?<=[.!?])\s", text.strip(), maxsplit=1)[0]
        first = " ".join(first.split())
        if 20 <= len(first) <= 200 and " " in first:
            found.append(Sentence(name, first))
    return found[:limit]


def long_texts(count: int) -> list[str]:
    """The longest docstrings."""
    return sorted(docstrings().values(), key=len, reverse=True)[:count]


def source_bytes(limit: int) -> bytes:
    """The library's own source, in order of file name."""
    parts, size = [], 0
    for path in sorted(library().glob("*.py")):
        parts.append(path.read_bytes())
        size += len(parts[-1])
        if size >= limit:
            break
    return b"".join(parts)[:limit]


def library() -> Path:
    """Where the standard library lies."""
    return Path(sysconfig.get_path("stdlib"))
