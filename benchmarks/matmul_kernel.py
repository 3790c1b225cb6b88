"""The kernel of `matmul`, as Triton's compiler reads it."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def grouped_tile(tile, tiles_m, tiles_n, GROUP_M: tl.constexpr):
    """The m_block and n_block of a tile's number: down GROUP_M rows, then a column to the right."""
    in_group = GROUP_M * tiles_n
    first_m = tile // in_group * GROUP_M
    rows = tl.minimum(tiles_m - first_m, GROUP_M)  # the last group may be lower
    within = tile % in_group
    return first_m + within % rows, within // rows


@triton.jit
def matmul_kernel(
    a, b, c, M, N, K, TILES: tl.constexpr, B_BY_COLUMN: tl.constexpr, PRECISION: tl.constexpr
):  # fmt: skip
    """C = A B for descriptors of A (M, K), B (K, N), or (N, K) where it lies by column, and C."""
    BLOCK_M: tl.constexpr = TILES.BLOCK_M
    BLOCK_N: tl.constexpr = TILES.BLOCK_N
    BLOCK_K: tl.constexpr = TILES.BLOCK_K
    FLATTEN: tl.constexpr = TILES.FLATTEN
    tiles_m, tiles_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    start, step = tl.program_id(0), tl.num_programs(0)
    # C's tile is counted apart: one number would keep its store between a tile's loads and the next
    stored = start - step
    for tile in tl.range(start, tiles_m * tiles_n, step, flatten=FLATTEN):
        m_block, n_block = grouped_tile(tile, tiles_m, tiles_n, TILES.GROUP_M)
        offs_m, offs_n = m_block * BLOCK_M, n_block * BLOCK_N
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for k_block in range(tl.cdiv(K, BLOCK_K)):
            offs_k = k_block * BLOCK_K
            a_tile = a.load([offs_m, offs_k])  # (BLOCK_M, BLOCK_K), zeros beyond the edge
            if B_BY_COLUMN:
                b_tile = b.load([offs_n, offs_k]).T
            else:
                b_tile = b.load([offs_k, offs_n])
            acc = tl.dot(a_tile, b_tile, acc, input_precision=PRECISION)
        stored += step
        m_block, n_block = grouped_tile(stored, tiles_m, tiles_n, TILES.GROUP_M)
        offs_m, offs_n = m_block * BLOCK_M, n_block * BLOCK_N
        if TILES.PARTS == 1:
            c.store([offs_m, offs_n], acc.to(c.dtype))
        else:
            HALF: tl.constexpr = BLOCK_N // 2
            left, right = tl.split(acc.reshape(BLOCK_M, 2, HALF).permute(0, 2, 1))
            c.store([offs_m, offs_n], left.to(c.dtype))
            c.store([offs_m, offs_n + HALF], right.to(c.dtype))
