"""An answer to each puzzle. Open it last."""

import triton
import triton.language as tl


@triton.jit
def load_kernel(x, y, n, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    inside = offs < n
    tl.store(y + offs, 10 * tl.load(x + offs, mask=inside), mask=inside)


@triton.jit
def reduce_kernel(x, out, columns, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    offs = tl.arange(0, BLOCK)
    block = tl.load(x + row * columns + offs, mask=offs < columns, other=0.0)
    tl.store(out + row, tl.sum(block, 0))


@triton.jit
def tile_sum_kernel(x, out, M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    i, j = tl.program_id(0), tl.program_id(1)
    offs_m = i * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = j * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = (offs_m[:, None] < M) & (offs_n[None, :] < N)
    offs = offs_m[:, None] * N + offs_n[None, :]
    tile = tl.load(x + offs, mask=inside, other=0.0)
    tl.store(out + i * tl.num_programs(1) + j, tl.sum(tl.sum(tile, 1), 0))


@triton.jit
def matmul_tile_kernel(a, b, c, M, N, K, BLOCK: tl.constexpr):
    offs_m = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    offs_n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    acc = tl.zeros((BLOCK, BLOCK), tl.float32)
    for start in range(0, K, BLOCK):
        offs_k = start + tl.arange(0, BLOCK)
        a_tile = tl.load(a + offs_m[:, None] * K + offs_k[None, :])
        b_tile = tl.load(b + offs_k[:, None] * N + offs_n[None, :])
        acc = tl.dot(a_tile, b_tile, acc)
    tl.store(c + offs_m[:, None] * N + offs_n[None, :], acc)


@triton.jit
def online_max_kernel(x, out, columns, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    m_i = -float("inf")
    for start in range(0, columns, BLOCK):
        offs = start + tl.arange(0, BLOCK)
        inside = offs < columns
        block = tl.load(x + row * columns + offs, mask=inside, other=-float("inf"))
        m_i = tl.maximum(m_i, tl.max(block, 0))
    tl.store(out + row, m_i)


@triton.jit
def online_softmax_kernel(x, m_out, l_out, columns, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    m_i = -float("inf")
    l_i = 0.0
    for start in range(0, columns, BLOCK):
        offs = start + tl.arange(0, BLOCK)
        inside = offs < columns
        block = tl.load(x + row * columns + offs, mask=inside, other=-float("inf"))
        m_new = tl.maximum(m_i, tl.max(block, 0))
        l_i = l_i * tl.exp(m_i - m_new) + tl.sum(tl.exp(block - m_new), 0)
        m_i = m_new
    tl.store(m_out + row, m_i)
    tl.store(l_out + row, l_i)


@triton.jit
def masked_tile_kernel(s, p, seqlen, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    q_idx = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    k_idx = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = (q_idx[:, None] < seqlen) & (k_idx[None, :] < seqlen)
    offs = q_idx[:, None] * seqlen + k_idx[None, :]
    tile = tl.load(s + offs, mask=inside, other=-float("inf"))
    tile = tl.where(k_idx[None, :] <= q_idx[:, None], tile, -float("inf"))
    m = tl.max(tile, 1)
    m = tl.where(m == -float("inf"), 0.0, m)  # any finite number: exp(-inf) is 0
    tl.store(p + offs, tl.exp(tile - m[:, None]), mask=inside)


@triton.jit
def attention_row_kernel(q, k, v, out, n, D: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    offs_d = tl.arange(0, D)
    q_row = tl.load(q + row * D + offs_d)
    m_i = -float("inf")
    l_i = 0.0
    acc = tl.zeros((D,), tl.float32)
    for start in range(0, n, BLOCK):
        k_idx = start + tl.arange(0, BLOCK)
        is_key = k_idx < n
        offs = k_idx[:, None] * D + offs_d[None, :]
        k_tile = tl.load(k + offs, mask=is_key[:, None], other=0.0)
        v_tile = tl.load(v + offs, mask=is_key[:, None], other=0.0)
        s = tl.sum(q_row[None, :] * k_tile, 1)
        s = tl.where(is_key, s, -float("inf"))
        m_new = tl.maximum(m_i, tl.max(s, 0))
        alpha = tl.exp(m_i - m_new)
        p = tl.exp(s - m_new)
        l_i = l_i * alpha + tl.sum(p, 0)
        acc = acc * alpha + tl.sum(p[:, None] * v_tile, 0)
        m_i = m_new
    tl.store(out + row * D + offs_d, acc / l_i)
