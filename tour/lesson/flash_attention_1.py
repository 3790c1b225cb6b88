"""FlashAttention-1's forward (Dao et al. 2022, algorithm 1), for lesson 04.

`fa1` has its loops: keys outside, queries inside, one program a head. `fa1_steps`
has its arithmetic, which normalises O after every block of keys, in the loops of
FlashAttention-2.
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
def fa1_kernel(
    q, k, v, o, l_rows, m_rows, seqlen, scale_log2,
    D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    CAUSAL: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0).to(tl.int64)
    first = head * seqlen * D  # of this head's numbers: tensors are contiguous
    offs_m, offs_n = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
    offs_d = tl.arange(0, D)[None, :]
    for n_start in range(0, seqlen, BLOCK_N):
        k_idx = n_start + offs_n
        of_keys = first + k_idx[:, None] * D + offs_d
        k_tile = tl.load(k + of_keys, mask=k_idx[:, None] < seqlen, other=0.0)
        v_tile = tl.load(v + of_keys, mask=k_idx[:, None] < seqlen, other=0.0)
        for m_start in range(0, seqlen, BLOCK_M):
            q_idx = m_start + offs_m
            is_row = q_idx < seqlen
            of_rows = first + q_idx[:, None] * D + offs_d
            q_tile = tl.load(q + of_rows, mask=is_row[:, None], other=0.0)
            o_tile = tl.load(o + of_rows, mask=is_row[:, None], other=0.0)  # fp32
            l_i = tl.load(l_rows + head * seqlen + q_idx, mask=is_row, other=1.0)
            m_i = tl.load(m_rows + head * seqlen + q_idx, mask=is_row, other=0.0)

            # S = Q K^T: (BLOCK_M, BLOCK_N)
            s = tl.dot(q_tile, tl.trans(k_tile)) * scale_log2
            keep = (k_idx < seqlen)[None, :]
            if CAUSAL:
                keep = keep & (q_idx[:, None] >= k_idx[None, :])
            s = tl.where(keep, s, float("-inf"))
            m_new = tl.maximum(m_i, tl.max(s, 1))
            p = tl.exp2(s - m_new[:, None])
            before = l_i * tl.exp2(m_i - m_new)
            l_new = before + tl.sum(p, 1)
            # O = (alpha l O + P V) / l_new
            pv = tl.dot(p.to(v_tile.dtype), v_tile)
            o_tile = (o_tile * before[:, None] + pv) * (1.0 / l_new)[:, None]

            tl.store(o + of_rows, o_tile, mask=is_row[:, None])
            tl.store(l_rows + head * seqlen + q_idx, l_new, mask=is_row)
            tl.store(m_rows + head * seqlen + q_idx, m_new, mask=is_row)
        # the next pass reads what other threads of this program wrote
        tl.debug_barrier()


def fa1(q, k, v, causal, block_m=64, block_n=64):
    """FlashAttention-1's forward; contiguous tensors, headdim a power of two."""
    batch, nheads, seqlen, headdim = q.shape
    o = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
    l_rows = o.new_zeros(batch, nheads, seqlen)
    m_rows = torch.full_like(l_rows, -math.inf)
    here(fa1_kernel)[(batch * nheads,)](
        *(q, k, v, o, l_rows, m_rows, seqlen, headdim**-0.5 * LOG2E),
        *(headdim, block_m, block_n, causal),
        num_warps=8 if headdim * block_m > 4096 else 4,
        num_stages=2,
    )
    return o.to(q.dtype)


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
