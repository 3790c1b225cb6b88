"""The copies of many rows compile for GPUs without spills, and move 16 bytes a thread at a time."""

import pytest
import torch
from helpers.tiers import sample

from tilewise.kernels.common.row_table import BLOCK_M, BLOCK_N
from tilewise.kernels.portable.copy_table import copy_table_kernel
from tilewise.testing import build, stats

pytestmark = pytest.mark.compile


@pytest.mark.parametrize("target", sample(["sm80", "sm90"], "sm90"))
def test_copy_table(target):
    table, address = torch.zeros(18, dtype=torch.int64), 2**40 + 16
    constants = dict(SOURCES=3, TARGETS=4, PROGRAMS=528, BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N)
    tensors = table, (address,) * 3, (address,) * 4
    kernel = build(copy_table_kernel, *tensors, 2**12, on=target, num_warps=4, **constants)
    found, ptx = stats(kernel), kernel.asm["ptx"]
    assert found["spill_stores"] == 0, found
    assert ptx.count("ld.global.v4.b32") == ptx.count("st.global.v4.b32") == 4
