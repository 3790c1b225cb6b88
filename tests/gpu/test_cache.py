"""A cache on a GPU: the formula, the contract, and one graph for any lengths, without a wait."""

import pytest
import torch
from helpers.appends import drawn, results
from helpers.caches import INT32, contiguous, paged, sequences
from helpers.waits import nothing_waits

import tilewise
from tilewise import cache
from tilewise.testing.tolerance import assert_within

pytestmark = pytest.mark.gpu

FEATURES = {
    "plain": {},
    "causal": dict(causal=True),
    "window": dict(causal=True, window=(700, 0)),
    "softcap": dict(causal=True, softcap=20.0),
    "mask": dict(mask_mod=lambda b, h, q_idx, kv_idx: (q_idx - kv_idx) % 5 != h),
}
IS_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
SERVED = [("portable", x) for x in (torch.float16, torch.bfloat16, torch.float32)]
SERVED += [("hopper", x) for x in (torch.float16, torch.bfloat16)]
QUERIES, LENGTHS = [1, 8, 0, 2], [1700, 130, 5, 3000]
HEADS = [(8, 8), (8, 2), (34, 2)]
HEADDIMS = [(64, 64), (128, 128), (80, 40), (192, 128), (256, 256)]
# Each feature with each pair of headdims and with each of heads, and these with one another
COVERED = [
    (name, HEADS[(i + j) % len(HEADS)], headdims)
    for i, name in enumerate(FEATURES)
    for j, headdims in enumerate(HEADDIMS)
]


def run(s, page_size=16, seed=0, attend=tilewise.attention, cast=None, device="cuda", **options):
    table, k, v = None, contiguous(s.k), contiguous(s.v)
    if page_size is not None:
        k, v, table = (x.to(device) for x in paged(s, page_size, seed))
    q, k, v = (x.to(device, cast) for x in (torch.cat(s.q), k, v))
    at = dict(seqused_k=s.lengths.to(device), cu_seqlens_q=s.starts.to(device))
    found = attend(q, k, v, page_table=table, return_lse=True, **at, **options)
    return tuple(x.cpu() for x in found)


def assert_equal(found, expected):
    for x, y in zip(found, expected, strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize("name, heads, headdims", COVERED)
@pytest.mark.parametrize("backend, dtype", SERVED)
def test_features(name, heads, headdims, backend, dtype):
    if backend == "hopper" and not IS_HOPPER:
        pytest.skip("needs a Hopper GPU")
    s = sequences(QUERIES, LENGTHS, heads, headdims, dtype)
    options = FEATURES[name] | dict(backend=backend)
    found = run(s, **options)
    reference = dict(attend=tilewise.attention_reference)
    oracle = run(s, None, cast=torch.float64, device="cpu", **reference, **FEATURES[name])
    # On the GPU, too: a CPU sums a long product in many lanes, and is off by less
    plain = run(s, None, upcast=False, **reference, **FEATURES[name])
    for what, mine, exact, rough in zip(("out", "lse"), found, oracle, plain):
        assert_within(mine, exact, rough, what)
    assert_equal(run(s, 1, seed=1, **options), found)
    assert_equal(run(s, 100, seed=2, **options), found)
    assert_equal(run(s, None, **options), found)


@pytest.mark.parametrize("name", ["causal", "window"])
def test_neither_mates_nor_the_number_of_queries_change_a_bit(name):
    s = sequences([8, 1, 1, 3], [1700, 1600, 3, 2048], (8, 2), (128, 128), torch.bfloat16)
    options = FEATURES[name] | dict(split_size=512)
    out, lse = run(s, **options)
    for i in range(8):
        part = type(s)([s.q[0][i : i + 1]], [s.k[0][: 1693 + i]], [s.v[0][: 1693 + i]])
        assert_equal(run(part, 64, **options), (out[i : i + 1], lse[:, i : i + 1]))


@pytest.mark.parametrize("headdim", [64, 128, 256])
def test_tiles_that_share_keys_have_the_bits_of_one_alone(headdim):
    """1 to 40 queries a sequence are 1, 2 or 4 tiles a program."""
    s = sequences([40], [1700], (8, 2), (headdim, headdim), torch.bfloat16)
    options = dict(causal=True, split_size=512)
    out, lse = run(s, **options)
    for a, b in ((0, 8), (8, 16), (36, 40), (5, 6)):
        n = 1660 + b
        part = type(s)([s.q[0][a:b]], [s.k[0][:n]], [s.v[0][:n]])
        assert_equal(run(part, **options), (out[a:b], lse[:, a:b]))


def test_a_relaunched_step_has_the_bits_of_the_first():
    from tilewise.ops import calls

    s = sequences([1, 1], [3000, 1700], (8, 2), (128, 128), torch.bfloat16)
    k, v, table = (x.cuda() for x in paged(s, 16))
    q, used = torch.stack(s.q).cuda(), s.lengths.cuda()
    at = dict(page_table=table, seqused_k=used)
    for x in (q, torch.randn_like(q)):
        calls._entry.cache_clear()
        first = tilewise.attention(x, k, v, **at)
        assert calls._entry.cache_info().currsize == 1
        assert torch.equal(tilewise.attention(x.clone(), k, v, **at), first)
        other = tilewise.attention(2 * x, k, v, **at)
        calls._entry.cache_clear()
        assert torch.equal(tilewise.attention(2 * x, k, v, **at), other)


def test_one_launch_gives_the_bits_of_two(monkeypatch):
    from tilewise.kernels.portable import decode_launch

    s = sequences([1, 5], [3000, 1700], (8, 2), (128, 128), torch.bfloat16)
    two = run(s, causal=True, backend="portable")
    with monkeypatch.context() as patched:
        patched.setattr(decode_launch.launches_of, "__defaults__", (0,))
        assert_equal(run(s, causal=True, backend="portable"), two)


def test_one_graph_serves_any_lengths_and_nothing_waits():
    """An append and a decode, captured at lengths of 1 and replayed at others."""
    room, batch, page_size = 2048, 3, 16
    pages = room // page_size
    table = torch.randperm(batch * pages).view(batch, pages).to("cuda", INT32)
    shape = batch * pages, page_size, 2, 128
    k_cache, v_cache = torch.randn(2, *shape, device="cuda", dtype=torch.float16).unbind(0)
    q = torch.randn(batch, 1, 8, 128, device="cuda", dtype=torch.float16)
    k, v = torch.randn(2, batch, 1, 2, 128, device="cuda", dtype=torch.float16).unbind(0)
    used, out = torch.ones(batch, device="cuda", dtype=INT32), torch.empty_like(q)

    def step():
        where = dict(page_table=table, seqused_k=used)
        cache.append(k_cache, v_cache, k, v, **where)
        tilewise.attention(q, k_cache, v_cache, causal=True, out=out, **where)

    step()
    with nothing_waits():
        step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for lengths in ([1, 2048, 513], [2, 0, 100], [1500, 1, 2047]):
        used.copy_(torch.tensor(lengths, dtype=INT32))
        graph.replay()
        replayed = out.clone()
        step()
        assert torch.equal(replayed, out)
        for b, n in enumerate(lengths):
            if n:
                rows = [x[table[b].long()].flatten(0, 1)[None, :n] for x in (k_cache, v_cache)]
                assert torch.equal(rows[0][0, -1], k[b, 0])
                alone = tilewise.attention_reference(q[b : b + 1], *rows)
                torch.testing.assert_close(out[b : b + 1], alone, atol=2e-3, rtol=2e-3)
            else:
                assert (out[b] == 0).all()


@pytest.mark.parametrize("seed", range(40))
def test_new_keys_have_the_bits_of_torchs_operators(monkeypatch, seed):
    """One launch that appends and prepares attention: first, relaunched, and without it."""
    from tilewise.ops import append as append_ops
    from tilewise.ops import calls

    given = drawn(seed, device="cuda", headdim=64)
    call, made, prepare = tilewise.flash_attn_with_kvcache, [], append_ops.prepare
    monkeypatch.setattr(
        append_ops, "prepare", lambda *x, **y: (made.append(0), prepare(*x, **y))[1]
    )
    found = [results(call, given) for _ in range(3)]
    assert len(made) == (3 if given.get("attention_chunk") else 1)
    calls._entry.cache_clear()
    monkeypatch.setattr(append_ops, "may_prepare", lambda *_, **named: False)
    apart = results(call, given)
    for x in found:
        assert_equal(x, apart)
