"""The error contract of FP8 products on a GPU, through the public functions.

Norm of the error over the norm of the exact result, in fp64, of what the 8 bits stand for; a sample
of queries, as scores of all would not fit.
"""

import functools

import pytest
import torch
from helpers.quantizing import quantized

import tilewise
from tilewise.kernels.common.quantized import FP8, Lengths
from tilewise.kernels.cpu import quantize as plain
from tilewise.kernels.cpu.hadamard import rotate_back
from tilewise.kernels.portable import quantize

pytestmark = pytest.mark.gpu
INT32 = torch.int32


def normal(seqlen, headdim, mean=0.0, batch=1, heads=(4, 2), seed=0):
    generator = torch.Generator("cuda").manual_seed(seed)

    def draw(nheads):
        shape = batch, seqlen, nheads, headdim
        return torch.randn(shape, device="cuda", generator=generator)

    return draw(heads[0]), draw(heads[1]), draw(heads[1]) + mean


def relative(x, exact):
    return ((x.double() - exact).norm() / exact.norm()).item()


def errors(inputs, meant, causal=False, rows=64, **options):
    """Of out, relative, and of lse, absolute, at the last queries."""
    options |= dict(causal=causal, return_lse=True)
    out, lse = tilewise.attention(*inputs, out_dtype=torch.float32, **options)
    q, k, v = (x.double() for x in meant)
    exact, of_lse = tilewise.attention_reference(q[:, -rows:], k, v, **options)
    off = (lse[..., -rows:] - of_lse).abs().max().item()
    return relative(out[:, -rows:], exact), off


def both(given):
    """As a `Quantized`, and as e4m3 tensors, each with what it stands for."""
    x = tilewise.quantize(*given)
    q, k, v = plain.dequantize(x, Lengths())
    raw = [t.to(FP8) for t in given]
    return {"quantized": ([x], (q, k + x.k_mean.unsqueeze(1), v)), "raw": (raw, raw)}


@pytest.mark.parametrize("form", ["quantized", "raw"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("headdim", [64, 128, 256])
def test_values_without_a_mean(headdim, causal, form):
    out, lse = errors(*both(normal(4096, headdim))[form], causal)
    assert out < 3e-2 and lse < 2e-3


@pytest.mark.parametrize("form", ["quantized", "raw"])
@pytest.mark.parametrize("headdim", [64, 128, 256])
@pytest.mark.parametrize("seqlen", [2**10, 2**14, 2**16, 2**17])
def test_values_of_mean_1_at_any_length(seqlen, headdim, form):
    out, lse = errors(*both(normal(seqlen, headdim, 1.0, heads=(2, 1)))[form], rows=16)
    assert out < 5e-3 and lse < 2e-3


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("seqlen", [2**10, 2**14, 2**16, 2**17])
def test_wide_values_of_mean_1_are_summed_in_one_level(seqlen, causal):
    """To 65,536 keys their sums without the mean drift little, and in any case the error is so."""
    given = normal(seqlen, 256, 1.0, heads=(1, 1), seed=3)
    inputs, meant = both(given)["quantized"]
    assert seqlen > 2**16 or inputs[0].v_drift <= 512
    out = tilewise.attention(*inputs, causal=causal, out_dtype=torch.float32)
    for row in (seqlen, seqlen // 2 + 100) if causal else (seqlen,):
        q, k, v = (t[:, :row].double() for t in meant)
        exact = tilewise.attention_reference(q[:, -16:], k, v, causal=causal)
        assert relative(out[:, row - 16 : row], exact) < 5e-3


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("off", [0.02, 1.0, 5.0])
def test_wide_values_that_drift(off, causal):
    """Their mean is `off` below in the first half, and as much above in the second."""
    q, k, v = normal(2**14, 256, heads=(2, 1))
    v[:, : 2**13] -= off
    v[:, 2**13 :] += off
    (x,), meant = both((q, k, v))["quantized"]
    assert (x.v_drift > 512) == (off > 0.1)
    if off < 2:  # above, what P's rounding takes from each half is large beside their difference
        assert errors([x], meant, causal)[0] < 3e-2
    if causal:  # rows that see one half
        found = tilewise.attention(x, causal=True, out_dtype=torch.float32)[:, 8000:8064]
        of_q, *of_keys = (t[:, :8064].double() for t in meant)
        exact = tilewise.attention_reference(of_q[:, -64:], *of_keys, causal=True)
        assert relative(found, exact) < (3e-2 if off < 0.1 else 5e-3)


@pytest.mark.parametrize("seqlen", [1024, 4096, 16384])
def test_outliers(seqlen):
    """A few queries have much of the error, so of 16 heads, and from all of the sequence."""
    generator = torch.Generator("cuda").manual_seed(0)
    shape = 3, 1, seqlen, 16, 128
    rare = torch.rand(shape, device="cuda", generator=generator) < 0.001
    more = 10 * torch.randn(shape, device="cuda", generator=generator) * rare
    given = (torch.randn(shape, device="cuda", generator=generator) + more).unbind(0)
    rows = slice(None, None, seqlen // 256)
    found = tilewise.attention(tilewise.quantize(*given), out_dtype=torch.float32)[:, rows]
    exact = tilewise.attention_reference(*(x.double() for x in (given[0][:, rows], *given[1:])))
    assert (found - exact).square().mean().sqrt() <= 1e-2


def test_a_key_far_above_the_others():
    q, k, v = normal(4096, 128, heads=(1, 1))
    q[..., 0], k[..., 0] = 8.0, 0.0
    k[0, 0] = 0.0
    k[0, 0, 0, 0] = 12.0 * 128**0.5 / 8
    inputs = [x.to(FP8) for x in (q, k, v)]
    assert errors(inputs, inputs, causal=True, rows=512)[0] <= 3.5e-2


def test_a_needle_is_found_among_131072_keys():
    q, k, v = normal(2**17, 64, heads=(1, 1))
    q = q[:, -8:].contiguous()
    at = torch.tensor([0, 3, 777, 65536, 99999, 131000, 131070, 131071], device="cuda")
    k[0, at, 0] = q[0, :, 0] * 4
    out = tilewise.attention(tilewise.quantize(q, k, v))
    found = torch.cdist(out[0, :, 0].float(), v[0, :, 0]).argmin(-1)
    assert torch.equal(found, at)


def test_what_is_not_in_use_stays_out():
    q, k, v = normal(1000, 128, batch=2)
    used = torch.tensor([700, 1], dtype=INT32, device="cuda")
    options = dict(causal=True, seqused_k=used, return_lse=True)
    expected = tilewise.attention(tilewise.quantize(q, k, v, seqused_k=used), **options)
    for x in (k, v):
        x[0, 700:], x[1, 1:] = torch.nan, torch.inf
    found = tilewise.attention(tilewise.quantize(q, k, v, seqused_k=used), **options)
    for mine, theirs in zip(found, expected):
        assert not mine.isnan().any() and torch.equal(mine, theirs)


@pytest.mark.parametrize("headdim", [64, 128, 256])
def test_packed_sequences_are_as_they_are_alone(headdim):
    lengths = [700, 1, 0, 129, 2048]
    q, k, v = (x[0] for x in normal(sum(lengths), headdim))
    starts = torch.tensor([0, *lengths]).cumsum(0).to("cuda", INT32)
    cu = dict(cu_seqlens_q=starts, cu_seqlens_k=starts)
    out, lse = tilewise.attention(
        tilewise.quantize(q, k, v, **cu), causal=True, return_lse=True, **cu
    )
    for i, parts in enumerate(zip(*(x.split(lengths) for x in (q, k, v)))):
        if lengths[i]:
            x = tilewise.quantize(*(part[None] for part in parts))
            alone = tilewise.attention(x, causal=True, return_lse=True)
            mine = out.split(lengths)[i]
            assert relative(mine, alone[0][0].double()) < 1e-2
            torch.testing.assert_close(lse.split(lengths, 1)[i], alone[1][0], rtol=0, atol=2e-3)


@pytest.mark.parametrize("headdim", [64, 128, 256])
def test_repeats_are_the_same_bits(headdim):
    x = tilewise.quantize(*normal(2048, headdim, 1.0))
    first = tilewise.attention(x, causal=True, return_lse=True)
    for _ in range(50):
        again = tilewise.attention(x, causal=True, return_lse=True)
        assert torch.equal(first[0], again[0]) and torch.equal(first[1], again[1])


@pytest.mark.parametrize("seqlen", [1, 700, 2048])
@pytest.mark.parametrize("headdim", [64, 256])
def test_calls_behind_each_other_do_not_see_each_other(headdim, seqlen):
    """Each leaves its memory to the next one, which must read what it wrote there itself."""

    def tensors(given):
        x = tilewise.quantize(*given)
        found = *x[:3], *x.scales, x.k_mean, x.v_mean, tilewise.attention(x)
        return [t.view(torch.uint8) for t in found]

    inputs = [
        [t * 10.0**power for t in normal(seqlen, headdim, 1.0, seed=power)] for power in range(4)
    ]
    expected = []
    for given in inputs:
        expected.append([t.clone() for t in tensors(given)])
        torch.cuda.synchronize()
    differ = torch.zeros((), dtype=torch.bool, device="cuda")
    for _ in range(50):
        for given, clones in zip(inputs, expected):
            for mine, theirs in zip(tensors(given), clones):
                differ |= (mine != theirs).any()  # later: the host must not wait
    assert not differ


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("headdim", [64, 128, 256])
def test_codes_past_one_row_are_zeros(headdim, dtype):
    """In each of many calls: ptxas left them as registers were (`tile.fp8.not_constant`)."""
    given = [x.to(dtype) for x in normal(1, headdim, 1.0)]
    faults = torch.zeros((), dtype=torch.bool, device="cuda")
    for _ in range(200):
        x = tilewise.quantize(*given)
        faults |= (x.v_t.view(torch.uint8)[..., 1:] != 0).any() | (x.v_mean != given[2][:, 0]).any()
        faults |= ~torch.isfinite(tilewise.attention(x)).all()
    assert not faults


@pytest.mark.parametrize("options", [dict(), dict(smooth="v"), dict(rotate=False, smooth=False)])
def test_quantising_gives_what_plain_torch_gives(options):
    """Scales and codes; a sum of another order may move a code by one."""
    q, k, _ = normal(1000, 128, 1.0, batch=2)
    given = q, k, normal(1000, 144, 1.0, batch=2)[2]  # wide enough that its drift is measured
    x = tilewise.quantize(*given, **options)
    y = tilewise.quantize(*(t.cpu() for t in given), **options)
    for mine, theirs in zip(x.scales, y.scales):
        torch.testing.assert_close(mine.cpu(), theirs, rtol=1e-5, atol=0)
    for mine, theirs in zip(x[:3], y[:3]):
        assert (mine.cpu().float() != theirs.float()).float().mean() < 1e-3
    assert (x.v_drift is None) == (y.v_drift is None)
    if y.v_drift is not None:
        torch.testing.assert_close(x.v_drift.cpu(), y.v_drift, rtol=1e-3, atol=0)


@pytest.mark.parametrize("used", [None, [1024, 1, 0, 700, 129]])
@pytest.mark.parametrize("seqlen", [129, 300, 1024])
def test_short_sequences_have_the_bits_of_separate_launches(seqlen, used, monkeypatch):
    """Programs wait for each other while matmuls of another stream take SMs from them."""
    used = used and torch.tensor(used, dtype=INT32, device="cuda").clamp(max=seqlen)
    fields = lambda x: [t.view(torch.uint8) for t in (*x[:3], *x.scales, x.k_mean, x.v_mean)]  # noqa: E731
    draws = [normal(seqlen, 128, 1.0, batch=5, heads=(8, 2), seed=seed) for seed in range(2)]
    draws = [[x.bfloat16() for x in given] for given in draws]
    with monkeypatch.context() as separately:
        separately.setattr(quantize, "waits_for_heads", lambda *of: False)
        separate = functools.partial(quantized, steps=plain.Steps(True, True, True))
        options = dict(scales=(None,) * 3, of=Lengths(seqused_k=used))
        expected = [fields(separate(*given, **options)) for given in draws]
    noise, other = torch.randn(2048, 2048, device="cuda"), torch.cuda.Stream()
    differ = torch.zeros((), dtype=torch.bool, device="cuda")
    for _ in range(40):
        with torch.cuda.stream(other):
            noise @ noise
        for given, pair in zip(draws, expected):
            found = fields(tilewise.quantize(*given, seqused_k=used))
            differ |= torch.stack([(a != b).any() for a, b in zip(found, pair)]).any()
    assert not differ


def test_straight_through():
    given = [x.bfloat16().requires_grad_() for x in normal(512, 64)]
    x = tilewise.quantize(*given)
    tilewise.attention(x, causal=True, backward="bf16").float().square().sum().backward()
    mine = [t.grad for t in given]
    q, k, v = plain.dequantize(x, Lengths())
    meant = rotate_back(q), rotate_back(k + x.k_mean.unsqueeze(1)), v
    exact = [t.detach().double().requires_grad_() for t in meant]
    tilewise.attention_reference(*exact, causal=True).square().sum().backward()
    for grad, oracle in zip(mine, exact):
        assert relative(grad, oracle.grad) < 5e-2


def test_a_compiled_and_a_captured_call():
    given = normal(512, 128)
    attend = lambda q, k, v: tilewise.attention(tilewise.quantize(q, k, v), causal=True)  # noqa: E731
    expected = attend(*given)
    compiled = torch.compile(attend, fullgraph=True)(*given)
    assert relative(compiled, expected.double()) < 2e-2
    x = tilewise.quantize(*given)
    tilewise.attention(x, causal=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = tilewise.attention(x, causal=True)
    out.zero_()
    graph.replay()
    assert torch.equal(out, expected)


def raw(seqlen, headdim, seed):
    draw = torch.Generator(device="cuda").manual_seed(seed)
    shape = 8, seqlen, 4, headdim
    return [torch.randn(shape, device="cuda", generator=draw).to(FP8) for _ in range(3)]


@pytest.mark.parametrize("causal", [False, True])
def test_raw_values_on_two_streams_and_in_a_graph(causal):
    """Programs of two launches wait for blocks of V^T on the same SMs; launches of a captured graph
    share counters. The bits are those of each call alone.
    """
    shapes = (3000, 128), (700, 128), (1500, 64), (128, 128), (1500, 256)
    calls = [raw(*shape, seed=seed) for seed, shape in enumerate(shapes)]
    attend = lambda x: tilewise.attention(*x, causal=causal)  # noqa: E731
    expected = [attend(x) for x in calls]
    torch.cuda.synchronize()
    streams = torch.cuda.Stream(), torch.cuda.Stream()
    found = []
    for _ in range(50):
        for n, x in enumerate(calls):
            with torch.cuda.stream(streams[n % 2]):
                found.append((attend(x), expected[n]))
    torch.cuda.synchronize()
    assert all(torch.equal(*pair) for pair in found)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = [attend(x) for x in calls]
    for _ in range(3):
        for out in outputs:
            out.zero_()
        graph.replay()
        assert all(map(torch.equal, outputs, expected))
