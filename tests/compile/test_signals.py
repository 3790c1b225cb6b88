"""The kernels of signals compile for GPUs, with the orders at system scope that they rely on."""

import pytest
import torch
from helpers.tiers import sample

from tilewise.kernels.portable.signals import LANES, Meeting, barrier_kernel, poison_kernel
from tilewise.testing import build, stats

pytestmark = pytest.mark.compile
WORDS, FLAG = torch.zeros(64, dtype=torch.int64), torch.zeros(1, dtype=torch.int32)


def test_one_kernel_is_the_barrier_of_all_numbers():
    """A launch past Triton's front end passes another number to what was compiled for the first."""
    constants = dict(WAITS=True, TIMED=True, THREADS=LANES, num_warps=1, on="sm90")
    first, later = (
        build(barrier_kernel, Meeting(WORDS, FLAG, WORDS, *numbers, limit=10**12), **constants)
        for numbers in ((1, 7, 1, 8), (16, 32, 0, 2))
    )
    assert first.asm["ptx"] == later.asm["ptx"]


@pytest.mark.parametrize("target", sample(["sm80", "sm90", "sm100"], "sm90"))
def test_the_barrier_releases_before_it_says_and_acquires_what_it_hears(target):
    meeting = Meeting(WORDS, FLAG, WORDS, 3, 7, 1, 8, limit=10**12)
    constants = dict(WAITS=True, TIMED=True, THREADS=LANES, num_warps=1)
    kernel = build(barrier_kernel, meeting, on=target, **constants)
    assert stats(kernel)["spill_stores"] == 0
    ptx = kernel.asm["ptx"]
    assert ptx.count("atom.global.sys.release.exch.b64") == 1
    assert ptx.count("atom.global.sys.acquire.add.u64") == 3  # before, in and after the loop
    assert "globaltimer" in ptx and "trap" not in ptx
    silent = build(barrier_kernel, meeting, on=target, **dict(constants, WAITS=False))
    assert "acquire" not in silent.asm["ptx"] and "globaltimer" not in silent.asm["ptx"]


@pytest.mark.parametrize("dtype", sample([torch.bfloat16, torch.float32], torch.bfloat16))
@pytest.mark.parametrize("size", sample([1000, 2**33], 2**33))
def test_poison(dtype, size):
    x = torch.empty(16, dtype=dtype)
    given = FLAG, WORDS, (x, torch.empty(16)), (size, 32), 3
    kernel = build(poison_kernel, *given, TENSORS=2, PROGRAMS=128, BLOCK=4096, num_warps=4)
    assert stats(kernel)["spill_stores"] == 0
