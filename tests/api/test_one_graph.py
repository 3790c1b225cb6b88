"""Every public function, with what makes its path another, is one graph to torch.compile: nothing
that it calls takes a lock, reads a frame or makes a mask where a compiler traces it.
"""

import pytest
import torch
from helpers.tiers import sample
from torch.utils import _pytree as pytree

import tilewise
from tilewise import mods


def ints(*numbers):
    return torch.tensor(numbers, dtype=torch.int32)


def random(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


q, k, v = random(2, 16, 4, 16), random(2, 24, 2, 16), random(2, 24, 2, 16) + 1
packed_q, packed_k, starts = random(30, 4, 16), random(30, 2, 16), ints(0, 13, 30)
steps, new, parts = random(2, 3, 4, 16), random(2, 2, 2, 16), random(2, 2, 3, 4, 16)
pages, table, used = random(2, 4, 8, 2, 16), ints(0, 1, 2, 3).view(2, 2), ints(14, 9)
eight, scale = (20 * pages).to(torch.int8), dict(k_descale=torch.tensor(0.05), v_descale=None)
heads_first = [x.transpose(1, 2) for x in (q, k, v)]
mask, score = mods.causal() | mods.chunked(4), tilewise.scores.score(lambda s, b, h, i, j: s / 2)
block_mask = tilewise.sparse.create_block_mask(mods.causal(), 1, 1, 16, 24)
CHUNKS = dict(causal=True, attention_chunk=5)
LEARNED = dict(alibi_slopes=torch.rand(4), learnable_sink=torch.randn(4))
PAGES = dict(page_table=table, seqused_k=used, causal=True)
CACHE = dict(cache_seqlens=used, block_table=table, causal=True)


def appended(**options):
    k_cache, v_cache = k.clone(), v.clone()
    options |= dict(cache_seqlens=used, causal=True)
    out = tilewise.flash_attn_with_kvcache(steps, k_cache, v_cache, new, new, **options)
    return out, k_cache, v_cache


packed = packed_q, packed_k, packed_k, starts, starts, 17, 17
CALLS = {
    "flash": lambda: tilewise.flash_attn_func(q, k, v, window_size=(3, 2), softcap=5.0, **LEARNED),
    "flash, chunks": lambda: tilewise.flash_attn_func(q, k, v, **CHUNKS),
    "flash, FP8": lambda: tilewise.flash_attn_func(*(x.to(torch.float8_e4m3fn) for x in (q, k, v))),
    "packed": lambda: tilewise.flash_attn_varlen_func(*packed, return_attn_probs=True),
    "packed, chunks": lambda: tilewise.flash_attn_varlen_func(*packed, **CHUNKS),
    "packed, pages": lambda: tilewise.flash_attn_varlen_func(
        *(steps.flatten(0, 1), *pages, ints(0, 3, 6), ints(0, 14, 23), 3, 14),
        **dict(**CHUNKS, block_table=table),
    ),
    "stacked": lambda: tilewise.flash_attn_qkvpacked_func(torch.stack([q, q, q], 2), causal=True),
    "k and v stacked": lambda: tilewise.flash_attn_kvpacked_func(q, torch.stack([k, v], 2)),
    "sdpa": lambda: tilewise.scaled_dot_product_attention(*heads_first, enable_gqa=True),
    "sdpa, mask": lambda: tilewise.scaled_dot_product_attention(
        *heads_first, torch.ones(16, 24, dtype=torch.bool).tril(), enable_gqa=True
    ),
    "flex": lambda: tilewise.flex_attention(*heads_first, score, block_mask, enable_gqa=True),
    "mask": lambda: tilewise.attention(q, k, v, mask_mod=mask),
    "score": lambda: tilewise.attention(q, k, v, score_mod=score),
    "split": lambda: tilewise.attention(q, k, v, split_size=8, causal=True),
    "pages": lambda: tilewise.attention(steps, *pages, **PAGES, window=(5, 0)),
    "pages, mask": lambda: tilewise.attention(steps, *pages, **PAGES, mask_mod=mask),
    "int8": lambda: tilewise.attention(steps.bfloat16(), *eight, **PAGES, **scale),
    "quantize": lambda: tilewise.attention(tilewise.quantize(q, k, v)),
    "cache": lambda: tilewise.flash_attn_with_kvcache(steps, *pages, **CACHE),
    "cache, int": lambda: tilewise.flash_attn_with_kvcache(steps, k, v, cache_seqlens=7),
    "cache, int8, chunks": lambda: tilewise.flash_attn_with_kvcache(
        steps.bfloat16(), *eight, **CACHE, **scale, attention_chunk=4
    ),
    "cache, moved": lambda: tilewise.flash_attn_with_kvcache(
        steps, k, v, cache_seqlens=used, cache_batch_idx=ints(1, 0), cache_leftpad=ints(2, 0)
    ),
    "append": appended,
    "append, out": lambda: appended(out=torch.empty_like(steps)),
    "combine": lambda: tilewise.flash_attn_combine(parts, parts[..., 0]),
}


@pytest.mark.parametrize("name", sample(CALLS, "packed, pages", "cache, int8, chunks", "stacked"))
def test_a_call_is_one_graph(name):
    torch._dynamo.reset()
    with torch.no_grad():
        found = torch.compile(CALLS[name], fullgraph=True, backend="eager")()
        leaves = [pytree.tree_leaves(x) for x in (found, CALLS[name]())]
    assert len(leaves[0]) == len(leaves[1]) and all(
        x is y is None or torch.equal(x, y) for x, y in zip(*leaves)
    )
