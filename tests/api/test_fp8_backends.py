"""FP8 calls through the public functions, by the kernels for GPUs: portable ones interpreted, those
for Hopper emulated, beside the CPU backend.
"""

import pytest
import torch

pytest.importorskip("triton")

import tilewise
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
