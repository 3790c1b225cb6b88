"""Docstrings of public functions are Google's: a sentence, an example, Args, Returns, Raises."""

import ast
import inspect
import re
from pathlib import Path

import pytest
from helpers.sources import FILES, nodes_of
from structure.test_public_paths import PUBLIC, load

DOCS = Path(__file__).parents[2] / "docs"
SECTIONS = ["Example", "Args", "Returns", "Raises"]
NO_SUBJECT = re.compile("(The same|Those|That of|That |So many|Of |As it|Such )")
HEADING = re.compile(r"^(\w+):$", re.MULTILINE)
# With functions that users call; the other modules of PUBLIC have kernels and commands.
MODULES = [
    "bert_padding",
    "cache",
    "distributed",
    "mods",
    "scores",
    "sparse",
    "testing",
    "testing.schedule",
]
GROUPS = ["Scores", "Masks", "Packed sequences", "KV cache", "Eight bits", "Execution"]  # of Args
# Their arguments are described where they are listed, in a sentence before.
OTHERS = re.compile(r"other arguments")


def public_functions():
    for module in ["tilewise", *(f"tilewise.{name}" for name in MODULES)]:
        for name in PUBLIC[module].split():
            found = getattr(load(module), name)
            if inspect.isfunction(found) and found.__module__.startswith("tilewise"):
                yield pytest.param(found, id=f"{module}.{name}")


def section(doc, name):
    found = re.search(rf"^{name}:\n((?:    .*\n|\n)*)", doc + "\n", re.MULTILINE)
    return found[1] if found else ""


@pytest.mark.parametrize("function", list(public_functions()))
def test_sections_are_googles(function):
    doc = inspect.getdoc(function)
    sentence, *rest = doc.split("\n\n")
    assert sentence.endswith("."), sentence
    headings = [x for x in HEADING.findall(doc) if x in SECTIONS]
    assert headings == sorted(headings, key=SECTIONS.index)
    assert not rest or ">>>" not in doc or rest[0].startswith("Example:\n")


@pytest.mark.parametrize("function", list(public_functions()))
def test_args_are_the_parameters(function):
    doc = inspect.getdoc(function)
    groups = (section(doc, name) for name in ["Args", *GROUPS])
    described = [x for text in groups for x in re.findall(r"^    (\w+): ", text, re.MULTILINE)]
    parameters = list(inspect.signature(function).parameters)
    assert set(described) <= set(parameters)
    if described and not OTHERS.search(doc):
        assert described == parameters


@pytest.mark.parametrize("function", list(public_functions()))
def test_attention_says_what_it_returns_and_raises(function):
    if re.search("attn|attention", function.__name__):
        doc = inspect.getdoc(function)
        assert section(doc, "Returns") and section(doc, "Raises")


def test_every_public_name_is_on_the_site():
    pages = (DOCS / "api").glob("*.md")
    text = "\n".join(page.read_text("utf-8") for page in pages)
    known = set(re.findall(r"(?:auto\w+|data):: (\w+)", text))
    modules = ["tilewise", *(f"tilewise.{name}" for name in MODULES)]
    names = {name for module in modules for name in PUBLIC[module].split()}
    assert names - known - {"__version__", "cache"} == set()


def test_docstrings_open_with_a_subject():
    """They say what a function or class is or does, not what the one before it does."""
    found = []
    for name in FILES:
        for node in nodes_of(name):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                doc = ast.get_docstring(node)
                found += [f"{name}:{node.lineno}"] if doc and NO_SUBJECT.match(doc) else []
    assert not found
