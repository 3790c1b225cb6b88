# %% [markdown]
# # 05. The backward, and how to profile
#
# **The idea:** the backward computes the probabilities again from q, k and one
# number per row, the log of the softmax's sum: it does more arithmetic than one
# that stores them, and is faster.
#
# After this lesson you can
#
# - derive the gradients of attention and compute them tile by tile, without a
#   stored matrix,
# - account for the bytes that training moves, beside the table of the
#   FlashAttention paper,
# - find out with two profilers what limits a kernel.
#
# You need lesson 04: its forward leaves O and lse, the log of the sum by which a
# row was divided.

# %%
import torch
import triton
import triton.language as tl
from lesson import (
    DEVICE,
    Figures,
    NotYet,
    assert_within,
    here,
    pictures_05,
    solutions_05,
)

import tilewise

figures = Figures("05_backward")
torch.manual_seed(0)

# %% [markdown]
# ## The gradients
#
# Write S = scale · Q Kᵀ, P = softmax(S), O = P V. Training gives dO, the gradient
# of the loss with respect to O, and wants dQ, dK and dV. A product Y = A B passes
# its gradient to both sides: dA = dY Bᵀ and dB = Aᵀ dY. That settles all but the
# softmax:
#
#     dV = Pᵀ dO      dP = dO Vᵀ      dQ = scale · dS K      dK = scale · dSᵀ Q
#
# For the softmax of one row, ∂p_j/∂s_i is p_i (1 - p_i) if i = j and else -p_i p_j:
# a score that rises takes weight from all others. So ds_i = p_i (dp_i - Σ_j p_j
# dp_j). The sum is one number for each row; call it delta. It seems to need all of
# the row, but
#
#     delta = Σ_j p_j dp_j = Σ_j p_j Σ_c do_c v_jc
#           = Σ_c do_c Σ_j p_j v_jc = Σ_c do_c o_c
#
# so delta = rowsum(dO ∘ O), of two tensors that are there before the first tile.
# And dS = P ∘ (dP - delta) can then be computed tile by tile. In torch, compared
# with autograd:


# %%
def backward_by_hand(q, k, v, dout, causal):
    """dq, dk, dv of one head in plain torch, (seqlen, headdim) each."""
    scale = q.shape[-1] ** -0.5
    s = scale * q @ k.T
    if causal:
        s = s.masked_fill(torch.ones_like(s).triu(1).bool(), float("-inf"))
    p = torch.softmax(s, -1)
    dv = p.T @ dout
    dp = dout @ v.T
    delta = (dout * (p @ v)).sum(-1, keepdim=True)
    ds = p * (dp - delta)
    return scale * ds @ k, scale * ds.T @ q, dv


q, k, v, dout = torch.randn(4, 50, 16, dtype=torch.float64).unbind(0)
leaves = [x.clone().requires_grad_() for x in (q, k, v)]
attend = torch.nn.functional.scaled_dot_product_attention
out = attend(*(x[None, None] for x in leaves), is_causal=True)[0, 0]
by_autograd = torch.autograd.grad(out, leaves, dout)
by_hand = backward_by_hand(q, k, v, dout, causal=True)
worst = max((a - b).abs().max().item() for a, b in zip(by_hand, by_autograd))
print(f"by hand and by autograd, fp64: they differ by {worst:.1e}")
assert worst < 1e-13

# %% [markdown]
# ## Exercise 1: dropout
#
# With a matrix Z that is 1 / (1 - p) where a weight is kept and else 0, the forward
# is O = (P ∘ Z) V. Which lines of `backward_by_hand` change? Is delta still
# rowsum(dO ∘ O)? (Z need not be stored either: `tilewise/tile/dropout.py` makes it
# again from a seed and the indices.)
#
# **Hint:** let A = P ∘ Z. First write the gradient of O = A V, then that of A.


# %%
def backward_with_dropout(q, k, v, dout, z):
    """dq, dk, dv of O = (P * z) V, no mask, one head."""
    raise NotYet


solutions_05.check_dropout(backward_with_dropout)

# %% [markdown]
# <details><summary>An answer</summary>
#
# ```{literalinclude} /../tour/lesson/solutions_05.py
# :pyobject: backward_with_dropout
# :language: python
# ```
#
# </details>
#
# ## Recompute, do not store
#
# Every line above needs P. Autograd keeps it from the forward on, seqlen² numbers
# for each head, and reads it back. FlashAttention does not keep P and computes it
# again: S = Q Kᵀ once more, a tile at a time, and P = exp(S - lse). With lse, no
# tile needs a maximum, a sum or a rescale: a tile of P is final at once. That is
# one matmul more for O(seqlen²) bytes less, and lesson 04 counted which of the two
# a GPU is short of.
#
# The loops can be nested in two ways. dV_j and dK_j are sums over queries, dQ_i is
# a sum over keys: a program with a block of keys can keep dK and dV in registers,
# but dQ gets a part from each of these programs. FlashAttention-2 (algorithm 2)
# gives each program a block of keys, and adds to dQ in memory with atomics. As a
# kernel:


# %%
@triton.jit
def backward_kernel(
    inputs, of_row, grads, seqlen, scale,
    D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    CAUSAL: tl.constexpr,
):  # fmt: skip
    q, k, v, dout = inputs  # contiguous (batch, nheads, seqlen, headdim)
    lse, delta = of_row
    dq, dk, dv = grads
    n_start, head = tl.program_id(0) * BLOCK_N, tl.program_id(1).to(tl.int64)
    first = head * seqlen * D
    k_idx, offs_d = n_start + tl.arange(0, BLOCK_N), tl.arange(0, D)[None, :]
    is_key = (k_idx < seqlen)[:, None]
    of_keys = first + k_idx[:, None] * D + offs_d
    k_tile = tl.load(k + of_keys, mask=is_key, other=0.0)
    v_tile = tl.load(v + of_keys, mask=is_key, other=0.0)
    acc_dk = tl.zeros([BLOCK_N, D], tl.float32)
    acc_dv = tl.zeros([BLOCK_N, D], tl.float32)

    # earlier queries do not attend to them
    start = n_start // BLOCK_M * BLOCK_M if CAUSAL else 0
    for m_start in range(start, seqlen, BLOCK_M):
        q_idx = m_start + tl.arange(0, BLOCK_M)
        is_row = q_idx < seqlen
        of_rows = first + q_idx[:, None] * D + offs_d
        q_tile = tl.load(q + of_rows, mask=is_row[:, None], other=0.0)
        do_tile = tl.load(dout + of_rows, mask=is_row[:, None], other=0.0)
        row_lse = tl.load(lse + head * seqlen + q_idx, mask=is_row, other=0.0)
        row_delta = tl.load(delta + head * seqlen + q_idx, mask=is_row, other=0.0)

        # P = exp(S - lse): (BLOCK_M, BLOCK_N)
        s = tl.dot(q_tile, tl.trans(k_tile)) * scale
        p = tl.exp2((s - row_lse[:, None]) * 1.4426950408889634)  # log2(e)
        keep = is_row[:, None] & (k_idx < seqlen)[None, :]
        if CAUSAL:
            keep = keep & (q_idx[:, None] >= k_idx[None, :])
        p = tl.where(keep, p, 0.0)
        # dV += P^T dO
        acc_dv = tl.dot(tl.trans(p.to(do_tile.dtype)), do_tile, acc_dv)
        # dS = P (dP - delta), dP = dO V^T
        dp = tl.dot(do_tile, tl.trans(v_tile))
        ds = (p * (dp - row_delta[:, None])).to(q_tile.dtype)
        # dK += dS^T Q, dQ += dS K
        acc_dk = tl.dot(tl.trans(ds), q_tile, acc_dk)
        tl.atomic_add(
            dq + of_rows, tl.dot(ds, k_tile) * scale, mask=is_row[:, None]
        )
    tl.store(dk + of_keys, (acc_dk * scale).to(k_tile.dtype), mask=is_key)
    tl.store(dv + of_keys, acc_dv.to(k_tile.dtype), mask=is_key)


def lesson_backward(q, k, v, dout, causal, tile=(64, 64)):
    """dq, dk, dv by recomputation; contiguous (batch, nheads, seqlen, headdim)."""
    batch, nheads, seqlen, headdim = q.shape
    out, lse = tilewise.attention(
        q, k, v, causal=causal, layout="bhsd", return_lse=True
    )
    delta = (dout.float() * out.float()).sum(-1)
    # many programs add to it
    dq = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
    dk, dv = torch.empty_like(k), torch.empty_like(v)
    here(backward_kernel)[(triton.cdiv(seqlen, tile[1]), batch * nheads)](
        *((q, k, v, dout), (lse, delta), (dq, dk, dv), seqlen, headdim**-0.5),
        *(headdim, *tile, causal),
        num_warps=8 if headdim > 64 else 4,
        num_stages=2,
    )
    return dq.to(q.dtype), dk, dv


# %% [markdown]
# Gradients are judged as results were in lesson 04: by their distance to fp64,
# beside that of plain torch in the same precision, which stores P and rounds it.


# %%
def check(name, backward, q, k, v, dout):
    """Compares dq, dk and dv with fp64, full and causal."""
    standard, gradients = pictures_05.standard_attention, pictures_05.gradients
    for causal in (False, True):
        wide = (x.double() for x in (q, k, v, dout))
        exact = gradients(standard, *wide, causal=causal)
        plain = gradients(standard, q, k, v, dout, causal=causal)
        line = []
        names = ("dq", "dk", "dv")
        for what, got, right, usual in zip(names, backward(causal), exact, plain):
            assert_within(got, right, usual, f"{what} of {name}")
            off, torchs = ((x.double() - right).abs().max() for x in (got, usual))
            line.append(f"{what} off by {off:.4f} (torch {torchs:.4f})")
        print(f"{name}, {'causal' if causal else 'full'}:", *line, sep="\n    ")


inputs = torch.randn(4, 1, 2, 150, 64).to(DEVICE, torch.bfloat16).unbind(0)
check("the lesson's kernel", lambda x: lesson_backward(*inputs, x), *inputs)

# %% [markdown]
# ## Exercise 2: dQ without atomics
#
# Sums of floating-point numbers depend on their order, and atomics add in any
# order: dQ has other bits in every run. Write a kernel for dQ alone, a program a
# block of queries, which loops over the keys as the forward does and computes S and
# dP once more. One head, no mask; dq is fp32.
#
# **Hint:** in `backward_kernel` exchange queries and keys. A program is then the
# only one that adds to its tile of dQ.


# %%
@triton.jit
def dq_kernel(
    q, k, v, dout, lse, delta, dq, seqlen, scale,
    D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """dQ = scale * dS K for the block of queries of this program."""
    raise NotYet


solutions_05.check_dq(dq_kernel)

# %% [markdown]
# <details><summary>An answer</summary>
#
# ```{literalinclude} /../tour/lesson/solutions_05.py
# :pyobject: dq_kernel
# :language: python
# ```
#
# </details>
#
# ## The library's kernels
#
# `tilewise.kernels.portable` has these two kernels where FA2 has one: `bwd_dkdv`,
# which is the kernel above without its last matmul, and `bwd_dq`. So there are
# seven matmuls per tile in place of five. No two programs add to the same memory:
# no atomics, no fp32 copy of dQ, and the same bits in every run. The library's
# Hopper kernels (`tilewise/kernels/hopper/bwd/*.py`) use five matmuls and add to
# dQ. Autograd calls them: the forward keeps q, k, v, out and lse for it.
#
# What does a tile cost? The backward has S, dP and two accumulators in registers at
# once. Compiled for an H200 at headdim 64, with tiles of 64 x 64 and of 128 x 128
# on 4 warps:

# %%
check(
    "tilewise, portable",
    lambda causal: pictures_05.portable_gradients(inputs, causal),
    *inputs,
)
pictures_05.cost(backward_kernel)

# %% [markdown]
# What does not fit into 255 registers is spilled: written to memory and read back.
# It is the first thing to look for in a slow kernel.
#
# ## The account
#
# The FlashAttention paper has a table for GPT-2 medium (seqlen 1024, headdim 64, 16
# heads, batch 64, an A100), forward and backward together. Its bytes can be
# counted.
#
# *Standard attention.* Each step reads and writes matrices of seqlen² and tensors
# of seqlen x headdim, in 2 bytes; dropout's mask has 1 byte, half a matrix. That
# gives the paper's 40.3 GB. (The paper does not say how it counted, and other
# counts may give it as well.)
#
# *FlashAttention.* With K and V in the outer loop, the forward reads K and V once,
# and in each of T passes reads Q and O and writes O. The backward reads K and V and
# writes dK and dV once, and in each pass reads Q, O, dO and dQ and writes dQ: 6 + 8
# T tensors in all. The block rule of lesson 04b gives four passes on an A100.
# FlashAttention-2's order reads K and V of a head, 256 KiB, from the L2 cache after
# the first time: each kernel must read each of its tensors from HBM once.

# %%
pictures_05.account(figures)

# %% [markdown]
# *Operations.* Six matmuls of 64 x 16 heads are more than ten times the paper's
# 66.6 GFLOP. But the difference of its rows, 8.6, is exactly one matmul of 64
# heads: S, computed a second time. We do not know how those were counted, and count
# matmuls of all heads.
#
# The lesson of the table stands either way: **FlashAttention computes more and is
# faster**, as it moves a tenth. Operations are the wrong measure for a kernel that
# waits for memory.
#
# ## Profiling, first: which kernel?
#
# `torch.profiler` answers one question well: which operations take the time, how
# often, how long. Warm up first, so that compiling is not in it, then profile a few
# calls, and sort by *self* time, which leaves out what an operation called. Below
# is standard attention on the machine that runs this lesson: the order differs
# between a CPU, where dropout's random numbers are slow, and a GPU. Look for
# operations that move data and compute next to nothing (copies, masks, dropout),
# and on a GPU for gaps between kernels, where the host launches too slowly.
# `prof.export_chrome_trace("t.json")` shows those on a time axis, in Perfetto.

# %%
pictures_05.profiled()

# %% [markdown]
# ## Second: why this kernel?
#
# Nsight Compute (`ncu`) reads the counters of the hardware. It runs one launch many
# times, once for each group of counters, so give it one launch of one kernel. `-k`
# takes the name, `--launch-skip` passes over the warm-up, and `--set full` collects
# all sections for the viewer `ncu-ui`:
#
#     ncu --set full -k regex:attn_fwd_kernel --launch-skip 2 --launch-count 1 \
#         -o fwd python mine.py
#
# It needs access to the counters: root, or permission from an administrator (the
# error is called ERR_NVGPUCTRPERM). These ten metrics say most of what there is to
# say about an attention kernel, here of the library's portable forward at the shape
# above. They are recorded figures, unless you run it on a GPU with TILEWISE_NCU=1.

# %%
pictures_05.counters(figures)

# %% [markdown]
# How to read them. Start from a prediction: bytes by the account above, FLOPs by
# the formula, each over what the card can do. Then one of four things is true.
#
# - *HBM near its best.* The kernel is bound by memory. Compare the bytes with the
#   formula: if they are equal, only an algorithm that moves less will help; if not,
#   find what is read twice.
# - *Tensor cores near their best.* You are done, or you compute what a mask throws
#   away.
# - *Neither, and stalls at loads.* Latency: loads begin too late. More stages,
#   larger tiles, or TMA (lesson 07).
# - *Neither, and no stalls at loads.* In attention that is the softmax:
#   exponentials and rescaling hold the matmuls up. Remove operations (lesson 04b),
#   or let one warpgroup multiply while another exponentiates (lesson 07). Or there
#   are too few programs: count tiles over SMs.
#
# **A checklist, cheapest first.**
#
# 1. Is it right, at this very shape?
# 2. Is it timed right: warmed up, by events on the device, caches flushed, the
#    median of some rounds and the spread beside it? In an order that changes? On an
#    H200 one kernel under two names differed by up to 4.5 %, by which kernel ran
#    before it: probably a slow kernel leaves power to spare, and the next one
#    clocks higher.
# 3. Is it this kernel at all? torch.profiler, share of the whole.
# 4. Is the host in time? A kernel under 20 µs often waits for its launch.
# 5. dtype: bf16 or fp16 operands, fp32 accumulators.
# 6. Registers and spills, from the compiler, before any run.
# 7. Tile, warps, stages: measured for the shape, not guessed.
# 8. Enough programs for the SMs, and the last wave not nearly empty.
# 9. Bytes counted beside bytes by formula; contiguous last dimension; 16-byte
#    alignment.
# 10. Are masked blocks skipped, and full blocks free of the mask?

# %%
solutions_05.exercises.show()
