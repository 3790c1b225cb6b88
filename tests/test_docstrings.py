"""Every public example runs, and every public function has one."""

import doctest
import importlib
import inspect

import pytest

import tilewise

FUNCTIONS = [name for name in tilewise.__all__ if inspect.isfunction(getattr(tilewise, name))]
MODULES = (
    *(
        "tilewise.frontend.attention",
        "tilewise.frontend.flash_attn",
        "tilewise.frontend.sdpa",
        "tilewise.frontend.flex",
        "tilewise.frontend.bert_padding",
        "tilewise.cache",
        "tilewise.frontend.append",
        "tilewise.frontend.kv_cache",
        "tilewise.reference",
        "tilewise.emulator.switch",
    ),
    *(
        "tilewise.mods.masks",
        "tilewise.mods.scores",
        "tilewise.mods.function",
        "tilewise.mods.derivative",
    ),
    *("tilewise.tile.random_bytes", "tilewise.mods.block_mask"),
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
