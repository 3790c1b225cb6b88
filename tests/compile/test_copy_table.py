"""The copies of many rows compile for GPUs without spills, and move 16 bytes a thread at a time."""

import pytest
import torch
from helpers.tiers import sample

from tilewise.kernels.portable.copy_table import copy_table_kernel, publish_kernel
from tilewise.kernels.portable.signals import Meeting
from tilewise.testing import build, stats

pytestmark = pytest.mark.compile


@pytest.mark.parametrize("target", sample(["sm80", "sm90"], "sm90"))
def test_copy_table(target):
    table, address = torch.zeros(18, dtype=torch.int64), 2**40 + 16
    constants = dict(SOURCES=3, TARGETS=4, PROGRAMS=528)
    tensors = table, (address,) * 3, (address,) * 4
    kernel = build(copy_table_kernel, *tensors, 2**12, on=target, num_warps=4, **constants)
    found, ptx = stats(kernel), kernel.asm["ptx"]
    assert found["spill_stores"] == 0, found
    assert ptx.count("ld.global.v4.b32") == ptx.count("st.global.v4.b32") == 4
    words = torch.zeros(4, dtype=torch.int32)
    meeting = Meeting(table, words, table, 3, 7, 1, 8, limit=10**12)
    constants |= dict(TIMED=True)
    kernel = build(publish_kernel, *tensors, 2**12, meeting, on=target, num_warps=4, **constants)
    found, ptx = stats(kernel), kernel.asm["ptx"]
    assert found["spill_stores"] == 0, found
    assert ptx.count("ld.global.v4.b32") == ptx.count("st.global.v4.b32") == 4
    # All threads have stored when one counts the program, and the last program says that it is here
    assert ptx.count("atom.global.gpu.acq_rel.add.u32") == 1
    counted = ptx.index("atom.global.gpu.acq_rel.add.u32")
    assert "bar.sync" in ptx[:counted]
    assert ptx.count("atom.global.sys.release.exch.b64") == 1
    assert ptx.index("atom.global.sys.release.exch.b64") > counted
    assert ptx.count("atom.global.sys.acquire.add.u64") == 3
