"""Appending to a cache of 8 bits: what is stored, which scales are read and which are written."""

import contextlib

import pytest
import torch
from helpers.caches import INT32
from helpers.eight_bits import DTYPES, LARGEST, POISON
from helpers.tiers import pairwise

import tilewise
from tilewise import ArgumentError, cache
from tilewise.testing import use_interpreter
from tilewise.tile.quantize import dequantize, quantize, row_scales
from tilewise.tile.rotary import Rotary, rotate

OP = torch.ops.tilewise.flash_attn_cache_append.default
BF16, E4M3, INT8 = torch.bfloat16, torch.float8_e4m3fn, torch.int8
BATCH, NEW, HEADS, SIZE = 3, 5, 2, 4
PAGES = torch.tensor([[3, 1, 0], [6, 2, -1], [5, 7, 4]], dtype=INT32)
USED = torch.tensor([9, 5, 12], dtype=INT32)
ALL_NEW = torch.full((BATCH,), NEW, dtype=INT32)
KINDS = ("none", "tensor", "head", "sequence", "row")
WAYS = {"cpu": contextlib.nullcontext, "portable": use_interpreter}


def draw(dtype, kind, q_dtype=BF16):
    """Pages, all of them poisoned, new keys and values, and scales."""
    pools = [torch.full((8, SIZE, HEADS, d), POISON[dtype], dtype=dtype) for d in (16, 24)]
    k, v = (torch.randn(BATCH, NEW, HEADS, d).to(q_dtype) * 3 for d in (16, 24))
    k[0, 0], v[1, 2, 0], v[2, 1, 1, 3] = 0, 300, -1e4
    shape = dict(tensor=(), head=(HEADS,), sequence=(BATCH, HEADS)).get(kind)
    scales = [None, None]
    if kind == "row":
        scales = [torch.full((8, SIZE, HEADS), torch.nan) for _ in "kv"]
    elif shape is not None:
        scales = [(torch.rand(shape) + 0.5) / 50 for _ in "kv"]
    return pools, (k, v), scales


def places():
    """Page and row of each new key, (BATCH, NEW)."""
    position = USED.unsqueeze(1) - NEW + torch.arange(NEW)
    return PAGES.long().gather(1, position // SIZE), position % SIZE


def scales_of(x, scale, dtype):
    """What each new row and head is divided by."""
    if scale is None:
        return torch.ones(x.shape[:3])
    if scale.dim() == 3:
        return row_scales(x, dtype)
    return (scale.unsqueeze(1) if scale.dim() == 2 else scale).expand(x.shape[:3])


@pytest.mark.parametrize(
    "way, dtype, kind, is_packed", pairwise(WAYS, DTYPES, KINDS, [False, True])
)
def test_what_is_stored(way, dtype, kind, is_packed):
    dtype = DTYPES[dtype]
    pools, new, scales = draw(dtype, kind)
    given = [None if x is None else x.clone() for x in scales]
    rotary = Rotary(*torch.randn(2, 20, 4).unbind(0), interleaved=False)
    at = dict(page_table=PAGES, seqused_k=USED, rotary=rotary)
    rows = new
    if is_packed:
        rows = [x.flatten(0, 1) for x in new]
        at["cu_seqlens_q"] = torch.arange(0, NEW * BATCH + 1, NEW, dtype=INT32)
    with WAYS[way]():
        cache.append(*pools, *rows, **at, k_descale=scales[0], v_descale=scales[1])
    position = USED.unsqueeze(1) - NEW + torch.arange(NEW)
    new = rotate(new[0], rotary, position), new[1]
    for pool, x, scale, before in zip(pools, new, scales, given):
        divisor = scales_of(x, scale, dtype)
        expected = torch.full(pool.shape, POISON[dtype], dtype=dtype)
        stored = quantize(x, divisor.unsqueeze(-1), dtype)
        expected.view(INT8).index_put_(places(), stored.view(INT8))
        assert torch.equal(pool.view(INT8), expected.view(INT8))
        if kind == "row":  # written where keys are, and nowhere else
            before[places()] = divisor
        if scale is not None:
            assert torch.equal(scale.nan_to_num(-7.0), before.nan_to_num(-7.0))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_come_back(way, dtype):
    """By the inverse: within half a step, and the largest of a row as it was."""
    dtype = DTYPES[dtype]
    pools, new, scales = draw(dtype, "row", torch.float32)
    slots = (places()[0] * SIZE + places()[1]).flatten()
    rows = [x.flatten(0, 1) for x in new]
    with WAYS[way]():
        cache.append(*pools, *rows, slots=slots, k_descale=scales[0], v_descale=scales[1])
    for pool, x, scale in zip(pools, new, scales):
        stored, found = pool[places()], scale[places()]
        back = dequantize(stored, found, torch.float32)
        largest = x.abs().amax(-1, keepdim=True)
        step = found.unsqueeze(-1) if dtype == INT8 else torch.maximum(x.abs() / 8, largest * 1e-4)
        assert ((back - x).abs() <= 0.501 * step + 1e-37).all()
        whole = stored.float().abs().amax(-1)[largest.squeeze(-1) > 0]
        assert (whole == LARGEST[dtype]).all()


@pytest.mark.parametrize("way", WAYS)
def test_nan_and_infinity(way):
    pools, (k, v), scales = draw(E4M3, "row")
    k[0, 1, 0, 2], v[2, 2, 1, 0] = torch.nan, torch.inf
    with WAYS[way]():
        cache.append(
            *(*pools, k, v),
            **dict(page_table=PAGES, seqused_k=USED, k_descale=scales[0], v_descale=scales[1]),
        )
    k_scale, v_scale = (x[places()] for x in scales)
    assert k_scale.isnan().nonzero().tolist() == [[0, 1, 0]]
    assert v_scale.isinf().nonzero().tolist() == [[2, 2, 1]]


def test_a_step_by_flash_attns_function_is_appending_then_attending():
    for kind in ("head", "row"):
        pools, new, scales = draw(INT8, kind)
        q = torch.randn(BATCH, NEW, 4, 16).to(BF16)
        copies = [x.clone() for x in pools], [x.clone() for x in scales]
        found = tilewise.flash_attn_with_kvcache(
            *(q, *pools, *new),
            **dict(cache_seqlens=ALL_NEW - NEW, block_table=PAGES, causal=True),
            **dict(k_descale=scales[0], v_descale=scales[1]),
        )
        (k, v), descales = copies
        names = dict(k_descale=descales[0], v_descale=descales[1])
        at = dict(page_table=PAGES, seqused_k=ALL_NEW)
        cache.append(k, v, *new, **at, **names)
        expected = tilewise.attention(q, k, v, causal=True, **at, **names)
        assert torch.equal(found, expected) and found.isfinite().all()
        assert torch.equal(scales[0].nan_to_num(7.0), descales[0].nan_to_num(7.0))


def test_refusals():
    pools, (k, v), scales = draw(E4M3, "sequence")
    at = dict(page_table=PAGES, seqused_k=USED)
    slots = torch.zeros(BATCH, NEW, dtype=torch.int64)
    with pytest.raises(ArgumentError, match="v_descale has shape .*, scales per sequence: pass"):
        cache.append(*pools, k, v, slots=slots, v_descale=scales[1])
    with pytest.raises(ArgumentError, match="k_descale has shape .* elements share memory"):
        cache.append(*pools, k, v, **at, k_descale=torch.ones(8, 1, HEADS).expand(8, SIZE, HEADS))
    with pytest.raises(ArgumentError, match=r"k_descale has shape \(3,\): it must be \(\) or"):
        cache.append(*pools, k, v, **at, k_descale=torch.ones(3))
    with pytest.raises(ArgumentError, match="k_descale with k_cache of torch.bfloat16"):
        cache.append(*(x.to(BF16) for x in pools), k, v, **at, k_descale=scales[0])
    with pytest.raises(NotImplementedError, match="v_cache.dtype is torch.float8_e5m2"):
        cache.append(pools[0], pools[1].view(torch.float8_e5m2), k, v, **at)
    with pytest.raises(ArgumentError, match="k_cache.dtype is .* and v_cache.dtype is torch.int8"):
        cache.append(pools[0], pools[1].view(INT8), k, v, **at)
    with pytest.raises(ArgumentError, match="k.dtype is torch.float8_e4m3fn: with a KV cache"):
        cache.append(*pools, k.to(E4M3), v.to(E4M3), **at)
    with pytest.raises(ArgumentError, match="v.dtype is torch.float32 and k.dtype is"):
        cache.append(*pools, k, v.float(), **at)
    with pytest.raises(NotImplementedError, match="k_descale.requires_grad"):
        cache.append(*pools, k, v, **at, k_descale=scales[0].requires_grad_())


# operators

READ, WRITTEN = ("k_descale", "v_descale"), ("k_row_scales", "v_row_scales")


@pytest.mark.parametrize("kind", ["none", "head", "row"])
def test_opcheck(kind):
    pools, (k, v), scales = draw(INT8, kind, torch.float32)
    tensors = *pools, k, v, PAGES, USED, None, None, None, None, True
    if kind == "row":
        scales = [x.nan_to_num(1.0) for x in scales]
    names = dict(zip(WRITTEN if kind == "row" else READ, scales))
    torch.library.opcheck(OP, tensors, names)


@pytest.mark.parametrize("kind", ["head", "row"])
def test_a_graph(kind):
    torch._dynamo.reset()
    pools, new, scales = draw(E4M3, kind)
    copies = [x.clone() for x in pools], [None if x is None else x.clone() for x in scales]

    def step(k_cache, v_cache, k, v, k_descale, v_descale):
        at = dict(page_table=PAGES, seqused_k=ALL_NEW, k_descale=k_descale, v_descale=v_descale)
        cache.append(k_cache, v_cache, k * 2, v, **at)
        return tilewise.attention(k, k_cache, v_cache, causal=True, **at)

    found = torch.compile(step, fullgraph=True, backend="aot_eager")(*pools, *new, *scales)
    assert torch.equal(found, step(*copies[0], *new, *copies[1]))
    assert torch.equal(pools[0].view(INT8), copies[0][0].view(INT8))
    assert torch.equal(scales[1].nan_to_num(7.0), copies[1][1].nan_to_num(7.0))
