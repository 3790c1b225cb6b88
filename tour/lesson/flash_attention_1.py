"""FlashAttention-1's blocks (Dao et al. 2022) and its arithmetic, for lesson 04b.

`fa1_steps` normalises O after every block of keys, in the loops of
FlashAttention-2. The lesson has a kernel with FlashAttention-1's own loops.
"""

import math

import torch
import triton
import triton.language as tl

from . import here

LOG2E = math.log2(math.e)


def fa1_blocks(sram_bytes, headdim, itemsize=2):
    """(B_r, B_c) by the paper's rule."""
    numbers = sram_bytes // itemsize
    b_c = math.ceil(numbers / (4 * headdim))
    return min(b_c, headdim), b_c


def power_of_two(n):
    """The largest one up to n: Triton's tiles have sides of no other kind."""
    return 1 << int(math.log2(n))


@triton.jit
def fa1_step(
    state, rows, k, v, n_start, seqlen, scale_log2,
    D: tl.constexpr, BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """One block of keys into the state of a block of queries; normalises O."""
    acc, m_i, l_i = state
    q_tile, q_idx = rows
    k_idx = n_start + tl.arange(0, BLOCK_N)
    offs = k_idx[:, None] * D + tl.arange(0, D)[None, :]
    if MASKED:
        k_tile = tl.load(k + offs, mask=k_idx[:, None] < seqlen, other=0.0)
        v_tile = tl.load(v + offs, mask=k_idx[:, None] < seqlen, other=0.0)
    else:
        k_tile, v_tile = tl.load(k + offs), tl.load(v + offs)
    s = tl.dot(q_tile, tl.trans(k_tile)) * scale_log2
    if MASKED:
        keep = (k_idx < seqlen)[None, :]
        if CAUSAL:
            keep = keep & (q_idx[:, None] >= k_idx[None, :])
        s = tl.where(keep, s, float("-inf"))
    m_new = tl.maximum(m_i, tl.max(s, 1))
    p = tl.exp2(s - m_new[:, None])
    alpha = tl.exp2(m_i - m_new)
    l_new = l_i * alpha + tl.sum(p, 1)
    pv = tl.dot(p.to(v_tile.dtype), v_tile)
    acc = (acc * (l_i * alpha)[:, None] + pv) * (1.0 / l_new)[:, None]
    return acc, m_new, l_new


@triton.jit
def fa1_steps_kernel(
    q, k, v, out, lse, seqlen, scale_log2,
    D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    CAUSAL: tl.constexpr,
):  # fmt: skip
    m_start, head = tl.program_id(0) * BLOCK_M, tl.program_id(1).to(tl.int64)
    q_idx = m_start + tl.arange(0, BLOCK_M)
    first = head * seqlen * D
    k, v = k + first, v + first
    of_rows = first + q_idx[:, None] * D + tl.arange(0, D)[None, :]
    q_tile = tl.load(q + of_rows, mask=q_idx[:, None] < seqlen, other=0.0)
    acc = tl.zeros([BLOCK_M, D], tl.float32)
    m_i = tl.full([BLOCK_M], float("-inf"), tl.float32)
    state = acc, m_i, tl.zeros([BLOCK_M], tl.float32)

    # Full blocks end here; partial ones follow, up to the diagonal or the end
    full = (m_start if CAUSAL else seqlen) // BLOCK_N * BLOCK_N
    stop = tl.minimum(m_start + BLOCK_M, seqlen) if CAUSAL else seqlen
    for n_start in range(full, stop, BLOCK_N):
        state = fa1_step(state, (q_tile, q_idx), k, v, n_start, seqlen,
                             scale_log2, D, BLOCK_N, True, CAUSAL)  # fmt: skip
    for n_start in range(0, full, BLOCK_N):
        state = fa1_step(state, (q_tile, q_idx), k, v, n_start, seqlen,
                             scale_log2, D, BLOCK_N, False, CAUSAL)  # fmt: skip

    acc, m_i, l_i = state
    tl.store(out + of_rows, acc.to(q_tile.dtype), mask=q_idx[:, None] < seqlen)
    row_lse = (m_i + tl.log2(l_i)) * 0.6931471805599453
    tl.store(lse + head * seqlen + q_idx, row_lse, mask=q_idx < seqlen)


def fa1_steps(q, k, v, causal, tile=(64, 64)):
    """FlashAttention-1's arithmetic in FlashAttention-2's loops."""
    batch, nheads, seqlen, headdim = q.shape
    out = torch.empty_like(q)
    lse = q.new_empty((batch, nheads, seqlen), dtype=torch.float32)
    here(fa1_steps_kernel)[(triton.cdiv(seqlen, tile[0]), batch * nheads)](
        *(q, k, v, out, lse, seqlen, headdim**-0.5 * LOG2E),
        *(headdim, *tile, causal),
        num_warps=8 if headdim * tile[0] > 4096 else 4,
        num_stages=3,
    )
    return out
