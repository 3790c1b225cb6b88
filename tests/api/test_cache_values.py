"""Values of lengths and pages on a CPU: each that is wrong is refused by the caller's name of it,
and nothing is written.
"""

import pytest
import torch

import tilewise

INT32 = torch.int32
SEQLENS = dict(cache_seqlens=torch.tensor([60, 3], dtype=INT32))
PAGES = dict(block_table=torch.arange(8, dtype=INT32).view(2, 4), **SEQLENS)
LEFTPAD = torch.tensor([2, 1], dtype=INT32)


def changed(given, name, value):
    """The arguments with one value of a tensor replaced: its last that is in use."""
    x = given[name].clone()
    x[(1,) if x.dim() == 1 else (0, 3)] = value
    return given | {name: x}


WRONG = {
    "a length past the rows": (SEQLENS, "cache_seqlens", 70),
    "a negative length": (SEQLENS, "cache_seqlens", -1),
    "the largest length": (SEQLENS, "cache_seqlens", 2**31 - 1),
    "a length past the pages": (PAGES, "cache_seqlens", 65),
    "no such page": (PAGES, "block_table", 99),
    "a negative page": (PAGES, "block_table", -1),
    "no such row": (
        dict(cache_batch_idx=torch.tensor([1, 0], dtype=INT32), **SEQLENS),
        "cache_batch_idx",
        8,
    ),
    "more padding than keys": (dict(cache_leftpad=LEFTPAD, **SEQLENS), "cache_leftpad", 5),
    "negative padding": (dict(cache_leftpad=LEFTPAD, **SEQLENS), "cache_leftpad", -1),
}


def called(given, new=None):
    rows = (8, 16) if "block_table" in given else (2, 64)
    k_cache, v_cache = torch.ones(2, *rows, 2, 16).unbind(0)
    q = torch.randn(2, 1, 4, 16)
    try:
        tilewise.flash_attn_with_kvcache(q, k_cache, v_cache, new, new, causal=True, **given)
    finally:
        assert new is not None or k_cache.eq(1).all()
    return k_cache


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("appends", [False, True])
def test_a_wrong_value_is_refused_by_name(name, appends):
    given, argument, value = WRONG[name]
    new = torch.zeros(2, 1, 2, 16) if appends else None
    called(given, new)
    with pytest.raises(tilewise.ArgumentError, match=argument):
        called(changed(given, argument, value), new)


@pytest.mark.parametrize("given", [SEQLENS, PAGES], ids=["rows", "pages"])
def test_a_new_key_of_a_full_sequence_is_not_dropped(given):
    full = changed(given, "cache_seqlens", 64)
    called(full)
    with pytest.raises(tilewise.ArgumentError, match=r"cache_seqlens \+ new keys=\[61, 65\]"):
        called(full, torch.zeros(2, 1, 2, 16))


def test_pages_are_read_without_lengths():
    k = torch.randn(8, 16, 2, 16)
    table = torch.tensor([[0, 8]], dtype=INT32)
    with pytest.raises(tilewise.ArgumentError, match=r"page_table\[0, 1\] is 8.*32 keys"):
        tilewise.attention(torch.randn(1, 1, 4, 16), k, k, page_table=table)
