"""flash-attn's functions for a cache, held to what they say in plain torch."""

import inspect
import itertools

import pytest
import torch
from helpers.caches import INT32, contiguous, paged, sequences

import tilewise
from tilewise.tile.rotary import Rotary, rotate

BATCH, ROOM, HEADS, HEADS_K, HEADDIM = 3, 80, 6, 3, 16
BEFORE = torch.tensor([31, 0, 64], dtype=INT32)
FLASH_ATTN_2 = (
    *("q", "k_cache", "v_cache", "k", "v", "rotary_cos", "rotary_sin", "cache_seqlens"),
    *("cache_batch_idx", "cache_leftpad", "block_table", "softmax_scale", "causal"),
    *("window_size", "softcap", "rotary_interleaved", "alibi_slopes", "num_splits"),
    "return_softmax_lse",
)


def test_positions_are_those_of_flash_attn_2():
    parameters = inspect.signature(tilewise.flash_attn_with_kvcache).parameters.values()
    positional = [x.name for x in parameters if x.kind is x.POSITIONAL_OR_KEYWORD]
    assert tuple(positional) == FLASH_ATTN_2


def tables(positions, rotary_dim):
    angles = torch.outer(torch.arange(positions), 100.0 ** -(torch.arange(0, rotary_dim, 2) / 9))
    return angles.cos(), angles.sin()


def draw(seqlen_q, seqlen_new, rows=BATCH):
    q = torch.randn(BATCH, seqlen_q, HEADS, HEADDIM)
    k, v = torch.randn(2, BATCH, seqlen_new, HEADS_K, HEADDIM).unbind(0)
    k_cache, v_cache = torch.randn(2, rows, ROOM, HEADS_K, HEADDIM).unbind(0)
    return q, k_cache, v_cache, k, v


def expected_of(q, k_cache, v_cache, new, rotary, idx, leftpad, causal, window, **options):
    """Row by row: append, rotate, attend to what is left of the row."""
    outs = []
    for b in range(BATCH):
        row = b if idx is None else int(idx[b])
        n, pad = int(BEFORE[b]), 0 if leftpad is None else int(leftpad[b])
        queries = q[b]
        if rotary is not None:
            steps = torch.arange(len(queries)) if causal or window != (-1, -1) else 0
            queries = rotate(queries, rotary, n + steps + torch.zeros(len(queries)))
        if new is not None:
            k, v = new[0][b], new[1][b]
            if rotary is not None:
                k = rotate(k, rotary, n + torch.arange(len(k)))
            k_cache[row, n : n + len(k)], v_cache[row, n : n + len(k)] = k, v
            n += len(k)
        keys = (x[None, row, pad:n] for x in (k_cache, v_cache))
        options["alibi_slopes"] = options.get("alibi_slopes")
        found = tilewise.attention_reference(
            queries[None], *keys, causal=causal, window=window, return_lse=True, **options
        )
        outs.append(found)
    return torch.cat([out for out, _ in outs]), torch.cat([lse for _, lse in outs])


CASES = itertools.product(
    [(1, 1), (3, 3), (5, 2), (2, None)],
    [None, (8, True), (16, False)],
    ["rows", "batch_idx", "leftpad", "both"],
    [(False, (-1, -1)), (True, (-1, -1)), (False, (20, 2))],
)
# Tables of angles need new keys
CASES = [case for case in CASES if case[1] is None or case[0][1] is not None]


@pytest.mark.parametrize("lengths, rotary, where, mask", CASES)
def test_the_semantics_of_flash_attn(lengths, rotary, where, mask):
    (causal, window), (seqlen_q, seqlen_new) = mask, lengths
    q, k_cache, v_cache, k, v = draw(seqlen_q, seqlen_new or 1, 5)
    new = None if seqlen_new is None else (k, v)
    turn = None if rotary is None else Rotary(*tables(ROOM, rotary[0]), rotary[1])
    idx = torch.tensor([4, 0, 2], dtype=INT32) if where in ("batch_idx", "both") else None
    pad = torch.tensor([7, 0, 33], dtype=INT32) if where in ("leftpad", "both") else None
    if idx is None:
        k_cache, v_cache = k_cache[:BATCH], v_cache[:BATCH]
    caches = k_cache.clone(), v_cache.clone()
    slopes = torch.rand(HEADS)
    expected = expected_of(
        q, *caches, new, turn, idx, pad, causal, window, alibi_slopes=slopes, softcap=5.0
    )
    found = tilewise.flash_attn_with_kvcache(
        *(q, k_cache, v_cache, *(new or (None, None))),
        *((None, None) if turn is None else turn[:2]),
        *(BEFORE, idx, pad, None, None, causal, window, 5.0),
        *(turn is None or turn.interleaved, slopes, 0, True),
    )
    for mine, theirs in zip(found, expected):
        torch.testing.assert_close(mine, theirs, atol=2e-5, rtol=2e-5)
    torch.testing.assert_close((k_cache, v_cache), caches, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("name", ["block_table", "page_table"])
@pytest.mark.parametrize("page_size", [1, 3, 16])
def test_pages(name, page_size):
    s = sequences([2, 2], [40, 9], (HEADS, HEADS_K))
    rows = contiguous(s.k, 42), contiguous(s.v, 42)
    k_pages, v_pages, table = paged(s, page_size)
    k_pages, v_pages = k_pages.nan_to_num(0.0), v_pages.nan_to_num(0.0)
    q, before = torch.stack(s.q), s.lengths - 2
    k, v = torch.randn(2, 2, 2, HEADS_K, 16).unbind(0)
    options = dict(cache_seqlens=before, causal=True, return_softmax_lse=True)
    expected = tilewise.flash_attn_with_kvcache(q, *rows, k, v, **options)
    found = tilewise.flash_attn_with_kvcache(q, k_pages, v_pages, k, v, **options, **{name: table})
    assert torch.equal(found[0], expected[0]) and torch.equal(found[1], expected[1])


def test_packed_queries_and_new_keys():
    """flash-attn 3's words; the same as one sequence at a time."""
    counts = [3, 1, 2]
    starts = torch.tensor([0, 3, 4, 6], dtype=INT32)
    q, k_cache, v_cache, k, v = draw(6, 6)
    q, k, v = q[0], k[0], v[0]
    cos, sin = tables(ROOM, 8)
    rotary = dict(rotary_cos=cos, rotary_sin=sin, causal=True)
    rows = [k_cache.clone(), v_cache.clone()]
    found = tilewise.flash_attn_with_kvcache(
        *(q, k_cache, v_cache, k, v),
        **dict(cache_seqlens=BEFORE, cu_seqlens_q=starts, cu_seqlens_k_new=starts, **rotary),
        **dict(max_seqlen_q=3, num_splits=4, pack_gqa=True, sm_margin=2),
    )
    for b, part in enumerate(torch.arange(6).split(counts)):
        one = [x[b : b + 1] for x in rows]
        new = k[None, part], v[None, part]
        out = tilewise.flash_attn_with_kvcache(
            q[None, part], *one, *new, cache_seqlens=int(BEFORE[b]), **rotary
        )
        assert torch.equal(out[0], found[part])
    assert torch.equal(k_cache, rows[0]) and torch.equal(v_cache, rows[1])


def test_rotary_seqlens_and_chunks_and_sinks():
    q, k_cache, v_cache, k, v = draw(2, 2)
    cos, sin = tables(ROOM, 16)
    sinks, elsewhere = torch.randn(HEADS), torch.tensor([5, 6, 7], dtype=INT32)
    turn = Rotary(cos, sin, True)
    rows = k_cache.clone(), v_cache.clone()
    at = elsewhere.unsqueeze(1) + torch.arange(2)
    expected = tilewise.flash_attn_with_kvcache(
        *(rotate(q, turn, at), *rows, rotate(k, turn, at), v),
        **dict(cache_seqlens=BEFORE, causal=True, attention_chunk=16, learnable_sink=sinks),
    )
    found = tilewise.flash_attn_with_kvcache(
        *(q, k_cache, v_cache, k, v, cos, sin, BEFORE),
        **dict(rotary_seqlens=elsewhere, causal=True, attention_chunk=16, learnable_sink=sinks),
    )
    assert torch.equal(found, expected)
    positions = BEFORE.unsqueeze(1) + torch.arange(2)
    for b in range(BATCH):
        seen = positions[b, -1] // 16 * 16
        keys = (x[b : b + 1, seen : BEFORE[b] + 2] for x in rows)
        last = rotate(q, turn, at)[b : b + 1, -1:]
        alone = tilewise.attention_reference(last, *keys, sinks=sinks)
        torch.testing.assert_close(expected[b : b + 1, -1:], alone)


def test_a_cache_that_is_full_and_out():
    q, k_cache, v_cache, *_ = draw(2, 1)
    out = torch.empty_like(q)
    found = tilewise.flash_attn_with_kvcache(q, k_cache, v_cache, out=out)
    assert found is out
    torch.testing.assert_close(out, tilewise.attention_reference(q, k_cache, v_cache))


def test_a_graph_of_a_step():
    def step(q, k_cache, v_cache, k, v, cos, sin, before, table):
        turn = dict(rotary_cos=cos, rotary_sin=sin, rotary_interleaved=False)
        where = dict(cache_seqlens=before, block_table=table, causal=True)
        return tilewise.flash_attn_with_kvcache(q, k_cache, v_cache, k, v, **turn, **where)

    s = sequences([1, 1], [40, 9], (HEADS, HEADS_K))
    k_pages, v_pages, table = (x.nan_to_num(0.0) for x in paged(s, 8, unused=(0, 0)))
    k, v = torch.randn(2, 2, 1, HEADS_K, 16).unbind(0)
    rest = k, v, *tables(64, 16), s.lengths - 1, table
    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    q, mine, theirs = torch.stack(s.q), *([x.clone() for x in (k_pages, v_pages)] for _ in "ab")
    assert torch.equal(compiled(q, *mine, *rest), step(q, *theirs, *rest))
    assert torch.equal(mine[0], theirs[0]) and torch.equal(mine[1], theirs[1])


def test_varlen_over_pages():
    s = sequences([1, 5, 3], [70, 33, 3], (HEADS, HEADS_K))
    k, v, table = paged(s, 8)
    starts_k = torch.tensor([0, 70, 103, 106], dtype=INT32)
    found = tilewise.flash_attn_varlen_func(
        *(torch.cat(s.q), k, v, s.starts, starts_k, 5, 70, 0.0, None, True, (30, 0)),
        **dict(block_table=table, return_lse=True),
    )
    expected = tilewise.flash_attn_varlen_func(
        *(torch.cat(s.q), torch.cat(s.k), torch.cat(s.v), s.starts, starts_k),
        **dict(causal=True, window_size=(30, 0), return_lse=True),
    )
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    used = torch.tensor([50, 20, 0], dtype=INT32)
    found = tilewise.flash_attn_varlen_func(
        *(torch.cat(s.q), k, v, s.starts, starts_k), block_table=table, seqused_k=used
    )
    expected = tilewise.attention(
        torch.cat(s.q), k, v, page_table=table, seqused_k=used, cu_seqlens_q=s.starts
    )
    assert torch.equal(found, expected)
    with pytest.raises(NotImplementedError, match="dropout_p with a cache"):
        tilewise.flash_attn_varlen_func(
            *(torch.cat(s.q), k, v, s.starts, starts_k, 5, 70, 0.1), block_table=table
        )


def test_what_is_not_served_says_so():
    q, k_cache, v_cache, k, v = draw(1, 1)
    attend = tilewise.flash_attn_with_kvcache
    idx = torch.zeros(BATCH, dtype=INT32)
    for name in ("qv", "q_descale"):
        with pytest.raises(NotImplementedError, match=name):
            attend(q, k_cache, v_cache, **{name: q})
    with pytest.raises(NotImplementedError, match="cache_batch_idx and cache_leftpad"):
        attend(q, k_cache, v_cache, cache_batch_idx=idx, block_table=idx.unsqueeze(1))
    with pytest.raises(tilewise.ArgumentError, match="two names of one table"):
        attend(q, k_cache, v_cache, block_table=idx[:, None], page_table=idx[:, None])
    with pytest.raises(tilewise.ArgumentError, match="rotary_cos without k"):
        attend(q, k_cache, v_cache, rotary_cos=tables(9, 8)[0], rotary_sin=tables(9, 8)[1])
    with pytest.raises(tilewise.ArgumentError, match="cache_seqlens='8'"):
        attend(q, k_cache, v_cache, cache_seqlens="8")
    with pytest.raises(NotImplementedError, match="requires_grad: a call with a cache"):
        attend(q.requires_grad_(), k_cache, v_cache, k, v, cache_seqlens=3)


# combine


@pytest.mark.parametrize("shape", [(2, 5, 4), (7, 4)])
@pytest.mark.parametrize("n", [1, 2, 5])
def test_combine(n, shape):
    out, lse = torch.randn(n, *shape, 8), torch.randn(n, *shape) * 3
    lse[0].flatten()[:3] = -torch.inf
    out[lse == -torch.inf] = torch.nan
    lse[:, ..., -1] = -torch.inf
    found, found_lse = tilewise.flash_attn_combine(out, lse)
    weights = torch.softmax(lse.double(), 0).nan_to_num(0.0)
    expected = (weights.unsqueeze(-1) * out.double().nan_to_num(0.0)).sum(0)
    torch.testing.assert_close(found.double(), expected, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(found_lse.double(), torch.logsumexp(lse.double(), 0))


def test_combine_writes_out_and_casts():
    out, lse = torch.randn(3, 2, 5, 4, 8), torch.randn(3, 2, 5, 4)
    exact, _ = tilewise.flash_attn_combine(out, lse)
    assert tilewise.flash_attn_combine(out, lse, out_dtype=torch.bfloat16)[0].equal(
        exact.bfloat16()
    )
    target = torch.empty(2, 5, 4, 8, dtype=torch.float16)
    found, _ = tilewise.flash_attn_combine(out, lse, target)
    assert found is target and target.equal(exact.half())
    with pytest.raises(tilewise.ArgumentError, match="out_partial has shape"):
        tilewise.flash_attn_combine(out, lse[:2])
    with pytest.raises(tilewise.ArgumentError, match="out has shape"):
        tilewise.flash_attn_combine(out, lse, target[:1])
