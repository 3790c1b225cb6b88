"""The sum of parts compiles for GPUs without spills, and reads memory in wide loads."""

import pytest
import torch
import triton.language as tl
from helpers.tiers import sample

from tilewise.kernels.portable.sum_parts import sum_parts_kernel
from tilewise.testing import build, stats

pytestmark = pytest.mark.compile


@pytest.mark.parametrize("dtype", sample([torch.bfloat16, torch.float32], torch.bfloat16))
@pytest.mark.parametrize("target", sample(["sm80", "sm90"], "sm90"))
def test_sum_parts(target, dtype):
    addresses = torch.zeros(8, dtype=torch.int64)
    of_rows = torch.zeros(64, 2, dtype=torch.int32)
    totals = tuple(torch.zeros(64, 128, dtype=dtype) for _ in range(2))
    numbers = 2**32, (128, 128), 256, 8, 2**20
    constants = dict(TENSORS=2, PART=tl.float32, IS_ALIGNED=True, PROGRAMS=528)
    kernel = build(
        sum_parts_kernel, addresses, of_rows, totals, *numbers, on=target, num_warps=4, **constants
    )
    found = stats(kernel)
    assert found["spill_stores"] == 0, found
    assert kernel.asm["ptx"].count("ld.global.v4.b32") == 2 * 2  # all 8 numbers of a thread
