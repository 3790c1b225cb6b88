"""Steps of decodes and chunks over a KV cache on the card: two launches at the same time, of which
each computes its own sequences.
"""

import math

import pytest
import torch
from helpers.caches import contiguous, paged, sequences

import tilewise
from tilewise.kernels.hopper.fwd import cached as schedules
from tilewise.ops import calls
from tilewise.testing.tolerance import assert_within

pytestmark = pytest.mark.gpu

BF16, E4M3, CHUNK = torch.bfloat16, torch.float8_e4m3fn, 64
QUERIES = [1, 300, 1, 0, 3, 140, 63, 64]
LENGTHS = [1900, 700, 40, 300, 31, 1200, 900, 20]  # of the last some see no key
SLOPES = torch.tensor([0.5, 0.1, 0.02, 0.01] * 2)
CASES = [
    ("plain", (128, 128), (8, 8), {}),
    ("causal", (128, 128), (8, 2), dict(causal=True)),
    ("narrow", (64, 64), (8, 1), dict(causal=True, sinks=torch.tensor([1.0, -math.inf] * 4))),
    ("wide", (256, 256), (8, 2), dict(causal=True, softcap=20.0, alibi_slopes=SLOPES)),
]


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("Hopper's kernels need a GPU of compute capability 9.0")
    monkeypatch.setattr(schedules, "least_queries", lambda nheads, group: 2 * CHUNK)
    calls._entry.cache_clear()
    yield
    calls._entry.cache_clear()


def drawn(queries=QUERIES, lengths=LENGTHS, heads=(8, 2), headdims=(128, 128), seed=0):
    return sequences(queries, lengths, heads, headdims, BF16, seed)


def moved(options):
    return {n: x.cuda() if isinstance(x, torch.Tensor) else x for n, x in options.items()}


def arguments(s, page_size, seed=0, tail=7):
    """Of a step, on the card; q has rows of no sequence, too."""
    if page_size is None:
        cache = dict(k=contiguous(s.k), v=contiguous(s.v))
    else:
        cache = dict(zip(("k", "v", "page_table"), paged(s, page_size, seed)))
    q = torch.cat([*s.q, s.q[0].new_full((tail, *s.q[0].shape[1:]), math.nan)])
    return moved(dict(q=q, **cache, seqused_k=s.lengths, cu_seqlens_q=s.starts))


def run(s, page_size=16, seed=0, **options):
    at = arguments(s, page_size, seed) | moved(options)
    at = dict(max_seqlen_q=max(map(len, s.q))) | at
    out, lse = tilewise.attention(**at, return_lse=True)
    rows = [len(x) for x in s.q]
    assert (out[sum(rows) :] == 0).all() and (lse[:, sum(rows) :] == -math.inf).all()
    return list(zip(out[: sum(rows)].split(rows), lse[:, : sum(rows)].split(rows, 1)))


def assert_equal(found, expected):
    for mine, theirs in zip(found, expected, strict=True):
        for x, y in zip(mine, theirs, strict=True):
            assert torch.equal(x, y)


@pytest.mark.parametrize("headdim", [64, 128])
def test_8_bits_have_the_bits_of_a_cache_that_was_converted_before(headdim):
    """Of chunks, and within the budget of decodes."""
    s = drawn(headdims=(headdim, headdim))
    kept = s._replace(k=[x.to(E4M3) for x in s.k], v=[x.to(E4M3) for x in s.v])
    converted = s._replace(k=[x.to(BF16) for x in kept.k], v=[x.to(BF16) for x in kept.v])
    expected = run(converted, None, causal=True)
    for page_size in (None, 16, 64):
        found = run(kept, page_size, causal=True)
        assert_equal(run(kept, page_size, 1, causal=True), found)
        for x, mine, theirs in zip(s.q, found, expected, strict=True):
            if len(x) >= CHUNK:
                assert_equal([mine], [theirs])
            else:
                assert all(torch.allclose(*pair, atol=0.02) for pair in zip(mine, theirs))


@pytest.mark.parametrize("name, headdims, heads, options", CASES, ids=[x[0] for x in CASES])
def test_the_formula_and_the_bits(name, headdims, heads, options):
    s = drawn(heads=heads, headdims=headdims)
    found = run(s, **options)
    assert_equal(run(s, **options), found)  # past Triton
    assert_equal(run(s, None, **options), found)
    turned = type(s)(*(x[::-1] for x in s))
    assert_equal(run(turned, seed=1, **options)[::-1], found)
    for i in (0, 1, 5):
        alone = type(s)(*([x[i]] for x in s))
        assert_equal(run(alone, max_seqlen_q=300, **options), [found[i]])
    words = moved(options) | dict(return_lse=True)
    for i, triple in enumerate(zip(*s)):
        q, k, v = (x[None].cuda() for x in triple)
        if not q.numel():
            continue
        exact = tilewise.attention_reference(*(x.double() for x in (q, k, v)), **words)
        rough = tilewise.attention_reference(q, k, v, upcast=False, **words)
        for what, mine, right, near in zip(("out", "lse"), found[i], exact, rough):
            assert_within(mine[None], right, near, f"{what} of sequence {i}")


STEPS = [
    QUERIES,
    [300, 64, 0, 3, 1, 63, 140, 1],
    [72, 72, 72, 72, 71, 71, 71, 71],
    [1, 1, 1, 1, 1, 1, 1, 1],
    [0, 565, 0, 0, 0, 0, 0, 7],
]


def test_a_graph_is_for_any_step():
    """Of the same rows in other sequences: chunks alone, decodes alone."""
    lengths = [1900, 700, 600, 300, 310, 1200, 900, 200]
    steps = [drawn(queries, lengths, seed=i) for i, queries in enumerate(STEPS)]
    steps = [arguments(s, 16, tail=sum(QUERIES) + 7 - sum(map(len, s.q))) for s in steps]
    room = {name: x.clone() for name, x in steps[0].items()}
    at = dict(causal=True, max_seqlen_q=600, return_lse=True)
    expected = [[x.clone() for x in tilewise.attention(**step, **at)] for step in steps]
    out = torch.empty_like(room["q"])
    tilewise.attention(**room, **at, out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        _, lse = tilewise.attention(**room, **at, out=out)
        found = out.clone(), lse.clone()  # after both launches
    for _ in range(3):
        for step, right in zip(steps, expected):
            for name, x in step.items():
                room[name].copy_(x)
            out.fill_(math.nan)
            lse.fill_(math.nan)
            graph.replay()
            used = int(step["cu_seqlens_q"][-1])
            assert torch.equal(found[0][:used], right[0][:used])
            assert torch.equal(found[1][:, :used], right[1][:, :used])


def test_what_follows_in_the_stream_follows_both_launches():
    s = drawn([1] * 60 + [200], [3000] * 61, seed=3)
    at = arguments(s, 16) | dict(causal=True, max_seqlen_q=200)
    out = torch.empty_like(at["q"])
    expected = tilewise.attention(**at, out=out).clone()
    for _ in range(100):
        out.fill_(math.nan)
        tilewise.attention(**at, out=out)
        found = out.clone()
        assert torch.equal(found[:260], expected[:260])
