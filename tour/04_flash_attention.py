# %% [markdown]
# # 04. FlashAttention, forward
#
# After this lesson you can say where the time of standard attention goes, step by step and in
# bytes; write FlashAttention-1's forward as a kernel, and say how its blocks follow from the size
# of the on-chip memory; turn it into FlashAttention-2 by three changes, and count what each saves;
# and read the library's own forward kernel.
#
# You need the tiled matmul of lesson 02 and the online softmax of lesson 03.

# %%
import contextlib
import inspect
import math
import re

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from lesson import DEVICE, ON_GPU, Figures, here, show

import tilewise
from tilewise.kernels.portable.step import attend
from tilewise.testing import SMEM_LIMIT, build, stats, use_interpreter
from tilewise.testing.tolerance import assert_within

figures = Figures("04_flash_attention")
torch.manual_seed(0)

# %% [markdown]
# ## Standard attention, and where its time goes
#
# Attention compares every query with every key, makes weights of the scores, and averages the
# values with them: S = Q Kᵀ / √d, P = softmax(S), O = P V. A language model also hides the keys of
# the future (the causal mask), and in training drops some weights. In torch that is five calls.


# %%
def standard_attention(q, k, v, causal, dropout_p=0.0):
    """Attention with its matrices in memory. All tensors are (batch, nheads, seqlen, headdim)."""
    s = q * q.shape[-1] ** -0.5 @ k.mT  # (batch, nheads, seqlen, seqlen)
    if causal:
        s = s.masked_fill(future(s), float("-inf"))
    p = torch.softmax(s, -1)
    if dropout_p:
        p = F.dropout(p, dropout_p)
    return p @ v


def future(s):
    """True where the key comes after the query."""
    return torch.ones(s.shape[-2:], dtype=torch.bool, device=s.device).triu(1)


# %% [markdown]
# Each call is a kernel of its own, and kernels hand things over through HBM, the large memory
# beside the chip. So each reads the matrix that the one before it wrote, and writes its own. The
# ledger below counts both sides of the bargain for bf16: what is computed and what is moved.
#
# The two last columns divide by what an H200 can do at best, by its data sheet: 989 TFLOP/s in
# dense bf16 matmuls, and 4.8 TB/s from HBM. Whichever takes longer is what bounds the step. The
# shape is GPT-2 medium's, with a batch of 64.


# %%
def ledger(problems, seqlen, headdim):
    """(step, FLOPs, bytes) of `problems` heads; a bf16 number has 2 bytes, a mask's bit 1."""
    pairs, rows = problems * seqlen**2, problems * seqlen * headdim
    return [
        ("matmul Q Kᵀ", 2 * pairs * headdim, 2 * (2 * rows + pairs)),
        ("mask", pairs, 2 * (pairs + pairs)),
        ("softmax", 5 * pairs, 2 * (pairs + pairs)),  # max, subtract, exp, sum, divide
        ("dropout", 2 * pairs, 2 * (pairs + pairs) + pairs),  # and what was kept, for the backward
        ("matmul P V", 2 * pairs * headdim, 2 * (pairs + 2 * rows)),
    ]


FLOPS, BANDWIDTH = 989e12, 4.8e12  # an H200's data sheet, a second
GPT2 = dict(batch=64, nheads=16, seqlen=1024, headdim=64, causal=True, dropout_p=0.1)
steps = ledger(64 * 16, 1024, 64)
print(f"{'step':12} {'GFLOP':>7} {'GB':>6} {'FLOP/byte':>10} {'ms of math':>11} {'ms of HBM':>10}")
for name, flops, size in steps:
    math_ms, hbm_ms = 1e3 * flops / FLOPS, 1e3 * size / BANDWIDTH
    counted = f"{flops / 1e9:7.1f} {size / 1e9:6.2f} {flops / size:10.1f}"
    print(f"{name:12} {counted} {math_ms:11.3f} {hbm_ms:10.3f}")

# %% [markdown]
# Every step takes longer in memory than in arithmetic, the matmuls too, as a headdim of 64 gives
# them little to do for each score that they write. The three steps between them do next to
# nothing, and move most of the bytes. **Standard attention is bound by memory**: a GPU with twice
# the arithmetic would not be faster.
#
# The same five steps on a clock, and beside them one kernel that does all five and keeps S and P
# on the chip:


# %%
def the_steps():
    """The five calls, each with its input in place, and one kernel for all. For a GPU."""
    shape = [GPT2[x] for x in ("batch", "nheads", "seqlen", "headdim")]
    q, k, v = torch.randn(3, *shape, device=DEVICE, dtype=torch.bfloat16).unbind(0)
    s = q * 64**-0.5 @ k.mT
    hidden, p = future(s), torch.softmax(s, -1)
    one = dict(causal=True, dropout_p=0.1, layout="bhsd")
    calls = (
        lambda: q @ k.mT,
        lambda: s.masked_fill(hidden, float("-inf")),
        lambda: torch.softmax(s, -1),
        lambda: F.dropout(p, 0.1),
        lambda: p @ v,
        lambda: tilewise.attention(q, k, v, **one),
    )
    return dict(zip(STEPS, calls))


STEPS = [name for name, _, _ in steps] + ["tilewise, all five"]
step_ms = figures.times(GPT2, the_steps() if ON_GPU else dict.fromkeys(STEPS), rounds=3)

bars = {"by the ledger": [1e3 * max(f / FLOPS, size / BANDWIDTH) for _, f, size in steps]}
if step_ms:
    bars |= {"measured": [step_ms[name] for name in STEPS[:5]], "one kernel": [step_ms[STEPS[5]]]}
fig, ax = plt.subplots(figsize=(8, 1.4 + 0.5 * len(bars)), layout="constrained")
for row, parts in enumerate(bars.values()):
    left, look = 0.0, dict(edgecolor="black", height=0.7)
    names = STEPS[:5] if len(parts) == 5 else STEPS[5:]
    for name, ms, hatch in zip(names, parts, ["", "//", "..", "xx", "||"]):
        color = "white" if len(parts) == 5 else "lightgray"
        label = name if row in (0, 2) else None
        ax.barh(row, ms, left=left, label=label, hatch=hatch, color=color, **look)
        left += ms
ax.set_yticks(range(len(bars)), bars)
ax.invert_yaxis()
ax.set_xlabel("ms, forward")
ax.set_title(f"Standard attention step by step ({figures.machine})", fontsize=9)
fig.legend(fontsize=8, ncols=6, loc="outside lower center")
show(fig, "04_steps")

# %% [markdown]
# Fusing two neighbours is what a compiler does, and it helps. But fusing all five meets an
# obstacle: softmax divides by a sum over the whole row, so it seems that a row of S must be
# complete before P V can begin. Lesson 03 removed it. With m, the largest score so far, and l, the
# sum of exp(s - m), a row's softmax can be had block by block, if that which was summed before is
# multiplied by exp(m_old - m_new) whenever the maximum grows. The output is a sum as well, so the
# same factor mends it. No step ever needs a second look at a score.
#
# ## FlashAttention-1
#
# Cut K and V into blocks of B_c rows, Q and O into blocks of B_r. For a block of each, everything
# happens on the chip: load, S = Q Kᵀ, exp, P V, add. FlashAttention-1 (Dao et al. 2022, algorithm
# 1) takes K and V in the outer loop: load K_j and V_j once, then pass over all Q_i. O_i, l_i and
# m_i wait in HBM until the next j, normalised, so that O is at any time the attention over the
# keys seen so far:
#
#     m_new = max(m, rowmax S)        P = exp(S - m_new)        l_new = exp(m - m_new) l + rowsum P
#     O_new = (exp(m - m_new) l O + P V) / l_new
#
# **How large are the blocks?** As large as the on-chip memory allows: a pass over Q and O costs
# the same HBM traffic whatever B_c is, and there are N / B_c passes. Four blocks lie there
# together: K_j, V_j, Q_i and O_i. If M is how many numbers the memory holds, each gets M / 4, so
# B_c = ⌈M / 4d⌉. The tile of scores, B_r x B_c, must fit as well: B_r = min(B_c, d) keeps it within
# B_c · d ≈ M / 4.


# %%
def fa1_blocks(sram_bytes, headdim, itemsize=2):
    """(B_r, B_c) by the paper's rule."""
    numbers = sram_bytes // itemsize
    b_c = math.ceil(numbers / (4 * headdim))
    return min(b_c, headdim), b_c


def power_of_two(n):
    """The largest one that is not over n: Triton's tiles have sides of no other kind."""
    return 1 << int(math.log2(n))


for gpu, arch in {"A100": "sm80", "RTX 4090": "sm89", "H200": "sm90"}.items():
    pairs = {d: fa1_blocks(SMEM_LIMIT[arch], d) for d in (64, 128)}
    print(f"{gpu:9} {SMEM_LIMIT[arch] >> 10:4} KiB a program: (B_r, B_c) by headdim {pairs}")

# %% [markdown]
# The rule counts shared memory alone. A compiler keeps S and O in registers, wants two or three
# blocks of K and V on their way, and needs sides that the matmul instructions have. So FA1's own
# code used 128 or 256 keys, and everybody since has measured. The rule still says what matters:
# more on-chip memory, larger blocks, fewer passes.
#
# Here it is as a kernel. One program does a whole head, as the loop over Q is inside. Scores are
# kept in base 2 (2^x is an instruction, e^x is not), so the scale holds a factor log2(e).


# %%
@triton.jit
def fa1_kernel(
    q, k, v, o, l_rows, m_rows, seqlen, scale_log2,
    D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0).to(tl.int64)
    first = head * seqlen * D  # of this head's numbers: tensors are contiguous
    offs_m, offs_n, offs_d = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N), tl.arange(0, D)[None, :]
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
        tl.debug_barrier()  # the next pass reads what other threads of this program wrote


def fa1(q, k, v, causal, block_m=64, block_n=64):
    """FlashAttention-1's forward; needs contiguous tensors and a headdim that is a power of two."""
    batch, nheads, seqlen, headdim = q.shape
    o = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
    l_rows = o.new_zeros(batch, nheads, seqlen)
    m_rows = torch.full_like(l_rows, -math.inf)
    here(fa1_kernel)[(batch * nheads,)](
        *(q, k, v, o, l_rows, m_rows, seqlen, headdim**-0.5 * math.log2(math.e)),
        *(headdim, block_m, block_n, causal),
        num_warps=8 if headdim * block_m > 4096 else 4,
        num_stages=2,
    )
    return o.to(q.dtype)


# %% [markdown]
# Is it right? Three numbers say so: the distance of our result from the same attention in fp64,
# that of plain torch in the precision of the inputs, and a budget made of the second. bf16 keeps
# 8 bits, so both are off by about 1/256 of a result, and a kernel may be off as plain torch is, but
# no more. Comparing with torch's bf16 result directly would say less: that is not right either.


# %%
def make_qkv(batch, nheads, seqlen, headdim):
    shape = (3, batch, nheads, seqlen, headdim)
    return torch.randn(shape).to(DEVICE, torch.bfloat16).unbind(0)


def check(name, attend, q, k, v):
    """Holds `attend(q, k, v, causal)` to fp64 and to torch, full and causal."""
    for causal in (False, True):
        exact = standard_attention(q.double(), k.double(), v.double(), causal)
        plain = standard_attention(q, k, v, causal)
        torchs = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
        out = attend(q, k, v, causal)
        assert_within(out, exact, plain, name)
        errors = [f"{(x.double() - exact).abs().max().item():.4f}" for x in (out, plain, torchs)]
        kind = "causal" if causal else "full"
        print(f"{name}, {kind}: off by {errors[0]}; plain torch {errors[1]}, SDPA {errors[2]}")


qkv = make_qkv(1, 2, 200, 64)  # 200 is no multiple of 64: the last block is ragged
check("FlashAttention-1", fa1, *qkv)

# %% [markdown]
# ## FlashAttention-2: three changes
#
# FA1 left most of the matmul units idle, for three reasons, and FlashAttention-2 (Dao 2023)
# removes each.
#
# *First, the loops trade places.* With K and V outside, O_i comes from HBM and goes back in every
# pass, and one program must do a whole head, or programs would add to the same O_i at once. With Q
# outside, O_i, l_i and m_i stay in registers from the first key to the last, and nobody else needs
# them: each block of queries becomes a program of its own. A sequence of 16Ki with 16 heads is 16
# programs for FA1, and 2048 for FA2. A GPU has more than a hundred processors.
#
# *Second, one division at the end.* Keep O unnormalised and divide once, after the last key. Each
# step then multiplies O by exp(m_old - m_new), and that is all. Why bother with so few operations?
# Because matmul units are more than ten times as fast as the rest of the chip: an H200's data
# sheet has 989 TFLOP/s for bf16 matmuls and 67 for fp32. One operation outside costs as much time
# as some fifteen inside.
#
# *Third, causal blocks are sorted.* Blocks above the diagonal are skipped, so half of the work is
# gone; blocks below it need no mask. Only those on the diagonal, or over the end of the sequence,
# pay for comparing indices. So the keys of a block of queries come in two runs, partial blocks and
# then full ones, and the compiler makes two loops of them, of which the long one has no mask.


# %%
@triton.jit
def attend_block(
    state, rows, k, v, n_start, seqlen, scale_log2,
    D: tl.constexpr, BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr, CAUSAL: tl.constexpr, EVERY_STEP: tl.constexpr,
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
    if EVERY_STEP:  # FA1's arithmetic in FA2's loops, to be compared
        pv = tl.dot(p.to(v_tile.dtype), v_tile)
        acc = (acc * (l_i * alpha)[:, None] + pv) * (1.0 / l_new)[:, None]
    else:
        acc = tl.dot(p.to(v_tile.dtype), v_tile, acc * alpha[:, None])
    return acc, m_new, l_new


@triton.jit
def fa2_kernel(
    q, k, v, out, lse, seqlen, scale_log2,
    D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    CAUSAL: tl.constexpr, EVERY_STEP: tl.constexpr,
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
        state = attend_block(state, (q_tile, q_idx), k, v, n_start, seqlen, scale_log2,
                             D, BLOCK_N, True, CAUSAL, EVERY_STEP)  # fmt: skip
    for n_start in range(0, full, BLOCK_N):
        state = attend_block(state, (q_tile, q_idx), k, v, n_start, seqlen, scale_log2,
                             D, BLOCK_N, False, CAUSAL, EVERY_STEP)  # fmt: skip

    acc, m_i, l_i = state
    if not EVERY_STEP:
        acc = acc / l_i[:, None]
    tl.store(out + of_rows, acc.to(q_tile.dtype), mask=q_idx[:, None] < seqlen)
    # lse = m + log l, all that the backward needs of the softmax
    row_lse = (m_i + tl.log2(l_i)) * 0.6931471805599453
    tl.store(lse + head * seqlen + q_idx, row_lse, mask=q_idx < seqlen)


def fa2(q, k, v, causal, tile=(64, 64), every_step=False, return_lse=False):
    """FlashAttention-2's forward, of contiguous tensors; one program a block of queries."""
    batch, nheads, seqlen, headdim = q.shape
    out, lse = torch.empty_like(q), q.new_empty((batch, nheads, seqlen), dtype=torch.float32)
    here(fa2_kernel)[(triton.cdiv(seqlen, tile[0]), batch * nheads)](
        *(q, k, v, out, lse, seqlen, headdim**-0.5 * math.log2(math.e)),
        *(headdim, *tile, causal, every_step),
        num_warps=8 if headdim * tile[0] > 4096 else 4,
        num_stages=3,
    )
    return (out, lse) if return_lse else out


check("FlashAttention-2", fa2, *qkv)

# %% [markdown]
# Why is there no guard against exp(-inf - -inf), which is NaN? Because every row sees a key in the
# first block that it meets: of the diagonal's blocks the first begins at or before the block's
# first query. Try the other order, full blocks first, and with a window as well: then a row can
# meet a block in which it sees nothing, and `tilewise/tile/softmax.py` has a line for it.
#
# The two orders as pictures, for a causal head of eight by eight blocks. A number is the moment at
# which a program comes to the block. Algorithm 1 of FA1 knows no mask, and visits all.

# %%
BLOCKS = 8
orders = {"FlashAttention-1: one program": {}, "FlashAttention-2: a program a row": {}}
one, two = orders.values()
for j in range(BLOCKS):
    for i in range(BLOCKS):
        one[i, j] = len(one)
        if j <= i:
            two[i, j] = 0 if j == i else j + 1  # the partial block first, then the full ones
fig, axes = plt.subplots(1, 2, figsize=(8, 4.2))
for ax, (title, order) in zip(axes, orders.items()):
    for (i, j), moment in order.items():
        hatch = "////" if i == j or order is one else ""
        box = dict(facecolor="white", edgecolor="gray", hatch=hatch)
        ax.add_patch(plt.Rectangle((j, i), 1, 1, **box))
        ax.text(j + 0.5, i + 0.5, moment, ha="center", va="center", fontsize=9,
                bbox=dict(facecolor="white", edgecolor="none", pad=1))  # fmt: skip
    ax.set(xlim=(0, BLOCKS), ylim=(BLOCKS, 0), xlabel="block of keys", ylabel="block of queries")
    ax.set(aspect="equal", xticks=[], yticks=[], facecolor="lightgray")
    ax.set_title(title, fontsize=10)
fig.suptitle("When each block is visited; hatched: with a mask; gray: never", fontsize=10)
show(fig, "04_orders")

# %% [markdown]
# ## Counting what the division costs
#
# By formula first. For one row and one block of keys, both kernels spend on each score a scale, a
# maximum, a subtraction, an exponential and a sum. On each of the d numbers of O, FA1 spends three
# operations, (O · a + PV) · b, and FA2 one, as the matmul adds to an accumulator by itself.
#
# And by what a compiler makes of it. `build` compiles a kernel for a GPU that need not be there;
# PTX is the assembly that it hands to NVIDIA's assembler. The three kernels have the same tiles:
# FA1, FA2's loops with FA1's arithmetic, and FA2. Counted are the fp32 instructions of the loop
# over full blocks, a score of the tile; matmuls are instructions of another kind.


# %%
def innermost_loop(ptx):
    """The text of the last loop that has none inside."""
    loops = []
    for label in re.finditer(r"^(\$L\w+):", ptx, re.MULTILINE):
        backward = list(re.finditer(rf"bra[.\w]*\s+{re.escape(label[1])};", ptx[label.end() :]))
        if backward:
            body = ptx[label.end() : label.end() + backward[-1].end()]
            loops = [loop for loop in loops if body not in loop] + [body]
    return loops[-1]


M, N, D, WARPS = 128, 64, 128, 8
x, fp32, rows = torch.empty(4096, D, dtype=torch.bfloat16), torch.empty(4096, D), torch.empty(4096)
sizes = dict(D=D, BLOCK_M=M, BLOCK_N=N, CAUSAL=False, num_warps=WARPS, num_stages=2, on="sm90")
of_fa2 = (fa2_kernel, x, x, x, x, rows, 4096, 0.1)
built = {
    "FA1": build(fa1_kernel, x, x, x, fp32, rows, rows, 4096, 0.1, **sizes),
    "FA1's steps, FA2's loops": build(*of_fa2, EVERY_STEP=True, **sizes),
    "FA2": build(*of_fa2, EVERY_STEP=False, **sizes),
}
KINDS = ("mul", "fma", "add", "sub", "max", "ex2", "div")
per_score = {}
print(
    f"tiles of {M} x {N}, headdim {D}, compiled for sm_90: operations beside the matmuls, a score"
)
print(f"{'':25} formula  counted:", " ".join(f"{kind:>5}" for kind in KINDS), "  registers")
for name, kernel in built.items():
    loop = innermost_loop(kernel.asm["ptx"])
    counts = [len(re.findall(rf"\b{kind}\.[\w.]*f32", loop)) * 32 * WARPS / M / N for kind in KINDS]
    per_score[name] = sum(counts)
    formula = 5 + (1 if name == "FA2" else 3) * D / N
    line = " ".join(f"{count:5.2f}" for count in counts)
    print(f"{name:25} {formula:7.1f} {per_score[name]:8.2f} {line} {stats(kernel)['registers']:11}")

# %% [markdown]
# FA1's count is below its formula because O · a goes into the matmul as what it adds to, and only
# the two multiplications are left. The rest is alike: one mul scales a score for the maximum, one
# fma scales it again and subtracts (in FA1 a mask lies between, and it is a sub). What is over
# whole numbers is done once a row: exponentials and sums of m and l, and the maxima and sums that
# threads must exchange. So the difference is one multiplication for each number of O in each step.
#
# ## The library's own kernel
#
# `tilewise.kernels.portable.fwd` is the kernel above and what users ask of it: lengths that differ,
# fewer key heads than query heads, windows, bias, dropout, sinks. Each is a call into
# `tilewise/tile/`. What is left reads as the algorithm does; this is its `attend_block`:

# %%
print(inspect.getsource(attend.fn))


def portable(q, k, v, causal):
    """The library's Triton kernel: compiled on a GPU, else in the interpreter."""
    place = contextlib.nullcontext() if ON_GPU else use_interpreter()
    with place:
        return tilewise.attention(q, k, v, causal=causal, layout="bhsd", backend="portable")


check("tilewise, portable", portable, *qkv)

# %% [markdown]
# ## How fast
#
# The chart of every FlashAttention paper: TFLOP/s against length, with as many tokens in all at
# each length. The work is that of the two matmuls over the pairs that the mask keeps, whatever a
# kernel really does: one that computes masked pairs as well gets no credit for it. "FA1's steps"
# are FA2's loops with FA1's arithmetic, so that each of the changes has its own line.


# %%
NAMES = ["standard", "SDPA", "lesson FA1", "FA1's steps", "lesson FA2", "portable", "tilewise"]
TOKENS, HEADS, HEADDIM = 16384, 16, 128
LENGTHS = [512, 1024, 2048, 4096, 8192, 16384]


def contenders(seqlen, causal):
    """name -> call, of those that fit into this GPU's memory."""
    shape = TOKENS // seqlen, HEADS, seqlen, HEADDIM
    q, k, v = torch.randn(3, *shape, device=DEVICE, dtype=torch.bfloat16).unbind(0)
    sram = SMEM_LIMIT["sm90"]
    if ON_GPU:
        sram = torch.cuda.get_device_properties(0).shared_memory_per_block_optin
    rule = [power_of_two(n) for n in fa1_blocks(sram, HEADDIM)]
    own = dict(causal=causal, layout="bhsd")
    calls = {
        "standard": lambda: standard_attention(q, k, v, causal),
        "SDPA": lambda: F.scaled_dot_product_attention(q, k, v, is_causal=causal),
        "lesson FA1": lambda: fa1(q, k, v, causal, *rule),
        "FA1's steps": lambda: fa2(q, k, v, causal, (128, 64), every_step=True),
        "lesson FA2": lambda: fa2(q, k, v, causal, (128, 64)),
        "portable": lambda: portable(q, k, v, causal),
        "tilewise": lambda: tilewise.attention(q, k, v, **own),
    }
    if ON_GPU and 4 * 2 * TOKENS * HEADS * seqlen > torch.cuda.mem_get_info()[0]:
        del calls["standard"]  # it holds up to four matrices of scores
    return calls


looks = dict(zip(NAMES, ["kx:", "k^--", "ks:", "kv-.", "ko-", "kD-", "k*-"]))
fig, axes = plt.subplots(1, 2, figsize=(9, 4.2), sharey=True, layout="constrained")
print(f"{'TFLOP/s at':20}", "  ".join(f"{n:6}" for n in LENGTHS), f"  ({figures.machine})")
for ax, causal in zip(axes, (False, True)):
    speeds = {name: {} for name in NAMES}
    for seqlen in LENGTHS:
        pairs = seqlen * (seqlen + 1) / 2 if causal else seqlen**2
        flops = 4 * (TOKENS // seqlen) * HEADS * pairs * HEADDIM
        shape = dict(seqlen=seqlen, tokens=TOKENS, nheads=HEADS, headdim=HEADDIM, causal=causal)
        calls = contenders(seqlen, causal) if ON_GPU else dict.fromkeys(NAMES)
        for name, ms in figures.times(shape, calls, flops, rounds=3, round_ms=12).items():
            speeds[name][seqlen] = flops / ms * 1e-9
    for name, of in speeds.items():
        ax.plot(of.keys(), of.values(), looks[name], label=name, markersize=5, linewidth=1)
    ax.set_xscale("log", base=2)
    ax.set(title="causal" if causal else "full", xlabel="sequence length", ylim=(0, None))
    for name in NAMES if any(speeds.values()) else ():
        line = "  ".join(f"{speeds[name].get(n, math.nan):6.0f}" for n in LENGTHS)
        print(f"{'causal' if causal else 'full':7} {name:12} {line}")
axes[0].set_ylabel("TFLOP/s, forward")
fig.legend(*axes[0].get_legend_handles_labels(), ncols=7, loc="outside lower center", fontsize=8)
fig.suptitle(f"16Ki tokens, 16 heads of 128, bf16 ({figures.machine})", fontsize=9)
show(fig, "04_speed")

# %% [markdown]
# How to read it. Standard attention stays flat and low: it moves the same bytes for each score at
# any length. FA1 is held up by its one program a head, the more the fewer heads there
# are in the batch, which is at the right end of the chart. Between FA1's steps and FA2 lies the
# rescaling; under a mask FA1 also computes what nobody sees. The library's portable kernel is the
# same algorithm with tiles measured for each headdim. "tilewise" is what a call takes by default:
# on a Hopper GPU that is another kernel, of lesson 07, where loads, matmuls and softmax overlap.
#
# ## Exercises
#
# **1.** *Count the traffic.* How many bytes go into and out of the processors in each of the three,
# for one head in bf16, forward, without a mask? FA1 reads K and V once, and in each of N / B_c
# passes reads Q and O and writes O (count 2 bytes for each number). FA2 reads Q and writes O once,
# and reads K and V in each of N / B_r programs. Standard attention writes S, reads it and writes P,
# and reads P. Which saves the most at N = 4096, d = 64 and blocks of 256 keys for FA1 and 128
# queries for FA2? FA2 reads K and V many times: why does so little of that reach HBM?
#
# <details><summary>Solution</summary>
#
# ```python
# def traffic(seqlen, headdim, b_c=256, b_r=128):
#     tensor = 2 * seqlen * headdim  # bytes of Q, K, V or O
#     return {
#         "standard": 4 * tensor + 4 * 2 * seqlen**2,
#         "FA1": 2 * tensor + 3 * tensor * (seqlen // b_c),
#         "FA2": 2 * tensor + 2 * tensor * (seqlen // b_r),
#     }
#
# for name, size in traffic(4096, 64).items():
#     print(f"{name:9} {size / 1e6:6.1f} MB")
# # The programs of a head run at the same time and walk the same keys: one of them
# # brings a block into the L2 cache, which holds K and V of a head many times over,
# # and the others find it there. S of one head takes 32 MiB.
# found = traffic(4096, 64)
# assert found["FA1"] < found["FA2"] < found["standard"] / 3
# ```
# </details>
#
# **2.** *Cut the keys in two.* A program of FA2 needs no other program, but when one query meets a
# very long sequence there are too few programs. Compute attention over the first half of the keys
# and over the second with `fa2(..., return_lse=True)`, and merge both to the whole with their lse.
# (Split-KV decoding does this.) Hint: exp(lse) is the sum by which each half was divided.
#
# <details><summary>Solution</summary>
#
# ```python
# q, k, v = make_qkv(1, 2, 128, 64)
# halves = []
# for keys in (slice(0, 64), slice(64, 128)):
#     part = [x[:, :, keys].contiguous() for x in (k, v)]
#     # the kernel takes one length for queries and keys, so the queries come in halves, too
#     rows = [fa2(q[:, :, at].contiguous(), *part, False, return_lse=True)
#             for at in (slice(0, 64), slice(64, 128))]
#     halves.append([torch.cat(x, 2) for x in zip(*rows)])
# (out1, lse1), (out2, lse2) = halves
# lse = torch.logaddexp(lse1, lse2)
# out = out1 * (lse1 - lse).exp()[..., None] + out2 * (lse2 - lse).exp()[..., None]
# whole, whole_lse = fa2(q, k, v, False, return_lse=True)
# assert (lse - whole_lse).abs().max() < 1e-3
# assert (out - whole).abs().max() < 1e-2
# ```
# </details>
#
# To try on the kernel itself: swap the two runs of `fa2_kernel`; set BLOCK_N over BLOCK_M; add a
# window of 64 keys to the left, which moves the start of the loop, adds a condition to `keep`, and
# makes a second kind of partial block.
