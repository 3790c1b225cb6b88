"""Tensors of engines that a call with a cache takes as they are, and those that it refuses, with
what to pass instead.
"""

import pytest
import torch

import tilewise
from tilewise import ArgumentError, cache

INT32, E4M3 = torch.int32, torch.float8_e4m3fn


@pytest.fixture
def pages():
    """Keys and values of 8 bits side by side in one row, heads before rows."""
    rows = torch.zeros(4, 2, 16, 2 * 8).to(E4M3).transpose(1, 2)
    return rows[..., :8], rows[..., 8:]


@pytest.fixture
def where():
    table, used = torch.tensor([[2, 1]], dtype=INT32), torch.tensor([3], dtype=INT32)
    return dict(page_table=table, seqused_k=used, cu_seqlens_q=torch.tensor([0, 3], dtype=INT32))


def test_views_of_packed_rows_and_scales_without_dimensions(pages, where):
    k, v = torch.randn(2, 3, 2, 8).unbind(0)
    scales = dict(k_descale=torch.tensor(0.1), v_descale=torch.tensor(0.2))
    cache.append(*pages, k, v, slots=torch.tensor([32, 33, 34]), **scales)
    out = tilewise.attention(torch.randn(3, 4, 8), *pages, causal=True, **where, **scales)
    stored = pages[1][2, 0].float() * 0.2
    torch.testing.assert_close(out[0], stored.repeat_interleave(2, 0))


def test_scales_of_rows_may_lie_within_the_rows():
    """K, its scale, V, its scale: each row and head is one run of bytes."""
    rows = torch.zeros(4, 2, 16, 8 + 4 + 8 + 4, dtype=torch.int8).transpose(1, 2)
    pages = rows[..., :8], rows[..., 12:20]
    found = [rows[..., n : n + 4].view(torch.float32).squeeze(-1) for n in (8, 20)]
    k, v = torch.randn(2, 3, 2, 8).unbind(0)
    scales = dict(k_descale=found[0], v_descale=found[1])
    cache.append(*pages, k, v, slots=torch.tensor([32, 33, 34]), **scales)
    for x, stored, scale in zip((k, v), pages, found):
        torch.testing.assert_close(scale[2, :3], x.abs().amax(-1) / 127)
        torch.testing.assert_close(stored[2, :3] * scale[2, :3, :, None], x, atol=0.02, rtol=0)
    assert rows[2, 3:].count_nonzero() == 0


@pytest.mark.parametrize(
    "changed, error, match",
    [
        (dict(k_descale=torch.ones(1)), ArgumentError, r"shape \(1,\).*expand\(\) it"),
        (dict(seqused_k=torch.tensor([3])), ArgumentError, "seqused_k.dtype .* must be int32"),
        (dict(page_table=torch.tensor([[2, 1]])), ArgumentError, "page_table.dtype .* be int32"),
        (dict(causal=torch.tensor([True])), NotImplementedError, "once for each of the two kinds"),
    ],
)
def test_what_attention_refuses(pages, where, changed, error, match):
    with pytest.raises(error, match=match):
        tilewise.attention(torch.randn(3, 4, 8), *pages, **where | dict(causal=True) | changed)


@pytest.mark.parametrize(
    "slots, match",
    [
        (torch.tensor([32, 33, 34], dtype=INT32), "slots.dtype is torch.int32: it must be int64"),
        (torch.tensor([32, 33]), r"slots has shape \(2,\): it must be \(3,\), one slot per new"),
    ],
)
def test_what_append_refuses(pages, slots, match):
    k, v = torch.randn(2, 3, 2, 8).unbind(0)
    with pytest.raises(ArgumentError, match=match):
        cache.append(*pages, k, v, slots=slots)
