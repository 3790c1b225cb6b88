"""Chunks over a KV cache by Hopper's forward of training on the card: the formula, the same bits
for all pages and any batch, launches past Triton and graphs.
"""

import math

import pytest
import torch
from helpers.caches import contiguous, paged, sequences
from helpers.eight_bits import POISON, quantised
from helpers.left_pages import arguments, in_batch, leave

import tilewise
from tilewise.kernels.hopper.fwd import cached as schedules
from tilewise.ops import calls
from tilewise.testing.tolerance import assert_within

pytestmark = pytest.mark.gpu

BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
QUERIES, LENGTHS = 300, [1900, 700, 31, 0]
SLOPES = torch.tensor([0.5, 0.1, 0.02, 0.01] * 2)
CASES = [
    ("plain", (128, 128), (8, 8), {}),
    ("causal", (64, 64), (8, 2), dict(causal=True)),
    ("window", (192, 128), (8, 2), dict(causal=True, window=(700, 0))),
    ("softcap", (80, 80), (8, 2), dict(causal=True, softcap=20.0, alibi_slopes=SLOPES)),
    ("sinks", (128, 64), (8, 1), dict(causal=True, sinks=torch.tensor([1.0, -math.inf] * 4))),
    ("wide", (256, 256), (8, 2), dict(causal=True)),
]


@pytest.fixture(autouse=True)
def served(monkeypatch):
    """Each call is a chunk, which this counts."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("Hopper's kernels need a GPU of compute capability 9.0")
    seen, why = [], schedules.why_in_pieces

    def noted(*asked):
        seen.append((reason := why(*asked)) is None)
        return reason

    monkeypatch.setattr(schedules, "why_in_pieces", noted)
    monkeypatch.setattr(schedules, "least_queries", lambda nheads, group: 9)
    calls._entry.cache_clear()
    yield seen
    assert all(seen)
    calls._entry.cache_clear()


def drawn(heads=(8, 2), headdims=(128, 128), lengths=LENGTHS, seed=0):
    return sequences([QUERIES] * len(lengths), lengths, heads, headdims, BF16, seed)


def moved(options):
    return {n: x.cuda() if isinstance(x, torch.Tensor) else x for n, x in options.items()}


def run(s, page_size=None, seed=0, **options):
    """Of tensors on the CPU, on the card."""
    fill = POISON.get(s.k[0].dtype, math.nan)
    if page_size is None:
        cache = dict(k=contiguous(s.k, fill=fill), v=contiguous(s.v, fill=fill))
    else:
        cache = dict(zip(("k", "v", "page_table"), paged(s, page_size, seed, fill)))
    q = torch.stack(s.q).cuda()
    out = q.new_full((*q.shape[:-1], cache["v"].shape[-1]), math.nan)
    at = moved(cache | dict(seqused_k=s.lengths) | options)
    return tilewise.attention(q, **at, out=out, return_lse=True)


def assert_equal(found, expected):
    for x, y in zip(found, expected, strict=True):
        assert torch.equal(x, y)


EIGHT_BITS = [
    (E4M3, BF16, 128, dict(causal=True)),
    (E4M3, torch.float16, 64, dict(causal=True, window=(700, 0))),
    (torch.int8, BF16, 64, {}),
]


@pytest.mark.parametrize("dtype, q_dtype, headdim, options", EIGHT_BITS)
def test_8_bits_have_the_bits_of_a_cache_that_was_converted_before(
    dtype, q_dtype, headdim, options, served
):
    x = quantised([QUERIES] * 3, LENGTHS[:3], dtype, "none", (8, 2), (headdim,) * 2, q_dtype)
    converted = x.s._replace(k=[k.to(q_dtype) for k in x.s.k], v=[v.to(q_dtype) for v in x.s.v])
    found = run(converted, **options)
    for page_size in (None, 8, 16, 64, 256):
        assert_equal(run(x.s, page_size, 1, **options), found)
        assert_equal(run(x.s, page_size, 2, **options), found)


@pytest.mark.parametrize("name, headdims, heads, options", CASES, ids=[x[0] for x in CASES])
def test_the_formula_and_the_bits(name, headdims, heads, options, served):
    s = drawn(heads, headdims)
    found = run(s, **options)
    few = () if name == "window" else (8,)  # of headdim 192 these are too many copies
    for page_size in (*few, 16, 64, 256):
        assert_equal(run(s, page_size, seed=page_size, **options), found)
    alone = type(s)(*(x[1:2] for x in s))
    for page_size in (None, 16):
        assert_equal([x[0] for x in run(alone, page_size, **options)], [x[1] for x in found])
    q, k, v = torch.stack(s.q), contiguous(s.k, fill=0.0), contiguous(s.v, fill=0.0)
    words = moved(options | dict(seqused_k=s.lengths, return_lse=True))
    exact = tilewise.attention_reference(*(x.cuda().double() for x in (q, k, v)), **words)
    rough = tilewise.attention_reference(*(x.cuda() for x in (q, k, v)), upcast=False, **words)
    for what, *triple in zip(("out", "lse"), found, exact, rough):
        assert_within(*triple, what)


LEFT = [(16, BF16, (256, 256)), (64, BF16, (128, 128)), (16, E4M3, (64, 64))]


@pytest.mark.parametrize("page_size, dtype, headdims", LEFT)
def test_pages_that_a_window_has_left_behind_may_be_anything(page_size, dtype, headdims, served):
    at = in_batch(arguments([QUERIES] * 3, LENGTHS[:3], page_size, dtype, (8, 2), headdims))
    for left in (110, 650):
        options = dict(causal=True, window=(left, 0), backend="hopper", return_lse=True)
        expected = tilewise.attention(**moved(at), **options)
        assert expected[0].isfinite().all()
        for _ in range(20):
            assert_equal(tilewise.attention(**moved(leave(at, left)), **options), expected)


@pytest.mark.parametrize("page_size", [None, 16])
def test_later_launches_and_graphs_are_of_their_own_tensors(page_size, served):
    first, second = drawn(seed=1), drawn(lengths=[1900, 5, 1200, 300], seed=2)
    expected = [run(s, page_size, causal=True) for s in (first, second)]
    cache = [
        paged(s, 16) if page_size else (contiguous(s.k), contiguous(s.v)) for s in (first, second)
    ]
    wide = max(x[0].shape[0] for x in cache), max(x[-1].shape[1] for x in cache)
    q, used = torch.stack(first.q).cuda(), first.lengths.cuda()
    names = ("k", "v", "page_table")
    room = [x.cuda() for x in cache[0]]
    if page_size:
        room = [x.new_zeros(wide[0], *x.shape[1:]) for x in room[:2]] + [used.new_zeros(4, wide[1])]
    at = dict(zip(names, room), seqused_k=used, causal=True, return_lse=True)
    out = torch.empty_like(q)

    def place(s, xs):
        q.copy_(torch.stack(s.q))
        used.copy_(s.lengths)
        for mine, x in zip(room, xs):
            mine[tuple(slice(n) for n in x.shape)] = x.cuda()

    tilewise.attention(q, **at, out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        _, lse = tilewise.attention(q, **at, out=out)
    for s, xs, right in zip((first, second) * 2, cache * 2, expected * 2):
        place(s, xs)
        graph.replay()
        assert_equal((out, lse), right)
        assert_equal(tilewise.attention(q, **at, out=out), right)
