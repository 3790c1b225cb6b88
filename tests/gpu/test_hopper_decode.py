"""Attention with a KV cache by Hopper's kernel on the card: the formula, the contract, what decides
no bit (pages, mates, queries at once, parts, folds, a graph), and caches of 8 bits, which the
portable kernels serve, too.
"""

import math

import pytest
import torch
from helpers.caches import INT32, contiguous, paged, sequences
from helpers.eight_bits import DTYPES, quantised

import tilewise
from tilewise.ops import calls
from tilewise.testing.tolerance import assert_within

pytestmark = pytest.mark.gpu

BF16 = torch.bfloat16
QUERIES, LENGTHS = [1, 8, 0, 2], [1700, 130, 5, 3000]
FEATURES = {
    "plain": {},
    "causal": dict(causal=True),
    "window": dict(causal=True, window=(700, 0)),
    "softcap": dict(
        causal=True, softcap=20.0, alibi_slopes=torch.tensor([0.5, 0.1, 0.02, 0.01] * 2)
    ),
    "sinks": dict(causal=True, sinks=torch.tensor([1.0, -math.inf, 0.0, 4.0] * 2)),
    "mask": dict(mask_mod=lambda b, h, q_idx, kv_idx: (q_idx - kv_idx) % 5 != h),
}


@pytest.fixture(autouse=True)
def hopper_alone():
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("Hopper's kernel needs a GPU of compute capability 9.0")


def moved(options, device):
    return {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in options.items()}


def attend(q, cache, backend="hopper", **options):
    """Of tensors on the CPU, on the card."""
    cache, options = moved(cache, "cuda"), moved(options, "cuda")
    found = tilewise.attention(q.cuda(), **cache, **options, return_lse=True, backend=backend)
    return tuple(x.cpu() for x in found)


def cache_of(s, page_size=16, seed=0):
    at = dict(seqused_k=s.lengths, cu_seqlens_q=s.starts)
    if page_size is None:
        return dict(k=contiguous(s.k), v=contiguous(s.v), **at)
    k, v, table = paged(s, page_size, seed)
    return dict(k=k, v=v, page_table=table, **at)


def run(s, page_size=16, seed=0, **options):
    return attend(torch.cat(s.q), cache_of(s, page_size, seed), **options)


def cut(s, row, a, b):
    """Queries [a, b) of a sequence, which then ends with the last of them."""
    n = len(s.k[row]) - len(s.q[row]) + b
    return type(s)([s.q[row][a:b]], [s.k[row][:n]], [s.v[row][:n]])


def assert_right(q, cache, found, on_gpu=True, **options):
    """Held to fp64, and to a plain run in the precision of the inputs, on the same device as ours:
    a CPU sums a long product in many lanes, and is off by less.
    """
    reference = tilewise.attention_reference
    floats = {n: x.double() if x.dtype.itemsize > 1 else x for n, x in cache.items() if n in "kv"}
    oracle = reference(q.double(), **cache | floats, return_lse=True, **options)
    device = "cuda" if on_gpu else "cpu"
    read = moved(cache, device) | moved(options, device)
    plain = reference(q.to(device), **read, return_lse=True, upcast=False)
    for name, mine, exact, rough in zip(("out", "lse"), found, oracle, plain):
        assert_within(mine, exact, rough.cpu(), name)


def assert_equal(found, expected):
    for x, y in zip(found, expected, strict=True):
        assert torch.equal(x, y)


SHAPES = [
    ("plain", (128, 128), (8, 8)),
    ("causal", (64, 64), (8, 2)),
    ("window", (192, 128), (8, 2)),
    ("softcap", (80, 80), (8, 2)),
    ("sinks", (128, 64), (8, 1)),
    ("mask", (256, 256), (8, 2)),
]


@pytest.mark.parametrize("name, headdims, heads", SHAPES)
def test_features(name, headdims, heads):
    s = sequences(QUERIES, LENGTHS, heads, headdims, BF16)
    found = run(s, **FEATURES[name])
    assert_right(torch.cat(s.q), cache_of(s, None), found, **FEATURES[name])


@pytest.mark.parametrize("page_size", [None, 1, 3, 8, 64, 256])
def test_pages_change_no_bit(page_size):
    """1 and 3 keys by cp.async, 8 to 64 in slices of a stage, 256 and none in whole blocks."""
    s = sequences(QUERIES, LENGTHS, (8, 2), (128, 128), BF16)
    assert_equal(run(s, page_size, seed=1, causal=True), run(s, 16, causal=True))


def test_the_contract_for_any_number_of_queries():
    """C0, C1 and C2: alone, among mates, in another order; 1 to 8 queries, more than a tile, and a
    prefill at once.
    """
    s = sequences([200, 1, 3, 8], [1900, 700, 5, 3000], (8, 2), (128, 128), BF16)
    options = dict(causal=True, split_size=512)
    out, lse = run(s, **options)
    assert_equal(run(s, **options), (out, lse))
    turned, _ = run(type(s)(*(x[::-1] for x in s)), **options)
    assert torch.equal(torch.cat(turned.split([8, 3, 1, 200])[::-1]), out)
    for a, b in [(i, i + 1) for i in range(0, 200, 23)] + [(0, n) for n in range(2, 9)]:
        assert_equal(run(cut(s, 0, a, b), **options), (out[a:b], lse[:, a:b]))
    for a, b in ((0, 129), (71, 200)):
        assert_equal(run(cut(s, 0, a, b), **options), (out[a:b], lse[:, a:b]))


@pytest.mark.parametrize("mates", [0, 40, 300])
def test_how_a_sequence_is_divided_changes_no_bit(mates, monkeypatch):
    """Of 40 pieces, alone they are many parts and slices of a fold, among 300 mates few parts; with
    no room for states one.
    """
    from tilewise.kernels.hopper.decode import launch

    s = sequences([8], [20_000], (8, 2), (128, 128), BF16)
    alone = run(s, split_size=512, causal=True)
    if mates:
        other = sequences([1], [600], (8, 2), (128, 128), BF16, seed=1)
        more = type(s)(*(one + mates * mate for one, mate in zip(s, other)))
        out, lse = run(more, split_size=512, causal=True)
        assert_equal((out[:8], lse[:, :8]), alone)
    monkeypatch.setattr(launch, "WORKSPACE", 0)
    calls._entry.cache_clear()  # or what was launched before would be launched again
    assert_equal(run(s, split_size=512, causal=True), alone)
    calls._entry.cache_clear()


def test_shared_pages_change_no_bit():
    """C4: two sequences whose first pages are the same ones."""
    s = sequences([1, 1], [1600, 1600], (8, 2), (128, 128), BF16)
    s.k[1][:1024], s.v[1][:1024] = s.k[0][:1024], s.v[0][:1024]
    cache = cache_of(s)
    expected = attend(torch.cat(s.q), cache, causal=True)
    cache["page_table"][1, :64] = cache["page_table"][0, :64]
    assert_equal(attend(torch.cat(s.q), cache, causal=True), expected)


@pytest.mark.parametrize("kept", [BF16, torch.float8_e4m3fn])
def test_one_graph_serves_any_lengths(kept):
    """Captured at lengths of 1 and replayed at others, again and again: counters end at zero."""
    room, batch = 4096, 3
    table = torch.randperm(batch * room // 16).view(batch, -1).to("cuda", INT32)
    shape = batch * room // 16, 16, 2, 128
    k, v = torch.randn(2, *shape, device="cuda").to(kept).unbind(0)
    q = torch.randn(batch, 2, 8, 128, device="cuda", dtype=BF16)
    used, out = torch.ones(batch, device="cuda", dtype=INT32), torch.empty_like(q)

    def step():
        where = dict(page_table=table, seqused_k=used, causal=True)
        tilewise.attention(q, k, v, out=out, backend="hopper", **where)

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for lengths in ([2, 4096, 513], [2, 0, 100], [4095, 2, 2047]):
        used.copy_(torch.tensor(lengths, dtype=INT32))
        step()
        expected = out.clone()
        for _ in range(20):
            out.fill_(math.nan)
            graph.replay()
            assert torch.equal(out, expected), lengths
        assert (out[1] == 0).all() if lengths[1] == 0 else out.isfinite().all()


EIGHT_BITS = [
    ((128, 128), "e4m3", "head", BF16),
    ((128, 128), "int8", "row", BF16),
    ((64, 64), "e4m3", "row", torch.float16),
    ((64, 64), "int8", "sequence", torch.float16),
    ((256, 256), "e4m3", "tensor", BF16),
    ((192, 128), "int8", "none", BF16),
    ((80, 80), "e4m3", "row", BF16),
]


@pytest.mark.parametrize("backend", ["hopper", "portable"])
@pytest.mark.parametrize("headdims, dtype, kind, q_dtype", EIGHT_BITS)
def test_eight_bits(headdims, dtype, kind, q_dtype, backend):
    x = quantised(QUERIES, LENGTHS, DTYPES[dtype], kind, (8, 2), headdims, q_dtype)
    q = torch.cat(x.s.q)
    found = attend(q, x.cache(16), backend, causal=True)
    assert_right(q, x.cache(None), found, on_gpu=False, causal=True)
    assert_equal(attend(q, x.cache(3, 1), backend, causal=True), found)


def test_all_bytes_are_what_torch_makes_of_them():
    """Each of the 256 in V, alone in its sequence, so that P is 1; NaN where it is NaN."""
    codes = torch.arange(256, dtype=torch.uint8).view(1, 1, 1, 256).expand(1, 64, 1, 256)
    q = torch.zeros(1, 1, 1, 256, device="cuda")
    used = torch.ones(1, device="cuda", dtype=INT32)
    for dtype in DTYPES.values():
        v = codes.contiguous().view(dtype).cuda()
        for q_dtype in (BF16, torch.float16):
            k = torch.zeros_like(v.float()).to(dtype)
            found = tilewise.attention(q.to(q_dtype), k, v, seqused_k=used, backend="hopper")
            expected = v[:, :1].to(q_dtype)
            torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype, kind", [("e4m3", "head"), ("int8", "row")])
def test_the_contract_of_eight_bits(dtype, kind):
    x = quantised([100, 1, 8], [1900, 3000, 700], DTYPES[dtype], kind, (8, 2), (128, 128))
    out, lse = attend(torch.cat(x.s.q), x.cache(16), causal=True)
    for a, b in [(0, 1), (50, 51), (99, 100)] + [(0, n) for n in range(2, 9)] + [(20, 90)]:
        part = x.cut(0, 1800 + a, 1800 + b)
        assert_equal(
            attend(torch.cat(part.s.q), part.cache(64), causal=True), (out[a:b], lse[:, a:b])
        )


@pytest.mark.parametrize("backend", ["hopper", "portable"])
def test_a_needle_among_131072_keys_of_e4m3(backend):
    """One key with a logit 20 above the others: its probability is off by less than 1e-2."""
    n, needle = 131_072, 77_777
    q = torch.zeros(1, 1, 4, 128, device="cuda", dtype=BF16)
    q[..., 0] = 1.0
    k = torch.zeros(1, n, 1, 128, device="cuda")
    k[0, needle, 0, 0] = 20 * 128**0.5
    v = torch.zeros(1, n, 1, 128, device="cuda")
    v[0, needle] = 1.0
    k, v = (x.to(torch.float8_e4m3fn) for x in (k, v))
    used = torch.full((1,), n, device="cuda", dtype=INT32)
    out = tilewise.attention(q, k, v, seqused_k=used, backend=backend)
    logit = k[0, needle, 0, 0].double() / 128**0.5
    p = 1 / (1 + (n - 1) * torch.exp(-logit))
    assert (out.double() - p).abs().max() < 1e-2 and p > 0.99
