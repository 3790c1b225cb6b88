"""FP8 calls through the public functions, by the kernels for GPUs: portable ones interpreted, those
for Hopper emulated, beside the CPU backend.
"""

import itertools

import pytest
import torch
from helpers.tiers import sample, sample_rows

pytest.importorskip("triton")

import tilewise
from tilewise.frontend import fp8
from tilewise.kernels.common.quantized import Scales
from tilewise.testing import use_emulator, use_interpreter

MODES = {"portable": use_interpreter, "hopper": use_emulator}
INT32 = torch.int32


def tensors():
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(2, 70, 4, 64, generator=generator)
    k, v = torch.randn(2, 2, 150, 2, 64, generator=generator)
    return q, k + 1, v + 1


def quantized(backend):
    return tilewise.attention(
        tilewise.quantize(*tensors()), causal=True, return_lse=True, backend=backend
    )


def raw(backend):
    given = (x.to(torch.float8_e4m3fn) for x in tensors())
    scale = torch.tensor([0.5, 1.5])
    options = dict(k_descale=scale, v_descale=scale, out_dtype=torch.float32)
    return tilewise.attention(*given, causal=True, return_lse=True, backend=backend, **options)


def sinks(backend):
    x = tilewise.quantize(*tensors(), smooth="v")
    options = dict(sinks=torch.tensor([0.0, 1.0, 2.0, 9.0]), window=(40, 0), softcap=20.0)
    return tilewise.attention(x, return_lse=True, backend=backend, **options)


def packed(backend):
    starts = torch.tensor([0, 1, 2]) * 70, torch.tensor([0, 1, 2]) * 150
    cu = dict(zip(("cu_seqlens_q", "cu_seqlens_k"), (x.to(INT32) for x in starts)))
    cu["seqused_k"] = torch.tensor([150, 90], dtype=INT32)
    x = tilewise.quantize(*(x.flatten(0, 1) for x in tensors()), **cu)
    return tilewise.attention(x, causal=True, return_lse=True, backend=backend, **cu)


@pytest.mark.parametrize("backend", MODES)
@pytest.mark.parametrize("call", [quantized, raw, sinks, packed])
def test_kernels_agree_with_the_cpu(call, backend):
    """Which does not round P to 8 bits."""
    with MODES[backend]():
        out, lse = call(backend)
    expected, of_cpu = call("cpu")
    off = (out.double() - expected.double()).norm() / expected.double().norm()
    assert out.dtype == expected.dtype and 0 < off < 1e-2
    torch.testing.assert_close(lse, of_cpu, rtol=0, atol=2e-3)


@pytest.mark.parametrize("backend", MODES)
@pytest.mark.parametrize("kind", ["a batch of zeros", "a scale of zero"])
def test_scores_that_are_all_zero(kind, backend):
    """As a batch's padding has them. A hidden score, -inf, times a scale of 0 would be NaN."""
    q, k, v = tensors()
    if kind == "a batch of zeros":
        q[1], k[1] = 0.0, 0.0
        given, options = [tilewise.quantize(q, k, v, smooth=False)], {}
    else:
        given = [x.to(torch.float8_e4m3fn) for x in (q, k, v)]
        options = dict(q_descale=torch.tensor([[1.0, 0.0], [0.0, 1.0]]))
    options = dict(causal=True, return_lse=True, out_dtype=torch.float32, **options)
    with MODES[backend]():
        found = tilewise.attention(*given, backend=backend, **options)
    for mine, of_cpu in zip(found, tilewise.attention(*given, backend="cpu", **options)):
        assert (mine - of_cpu).norm() < 1e-2 * of_cpu.norm()


@pytest.mark.parametrize("backend", MODES)
def test_some_heads_of_a_quantized(backend):
    """A cut of it, of which neither the scales nor the means are contiguous."""
    q, k, v = tensors()
    x = tilewise.quantize(q, k * torch.tensor([[0.5], [9.0]]), v + torch.tensor([[0.0], [9.0]]))
    scales = Scales(*(s[:, 1:] for s in x.scales))
    cut = x._replace(q=x.q[:, :, 2:], k=x.k[:, :, 1:], v_t=x.v_t[:, 1:], scales=scales)
    cut = cut._replace(k_mean=x.k_mean[:, 1:], v_mean=x.v_mean[:, 1:])
    with MODES[backend]():
        whole, part = (tilewise.attention(a, causal=True, backend=backend) for a in (x, cut))
    assert torch.equal(part, whole[:, :, 2:])


@pytest.mark.parametrize("headdim_v", sample([None, 256], None))
@pytest.mark.parametrize("backend", MODES)
def test_later_tokens_change_no_bit_with_given_scales(backend, headdim_v):
    q, k, v = tensors()
    if headdim_v is not None:
        v = torch.randn(*v.shape[:3], headdim_v)
    options = dict(causal="top_left", return_lse=True, backend=backend, out_dtype=torch.float32)
    found = []
    for later in (1.0, 9.0):
        k[:, 60:], v[:, 50:] = k[:, 60:] * later, v[:, 50:] + later
        x = tilewise.quantize(q, k, v, scales=(torch.tensor(0.02),) * 3, smooth=False)
        with MODES[backend]():
            found.append(tilewise.attention(x, **options))
    (out, lse), (other, other_lse) = found
    assert torch.equal(out[:, :50], other[:, :50]) and not torch.equal(out, other)
    assert torch.equal(lse[..., :60], other_lse[..., :60])


SIGNS = {"q": (-1.0, 1.0), "k": (1.0, -0.5), "both": (-1.0, -2.0)}
_FAST = ("q", False), ("k", True), ("both", True)
CAUSAL = sample_rows(itertools.product(SIGNS, (False, True)), *_FAST)


@pytest.mark.parametrize("backend", MODES)
@pytest.mark.parametrize("name, causal", CAUSAL)
def test_a_scale_below_zero(name, causal, backend, monkeypatch):
    """Refused where values are read. Kernels, which do not, give NaN, or what the formula says."""
    given = [x.to(torch.float8_e4m3fn) for x in tensors()]
    scales = [torch.tensor(x) for x in SIGNS[name]]
    options = dict(zip(("q_descale", "k_descale"), scales), causal=causal, return_lse=True)
    for of in ("cpu", backend):
        with MODES[backend](), pytest.raises(tilewise.ArgumentError, match="_descale has -"):
            tilewise.attention(*given, backend=of, **options)
    x = tilewise.quantize(*tensors(), smooth=False)
    turned = x.scales._replace(**{"k" if name == "k" else "q": -x.scales.q})
    with pytest.raises(tilewise.ArgumentError, match="scales.. has -"):
        tilewise.attention(x._replace(scales=turned))
    with pytest.raises(tilewise.ArgumentError, match="scales.q has -1"):
        tilewise.quantize(*tensors(), scales=(torch.tensor(-1.0), None, None))
    monkeypatch.setattr(fp8, "check_signs", lambda named: None)
    with MODES[backend]():
        out, lse = tilewise.attention(*given, backend=backend, **options)
    if name == "both":
        expected, of_cpu = tilewise.attention(*given, backend="cpu", **options)
        assert (out.double() - expected.double()).norm() < 1e-2 * expected.double().norm()
        torch.testing.assert_close(lse, of_cpu, rtol=0, atol=2e-3)
    else:
        assert out.isnan().all() and lse.isnan().all()


@pytest.mark.parametrize("backend", MODES)
def test_a_scale_of_v_below_zero(backend):
    given = [x.to(torch.float8_e4m3fn) for x in tensors()]
    options = dict(causal=True, backend=backend)
    with MODES[backend]():
        out, negated = (
            tilewise.attention(*given, v_descale=torch.tensor(x), **options) for x in (2.0, -2.0)
        )
    assert torch.equal(negated, -out) and out.isfinite().all()
