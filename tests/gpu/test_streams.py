"""Calls on streams that torch does not own, made and destroyed around each: a handle is soon used
again, while kernels of the stream before may still run.
"""

import ctypes

import pytest
import torch

import tilewise

pytestmark = pytest.mark.gpu


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_streams_that_are_destroyed_share_no_tiles():
    runtime = ctypes.CDLL(
        "libcudart.so.13" if (torch.version.cuda or "") >= "13" else "libcudart.so.12"
    )
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, 2048, 8, 128, device="cuda", dtype=torch.bfloat16).unbind(0)
    expected = tilewise.attention(q, k, v, causal=True)
    torch.cuda.synchronize()
    outs, handles = [], []
    for _ in range(100):
        handle = ctypes.c_void_p()
        assert runtime.cudaStreamCreateWithFlags(ctypes.byref(handle), 1) == 0
        with torch.cuda.stream(torch.cuda.ExternalStream(handle.value)):
            outs += [tilewise.attention(q, k, v, causal=True) for _ in range(2)]
        handles.append(handle.value)
        assert runtime.cudaStreamDestroy(handle) == 0
    torch.cuda.synchronize()
    assert all(torch.equal(out, expected) for out in outs), len(set(handles))
