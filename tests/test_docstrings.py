"""Every public example runs, and every public function has one."""

import doctest
import importlib
import inspect

import pytest

import tilewise

FUNCTIONS = [name for name in tilewise.__all__ if inspect.isfunction(getattr(tilewise, name))]
MODULES = (
    *(
        "tilewise.api",
        "tilewise.faces",
        "tilewise.sdpa",
        "tilewise.flex",
        "tilewise.bert_padding",
        "tilewise.cache",
        "tilewise.kv_cache",
        "tilewise.reference",
        "tilewise.testing.switch",
    ),
    *("tilewise.masks", "tilewise.scores", "tilewise.traced", "tilewise.derivative"),
    *("tilewise.dropout", "tilewise.sparse.block_mask"),
)


@pytest.mark.parametrize("name", MODULES)
def test_examples_run(name):
    found = doctest.testmod(importlib.import_module(name))
    assert found.attempted > 0 and found.failed == 0


@pytest.mark.parametrize(
    "name", [n for n in tilewise.__all__ if inspect.isfunction(getattr(tilewise, n))]
)
def test_public_functions_have_examples(name):
    assert ">>>" in inspect.getdoc(getattr(tilewise, name))
