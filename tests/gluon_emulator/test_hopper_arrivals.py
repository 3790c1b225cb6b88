"""Memory that DMA fills while a kernel runs, in the emulator: a copy of a piece that was not waited
for is an error, whatever the order of events, and one that never comes is named.
"""

import pytest
import torch
from helpers.hopper_launches import descriptor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from gluon_emulator.hopper import emulate
from gluon_emulator.hopper.arrivals import Arrivals
from gluon_emulator.hopper.machine import Deadlock, HopperError
from tilewise.kernels.hopper.compat import tma_load
from tilewise.kernels.hopper.fwd.runs import ASM, AWAIT

ROWS, PIECES = 64, 4
_AWAIT = gl.constexpr(AWAIT)


@gluon.jit
def copy_pieces_kernel(
    x_desc, y, word, limit, ROWS: gl.constexpr, PIECES: gl.constexpr, LESS: gl.constexpr
):
    """Copies pieces in their order; waits for each, or for LESS."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    smem = gl.allocate_shared_memory(x_desc.dtype, [ROWS, 64], x_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(full, count=1)
    fence_async_shared()
    rows = gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    columns = gl.arange(0, 64, gl.SliceLayout(0, LAYOUT))
    arrived = gl.to_tensor(0)
    for piece in range(PIECES):
        arrived = gl.inline_asm_elementwise(
            _AWAIT,
            "=&r,l,r,r,l",
            [word, piece + 1 - LESS, arrived, gl.cast(limit, gl.int64)],
            dtype=gl.int32,
            is_pure=False,
            pack=1,
        )
        mbarrier.expect(full, x_desc.block_type.nbytes)
        tma_load(x_desc, [piece * ROWS, 0], full, smem)
        mbarrier.wait(full, piece & 1)
        at = (piece * ROWS + rows)[:, None] * 64 + columns[None, :]
        gl.store(y + at, smem.load(LAYOUT))


def copied(seed, less=0, pieces=PIECES, limit=10**9):
    source = torch.randn(ROWS * PIECES, 64).half()
    x, y, word = torch.zeros_like(source), torch.zeros_like(source), torch.zeros(1).int()
    parts = [
        [(x[i : i + ROWS // 2], source[i : i + ROWS // 2]) for i in (j, j + ROWS // 2)]
        for j in range(0, ROWS * pieces, ROWS)
    ]
    arrivals = Arrivals(word, parts)
    constants = dict(ROWS=ROWS, PIECES=PIECES, LESS=less, num_warps=4)
    kernel = emulate(copy_pieces_kernel, seed, asm=ASM, arrivals=arrivals)
    kernel[(1,)](descriptor(x, [ROWS, 64]), y, word, limit, **constants)
    return source, y, word


@pytest.mark.parametrize("seed", range(9))
def test_pieces_that_are_waited_for(seed):
    source, y, word = copied(seed)
    assert torch.equal(y, source) and word == PIECES


@pytest.mark.parametrize("seed", range(9))
def test_a_copy_that_begins_too_early(seed):
    with pytest.raises(HopperError, match=r"starts a copy of piece \d of 4, and has waited for"):
        copied(seed, less=1)


def test_a_piece_that_never_comes():
    with pytest.raises(Deadlock, match="waits for piece 4, of which 3 arrived"):
        copied(0, pieces=3)


def test_a_wait_that_ends():
    with pytest.raises(HopperError, match="starts a copy of piece"):
        copied(2, limit=0)
