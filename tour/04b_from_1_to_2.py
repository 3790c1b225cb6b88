# %% [markdown]
# # 04b. From FlashAttention-1 to 2
#
# **The idea:** FlashAttention-2 computes what FlashAttention-1 does with more
# programs, with fewer operations outside the matmuls, and without the blocks that a
# mask hides.
#
# After this lesson you can
#
# - say what FlashAttention-2 changed in FlashAttention-1,
# - count what each change saves, by formula and in a compiler's output,
# - read the chart of every FlashAttention paper.
#
# You need lesson 04, whose kernel is used here: what you change there changes here.

# %%
import torch
import triton
import triton.language as tl
from lesson import (
    Figures,
    NotYet,
    definitions_of,
    here,
    listing,
    pictures_04b,
    solutions_04b,
)

figures = Figures("04b_from_1_to_2")
lesson_04 = definitions_of("04_flash_attention")  # its functions; no cell runs
LOG2E = 1.4426950408889634
torch.manual_seed(0)

# %% [markdown]
# ## FlashAttention-1's loops
#
# FlashAttention-1 (Dao et al. 2022, algorithm 1) has K and V in the outer loop: it
# loads K_j and V_j once, then passes over all Q_i. O_i, l_i and m_i are in HBM
# until the next j, normalised, so that O is at any time the attention over the keys
# so far:
#
#     m_new = max(m, rowmax S)        P = exp(S - m_new)
#     l_new = exp(m - m_new) l + rowsum P
#     O_new = (exp(m - m_new) l O + P V) / l_new
#
# Its blocks are as large as the on-chip memory allows. If that holds M numbers,
# K_j, V_j, Q_i and O_i get M / 4 each: B_c = ⌈M / 4d⌉ keys and B_r = min(B_c, d)
# queries. This kernel is the algorithm, with a mask.


# %%
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
    m_rows = torch.full_like(l_rows, -float("inf"))
    here(fa1_kernel)[(batch * nheads,)](
        *(q, k, v, o, l_rows, m_rows, seqlen, headdim**-0.5 * LOG2E),
        *(headdim, block_m, block_n, causal),
        num_warps=8 if headdim * block_m > 4096 else 4,
        num_stages=2,
    )
    return o.to(q.dtype)


# %%
pictures_04b.block_rule()
qkv = lesson_04.make_qkv(1, 2, 200, 64)
lesson_04.check("FlashAttention-1", fa1, *qkv)
lesson_04.check("FlashAttention-1's steps", pictures_04b.fa1_steps, *qkv)

# %% [markdown]
# "FlashAttention-1's steps" is a kernel between the two, `fa1_steps` in
# `lesson/flash_attention_1.py`: FlashAttention-1's arithmetic in FlashAttention-2's
# loops. With it each change is counted by itself.
#
# ## Three changes
#
# FlashAttention-2 (Dao 2023) makes three changes.
#
# *First, the loops are exchanged.* With K and V outside, O_i comes from HBM and
# goes back in every pass, and one program must compute a whole head, or programs
# would add to the same O_i at once. With Q outside, each block of queries is a
# program of its own. A sequence of 16Ki with 16 heads is 16 programs for FA1, and
# 2048 for FA2. An H200 has 132 SMs.
#
# *Second, one division at the end.* O stays unnormalised and is divided once, after
# the last key. Each step then multiplies O by alpha, and that is all. Tensor cores
# are more than ten times as fast as the other units: an H200's data sheet has 989
# TFLOP/s for bf16 matmuls and 67 for fp32. So one operation outside costs as much
# time as some fifteen inside.
#
# *Third, causal blocks are sorted* into skipped, partial and full ones. Algorithm 1
# has no mask (the full forward in the paper's appendix has), and its loops visit
# all blocks. So `fa1_kernel` compares indices in every block, and computes even
# those in which nothing is left: on the left below all are hatched.

# %%
pictures_04b.orders()

# %% [markdown]
# What does the division cost? By formula: for one row and one block of keys, both
# kernels spend on each score a scale, a maximum, a subtraction, an exponential and
# a sum. On each of the d numbers of O, FA1 spends three operations, (O · a + PV) ·
# b, and FA2 one.
#
# And by what a compiler makes of it. `build` compiles a kernel for a GPU that need
# not be there; PTX is the assembly that is handed to NVIDIA's assembler. Counted
# are the fp32 instructions of the loop over full blocks, per score of the tile, for
# FA1, FA1's arithmetic in FA2's loops, and FA2.

# %%
per_score = pictures_04b.operations(fa1_kernel, lesson_04.fa2_kernel)

# %% [markdown]
# FA1's count is below its formula because O · a goes into the matmul as what it
# adds to, and only the two multiplications are left. The rest is alike: one mul
# scales a score for the maximum, one fma scales it again and subtracts (in FA1 a
# mask lies between, and it is a sub). What is over whole numbers is done once per
# row. So the difference is one multiplication for each number of O in each step.
#
# ## How fast
#
# The chart of every FlashAttention paper: TFLOP/s against length, with as many
# tokens in all at each length. The work is that of the two matmuls over the pairs
# that the mask keeps. "portable" is the library's kernel,
# `tilewise.kernels.portable.fwd`: lesson 04's kernel and what users ask of it,
# lengths that differ, fewer key heads than query heads, windows, bias, dropout,
# sinks. Each is a call into `tilewise/tile/`, and what is left reads as the
# algorithm does. This is its `attend`, the `attend_block` of lesson 04:

# %%
listing(pictures_04b.attend)
lesson_04.check("tilewise, portable", pictures_04b.portable, *qkv)
pictures_04b.speed(figures, lesson_04.standard_attention, fa1, lesson_04.fa2)

# %% [markdown]
# Standard attention stays low: it moves the same bytes for each score at any
# length. That does not explain all of its line, which falls from 1Ki to 8Ki keys
# and is higher again at 16Ki, where the batch is one sequence: only a profile would
# (lesson 05). FA1 is limited by its one program per head, the more the fewer heads
# there are in the batch, at the right end of the chart. Between FA1's steps and FA2
# lies the rescaling. The portable kernel is the same algorithm with tiles measured
# for each headdim. "tilewise" is what a call takes by default: on a Hopper GPU that
# is another kernel, of lesson 07, where loads, matmuls and softmax overlap.
#
# ## Exercise 1: count the traffic
#
# How many bytes go into and out of the SMs, for one head in bf16, forward, without
# a mask? FA1 reads K and V once, and in each of N / B_c passes reads Q and O and
# writes O (2 bytes for each number). FA2 reads Q and writes O once, and reads K and
# V in each of N / B_r programs. Standard attention reads Q, K and V and writes O,
# writes S, reads it and writes P, and reads P. FA2 reads K and V many times: why
# does so little of that reach HBM?
#
# **Hint:** count in two units: a tensor of seqlen x headdim numbers, and a matrix
# of seqlen x seqlen.


# %%
def traffic(seqlen, headdim, b_c, b_r):
    """Bytes of standard, FA1 (blocks of b_c keys), FA2 (blocks of b_r queries)."""
    raise NotYet


solutions_04b.check_traffic(traffic)

# %% [markdown]
# <details><summary>An answer</summary>
#
# ```{literalinclude} /../tour/lesson/solutions_04b.py
# :pyobject: traffic
# :language: python
# ```
#
# The programs of a head run at the same time over the same keys: the first one to
# ask brings a block into the L2 cache, which holds K and V of a head many times
# over. S of one head takes 32 MiB at N = 4096.
#
# </details>

# %%
solutions_04b.exercises.show()
