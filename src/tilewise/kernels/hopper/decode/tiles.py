"""Tiles of decoding: their shapes, and how shared memory is divided among all that passes it."""

from __future__ import annotations

import functools

import torch

from ....hardware import RESERVED, SHARED_MEMORY
from ....problem import Problem
from ....tile.types import SplitPipeline
from ..descriptors import block_of

ROWS = 64
SHORTEST_PAGE = 8  # rows after which the swizzle of shared memory repeats
# From how many keys a page on TMA copies them to one warpgroup: boxes of 8, 16 and 32 keys take
# longer than threads' copies, on an H100, 32 sequences with 8Ki keys, 1.04 to 1.07, 1.03 to 1.06
# and 1.01 to 1.02 of the time, more with more queries; of 8 bits 1.08 to 1.12
SHORTEST_BOX = 64
# Bytes of keys and values that TMA may be copying to a program with few rows. With more, what else
# goes to memory, partial states above all, waits behind them: docs/design/decode.md
IN_FLIGHT = 96 * 2**10
CACHES = {torch.float8_e4m3fn: "e4m3", torch.int8: "int8"}  # of 8 bits


def is_box(page_size: int, block_n: int) -> bool:
    """Whether blocks of keys are whole pages, or pages whole blocks, so that TMA copies them."""
    if page_size % block_n == 0:
        return True
    return page_size >= SHORTEST_PAGE and block_n % page_size == 0


@functools.lru_cache(maxsize=64)
def tile_of(
    problem: Problem,
    page_size: int = 0,
    kept: torch.dtype | None = None,
    row_scales: int = 0,
    warpgroups: int = 1,
    rows: int = ROWS,
    is_beside_chunks: bool = False,
    has_many_tiles: bool = False,
) -> SplitPipeline:
    """One tile for a problem and its cache's dtype, whatever its lengths: a row's bits depend on
    it, but neither on how many `rows` it has nor on how its keys are copied, nor on whether it
    `is_beside_chunks` or an SM `has_many_tiles`. `row_scales` counts the sides, of keys and values,
    whose rows have their own scales.
    """
    block_d, block_dv = map(block_of, (problem.headdim, problem.headdim_v))
    # Headdim 64 would be waiting for its exponentials, not for memory, by fewer keys at a time
    block_n = 128 if max(block_d, block_dv) == 64 else 64
    if warpgroups > 1:
        return shared_tile(problem, (block_n, block_d, block_dv), page_size, warpgroups)
    shape = block_n, block_d, block_dv
    by_tma = is_box(page_size, block_n) and not 0 < page_size < SHORTEST_BOX
    if kept in CACHES or rows < ROWS:
        return swapped_tile(
            shape,
            rows,
            by_tma=by_tma,
            cache=CACHES.get(kept, ""),
            row_scales=row_scales,
            is_beside_chunks=is_beside_chunks,
            has_many_tiles=has_many_tiles,
        )
    is_wide = block_dv > 128
    q_stages = 1 if is_wide else 2
    used = 2 * q_stages * ROWS * block_d + 4 * ROWS * block_dv * is_wide + 1024
    stage = 2 * block_n * (block_d + block_dv)
    stages = min((SHARED_MEMORY["sm90"] - used) // stage, 8)
    return SplitPipeline(
        ROWS, block_n, block_d, block_dv, stages, q_stages, by_tma, STATE_IN_SHARED=is_wide
    )


def swapped_tile(
    shape: tuple[int, int, int],
    rows: int,
    *,
    by_tma: bool,
    cache: str = "",
    row_scales: int = 0,
    is_beside_chunks: bool = False,
    has_many_tiles: bool = False,
) -> SplitPipeline:
    """The tile whose keys are the rows of wgmma: of 8 to 32 rows, or to 64 of a `cache` of 8 bits.

    An SM has two programs where each has room for enough stages. Of 8 bits to 32 rows: while a
    warpgroup converts, or waits for its own products or maxima, the other one's has the SM's units.
    Of 16 bits beside chunks: one reads 44 to 51 bytes a ns, two 69, so that chunks have more SMs.
    And of 32 rows whose keys threads copy, if an SM has many tiles: a block then takes a warpgroup
    longer than the memory (an H200, 32 sequences, 8 queries, pages of 16: 272 to 280 us, 257).
    """
    block_n, block_d, block_dv = shape
    is_wide = max(block_d, block_dv) > 128
    # Two accumulators may be too many registers
    in_shared = cache != "" and rows > (8 if is_wide else 32)
    takes_turns = has_many_tiles and rows == 32 and max(block_d, block_dv) == 128
    takes_turns = takes_turns and not (cache or by_tma or is_beside_chunks)
    q_stages = 1 if (rows > 16 and is_wide) or takes_turns else 2
    stage = block_n * ((1 if cache else 2) * (block_d + block_dv) + 4 * row_scales)
    # Of a row: queries, P of two blocks, a maximum and a sum of each of four warps, folded pieces
    row = 2 * q_stages * block_d + 4 * block_n + 32 + 4 * block_dv * in_shared
    most = 8 if cache or not by_tma else max(IN_FLIGHT // stage, 2)

    def stages_of(programs: int) -> int:
        return min((room_of(programs, by_tma) - rows * row) // stage, most)

    enough = 2 if cache or takes_turns else 3
    may_be_two = rows <= 32 if cache else is_beside_chunks or takes_turns
    programs = 2 if may_be_two and stages_of(2) >= enough else 1
    return SplitPipeline(
        ROWS=rows,
        BLOCK_N=block_n,
        BLOCK_D=block_d,
        BLOCK_DV=block_dv,
        STAGES=stages_of(programs),
        Q_STAGES=q_stages,
        BY_TMA=by_tma,
        STATE_IN_SHARED=in_shared,
        COPY_WARPS=2 if programs > 1 else 4,  # those that the load warp's group has room for
        CACHE=cache,
        BLOCK_M=rows,
        SWAPPED=True,
        PROGRAMS=programs,
    )


def room_of(programs: int, by_tma: bool) -> int:
    """Bytes of shared memory of each of an SM's programs. Beside copies by threads Triton has 1,668
    of its own, else 748.
    """
    room = (SHARED_MEMORY["sm90"] + RESERVED) // programs - RESERVED
    return room - (1024 if by_tma else 2048)


def shared_tile(
    problem: Problem, block: tuple[int, int, int], page_size: int, warpgroups: int
) -> SplitPipeline:
    """The tile in which two warpgroups of rows share each block, so half the bytes of keys."""
    block_n, block_d, block_dv = block
    rows = ROWS // problem.group * problem.group
    room = SHARED_MEMORY["sm90"] - 1024
    stage = 2 * block_n * (block_d + block_dv)
    of_queries = 2 * warpgroups * ROWS * block_d
    q_stages = 2 if (room - 2 * of_queries) // stage > 3 else 1
    stages = min((room - q_stages * of_queries) // stage, 8)
    by_tma = is_box(page_size, block_n)
    return SplitPipeline(
        ROWS=rows,
        BLOCK_N=block_n,
        BLOCK_D=block_d,
        BLOCK_DV=block_dv,
        STAGES=stages,
        Q_STAGES=q_stages,
        BY_TMA=by_tma,
        STATE_IN_SHARED=False,
        COPY_WARPS=2,  # those that the load warp's group has room for
        WARPGROUPS=warpgroups,
    )
