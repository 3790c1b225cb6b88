"""Chunks over a KV cache with fewer tiles than SMs on the card: the formula, the bits in any batch,
launches past Triton and graphs.
"""

import math

import pytest
import torch
from helpers.caches import contiguous, paged, sequences

import tilewise
from tilewise.kernels.hopper.fwd import cached as schedules
from tilewise.kernels.hopper.fwd.parts_launch import whole_of
from tilewise.ops import calls
from tilewise.testing.tolerance import assert_within

pytestmark = pytest.mark.gpu

BF16 = torch.bfloat16
LENGTHS = [8192, 3000, 31, 0]
SLOPES = torch.tensor([0.5, 0.1, 0.02, 0.01] * 2)
CASES = [
    ("plain", 150, (128, 128), (8, 8), {}),
    ("causal", 130, (64, 64), (8, 2), dict(causal=True)),
    ("window", 520, (192, 128), (8, 2), dict(causal=True, window=(4000, 0))),
    ("softcap", 140, (80, 80), (8, 2), dict(causal=True, softcap=20.0, alibi_slopes=SLOPES)),
    ("sinks", 128, (128, 64), (8, 1), dict(causal=True, sinks=torch.tensor([1.0, -math.inf] * 4))),
    ("wide", 260, (256, 256), (8, 2), dict(causal=True)),
]


@pytest.fixture(autouse=True)
def parts(monkeypatch):
    """How many parts each first launch had."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("Hopper's kernels need a GPU of compute capability 9.0")
    seen, count_of = [], schedules.count_of

    def noted(*asked, **named):
        seen.append(count_of(*asked, **named))
        return seen[-1]

    monkeypatch.setattr(schedules, "count_of", noted)
    calls._entry.cache_clear()
    yield seen
    assert min(seen) > 1
    calls._entry.cache_clear()


def run(s, page_size=None, seed=0, **options):
    """Of tensors on the CPU, on the card."""
    if page_size is None:
        cache = dict(k=contiguous(s.k), v=contiguous(s.v))
    else:
        cache = dict(zip(("k", "v", "page_table"), paged(s, page_size, seed)))
    q = torch.stack(s.q).cuda()
    out = q.new_full((*q.shape[:-1], cache["v"].shape[-1]), math.nan)
    at = cache | dict(seqused_k=s.lengths) | options
    at = {name: x.cuda() if isinstance(x, torch.Tensor) else x for name, x in at.items()}
    return tilewise.attention(q, **at, out=out, return_lse=True)


def assert_equal(found, expected):
    for x, y in zip(found, expected, strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize(
    "name, queries, headdims, heads, options", CASES, ids=[x[0] for x in CASES]
)
def test_the_formula_and_the_bits(name, queries, headdims, heads, options):
    s = sequences([queries] * 4, LENGTHS, heads, headdims, BF16, 0)
    found = run(s, **options)
    for page_size in (16, 64, 256):
        assert_equal(run(s, page_size, seed=page_size, **options), found)
    assert_equal(run(s, **options), found)  # past Triton
    alone = type(s)(*(x[1:2] for x in s))
    for page_size in (None, 16):
        assert_equal([x[0] for x in run(alone, page_size, **options)], [x[1] for x in found])
    q, k, v = torch.stack(s.q), contiguous(s.k, fill=0.0), contiguous(s.v, fill=0.0)
    words = options | dict(seqused_k=s.lengths, return_lse=True)
    words = {name: x.cuda() if isinstance(x, torch.Tensor) else x for name, x in words.items()}
    exact = tilewise.attention_reference(*(x.cuda().double() for x in (q, k, v)), **words)
    rough = tilewise.attention_reference(*(x.cuda() for x in (q, k, v)), upcast=False, **words)
    for what, *triple in zip(("out", "lse"), found, exact, rough):
        assert_within(*triple, what)


@pytest.mark.parametrize("batch", [5, 8])
def test_tiles_that_one_program_computes_have_the_bits_of_shared_ones(batch, parts):
    """Of 5 sequences most tiles, of 8 all are those of one program; alone, none is."""
    lengths = [4096, 3000, 31, 0, 4000, 2048, 700, 4095][:batch]
    s = sequences([128] * batch, lengths, (32, 8), (128, 128), BF16, batch)
    found = run(s, 16, causal=True)
    assert 0 < whole_of(32 * batch, parts[-1], 132)
    for i in range(batch):
        alone = run(type(s)(*(x[i : i + 1] for x in s)), 16, seed=i, causal=True)
        assert_equal([x[0] for x in alone], [x[i] for x in found])
    for _ in range(20):
        assert_equal(run(s, 16, causal=True), found)


def test_graphs_and_later_launches_are_of_their_own_tensors():
    first, second = (
        sequences([130] * 2, [8192, n], (8, 2), (128, 128), BF16, n) for n in (31, 900)
    )
    expected = [run(s, causal=True) for s in (first, second)]
    room = [contiguous(x).cuda() for x in (first.k, first.v)]
    q, used = torch.stack(first.q).cuda(), first.lengths.cuda()
    out = torch.empty_like(q)
    at = dict(zip("kv", room), seqused_k=used, causal=True, return_lse=True, out=out)
    tilewise.attention(q, **at)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        _, lse = tilewise.attention(q, **at)
    for s, right in zip((first, second) * 2, expected * 2):
        q.copy_(torch.stack(s.q))
        used.copy_(s.lengths)
        for mine, x in zip(room, (s.k, s.v)):
            mine.copy_(contiguous(x))
        out.fill_(math.nan)
        graph.replay()
        assert_equal((out, lse), right)
        again = tilewise.attention(q, **at)
        assert_equal((out, again[1]), right)
