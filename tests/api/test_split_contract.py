"""The bitwise contract of split-KV: a row's bits are those of its query, its keys and split_size.

Clauses: C0 one run is the next; C1 neither batch mates nor order nor where pages lie and how large
they are; C2 whole prefill, chunks, verification of a few and decoding one by one; C3 the forward
of training; C4 pages that sequences share. All on lengths of three pieces and more: shorter ones
have nothing to fold.
"""

import pytest
import torch
from helpers.caches import contiguous, paged, sequences
from helpers.tiers import pairwise
from hypothesis import given, settings
from hypothesis import strategies as st

import tilewise
from tilewise.kernels.cpu import cache, cache_rows
from tilewise.tile import split_kv

SPLIT = 32
FEATURES = {
    "plain": {},
    "causal": dict(causal=True),
    "window": dict(causal=True, window=(45, 0)),
    "softcap": dict(causal=True, softcap=2.0),
    "alibi": dict(causal=True, alibi_slopes=torch.tensor([0.3, 0.1])),
    "sinks": dict(causal=True, sinks=torch.tensor([0.3, 2.0])),
    "mask": dict(mask_mod=lambda b, h, q_idx, kv_idx: (kv_idx <= q_idx) & (kv_idx % 5 != h)),
}
features = st.sampled_from(sorted(FEATURES))
heads = st.sampled_from([(2, 2), (2, 1)])
page_sizes = st.sampled_from([None, 1, 2, 7, 16, 64, 256, 512])
dtypes = st.sampled_from([torch.float32, torch.bfloat16, torch.float64])
seeds = st.integers(0, 2**16)
lengths = st.integers(3 * SPLIT, 6 * SPLIT)
several = st.lists(st.tuples(st.integers(1, 9), lengths), min_size=2, max_size=4)
contract = settings(max_examples=10, deadline=None, database=None)


def run(s, page_size=None, seed=0, split_size=SPLIT, **options):
    table, k, v = None, contiguous(s.k), contiguous(s.v)
    if page_size is not None:
        k, v, table = paged(s, page_size, seed)
    at = dict(page_table=table, seqused_k=s.lengths, cu_seqlens_q=s.starts, split_size=split_size)
    return tilewise.attention(torch.cat(s.q), k, v, return_lse=True, **at, **options)


def rows_of(s, found):
    """out and lse of each sequence."""
    counts = [len(x) for x in s.q]
    return list(zip(found[0].split(counts), found[1].split(counts, 1)))


def assert_equal(found, expected):
    for x, y in zip(found, expected, strict=True):
        assert torch.equal(x, y)


def only(s, i):
    return type(s)(*([x[i]] for x in s))


@contract
@given(seed=seeds, shape=several, name=features, h=heads, dtype=dtypes, page_size=page_sizes)
def test_c0_and_c1_neither_mates_nor_order_nor_pages(seed, shape, name, h, dtype, page_size):
    s = sequences(*zip(*shape), h, (16, 24), dtype, seed)
    options = FEATURES[name]
    together = run(s, **options)
    assert_equal(together, run(s, **options))
    assert_equal(together, run(s, page_size, seed, **options))
    order = torch.randperm(len(shape)).tolist()
    turned = type(s)(*([x[i] for i in order] for x in s))
    for i, found in zip(order, rows_of(turned, run(turned, page_size, seed, **options))):
        assert_equal(found, rows_of(s, together)[i])
    for i, found in enumerate(rows_of(s, together)):
        assert_equal(found, run(only(s, i), page_size, seed + 1, **options))


def steps(total, seqlen_k, chunk):
    """Ends of the calls that `total` last queries are computed in."""
    begin = seqlen_k - total
    return [(max(begin, a), min(a + chunk, seqlen_k)) for a in range(begin, seqlen_k, chunk)]


@contract
@given(
    **dict(seed=seeds, seqlen_k=lengths, name=features, h=heads, page_size=page_sizes),
    total=st.integers(1, 40),
    chunk=st.integers(1, 12),
)
def test_c2_prefill_is_chunks_is_decode(seed, seqlen_k, name, h, page_size, total, chunk):
    s = sequences([total], [seqlen_k], h, (16, 24), seed=seed)
    options = dict(FEATURES[name])
    if name == "plain":
        options = dict(causal=True)  # else later keys would be seen
    out, lse = run(s, **options)
    for a, b in steps(total, seqlen_k, chunk):
        begin = seqlen_k - total
        part = type(s)([s.q[0][a - begin : b - begin]], [s.k[0][:b]], [s.v[0][:b]])
        found = run(part, page_size, seed, **options)
        assert_equal(found, (out[a - begin : b - begin], lse[:, a - begin : b - begin]))


def test_c2_a_whole_prefill_token_by_token():
    s = sequences([4 * SPLIT], [4 * SPLIT], (2, 1))
    out, lse = run(s, 16, causal=True)
    for i in range(4 * SPLIT):
        part = type(s)([s.q[0][i : i + 1]], [s.k[0][: i + 1]], [s.v[0][: i + 1]])
        assert_equal(run(part, 8, causal=True), (out[i : i + 1], lse[:, i : i + 1]))


TRAINED = ("plain", "causal", "window", "softcap", "alibi", "sinks")


@pytest.mark.parametrize("name", TRAINED)
def test_c3_the_training_forward(name):
    """Decoding has the bits that a gradient was computed with, and that is the formula's."""
    s = sequences([3 * SPLIT + 7] * 2, [3 * SPLIT + 7] * 2, (2, 1), (16, 24))
    options = dict(FEATURES[name]) | dict(causal=True)
    if "sinks" in options:
        options["sinks"] = options["sinks"].clone().requires_grad_()
    q, k, v = (torch.stack(x).requires_grad_() for x in s)
    out, lse = tilewise.attention(q, k, v, split_size=SPLIT, return_lse=True, **options)
    with torch.no_grad():
        for n in (3 * SPLIT, 3 * SPLIT + 7):
            last = [x[n - 1 : n] for x in s.q]
            part = type(s)(last, *([x[:n] for x in y] for y in s[1:]))
            found = run(part, 16, **options)
            assert torch.equal(found[0], out[:, n - 1])
            assert torch.equal(found[1].T, lse[:, :, n - 1])
    inputs = [q, k, v, *(x for x in [options.get("sinks")] if x is not None)]
    weights, of_lse = torch.randn_like(out), torch.randn_like(lse)
    grads = torch.autograd.grad((out * weights).sum() + (lse * of_lse).sum(), inputs)
    exact = [x.detach().double().requires_grad_() for x in inputs]
    if len(exact) == 4:
        options["sinks"] = exact[3]
    out, lse = tilewise.attention_reference(*exact[:3], return_lse=True, **options)
    loss = (out * weights.double()).sum() + (lse * of_lse.double()).sum()
    for mine, oracle in zip(grads, torch.autograd.grad(loss, exact)):
        torch.testing.assert_close(mine.double(), oracle, atol=2e-5, rtol=2e-5)


def test_c3_what_is_not_served_says_so():
    q, k = torch.randn(1, 3, 2, 16, requires_grad=True), torch.randn(1, 5, 2, 16)
    with pytest.raises(NotImplementedError, match="mask_mod with split_size and a gradient"):
        tilewise.attention(q, k, k, split_size=4, mask_mod=lambda b, h, i, j: i >= j)
    # Where a graph may break, torch 2.11 fails in its own code before it comes to the error
    compiled = torch.compile(tilewise.attention, backend="eager", fullgraph=True)
    with pytest.raises(Exception, match="split_size with a gradient under a compiler"):
        compiled(q, k, k, split_size=4)


@contract
@given(
    seed=seeds, prefix=st.integers(3, 6), own=st.lists(st.integers(1, 40), min_size=2, max_size=4)
)
def test_c4_a_prefix_that_is_shared(seed, prefix, own):
    """Tables may repeat pages: sequences with the same pages have the bits of copies."""
    size = SPLIT // 2
    s = sequences([1] * len(own), [prefix * size + n for n in own], seed=seed)
    for x in (s.k, s.v):
        for y in x[1:]:
            y[: prefix * size] = x[0][: prefix * size]
    expected = run(s, size, seed, causal=True)
    k, v, table = paged(s, size, seed)
    for row in table[1:]:
        k[row[:prefix].long()] = torch.nan  # pages that no table names may hold anything
        row[:prefix] = table[0, :prefix]
    at = dict(page_table=table, seqused_k=s.lengths, cu_seqlens_q=s.starts, split_size=SPLIT)
    found = tilewise.attention(torch.cat(s.q), k, v, return_lse=True, causal=True, **at)
    assert_equal(found, expected)


def test_split_size_is_part_of_the_arithmetic():
    """Else the properties above would hold of anything."""
    s = sequences([3], [6 * SPLIT], (4, 2), (64, 64))
    found = {n: run(s, split_size=n)[0] for n in (SPLIT, 2 * SPLIT, 6 * SPLIT, 100 * SPLIT)}
    assert not torch.equal(found[SPLIT], found[2 * SPLIT])
    assert not torch.equal(found[2 * SPLIT], found[6 * SPLIT])


def test_threads_change_no_bit():
    s = sequences([5, 1], [4 * 512, 3 * 512], (8, 8), (64, 64))
    threads = torch.get_num_threads()
    try:
        found = []
        for n in (1, 2, 3):
            torch.set_num_threads(n)
            found.append(run(s, 16, split_size=512, causal=True))
    finally:
        torch.set_num_threads(threads)
    for other in found[1:]:
        assert_equal(other, found[0])


# the arithmetic


def state(rows=5, headdim=4, dtype=torch.float32):
    s, v = torch.randn(rows, 7, dtype=dtype) * 4, torch.randn(7, headdim, dtype=dtype)
    m = s.amax(1, keepdim=True)
    p = torch.exp(s - m)
    return split_kv.SplitState(p @ v, m, p.sum(1, keepdim=True)), (s, v)


def test_folding_is_the_softmax_over_both():
    (left, (s1, v1)), (right, (s2, v2)) = state(dtype=torch.float64), state(dtype=torch.float64)
    out, lse = split_kv.finish(split_kv.fold(left, right))
    s = torch.cat([s1, s2], 1)
    torch.testing.assert_close(out, torch.softmax(s, 1) @ torch.cat([v1, v2]))
    torch.testing.assert_close(lse, torch.logsumexp(s, 1))


def test_a_piece_without_keys_changes_no_bit():
    some, _ = state()
    empty = split_kv.empty_state(some.acc_o)
    assert_equal(split_kv.fold(some, empty), some)
    assert_equal(split_kv.fold(empty, some), some)
    out, lse = split_kv.finish(split_kv.fold(empty, empty))
    assert (out == 0).all() and (lse == -torch.inf).all()


def with_sinks(state, sinks):
    return split_kv.finish(split_kv.fold(state, split_kv.key_without_value(sinks, state.acc_o)))


def test_a_sink_is_a_key_without_a_value():
    some, (s, v) = state(dtype=torch.float64)
    sinks = torch.tensor([0.3, -torch.inf, 50.0, -2.0, 1.0], dtype=torch.float64).view(5, 1)
    out, lse = with_sinks(some, sinks)
    p = torch.softmax(torch.cat([s, sinks], 1), 1)
    torch.testing.assert_close(out, p[:, :-1] @ v)
    torch.testing.assert_close(lse, torch.logsumexp(torch.cat([s, sinks], 1), 1))
    assert torch.equal(with_sinks(split_kv.empty_state(some.acc_o), sinks)[1], sinks.squeeze(1))


@pytest.mark.parametrize("first, last, found", [(0, 0, []), (0, 1, [0]), (0, 64, [0, 1])])
def test_pieces_count_from_key_0(first, last, found):
    assert list(split_kv.pieces(first, last, SPLIT)) == found
    assert list(split_kv.pieces(SPLIT + 1, 3 * SPLIT + 1, SPLIT)) == [1, 2, 3]


def test_pieces_grow_with_the_rows_that_they_write():
    assert [split_kv.default_split_size(group) for group in (1, 4, 8, 9)] == [512, 512, 1024, 2048]


SIZES = (0, 0, 0), (1 << 7, 1 << 12, 1 << 10)


@pytest.mark.parametrize(
    "name, page_size, sizes", pairwise(["causal", "window", "mask", "alibi"], [None, 3], SIZES)
)
def test_sizes_of_tiles_and_chunks_change_no_bit(monkeypatch, name, page_size, sizes):
    """How many queries, spans and copied keys go together is for speed; a piece has two spans."""
    monkeypatch.setattr(cache, "SPAN", 24)
    s = sequences([7, 1, 5], [4 * SPLIT + 5, 3 * SPLIT, 5 * SPLIT + 1], (2, 1), (16, 24))
    options = dict(causal=True) | FEATURES[name]
    found = run(s, page_size, **options)
    exact = tilewise.attention_reference(
        *(torch.cat(s.q), contiguous(s.k), contiguous(s.v)),
        **dict(seqused_k=s.lengths, cu_seqlens_q=s.starts, return_lse=True, **options),
    )
    for mine, theirs in zip(found, exact):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)
    for module, what, value in zip(
        (cache, cache, cache_rows), ("SCORES", "STATES", "COPIED"), sizes, strict=True
    ):
        monkeypatch.setattr(module, what, value)
    assert_equal(run(s, page_size, **options), found)
    monkeypatch.setattr(cache_rows, "_is_in_units", lambda x: False)
    assert_equal(run(s, page_size, **options), found)
