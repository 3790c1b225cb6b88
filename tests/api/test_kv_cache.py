"""A cache: features against the formula, what is promised of unused memory."""

import math
import threading

import pytest
import torch
from helpers.caches import INT32, contiguous, paged, sequences

import tilewise
from tilewise import mods
from tilewise.frontend import values
from tilewise.testing import use_interpreter
from tilewise.testing.tolerance import assert_within

QUERIES, LENGTHS = [1, 3, 0, 7], [130, 64, 5, 300]
SLOPES_OF_ROWS = torch.rand(4, 4, generator=torch.Generator().manual_seed(1))
FEATURES = {
    "plain": {},
    "causal": dict(causal=True),
    "window": dict(window=(20, 3)),
    "causal window": dict(causal=True, window=(40, 0)),
    "scale and softcap": dict(scale=0.7, softcap=3.0),
    "alibi": dict(causal=True, alibi_slopes=torch.tensor([0.5, 0.1, 0.02, 0.01])),
    "alibi of rows": dict(alibi_slopes=SLOPES_OF_ROWS),
    "sinks": dict(causal=True, sinks=torch.tensor([1.0, -math.inf, 0.0, 4.0])),
    "mask": dict(mask_mod=lambda b, h, q_idx, kv_idx: ((q_idx - kv_idx) % 3 != h) | (b == 1)),
}
PAGE_SIZES = [None, 1, 3, 16, 48, 256, 512]


def cached(s, page_size, **poison):
    """k, v and page_table."""
    if page_size is None:
        return contiguous(s.k), contiguous(s.v), None
    return paged(s, page_size, **poison)


def run(s, page_size=16, split_size=64, attend=tilewise.attention, cast=None, **options):
    k, v, table = cached(s, page_size)
    q = torch.cat(s.q)
    if cast is not None:
        q, k, v = q.to(cast), k.to(cast), v.to(cast)
    if attend is tilewise.attention:
        options["split_size"] = split_size
    lengths = dict(seqused_k=s.lengths, cu_seqlens_q=s.starts, page_table=table)
    return attend(q, k, v, return_lse=True, **lengths, **options)


def check(s, found, page_size=None, **options):
    reference = tilewise.attention_reference
    oracle = run(s, page_size, attend=reference, cast=torch.float64, **options)
    plain = run(s, page_size, attend=reference, upcast=False, **options)
    for name, mine, exact, rough in zip(("out", "lse"), found, oracle, plain):
        assert_within(mine, exact, rough, name)


@pytest.mark.parametrize("page_size", [None, 3, 256])
@pytest.mark.parametrize("name", FEATURES)
def test_features(name, page_size):
    s = sequences(QUERIES, LENGTHS)
    check(s, run(s, page_size, **FEATURES[name]), page_size, **FEATURES[name])


@pytest.mark.parametrize("heads", [(1, 1), (4, 4), (6, 2), (8, 1), (34, 2)])
@pytest.mark.parametrize("headdims", [(8, 8), (40, 24), (16, 72)])
def test_heads_and_headdims(heads, headdims):
    s = sequences(QUERIES, LENGTHS, heads, headdims)
    check(s, run(s, causal=True), causal=True)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_halves(dtype):
    s = sequences(QUERIES, LENGTHS, dtype=dtype)
    out, lse = run(s, causal=True)
    assert out.dtype == dtype and lse.dtype == torch.float32
    check(s, (out, lse), causal=True)


def test_doubles():
    s = sequences(QUERIES, LENGTHS, dtype=torch.float64)
    expected = run(s, attend=tilewise.attention_reference, causal=True)
    for x, y in zip(run(s, causal=True), expected):
        torch.testing.assert_close(x, y, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("split_size", [1, 63, 64, 65, 300, 600, 10**6])
def test_any_piece(split_size):
    s = sequences(QUERIES, LENGTHS)
    check(s, run(s, split_size=split_size, causal=True), causal=True)


def test_queries_in_a_batch_and_both_layouts():
    s = sequences([2, 2], [40, 9])
    q, (k, v, table) = torch.stack(s.q), paged(s, 8)
    options = dict(page_table=table, seqused_k=s.lengths, causal=True, return_lse=True)
    out, lse = tilewise.attention(q, k, v, **options)
    assert out.shape == q.shape and lse.shape == (2, 4, 2)
    packed, packed_lse = run(s, 8, None, causal=True)
    assert torch.equal(out.flatten(0, 1), packed)
    assert torch.equal(lse.transpose(0, 1).flatten(1), packed_lse)
    turned = (x.transpose(1, 2) for x in (q, k, v))
    found, found_lse = tilewise.attention(*turned, layout="bhsd", **options)
    assert torch.equal(found, out.transpose(1, 2)) and torch.equal(found_lse, lse)
    q_row, k_row, v_row = q, contiguous(s.k), contiguous(s.v)
    options.pop("page_table")
    found = tilewise.attention(q_row, k_row, v_row, split_size=512, **options)
    assert torch.equal(found[0], out) and torch.equal(found[1], lse)


def test_lengths_that_are_left_out_are_all_that_there_is_room_for():
    q, k, v = torch.randn(2, 1, 4, 16), torch.randn(6, 8, 2, 16), torch.randn(6, 8, 2, 16)
    table = torch.tensor([[5, 0, 2], [1, 1, 3]], dtype=INT32)
    found = tilewise.attention(q, k, v, page_table=table)
    rows = [x[table.long()].flatten(1, 2) for x in (k, v)]
    torch.testing.assert_close(found, tilewise.attention_reference(q, *rows))


STRIDES = {
    "heads first": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "a longer row": lambda x: torch.cat([x, x], -1)[..., : x.shape[-1]],
    "rows that are no unit": lambda x: torch.nn.functional.pad(x, (0, 3))[..., : x.shape[-1]],
    "off by one number": lambda x: torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape),
    "a layer inside a block": lambda x: torch.stack([x, x * 0, x], 1)[:, 2],
    "shared by heads": lambda x: x[:, :, :1].expand(-1, -1, x.shape[2], -1),
}


@pytest.mark.parametrize("page_size", [4, 256])
@pytest.mark.parametrize("name", STRIDES)
def test_strides(name, page_size):
    s = sequences(QUERIES, LENGTHS)
    k, v, table = paged(s, page_size)
    options = dict(page_table=table, seqused_k=s.lengths, cu_seqlens_q=s.starts, split_size=64)
    k, v = STRIDES[name](k), STRIDES[name](v)
    found = tilewise.attention(torch.cat(s.q), k, v, **options)
    expected = tilewise.attention(torch.cat(s.q), k.contiguous(), v.contiguous(), **options)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("fill", [math.nan, math.inf])
def test_what_is_not_in_use_changes_nothing(page_size, fill):
    s = sequences(QUERIES, LENGTHS)
    expected = run(s, None)
    q = torch.cat(s.q)
    options = dict(seqused_k=s.lengths, cu_seqlens_q=s.starts, split_size=64, return_lse=True)
    if page_size is None:
        k, v, table = contiguous(s.k, 400, fill), contiguous(s.v, 400, fill), None
    else:
        k, v, table = paged(s, page_size, fill=fill, seed=3)
    found = tilewise.attention(q, k, v, page_table=table, **options)
    assert torch.equal(found[0], expected[0]) and torch.equal(found[1], expected[1])


def test_pages_that_a_window_has_left_behind_may_be_anything():
    s = sequences([1, 2], [200, 90])
    expected = run(s, 16, causal=True, window=(30, 0))
    k, v, table = paged(s, 16)
    for row, length, seqlen_q in ((0, 200, 1), (1, 90, 2)):
        first = (length - seqlen_q - 30) // 16
        k[table[row, :first].long()] = math.nan
        v[table[row, :first].long()] = math.inf
        table[row, :first] = -1
    found = tilewise.attention(
        *(torch.cat(s.q), k, v),
        **dict(page_table=table, seqused_k=s.lengths, cu_seqlens_q=s.starts, split_size=64),
        **dict(causal=True, window=(30, 0), return_lse=True),
    )
    assert torch.equal(found[0], expected[0]) and torch.equal(found[1], expected[1])


@pytest.mark.parametrize("page_size", [None, 16])
def test_sequences_without_keys(page_size):
    s = sequences([2, 1, 2], [0, 40, 0])
    sinks = torch.tensor([0.5, 1.0, -1.0, 2.0])
    out, lse = run(s, page_size, causal=True)
    assert (out[[0, 1, 3, 4]] == 0).all() and (lse[:, [0, 1, 3, 4]] == -math.inf).all()
    out, lse = run(s, page_size, causal=True, sinks=sinks)
    assert (out[[0, 1, 3, 4]] == 0).all()
    assert torch.equal(lse[:, 0], sinks) and torch.isfinite(lse).all()


def test_rows_that_pad_a_graph():
    """Sequences of no keys and entries of -1, queries past the last one: nothing is written."""
    s = sequences([1, 2], [100, 33])
    expected, _ = run(s, 16, causal=True)
    k, v, table = paged(s, 16)
    q = torch.cat([*s.q, torch.full((5, 4, 16), math.nan)])
    out = torch.full_like(q, 7.0)
    found = tilewise.attention(
        *(q, k, v),
        page_table=torch.cat([table, torch.full_like(table, -1)]),
        seqused_k=torch.cat([s.lengths, torch.zeros(2, dtype=INT32)]),
        cu_seqlens_q=torch.cat([s.starts, s.starts[-1:], s.starts[-1:]]),
        **dict(causal=True, split_size=64, out=out),
    )
    assert found is out
    assert torch.equal(out[:3], expected) and (out[3:] == 7).all()


def test_a_length_past_the_table_is_clamped_or_named(monkeypatch):
    s = sequences([1, 1], [64, 32])
    k, v, table = paged(s, 16)
    table = table[:, :3]  # of 48 keys
    options = dict(page_table=table, cu_seqlens_q=s.starts, split_size=16)
    q, long = torch.cat(s.q), torch.tensor([64, 32], dtype=INT32)
    room = torch.tensor([48, 32], dtype=INT32)
    with monkeypatch.context() as unread:  # as on a GPU
        unread.setattr(values, "knows_values", lambda x: False)
        result = tilewise.attention(q, k, v, seqused_k=long, **options)
    assert torch.equal(result, tilewise.attention(q, k, v, seqused_k=room, **options))
    with pytest.raises(tilewise.ArgumentError, match=r"seqused_k=\[64, 32\].*page_table.*48 keys"):
        tilewise.attention(q, k, v, seqused_k=long, **options)
    table[1, 1] = len(k)
    with pytest.raises(
        tilewise.ArgumentError, match=r"page_table\[1, 1\].*below the number of pages"
    ):
        tilewise.attention(q, k, v, seqused_k=room, **options)


def test_one_page_many_times():
    """More keys than the pool holds."""
    q, k, v = torch.randn(1, 3, 4, 16), torch.randn(1, 8, 1, 16), torch.randn(1, 8, 1, 16)
    table = torch.zeros(1, 90, dtype=INT32)
    found = tilewise.attention(q, k, v, page_table=table, causal=True)
    rows = [x[table.long()].flatten(1, 2) for x in (k, v)]
    torch.testing.assert_close(found, tilewise.attention_reference(q, *rows, causal=True))


def test_an_entry_in_use_that_is_no_page_reads_a_page_that_is_there(monkeypatch):
    monkeypatch.setattr(values, "knows_values", lambda x: False)  # as on a GPU
    s = sequences([1], [40])
    k, v, table = paged(s, 16, fill=0.0)
    table[0, 1] = 2**31 - 1
    options = dict(page_table=table, seqused_k=s.lengths, cu_seqlens_q=s.starts)
    found = tilewise.attention(torch.cat(s.q), k, v, **options)
    assert found.isfinite().all()


def test_out_is_written_in_place_whatever_its_strides():
    s = sequences(QUERIES, LENGTHS)
    expected, expected_lse = run(s)
    buffer = torch.full((11, 4, 40), 5.0)
    out, lse = run(s, out=buffer[..., :16])
    assert out.data_ptr() == buffer.data_ptr() and torch.equal(out, expected)
    assert torch.equal(lse, expected_lse) and (buffer[..., 16:] == 5).all()


def test_no_queries_and_no_sequences():
    k, v = torch.randn(4, 8, 2, 16), torch.randn(4, 8, 2, 16)
    for batch in (0, 3):
        found, lse = tilewise.attention(
            *(torch.randn(0, 4, 16), k, v),
            page_table=torch.zeros(batch, 2, dtype=INT32),
            seqused_k=torch.zeros(batch, dtype=INT32),
            cu_seqlens_q=torch.zeros(batch + 1, dtype=INT32),
            return_lse=True,
        )
        assert found.shape == (0, 4, 16) and lse.shape == (4, 0)


def test_a_pool_without_pages():
    q, k = torch.randn(2, 1, 4, 16), torch.randn(0, 8, 2, 16)
    table = torch.full((2, 3), -1, dtype=INT32)
    out = tilewise.attention(q, k, k, page_table=table, seqused_k=torch.zeros(2, dtype=INT32))
    assert (out == 0).all()


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["cpu", "portable"])
def test_a_pool_of_more_than_2_to_the_31_elements(backend):
    """Only its last pages are in use, and only they are ever touched."""
    page_size, headdim = 16, 64
    num_pages = 2**31 // (page_size * headdim) + 8
    s = sequences([1, 2], [40, 20], (2, 1), (headdim, headdim), torch.float16)
    k, v, table = paged(s, page_size, fill=0.0)
    pools = [torch.empty(num_pages, page_size, 1, headdim, dtype=torch.float16) for _ in "kv"]
    offset = num_pages - len(k)
    for pool, x in zip(pools, (k, v)):
        assert pool.numel() > 2**31
        pool[offset:] = x
    options = dict(seqused_k=s.lengths, cu_seqlens_q=s.starts, split_size=16, backend=backend)
    in_use = (table >= 0) & (table < len(k))
    moved = torch.where(in_use, table + offset, table)
    with use_interpreter():
        expected = tilewise.attention(torch.cat(s.q), k, v, page_table=table, **options)
        found = tilewise.attention(torch.cat(s.q), *pools, page_table=moved, **options)
        assert torch.equal(found, expected)
        new = torch.ones(2, 1, 1, headdim, dtype=torch.float16)
        where = dict(page_table=moved, seqused_k=s.lengths)
        tilewise.cache.append(*pools, new, 2 * new, **where)
    for row, n in enumerate(s.lengths.tolist()):
        page = moved[row, (n - 1) // page_size]
        assert (pools[0][page, (n - 1) % page_size] == 1).all()
        assert (pools[1][page, (n - 1) % page_size] == 2).all()


def ancestors_of(parents):
    """Bits of each draft's ancestors and its own, from the draft that it follows; -1 for none."""
    found = []
    for i, parent in enumerate(parents):
        found.append(1 << i | (found[parent] if parent >= 0 else 0))
    return found


def test_a_tree_of_drafts():
    """Each draft sees what is before all of them, and its own ancestors."""
    trees = [[-1, 0, 0, 1, 2, 2], [-1], [-1, -1, 1]]
    s = sequences([len(x) for x in trees], [130, 40, 3])
    ancestors = torch.tensor([bits for x in trees for bits in ancestors_of(x)])
    k, v, table = paged(s, 8)
    at = dict(page_table=table, seqused_k=s.lengths, cu_seqlens_q=s.starts, split_size=32)
    mask = mods.tree(ancestors, s.lengths, s.starts)
    out, lse = tilewise.attention(torch.cat(s.q), k, v, mask_mod=mask, return_lse=True, **at)
    rows = iter(range(10))
    for i, parents in enumerate(trees):
        before = len(s.k[i]) - len(parents)
        for j, bits in enumerate(ancestors_of(parents)):
            seen = [*range(before), *(before + x for x in range(len(parents)) if bits >> x & 1)]
            alone, own = tilewise.attention_reference(
                s.q[i][None, j : j + 1], s.k[i][None, seen], s.v[i][None, seen], return_lse=True
            )
            row = next(rows)
            torch.testing.assert_close(out[row], alone[0, 0], atol=2e-6, rtol=2e-5)
            torch.testing.assert_close(lse[:, row], own[0, :, 0], atol=2e-6, rtol=2e-5)
    with use_interpreter():
        found = tilewise.attention(torch.cat(s.q), k, v, mask_mod=mask, backend="portable", **at)
    torch.testing.assert_close(found, out, atol=2e-6, rtol=2e-5)


def test_a_chain_of_drafts_has_the_bits_of_causal():
    s = sequences([5, 64], [130, 100])
    chains = [(1 << i + 1) - 1 if i < 63 else -1 for n in (5, 64) for i in range(n)]
    mask = mods.tree(torch.tensor(chains), s.lengths, s.starts)
    for x, y in zip(run(s, mask_mod=mask), run(s, causal=True)):
        assert torch.equal(x, y)
    with pytest.raises(tilewise.ArgumentError, match="ancestors.dtype is torch.int32.*int64"):
        mods.tree(torch.tensor(chains[:5]).int(), s.lengths, s.starts)


def test_memory_that_outlives_a_call_may_be_of_inference_mode():
    """The CPU keeps a block's memory in each thread; here the thread's first call makes it."""
    s = sequences([1], [300], (4, 2), (8, 8), torch.bfloat16)
    found = []

    def calls():
        with torch.inference_mode():
            found.append(run(s, 16))
        found.append(run(s, 16))

    thread = threading.Thread(target=calls)
    thread.start(), thread.join()
    assert len(found) == 2 and all(map(torch.equal, *found))
