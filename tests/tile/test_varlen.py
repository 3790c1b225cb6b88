"""A tile number of a packed batch means what the plain Python twin says, hint or none."""

import itertools
import random

import pytest
import torch
import triton
import triton.language as tl
from helpers.tiers import every, sample, sample_rows
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from gluon_emulator.hopper import emulate
from tilewise.testing import build, interpret, stats
from tilewise.testing.schedule import tiles
from tilewise.tile.varlen import Hint, varlen_tile

NONE = (0, 0, 0)  # head, block, split where there is no tile


@triton.jit
def tile_kernel(
    out,
    cu_seqlens,
    total,
    batch_size,
    nheads,
    BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
    LPT: tl.constexpr,
):
    """One program a tile: each looks from the start."""
    tile = tl.program_id(0)
    lane = tl.arange(0, 32)
    sequences = cu_seqlens, total, batch_size
    found = varlen_tile(tile, Hint(0, 0), lane, *sequences, nheads, BLOCK, SPLITS, LPT)
    write(out + 5 * tile, found)


@triton.jit
def persistent_kernel(
    out,
    cu_seqlens,
    total,
    batch_size,
    nheads,
    bound,
    BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
    LPT: tl.constexpr,
):
    """A program takes tile after tile and goes on where it was."""
    lane = tl.arange(0, 32)
    hint = Hint(0, 0)
    for tile in range(tl.program_id(0), bound, tl.num_programs(0)):
        sequences = cu_seqlens, total, batch_size
        found = varlen_tile(tile, hint, lane, *sequences, nheads, BLOCK, SPLITS, LPT)
        write(out + 5 * tile, found)
        hint = found.hint


@triton.jit
def write(out, found):
    tl.store(out, found.is_tile.to(tl.int32))
    tl.store(out + 1, found.batch)
    tl.store(out + 2, found.head)
    tl.store(out + 3, found.m_block)
    tl.store(out + 4, found.split_idx)


@gluon.jit
def warp_kernel(out, cu_seqlens, total, batch_size, nheads, bound, BLOCK: gl.constexpr):
    """The same by one warp in Gluon, as a load warp would."""
    lane = gl.arange(0, 32, gl.BlockedLayout([1], [32], [1], [0]))
    hint = Hint(0, 0)
    for tile in range(gl.program_id(0), bound, gl.num_programs(0)):
        found = varlen_tile(tile, hint, lane, cu_seqlens, total, batch_size, nheads, BLOCK)
        write(out + 5 * tile, found)
        hint = found.hint


def cumulative(lengths):
    return torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)


def upper_bound(lengths, nheads, block, splits=1):
    """What a host that knows only the total would launch."""
    return (sum(lengths) // block + len(lengths)) * nheads * splits


def expected(lengths, nheads, block, bound, splits=1, longest_first=False):
    rows = [[1, *tile[1:]] for tile in tiles(lengths, nheads, block, splits, longest_first)]
    assert len(rows) <= bound
    return rows + [[0, len(lengths), *NONE]] * (bound - len(rows))


def found_by(lengths, nheads, block, splits=1, longest_first=False, programs=None):
    bound = upper_bound(lengths, nheads, block, splits)
    out = torch.full((bound, 5), -7, dtype=torch.int32)
    constants = dict(BLOCK=block, SPLITS=splits, LPT=longest_first)
    args = (out, cumulative(lengths), sum(lengths), len(lengths), nheads)
    if programs is None:
        interpret(tile_kernel)[(bound,)](*args, **constants)
    else:
        interpret(persistent_kernel)[(programs,)](*args, bound, **constants)
    assert out.tolist() == expected(lengths, nheads, block, bound, splits, longest_first)
    return out.tolist()


def test_worked_example():
    rows = found_by([160, 300], 1, 128)
    assert [(batch, m_block) for is_tile, batch, _, m_block, _ in rows if is_tile] == [
        *[(0, 0), (0, 1)],
        *[(1, 0), (1, 1), (1, 2)],
    ]


RAGGED = {
    "one": [1],
    "exact blocks": [128, 256],
    "none but empty": [0, 0, 0],
    "empty at both ends": [0, 0, 5, 0, 17, 0],
    "32": list(range(32)),
    "33": [9] * 33,
    "an empty group between": [3] * 32 + [0] * 40 + [20, 1],
    "an empty group first": [0] * 64 + [9],
    "one huge among small": [1] * 40 + [700] + [2] * 40,
    "the huge one first": [500] + [1] * 70,
}


@pytest.mark.parametrize("lengths", every(2, RAGGED.values()), ids=RAGGED)
@pytest.mark.parametrize("programs", sample([None, 3], 3), ids=["one a tile", "persistent"])
def test_ragged_batches(lengths, programs):
    found_by(lengths, 2, 16, programs=programs)


@pytest.mark.parametrize("seed", sample(range(4), 0))
@pytest.mark.parametrize("programs", sample([None, 1, 5], 5), ids=["one a tile", "1", "5"])
def test_random_lengths(seed, programs):
    draw = random.Random(seed)
    lengths = [draw.choice([0, 1, draw.randrange(60)]) for _ in range(draw.choice([7, 50, 100]))]
    splits, longest_first = draw.choice([1, 1, 3]), draw.random() < 0.5
    found_by(lengths, draw.choice([1, 2, 3]), 16, splits, longest_first, programs)


@pytest.mark.parametrize("longest_first", [False, True])
def test_splits_are_neighbours(longest_first):
    rows = found_by([20, 0, 40], 2, 16, splits=3, longest_first=longest_first)
    assert [row[4] for row in rows[:6]] == [0, 1, 2, 0, 1, 2]
    assert [row[3] for row in rows[:6]] == [longest_first] * 3 + [not longest_first] * 3


def test_far_past_the_end():
    out = torch.full((300, 5), -7, dtype=torch.int32)
    args = (out, cumulative([5] * 40), 200, 40, 1, 300)
    interpret(persistent_kernel)[(60,)](*args, BLOCK=16, SPLITS=1, LPT=True)
    assert out[40:].tolist() == [[0, 40, *NONE]] * 260


WRONG = {
    "past the end": (0, 20, 70, 90),
    "far past it": (0, 2**31 - 1, -(2**31), 50),
    "decreasing": (40, 0, -5, 3),
    "all over again": (0, 50) * 40,
}


@pytest.mark.parametrize("starts", WRONG.values(), ids=WRONG)
@pytest.mark.parametrize("programs", [1, 5])
def test_wrong_starts_give_tiles_of_rows_that_exist(starts, programs):
    """In the order of a right batch, and no more of them than one can have: then there are none."""
    total, block, nheads = 50, 16, 2
    held = [min(max(start, 0), total) for start in starts]
    lengths = [max(stop - start, 0) for start, stop in itertools.pairwise(held)]
    lengths[-1] = total - held[-2]  # the last sequence has the rows behind it
    bound = upper_bound([total], nheads, block) + (len(lengths) - 1) * nheads
    out = torch.full((bound + 9, 5), -7, dtype=torch.int32)
    args = (out, torch.tensor(starts, dtype=torch.int32), total, len(lengths), nheads, bound + 9)
    interpret(persistent_kernel)[(programs,)](*args, BLOCK=block, SPLITS=1, LPT=False)
    rows = [[1, *tile[1:]] for tile in tiles(lengths, nheads, block)][:bound]
    assert out.tolist() == rows + [[0, len(lengths), *NONE]] * (bound + 9 - len(rows))


@pytest.mark.emulator
@pytest.mark.parametrize("programs", [1, 4])
def test_one_warp_in_gluon(programs):
    lengths = [3] * 32 + [0] * 40 + [50, 1, 0]
    bound = upper_bound(lengths, 2, 16)
    out = torch.full((bound, 5), -7, dtype=torch.int32)
    args = (out, cumulative(lengths), sum(lengths), len(lengths), 2, bound)
    emulate(warp_kernel)[(programs,)](*args, BLOCK=16, num_warps=1)
    assert out.tolist() == expected(lengths, 2, 16, bound)


# A launch makes the number 1 a constant: Triton 3.6 died of that with one sequence.
COUNTS = pytest.mark.parametrize(
    ("batch_size", "nheads"), sample_rows([(1, 1), (1, 2), (40, 1), (40, 2)], (40, 2))
)


@pytest.mark.compile
@COUNTS
@pytest.mark.parametrize("target", sample(["sm80", "sm90"], "sm90"))
def test_compiles(target, batch_size, nheads):
    args = (torch.int32, torch.int32, 4000, batch_size, nheads, 70)
    constants = dict(BLOCK=128, SPLITS=2, LPT=True)
    found = stats(build(persistent_kernel, *args, on=target, **constants))
    assert (found["spill_stores"], found["spill_loads"]) == (0, 0)


@pytest.mark.compile
@COUNTS
def test_one_warp_needs_no_shared_memory(batch_size, nheads):
    args = (torch.int32, torch.int32, 4000, batch_size, nheads, 70)
    found = stats(build(warp_kernel, *args, on="sm90", BLOCK=128, num_warps=1))
    assert found["smem"] == 0
    assert (found["spill_stores"], found["spill_loads"]) == (0, 0)


@triton.jit
def interleaved_kernel(out, cu_seqlens, total, batch_size, nheads, l2_group, BLOCK: tl.constexpr):
    tile, lane = tl.program_id(0), tl.arange(0, 32)
    sequences = cu_seqlens, total, batch_size
    found = varlen_tile(tile, Hint(0, 0), lane, *sequences, nheads, BLOCK, 1, False, l2_group)
    write(out + 5 * tile, found)


def test_heads_of_long_sequences_take_turns():
    """Of 3, 16 and 40 blocks, 5 heads: 50 blocks at once are 3 heads of the second."""
    lengths, nheads = [70, 512, 1280], 5
    tiles = upper_bound(lengths, nheads, 32)
    out = torch.full((tiles, 5), -7, dtype=torch.int32)
    interpret(interleaved_kernel)[(tiles,)](
        out, cumulative(lengths), sum(lengths), len(lengths), nheads, 50, BLOCK=32
    )
    found = [(batch, head, block) for is_tile, batch, head, block, _ in out.tolist() if is_tile]
    expected = []
    for batch, (blocks, width) in enumerate([(3, 1), (16, 3), (40, 1)]):
        for first in range(0, nheads, width):
            heads = range(first, min(first + width, nheads))
            expected += [(batch, head, block) for block in range(blocks) for head in heads]
    assert found == expected
