"""Chunks over a KV cache of 8 bits, instruction by instruction: the bits of a cache that was
converted before, for every way to store it.
"""

import pytest
import torch
from helpers.eight_bits import DTYPES, quantised

import tilewise
from ptx import executing
from tilewise.kernels.hopper.fwd import cached as schedules
from tilewise.testing import use_emulator

pytestmark = pytest.mark.slow

CASES = [
    ("e4m3", torch.bfloat16, (128, 128), None),
    ("e4m3", torch.float16, (64, 64), 16),
    ("int8", torch.bfloat16, (64, 64), 64),
]


@pytest.mark.parametrize("dtype, q_dtype, headdims, page_size", CASES)
def test_the_bits_of_a_cache_that_was_converted_before(
    dtype, q_dtype, headdims, page_size, monkeypatch
):
    monkeypatch.setattr(schedules, "least_queries", lambda nheads, group: 9)
    monkeypatch.setattr(schedules, "parts_of", lambda cached, problem: 1)
    lengths = [300, 90]
    x = quantised([70] * len(lengths), lengths, DTYPES[dtype], "none", (2, 1), headdims, q_dtype)
    at = x.cache(page_size)
    del at["cu_seqlens_q"], at["k_descale"], at["v_descale"]
    converted = at | {name: at[name].to(q_dtype) for name in ("k", "v")}
    how = dict(causal=True, return_lse=True, backend="hopper")
    with executing(monkeypatch, strict=True), use_emulator():
        found = tilewise.attention(torch.stack(x.s.q), **at, **how)
    with use_emulator():
        expected = tilewise.attention(torch.stack(x.s.q), **converted, **how)
    for mine, other in zip(found, expected):
        assert torch.allclose(mine.float(), other.float(), atol=2e-2, rtol=2e-2)
    with executing(monkeypatch, strict=True), use_emulator():
        expected = tilewise.attention(torch.stack(x.s.q), **converted, **how)
    for mine, other in zip(found, expected):
        assert torch.equal(mine, other)
