"""Many queries with a KV cache by Hopper's kernel on the card, whose warpgroups then share tiles of
keys: the formula, and the bits of one warpgroup, of single tokens, of any division.
"""

import math

import pytest
import torch
from helpers.caches import INT32, contiguous, paged, sequences

import tilewise
from tilewise.kernels.hopper.decode import launch
from tilewise.ops import calls
from tilewise.testing.tolerance import assert_within

pytestmark = pytest.mark.gpu

BF16 = torch.bfloat16
QUERIES, LENGTHS = [300, 1, 0, 70], [1900, 700, 5, 3000]
SLOPES = torch.tensor([0.5, 0.1, 0.02, 0.01] * 2)
CASES = [
    ("plain", (128, 128), (8, 8), {}),
    ("causal", (64, 64), (8, 2), dict(causal=True)),
    ("window", (192, 128), (8, 2), dict(causal=True, window=(700, 0))),
    ("softcap", (80, 80), (8, 2), dict(causal=True, softcap=20.0, alibi_slopes=SLOPES)),
    ("sinks", (128, 64), (8, 1), dict(causal=True, sinks=torch.tensor([1.0, -math.inf] * 4))),
    ("mask", (64, 128), (8, 2), dict(mask_mod=lambda b, h, q, kv: (q - kv) % 5 != h)),
    ("groups of 3", (128, 128), (6, 2), dict(causal=True)),
]


@pytest.fixture(autouse=True)
def hopper_alone():
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("Hopper's kernel needs a GPU of compute capability 9.0")


@pytest.fixture
def share(monkeypatch):
    """Sets how many warpgroups share tiles of keys, whatever the call."""

    def use(count):
        monkeypatch.setattr(launch, "warpgroups_of", lambda *args, **named: count)
        calls._entry.cache_clear()  # or what was launched before would be launched again

    yield use
    calls._entry.cache_clear()


def moved(options):
    return {n: x.cuda() if isinstance(x, torch.Tensor) else x for n, x in options.items()}


def run(s, page_size=16, seed=0, **options):
    """Of tensors on the CPU, on the card."""
    if page_size is None:
        cache = dict(k=contiguous(s.k), v=contiguous(s.v))
    else:
        cache = dict(zip(("k", "v", "page_table"), paged(s, page_size, seed)))
    at = moved(cache | dict(seqused_k=s.lengths, cu_seqlens_q=s.starts) | options)
    found = tilewise.attention(torch.cat(s.q).cuda(), **at, return_lse=True, backend="hopper")
    return tuple(x.cpu() for x in found)


def cut(s, row, a, b):
    """Queries [a, b) of a sequence, which then ends with the last of them."""
    n = len(s.k[row]) - len(s.q[row]) + b
    return type(s)([s.q[row][a:b]], [s.k[row][:n]], [s.v[row][:n]])


def assert_right(s, found, **options):
    reference = tilewise.attention_reference
    q, k, v = torch.cat(s.q), contiguous(s.k), contiguous(s.v)
    at = dict(seqused_k=s.lengths, cu_seqlens_q=s.starts, return_lse=True)
    oracle = reference(q.double(), k.double(), v.double(), **at, **options)
    plain = reference(*(x.cuda() for x in (q, k, v)), **moved(at | options), upcast=False)
    for name, mine, exact, rough in zip(("out", "lse"), found, oracle, plain):
        assert_within(mine, exact, rough.cpu(), name)


def assert_equal(found, expected):
    for x, y in zip(found, expected, strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize("name, headdims, heads, options", CASES)
def test_two_warpgroups_have_the_bits_of_one(name, headdims, heads, options, share):
    s = sequences(QUERIES, LENGTHS, heads, headdims, BF16)
    share(2)
    found = run(s, **options)
    assert_right(s, found, **options)
    for page_size in (None, 1, 3, 8, 64):
        assert_equal(run(s, page_size, seed=1, **options), found)
    share(1)
    assert_equal(run(s, **options), found)


@pytest.mark.parametrize("split_size", [None, 2048])
def test_a_chunk_has_the_bits_of_its_tokens(split_size, share):
    """C2: one by one, a few for verification, and in chunks of any cut."""
    s = sequences([1500], [5000], (8, 2), (128, 128), BF16)
    options = dict(causal=True, split_size=split_size)
    share(2)
    out, lse = run(s, **options)
    cuts = [(0, 500), (431, 1500), (64, 192)]
    for count in (2, 1):
        share(count)
        for a, b in [*cuts, *((i, i + 1) for i in range(0, 1500, 187)), (7, 9), (1000, 1008)]:
            assert_equal(run(cut(s, 0, a, b), **options), (out[a:b], lse[:, a:b]))


@pytest.mark.parametrize("mates", [1, 63, 200])
def test_parts_of_long_and_short_sequences_alternate(mates, share):
    s = sequences([1] * mates + [700, 3], [900] * mates + [2600, 1800], (8, 2), (128, 128), BF16)
    share(2)
    found = run(s, causal=True)
    assert_equal(
        run(type(s)(s.q[mates:], s.k[mates:], s.v[mates:]), causal=True)[0], found[0][mates:]
    )
    turned = run(type(s)(*(x[::-1] for x in s)), causal=True)[0]
    assert torch.equal(turned[:3], found[0][-3:]) and torch.equal(turned[3:703], found[0][-703:-3])
    share(1)
    assert_equal(run(s, causal=True), found)


@pytest.mark.parametrize("queries", [20, 90, 300])
def test_how_a_tile_is_divided_changes_no_bit(queries, share, monkeypatch):
    """In many parts, folded in slices or by the last one, or in one part."""
    s = sequences([queries, 1], [20_000, 300], (8, 2), (128, 128), BF16)
    share(1)
    expected = run(s, causal=True)
    share(2)
    assert_equal(run(s, causal=True), expected)
    monkeypatch.setattr(launch, "WORKSPACE", 0)
    share(2)
    assert_equal(run(s, causal=True), expected)


def test_again_and_again(share):
    """Stages that one half of a tile passes, values that a warp clears: no race."""
    s = sequences([200, 33, 1, 65], [331, 1000, 64, 65], (8, 2), (128, 128), BF16)
    share(2)
    expected = run(s, 8, causal=True, window=(400, 0))
    for seed in range(200):
        assert_equal(run(s, 8, seed, causal=True, window=(400, 0)), expected)


@pytest.mark.parametrize("fill", [math.nan, math.inf])
def test_what_is_not_in_use_changes_nothing(fill, share):
    s = sequences([70, 2, 2], [1400, 133, 0], (8, 2), (128, 128), BF16)
    options = dict(causal=True, window=(640, 0))
    share(1)
    expected = run(s, None, **options)
    share(2)
    k, v, table = paged(s, 16, fill=fill)
    hidden = (1400 - 70 - 640) // 16
    k[table[0, :hidden].long()] = fill
    v[table[0, :hidden].long()] = fill
    table[0, :hidden] = -1
    at = moved(dict(page_table=table, seqused_k=s.lengths, cu_seqlens_q=s.starts))
    q, k, v = (x.cuda() for x in (torch.cat(s.q), k, v))
    found = tilewise.attention(q, k, v, **at, **options, return_lse=True, backend="hopper")
    assert_equal([x.cpu() for x in found], expected)


def test_one_graph_serves_any_chunks(share):
    """Captured with one sequence of all queries, replayed with others and other lengths."""
    share(2)
    room, batch, total = 4096, 4, 700
    table = torch.randperm(batch * room // 16).view(batch, -1).to("cuda", INT32)
    k, v = torch.randn(2, batch * room // 16, 16, 2, 128, device="cuda").to(BF16).unbind(0)
    q = torch.randn(total, 8, 128, device="cuda", dtype=BF16)
    used = torch.full((batch,), total, device="cuda", dtype=INT32)
    starts = torch.tensor([0, total, total, total, total], device="cuda", dtype=INT32)
    out = torch.empty_like(q)

    def step():
        where = dict(page_table=table, seqused_k=used, cu_seqlens_q=starts, causal=True)
        tilewise.attention(q, k, v, out=out, backend="hopper", **where)

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for queries, lengths in (
        ([1, 1, 1, 697], [4096, 5, 1, 3000]),
        ([350, 0, 350, 0], [350, 0, 4000, 9]),
        ([100, 200, 300, 100], [2048, 2049, 300, 4095]),
    ):
        used.copy_(torch.tensor(lengths, dtype=INT32))
        starts.copy_(torch.tensor([0, *queries], dtype=INT32).cumsum(0, dtype=INT32))
        step()
        expected = out.clone()
        assert expected.isfinite().all()
        for _ in range(20):
            out.fill_(math.nan)
            graph.replay()
            assert torch.equal(out, expected), (queries, lengths)


def test_training_has_the_bits_of_decoding():
    """C3, at a size that two warpgroups share tiles of without being told."""
    q, k, v = (torch.randn(1, 2500, n, 128, device="cuda", dtype=BF16) for n in (32, 8, 8))
    options = dict(causal=True, split_size=512, backend="hopper", return_lse=True)
    out, lse = tilewise.attention(q.clone().requires_grad_(), k, v, **options)
    for a, b in ((0, 1200), (1200, 2500), (2499, 2500), (700, 708)):
        used = torch.tensor([b], device="cuda", dtype=INT32)
        found = tilewise.attention(q[:, a:b], k, v, seqused_k=used, **options)
        assert_equal(found, (out[:, a:b].detach(), lse[:, :, a:b].detach()))
