"""Pages that README links are readable on a git host, where Sphinx's directives do nothing."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
READMES = "README.md", "README.zh-CN.md"
FENCE = re.compile(r"^(`{3,}|:{3,})\{([\w-]+)\}(.*?)^\1\s*$", re.MULTILINE | re.DOTALL)
SHOWN = re.compile(r"^<!-- `(\w+)` of (\S+) -->\n+```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
INCLUDED = re.compile(
    r"^`{3,}\{(literalinclude|include)\}(.*?)\n(.*?)^`{3,}", re.MULTILINE | re.DOTALL
)
ELSEWHERE = ("http://", "https://", "#")


def links(text: str) -> list[str]:
    """Paths that a page links, without the place in the page."""
    found = re.findall(r"\]\(([^)\s]+)\)", text)
    return sorted({path.split("#")[0] for path in found if not path.startswith(ELSEWHERE)})


def page_at(path: Path) -> Path:
    """The page that a git host shows there."""
    return path / "README.md" if path.is_dir() and (path / "README.md").exists() else path


def empty_directives(text: str) -> list[str]:
    """Directives whose block has nothing to read: no line, or options alone."""
    found = []
    for _, name, body in FENCE.findall(text):
        lines = body.splitlines()[1:]
        if not [x for x in lines if x.strip() and not re.match(r":[\w-]+:", x)]:
            found.append(name)
    return found


@pytest.mark.parametrize("name", READMES)
def test_links_lead_to_pages_that_can_be_read(name):
    for link in links((ROOT / name).read_text("utf-8")):
        path = page_at(ROOT / link)
        assert path.exists(), link
        if path.suffix == ".md":
            assert not empty_directives(path.read_text("utf-8")), link


def test_empty_directives_are_found():
    page = "```{lessons}\n```\n\n```{figure} x.svg\n:alt: x\n```\n\n```{note}\nWords.\n```\n"
    assert empty_directives(page) == ["lessons", "figure"]


@pytest.mark.parametrize("page", sorted((ROOT / "docs").glob("*.md")), ids=lambda page: page.name)
def test_code_that_a_page_shows_is_that_of_its_file(page):
    for name, file, code in SHOWN.findall(page.read_text("utf-8")):
        source = (ROOT / file).read_text("utf-8")
        (function,) = (
            node
            for node in ast.walk(ast.parse(source))
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name
        )
        assert ast.get_source_segment(source, function) == code.rstrip("\n")


def test_what_a_page_includes_is_in_its_file():
    """A function that is renamed takes its page along."""
    missing = []
    for page in (ROOT / "docs").rglob("*.md"):
        if "_build" in page.parts:
            continue
        for directive, path, body in INCLUDED.findall(page.read_text("utf-8")):
            from_root = path.strip().startswith("/")  # as Sphinx reads it
            file = (ROOT / "docs" if from_root else page.parent) / path.strip().lstrip("/")
            if not file.exists():
                missing.append((page.name, directive, path))
                continue
            names = re.findall(r":pyobject: (\S+)", body)
            missing += [(page.name, x, path) for x in names if x not in defined_in(file)]
    assert not missing


def defined_in(path: Path) -> set[str]:
    """The functions and classes of a module."""
    nodes = ast.parse(path.read_text("utf-8")).body
    return {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)}
