# %% [markdown]
# # 04. FlashAttention, forward
#
# **The idea:** a block of queries stays on the chip while the keys pass by in
# blocks, and the output is rescaled together with the online softmax, so that no
# score is ever written to memory.
#
# After this lesson you can
#
# - write FlashAttention's forward as a kernel, full and causal, and choose its
#   tile,
# - merge attention over two sets of keys,
# - say where the time and the memory of standard attention go.
#
# You need the tiled matmul of lesson 02 and the online softmax of lesson 03.

# %%
import torch
import torch.nn.functional as functional
import triton
import triton.language as tl
from lesson import (
    DEVICE,
    Figures,
    NotYet,
    assert_within,
    here,
    pictures_04,
    solutions_04,
)

figures = Figures("04_flash_attention")
LOG2E = 1.4426950408889634
torch.manual_seed(0)

# %% [markdown]
# ## Standard attention
#
# Attention compares every query with every key, makes weights of the scores, and
# averages the values with them: S = Q Kᵀ / √d, P = softmax(S), O = P V. A language
# model also hides the keys of the future (the causal mask). In torch each step is a
# kernel of its own.


# %%
def standard_attention(q, k, v, causal):
    """Attention with its matrices in memory; (batch, nheads, seqlen, headdim)."""
    s = q * q.shape[-1] ** -0.5 @ k.mT  # (batch, nheads, seqlen, seqlen)
    if causal:
        future = torch.ones(s.shape[-2:], dtype=torch.bool, device=s.device).triu(1)
        s = s.masked_fill(future, float("-inf"))
    return torch.softmax(s, -1) @ v


# %% [markdown]
# Every kernel reads the seqlen x seqlen matrix that the one before it wrote, and
# writes its own. Fusing all of them meets an obstacle: softmax divides by a sum
# over the whole row, so it seems that a row of S must be complete before P V can
# begin. Lesson 03 removed it: with m, the largest score so far, and l, the sum of
# exp(s - m), what was summed before is multiplied by alpha = exp(m_old - m_new)
# whenever the maximum grows. The output is a sum as well, so the same factor
# corrects it.
#
# ## The kernel
#
# Each program has one block of queries of one head. It loads Q once, and for every
# block of keys computes S = Q Kᵀ, the new m and l, P, and O = alpha O + P V. O, m
# and l stay in registers from the first key to the last; one division by l ends it.
# Scores are kept in base 2 (2^x is an instruction, e^x is not), so the scale has a
# factor log2(e).
#
# Causally, blocks above the diagonal are skipped, and blocks below it need no mask.
# Only those on the diagonal, or over the end of the sequence, compare indices. So
# the keys of a block of queries come in two runs, partial blocks and then full
# ones, and the compiler makes two loops of them, of which the long one has no mask.


# %%
@triton.jit
def attend_block(
    state, rows, k, v, n_start, seqlen, scale_log2,
    D: tl.constexpr, BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """One block of keys into the state of a block of queries."""
    acc, m_i, l_i = state
    q_tile, q_idx = rows
    k_idx = n_start + tl.arange(0, BLOCK_N)
    offs = k_idx[:, None] * D + tl.arange(0, D)[None, :]
    if MASKED:
        k_tile = tl.load(k + offs, mask=k_idx[:, None] < seqlen, other=0.0)
        v_tile = tl.load(v + offs, mask=k_idx[:, None] < seqlen, other=0.0)
    else:
        k_tile, v_tile = tl.load(k + offs), tl.load(v + offs)
    s = tl.dot(q_tile, tl.trans(k_tile)) * scale_log2  # (BLOCK_M, BLOCK_N)
    if MASKED:
        keep = (k_idx < seqlen)[None, :]
        if CAUSAL:
            keep = keep & (q_idx[:, None] >= k_idx[None, :])
        s = tl.where(keep, s, float("-inf"))
    m_new = tl.maximum(m_i, tl.max(s, 1))
    p = tl.exp2(s - m_new[:, None])
    alpha = tl.exp2(m_i - m_new)
    l_new = l_i * alpha + tl.sum(p, 1)
    acc = tl.dot(p.to(v_tile.dtype), v_tile, acc * alpha[:, None])
    return acc, m_new, l_new


@triton.jit
def fa2_kernel(
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
        state = attend_block(state, (q_tile, q_idx), k, v, n_start, seqlen,
                             scale_log2, D, BLOCK_N, True, CAUSAL)  # fmt: skip
    for n_start in range(0, full, BLOCK_N):
        state = attend_block(state, (q_tile, q_idx), k, v, n_start, seqlen,
                             scale_log2, D, BLOCK_N, False, CAUSAL)  # fmt: skip

    acc, m_i, l_i = state
    acc = acc / l_i[:, None]
    tl.store(out + of_rows, acc.to(q_tile.dtype), mask=q_idx[:, None] < seqlen)
    # lse = m + log l, all that the backward needs of the softmax
    row_lse = (m_i + tl.log2(l_i)) * 0.6931471805599453
    tl.store(lse + head * seqlen + q_idx, row_lse, mask=q_idx < seqlen)


def fa2(q, k, v, causal, tile=(64, 64), warps=None, return_lse=False):
    """FlashAttention-2's forward: a program per block of queries; contiguous."""
    batch, nheads, seqlen, headdim = q.shape
    out = torch.empty_like(q)
    lse = q.new_empty((batch, nheads, seqlen), dtype=torch.float32)
    here(fa2_kernel)[(triton.cdiv(seqlen, tile[0]), batch * nheads)](
        *(q, k, v, out, lse, seqlen, headdim**-0.5 * LOG2E),
        *(headdim, *tile, causal),
        num_warps=warps or (8 if headdim * tile[0] > 4096 else 4),
        num_stages=3,
    )
    return (out, lse) if return_lse else out


# %% [markdown]
# Is it right? Three numbers say so: the distance of our result from the same
# attention in fp64, that of plain torch in the precision of the inputs, and a
# budget made of the second. bf16 keeps 8 bits, so both are off by about 1/256 of a
# result, and a kernel may be off as plain torch is, but not much more. A comparison
# with torch's bf16 result alone would say less: that is rounded, too.


# %%
def make_qkv(batch, nheads, seqlen, headdim):
    """q, k and v in bf16."""
    shape = (3, batch, nheads, seqlen, headdim)
    return torch.randn(shape).to(DEVICE, torch.bfloat16).unbind(0)


def check(name, attend, q, k, v):
    """Compares `attend(q, k, v, causal)` and torch with fp64, full and causal."""
    for causal in (False, True):
        exact = standard_attention(q.double(), k.double(), v.double(), causal)
        plain = standard_attention(q, k, v, causal)
        sdpa = functional.scaled_dot_product_attention(q, k, v, is_causal=causal)
        out = attend(q, k, v, causal)
        assert_within(out, exact, plain, name)
        errors = [(x.double() - exact).abs().max() for x in (out, plain, sdpa)]
        own, torchs, sdpas = (f"{x.item():.4f}" for x in errors)
        kind = "causal" if causal else "full"
        print(f"{name}, {kind}: off by {own}; plain torch {torchs}, SDPA {sdpas}")


qkv = make_qkv(1, 2, 200, 64)  # 200 is no multiple of 64: the last block is ragged
check("FlashAttention-2", fa2, *qkv)

# %% [markdown]
# Why is there no guard against exp(-inf - -inf), which is NaN? Because every row
# has an unmasked key in the first block that it meets: of the diagonal's blocks the
# first begins at or before the block's first query. Try the other order, full
# blocks first, and with a window as well: then a row can meet a block in which
# every key is masked, and `tilewise/tile/softmax.py` has a line for it.
#
# ## Exercise 1: merge two halves of the keys
#
# When one query meets a very long sequence there are too few programs. So cut the
# keys in two, compute attention over each half with its lse, and merge. (Split-KV
# decoding, lesson 08, does this.) exp(lse) is the sum by which an output was
# divided.
#
# **Hint:** find the lse of all keys first. Each half counts with its share of that
# sum.


# %%
def merge(out1, lse1, out2, lse2):
    """out and lse over all keys; out is (..., rows, headdim), lse (..., rows)."""
    raise NotYet


solutions_04.check_merge(merge)

# %% [markdown]
# <details><summary>An answer</summary>
#
# ```{literalinclude} /../tour/lesson/solutions_04.py
# :pyobject: merge
# :language: python
# ```
#
# </details>
#
# ## Which tile?
#
# A larger BLOCK_M reads K and V fewer times; a larger BLOCK_N has fewer steps. S, P
# and O take registers, and stages of K and V take shared memory. The recorded table
# has the tile, what the compiler made of it, how many programs fit on an SM, and
# the speed; with a GPU you see the speed of the kernel above. More registers than
# 255 per thread are spilled. The fastest two tiles of an H200 are opposites: two
# small programs per SM, of which one computes while the other waits, or one large
# one. So tiles are measured, not guessed.

# %%
pictures_04.tiles(figures, fa2)

# %% [markdown]
# ## The memory test
#
# Standard attention keeps S and P: memory grows with the square of the length. The
# kernel keeps O and one lse per row. A line ends where the next length did not fit
# into memory, or was not tried. "flash" is torch's SDPA.

# %%
pictures_04.memory(figures, standard_attention, fa2)

# %% [markdown]
# ## Where the time of standard attention goes
#
# Bytes, too, explain the time. Kernels hand matrices over through HBM. The table
# counts for bf16 what is computed and what is moved, in training with dropout. The
# two last columns divide by what an H200 can do at best, by its data sheet: 989
# TFLOP/s in dense bf16 matmuls, and 4.8 TB/s from HBM. The shape is GPT-2 medium's,
# with a batch of 64.

# %%
pictures_04.steps(figures)

# %% [markdown]
# Every step takes longer in memory than in arithmetic, the matmuls too, as a
# headdim of 64 gives them little to do for each score that they write. The three
# steps between them do next to nothing, and move most of the bytes. **Standard
# attention is bound by memory**: a GPU with twice the arithmetic would not be
# faster. One kernel does all five and keeps S and P on the chip.
#
# FlashAttention-1 did so first, with other loops and more operations; the kernel
# here is FlashAttention-2's. Lesson 04b counts what lies between the two, and has
# the chart of speeds.
#
# To try on the kernel itself: exchange the two runs of `fa2_kernel`; add a window
# of 64 keys to the left, which moves the start of the loop, adds a condition to
# `keep`, and makes a second kind of partial block.

# %%
solutions_04.exercises.show()
