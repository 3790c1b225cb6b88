"""Docstrings of public functions are Google's: a sentence, an example, Args, Returns, Raises."""

import inspect
import re

import pytest
from structure.test_public_paths import PUBLIC, load

SECTIONS = ["Example", "Args", "Returns", "Raises"]
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
# Their arguments are described where they are listed, in a sentence before.
OTHERS = re.compile(r"other arguments|What follows is as in|What follows `max_seqlen` is as in")


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
    described = re.findall(r"^    (\w+): ", section(doc, "Args"), re.MULTILINE)
    parameters = list(inspect.signature(function).parameters)
    assert set(described) <= set(parameters)
    if described and not OTHERS.search(doc):
        assert described == parameters
