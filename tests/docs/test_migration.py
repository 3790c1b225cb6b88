"""The migration page: every argument of our drop-in functions, and of the originals."""

import importlib.util
import inspect
import re
from pathlib import Path

import pytest
import torch
from torch.nn.attention.flex_attention import flex_attention

import tilewise

SOURCE = Path(__file__).resolve().parents[2] / "docs" / "extensions" / "migration.py"
SPEC = importlib.util.spec_from_file_location("migration", SOURCE)
migration = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(migration)

FLASH = [tilewise.flash_attn_func, tilewise.flash_attn_varlen_func]
WORDS = {
    tilewise.scaled_dot_product_attention: migration.SDPA,
    tilewise.flex_attention: migration.FLEX,
}


def names(function):
    return inspect.signature(function).parameters.keys()


def test_page_is_what_the_signatures_say():
    command = "PYTHONPATH=src python docs/extensions/migration.py writes it"
    assert migration.PAGE.read_text("utf-8") == migration.page(), command


def test_every_argument_of_ours_is_there():
    assert set().union(*map(names, FLASH)) == migration.FLASH.keys()
    for function, words in WORDS.items():
        assert names(function) == words.keys()


def test_every_argument_of_theirs_is_there():
    for theirs, ours in zip((migration.FLASH_3, migration.FLASH_3_VARLEN), FLASH, strict=True):
        assert set(theirs) - names(ours) == migration.ABSENT.keys()
    assert names(flex_attention) <= migration.FLEX.keys()
    head = torch.nn.functional.scaled_dot_product_attention.__doc__.partition("->")[0]
    assert re.findall(r"(\w+)(?:=[\w.]+)?[,)]", head) == list(migration.SDPA)


@pytest.mark.parametrize("words", [migration.FLASH, migration.SDPA, migration.FLEX])
def test_attention_has_what_is_named(words):
    named = {name for word in words.values() for name in word.attention.split(" or ") if name}
    assert named <= names(tilewise.attention)


SLOPES = torch.tensor([0.3, 0.1])
SEEN = torch.rand(6, 9) > 0.3
SAME = [
    (tilewise.flash_attn_func, dict(softmax_scale=0.2), dict(scale=0.2)),
    (tilewise.flash_attn_func, dict(causal=True), dict(causal=True)),
    (tilewise.flash_attn_func, dict(window_size=(2, -1)), dict(window=(2, None))),
    (tilewise.flash_attn_func, dict(softcap=0.0), dict(softcap=None)),
    (tilewise.flash_attn_func, dict(alibi_slopes=SLOPES), dict(alibi_slopes=SLOPES)),
    (tilewise.flash_attn_func, dict(learnable_sink=SLOPES), dict(sinks=SLOPES)),
    (
        tilewise.flash_attn_func,
        dict(attention_chunk=4),
        dict(mask_mod=lambda b, h, q_idx, kv_idx: (q_idx + 3) // 4 == kv_idx // 4),
    ),
    (tilewise.scaled_dot_product_attention, dict(is_causal=True), dict(causal="top_left")),
    (
        tilewise.scaled_dot_product_attention,
        dict(attn_mask=SEEN),
        dict(mask_mod=lambda b, h, q_idx, kv_idx: SEEN[q_idx, kv_idx]),
    ),
    (
        tilewise.scaled_dot_product_attention,
        dict(attn_mask=SEEN.float()),
        dict(bias=SEEN.float()[None, None]),
    ),
]


@pytest.mark.parametrize(("function", "theirs", "ours"), SAME)
def test_both_columns_say_the_same(function, theirs, ours):
    """Each argument that has another name or another value in `attention`."""
    q, k, v = torch.randn(1, 6, 2, 8), *torch.randn(2, 1, 9, 2, 8)
    expected = tilewise.attention(q, k, v, **ours)
    if function is tilewise.scaled_dot_product_attention:
        got = function(*(x.transpose(1, 2) for x in (q, k, v)), **theirs).transpose(1, 2)
    else:
        got = function(q, k, v, **theirs)
    torch.testing.assert_close(got, expected)
