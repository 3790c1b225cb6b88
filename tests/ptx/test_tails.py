"""PTX of the packed Hopper forward, executed: rows behind the last sequence hold NaN, and get out 0
and lse -inf by stores of their own.
"""

import pytest
import torch

import tilewise
from tilewise.testing import use_emulator

from .launch import executing

pytestmark = [pytest.mark.compile, pytest.mark.slow]
LENGTHS = [70, 5, 60]


@pytest.mark.parametrize(("headdim", "causal"), [(64, True), (128, False)])
def test_rows_behind_the_last_sequence(headdim, causal, monkeypatch):
    torch.manual_seed(headdim)
    used = sum(LENGTHS)
    tensors = [torch.randn(used + 90, 1, headdim).bfloat16() for _ in range(3)]
    for x in tensors:
        x[used:] = float("nan")
    starts = torch.tensor([0, 70, 75, used], dtype=torch.int32)
    lengths = dict(cu_seqlens_q=starts, cu_seqlens_k=starts, max_seqlen_q=70, max_seqlen_k=70)
    expected, expected_lse = tilewise.attention(
        *tensors, **lengths, causal=causal, return_lse=True, backend="cpu"
    )
    with executing(monkeypatch), use_emulator(0):
        out, lse = tilewise.attention(
            *tensors, **lengths, causal=causal, return_lse=True, backend="hopper"
        )
    assert (out[used:] == 0).all() and (lse[:, used:] == float("-inf")).all()
    assert (out - expected).norm() < 2**-8 * expected.norm()  # bits of bf16
    assert (lse - expected_lse)[:, :used].abs().max() < 1e-3
