"""The sum of runs compiles for GPUs without spills, and moves 16 bytes a thread at a time."""

import pytest
import torch
from helpers.tiers import sample

from tilewise.kernels.portable.sum_runs import sum_runs_kernel
from tilewise.testing import build, stats

pytestmark = pytest.mark.compile


@pytest.mark.parametrize("dtype, stores", [(torch.float32, 2), (torch.bfloat16, 1)])
@pytest.mark.parametrize("scattered", sample([False, True], True))
def test_sum_runs(dtype, stores, scattered):
    parts, places = (torch.zeros(64, 128),) * 2, torch.zeros(64, 2, dtype=torch.int32)
    totals = tuple(torch.zeros(64, 128, dtype=dtype) for _ in range(2))
    targets = places[:, 0].contiguous()
    constants = dict(TENSORS=2, RUNS=2, SCATTERED=scattered, PROGRAMS=528)
    given = parts, places, targets, totals, (1024, 1024), (2048, 2048), 2**20
    kernel = build(sum_runs_kernel, *given, on="sm90", num_warps=4, **constants)
    assert stats(kernel)["spill_stores"] == 0
    ptx = kernel.asm["ptx"]
    assert ptx.count("ld.global.v4.b32") == 2 * 2 * 2
    assert ptx.count("st.global.v4.b32") == 2 * stores
