# %% [markdown]
# # 05. The backward, and how to profile
#
# After this lesson you can derive the gradients of attention on one page; compute them without a
# stored matrix, in a kernel of your own; account for every byte and operation that training moves
# and does, beside the table of the FlashAttention paper; and find out with two profilers what
# holds a kernel back.
#
# You need lesson 04: its forward leaves O and lse, the log of the sum by which a row was divided.

# %%
import contextlib
import csv
import math
import os
import subprocess
import sys

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from lesson import DEVICE, ON_GPU, Figures, here, show
from torch.profiler import ProfilerActivity, profile

import tilewise
from tilewise.testing import build, stats, use_interpreter
from tilewise.testing.tolerance import assert_within

figures = Figures("05_backward")
torch.manual_seed(0)

# %% [markdown]
# ## The gradients
#
# Write S = scale · Q Kᵀ, P = softmax(S), O = P V. Training hands us dO, what the loss says of each
# number of O, and wants dQ, dK and dV. A product Y = A B passes its gradient to both sides:
# dA = dY Bᵀ and dB = Aᵀ dY. That settles all but the softmax:
#
#     dV = Pᵀ dO        dP = dO Vᵀ        dQ = scale · dS K        dK = scale · dSᵀ Q
#
# For the softmax of one row, ∂p_j/∂s_i is p_i (1 - p_i) if i = j and else -p_i p_j: a score that
# rises takes weight from all others. So ds_i = p_i (dp_i - Σ_j p_j dp_j). The sum is one number for
# each row; call it delta. It looks as if it needs all of the row, but
#
#     delta = Σ_j p_j dp_j = Σ_j p_j Σ_c do_c v_jc = Σ_c do_c Σ_j p_j v_jc = Σ_c do_c o_c
#
# so delta = rowsum(dO ∘ O), to be had from two tensors that are there before the first tile. And
# dS = P ∘ (dP - delta) is then a matter of single tiles. Six lines of torch, held to autograd:


# %%
def backward_by_hand(q, k, v, dout, causal):
    """dq, dk, dv of one head in plain torch, (seqlen, headdim) each."""
    scale = q.shape[-1] ** -0.5
    s = scale * q @ k.T
    if causal:
        s = s.masked_fill(torch.ones_like(s).triu(1).bool(), -math.inf)
    p = torch.softmax(s, -1)
    dv = p.T @ dout
    dp = dout @ v.T
    delta = (dout * (p @ v)).sum(-1, keepdim=True)
    ds = p * (dp - delta)
    return scale * ds @ k, scale * ds.T @ q, dv


q, k, v, dout = torch.randn(4, 50, 16, dtype=torch.float64).unbind(0)
leaves = [x.requires_grad_() for x in (q, k, v)]
out = F.scaled_dot_product_attention(*(x[None, None] for x in leaves), is_causal=True)[0, 0]
by_autograd = torch.autograd.grad(out, leaves, dout)
with torch.no_grad():
    by_hand = backward_by_hand(q, k, v, dout, causal=True)
worst = max((a - b).abs().max().item() for a, b in zip(by_hand, by_autograd))
print(f"by hand and by autograd, fp64: they differ by {worst:.1e}")
assert worst < 1e-13

# %% [markdown]
# ## Recompute, do not store
#
# Every line above needs P. Autograd has kept it since the forward, seqlen² numbers for each head,
# and reads it back. FlashAttention throws P away and makes it again: S = Q Kᵀ once more, a tile at
# a time, and P = exp(S - lse). Having lse, no tile needs a maximum, a sum or a rescale: a tile of P
# is final when it is made. That is one matmul more for O(seqlen²) bytes less, and the ledger of
# lesson 04 said which of the two a GPU is short of.
#
# The loops can be nested in two ways again. dV_j and dK_j are sums over queries, dQ_i is a sum over
# keys: whoever owns a block of keys can keep dK and dV in registers, but dQ gets something from
# each owner. FlashAttention-2 (algorithm 2) gives each program a block of keys, and adds to dQ in
# memory with atomics. As a kernel:


# %%
@triton.jit
def backward_kernel(
    inputs, of_row, grads, seqlen, scale,
    D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr,
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

    start = n_start // BLOCK_M * BLOCK_M if CAUSAL else 0  # no query before it sees these keys
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
        tl.atomic_add(dq + of_rows, tl.dot(ds, k_tile) * scale, mask=is_row[:, None])
    tl.store(dk + of_keys, (acc_dk * scale).to(k_tile.dtype), mask=is_key)
    tl.store(dv + of_keys, acc_dv.to(k_tile.dtype), mask=is_key)


def lesson_backward(q, k, v, dout, causal, tile=(64, 64)):
    """dq, dk, dv of contiguous (batch, nheads, seqlen, headdim), by recomputation."""
    batch, nheads, seqlen, headdim = q.shape
    out, lse = tilewise.attention(q, k, v, causal=causal, layout="bhsd", return_lse=True)
    delta = (dout.float() * out.float()).sum(-1)
    dq = torch.zeros(q.shape, dtype=torch.float32, device=q.device)  # many add to it
    dk, dv = torch.empty_like(k), torch.empty_like(v)
    here(backward_kernel)[(triton.cdiv(seqlen, tile[1]), batch * nheads)](
        *((q, k, v, dout), (lse, delta), (dq, dk, dv), seqlen, headdim**-0.5),
        *(headdim, *tile, causal),
        num_warps=8 if headdim > 64 else 4,
        num_stages=2,
    )
    return dq.to(q.dtype), dk, dv


# %% [markdown]
# Gradients are judged as results were in lesson 04: by their distance to fp64, beside that of plain
# torch in the same precision, which stores P and rounds it.


# %%
def standard_attention(q, k, v, causal, dropout_p=0.0):
    """With its matrices in memory, and autograd's backward."""
    s = q * q.shape[-1] ** -0.5 @ k.mT
    if causal:
        hidden = torch.ones(s.shape[-2:], dtype=torch.bool, device=s.device).triu(1)
        s = s.masked_fill(hidden, -math.inf)
    p = torch.softmax(s, -1)
    if dropout_p:
        p = F.dropout(p, dropout_p)
    return p @ v


def gradients(attend, q, k, v, dout, **how):
    """What autograd makes of a forward."""
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    return torch.autograd.grad(attend(*leaves, **how), leaves, dout)


def check(name, backward, q, k, v, dout):
    """Holds dq, dk and dv to fp64, full and causal."""
    for causal in (False, True):
        wide = (x.double() for x in (q, k, v, dout))
        exact = gradients(standard_attention, *wide, causal=causal)
        plain = gradients(standard_attention, q, k, v, dout, causal=causal)
        line = []
        for what, got, right, usual in zip(("dq", "dk", "dv"), backward(causal), exact, plain):
            assert_within(got, right, usual, f"{what} of {name}")
            off, torchs = ((x.double() - right).abs().max().item() for x in (got, usual))
            line.append(f"{what} off by {off:.4f} (torch {torchs:.4f})")
        print(f"{name}, {'causal' if causal else 'full'}: {', '.join(line)}")


inputs = torch.randn(4, 1, 2, 150, 64).to(DEVICE, torch.bfloat16).unbind(0)
check("the lesson's kernel", lambda causal: lesson_backward(*inputs, causal), *inputs)

# %% [markdown]
# ## The library's kernels
#
# `tilewise.kernels.portable` has two kernels where FA2 has one. `bwd_dkdv` is the kernel above
# without its last matmul. `bwd_dq` gives each program a block of queries, which walks over the
# keys as the forward does and recomputes S and dP a second time. So there are seven matmuls a tile
# in place of five. Nobody adds to memory that another one adds to: no atomics, no fp32 copy of dQ,
# and, as floating point sums depend on their order, the same bits in every run. The library's
# Hopper kernels (`tilewise/kernels/hopper/bwd/*.py`) do it the other way, with five.
#
# You call neither: the forward keeps q, k, v, out and lse for autograd, whose backward runs them.


# %%
def portable_gradients(causal):
    """The library's Triton kernels: compiled on a GPU, else in the interpreter."""
    with contextlib.nullcontext() if ON_GPU else use_interpreter():
        how = dict(causal=causal, layout="bhsd", backend="portable")
        return gradients(tilewise.attention, *inputs, **how)


check("tilewise, portable", portable_gradients, *inputs)

# %% [markdown]
# What does a tile cost a compiler? The backward holds S, dP and two accumulators at once. Compiled
# for an H200 at headdim 64, with tiles of 64 x 64 and of 128 x 128 on 4 warps:

# %%
x, row = torch.empty(1, 1, 4096, 64, dtype=torch.bfloat16), torch.empty(1, 1, 4096)
arguments = (x, x, x, x), (row, row), (torch.empty(1, 1, 4096, 64), x, x), 4096, 0.125
for side in (64, 128):
    meta = dict(D=64, BLOCK_M=side, BLOCK_N=side, CAUSAL=True, num_warps=4, num_stages=2)
    needs = stats(build(backward_kernel, *arguments, on="sm90", **meta))
    line = f"{needs['registers']} registers a thread, {needs['smem'] >> 10} KiB of shared memory"
    print(f"{side} x {side}: {line}, {needs['spill_stores']} bytes spilled")

# %% [markdown]
# What does not fit into 255 registers is spilled: written to memory and read back. It is the first
# thing to look for in a slow kernel.
#
# ## The account
#
# The FlashAttention paper has a table for GPT-2 medium (seqlen 1024, headdim 64, 16 heads, batch
# 64, an A100), forward and backward together. Let us try to arrive at its numbers by counting.
#
# *Bytes of standard attention.* Each step reads and writes matrices of seqlen² and tensors of
# seqlen x headdim, in 2 bytes; the mask that dropout keeps has 1 byte, half a matrix.

# %%
PAPER = {"standard": (66.6, 40.3, 41.7), "FlashAttention": (75.2, 4.4, 7.3)}  # GFLOP, GB, ms
HEADS, SEQLEN, HEADDIM = 64 * 16, 1024, 64
MATRIX, TENSOR = 2 * HEADS * SEQLEN**2, 2 * HEADS * SEQLEN * HEADDIM  # bytes
MATMUL = 2 * HEADS * SEQLEN**2 * HEADDIM  # FLOPs

STANDARD = {  # step: (matrices, tensors) read or written, matmuls
    "S = Q Kᵀ": (1, 2, 1),
    "mask": (2, 0, 0),
    "softmax": (2, 0, 0),
    "dropout": (2.5, 0, 0),
    "O = P V": (1, 2, 1),
    "dV = Pᵀ dO": (1, 2, 1),
    "dP = dO Vᵀ": (1, 2, 1),
    "dropout's": (2.5, 0, 0),
    "softmax's": (3, 0, 0),  # reads P and dP, writes dS; the mask's gradient is 0 in it
    "dQ = dS K": (1, 2, 1),
    "dK = dSᵀ Q": (1, 2, 1),
}
moved = {step: m * MATRIX + t * TENSOR for step, (m, t, _) in STANDARD.items()}
matrices, tensors, matmuls = (sum(x) for x in zip(*STANDARD.values()))
standard_gb = sum(moved.values()) / 1e9
print(f"standard: {matrices} matrices and {tensors} tensors are {standard_gb:.1f} GB")
assert round(standard_gb, 1) == PAPER["standard"][1]

# %% [markdown]
# That is the paper's figure. (The paper does not say how it counted, and other counts may give it
# as well.)
#
# *Bytes of FlashAttention.* With K and V in the outer loop, the forward reads K and V once, and in
# each of T passes reads Q and O and writes O. The backward reads K and V and writes dK and dV once,
# and in each pass reads Q, O, dO and dQ and writes dQ: 6 + 8 T tensors in all. The block rule of
# lesson 04 gives four passes on an A100. FlashAttention-2's order reads each tensor in tiles many
# times, but K and V of a head are 256 KiB: the L2 cache has them after the first time. What must
# come from HBM is each tensor once for each kernel that wants it.

# %%
fa1_gb = (6 + 8 * 4) * TENSOR / 1e9
portable = {"forward": 4, "delta": 2, "dK, dV": 6, "dQ": 5}  # tensors each kernel reads and writes
portable_gb = sum(portable.values()) * TENSOR / 1e9
flops = {"standard": matmuls, "FlashAttention, 1 and 2": 7, "tilewise, portable": 9}
print(f"{'':24} {'GFLOP':>7} {'of 64 heads':>12} {'GB':>6}")
for (name, count), gb in zip(flops.items(), (standard_gb, fa1_gb, portable_gb)):
    of_64 = count * MATMUL / 16 / 1e9
    print(f"{name:24} {count * MATMUL / 1e9:7.1f} {of_64:12.1f} {gb:6.1f}")
for name, (gflop, gb, ms) in PAPER.items():
    print(f"the paper's {name:15} {gflop:17.1f} {gb:9.1f}   {ms} ms on an A100")
assert round(MATMUL / 16 / 1e9, 1) == round(PAPER["FlashAttention"][0] - PAPER["standard"][0], 1)

# %% [markdown]
# *Operations.* Here the table puzzles. Six matmuls of 64 x 16 heads are more than ten times its
# 66.6 GFLOP. But the difference of its rows, 8.6, is exactly one matmul of 64 heads: S, computed a
# second time. So bytes fit all 1024 heads, and operations fit 64 of them, with 15 GFLOP in both
# rows for what is no matmul. We do not know how those were counted, and count matmuls of all heads.
# A causal mask halves what a kernel does that skips blocks; none of these numbers has that.
#
# The lesson of the table stands either way: **FlashAttention computes more and is faster**, as it
# moves a tenth. Operations are the wrong price for a kernel that waits for memory.
#
# The same shape on this lesson's GPU, with causal mask and dropout, forward and backward:

# %%
GPT2 = dict(batch=64, nheads=16, seqlen=SEQLEN, headdim=HEADDIM, causal=True, dropout_p=0.1)


def trainings():
    """name -> forward and backward. For a GPU."""
    shape = [GPT2[x] for x in ("batch", "nheads", "seqlen", "headdim")]
    qkv_dout = torch.randn(4, *shape, device=DEVICE, dtype=torch.bfloat16).unbind(0)
    own = dict(causal=True, dropout_p=0.1, layout="bhsd")
    sdpa = F.scaled_dot_product_attention
    return {
        "standard": lambda: gradients(standard_attention, *qkv_dout, causal=True, dropout_p=0.1),
        "SDPA": lambda: gradients(sdpa, *qkv_dout, is_causal=True, dropout_p=0.1),
        "portable": lambda: gradients(tilewise.attention, *qkv_dout, backend="portable", **own),
        "tilewise": lambda: gradients(tilewise.attention, *qkv_dout, **own),
    }


NAMES = ["standard", "SDPA", "portable", "tilewise"]
train_ms = figures.times(GPT2, trainings() if ON_GPU else dict.fromkeys(NAMES), rounds=3)

fig, (ax, ax_ms) = plt.subplots(1, 2, figsize=(9.5, 4), width_ratios=(3, 2))
gb_of = {"standard": standard_gb, "paper:\nstandard": PAPER["standard"][1]}
gb_of |= {"FA1 by\nformula": fa1_gb, "paper:\nFA1": PAPER["FlashAttention"][1]}
gb_of |= {"portable,\nat least": portable_gb}
ms_of = {
    "paper:\nstandard": PAPER["standard"][2],
    "paper:\nFA1": PAPER["FlashAttention"][2],
}
for axes, of, unit in ((ax, gb_of, "GB from and to HBM"), (ax_ms, ms_of | train_ms, "ms")):
    hatches = ["//" if "paper" in name else "" for name in of]
    axes.bar(of.keys(), of.values(), color="white", edgecolor="black", hatch=hatches)
    for place, value in enumerate(of.values()):
        axes.text(place, value, f"{value:.1f}", ha="center", va="bottom", fontsize=8)
    axes.set_ylabel(f"{unit}, forward and backward")
    axes.tick_params(axis="x", labelsize=6.5)
bottom = 0.0
for step, size in moved.items():  # what the first bar is made of
    ax.bar("standard", size / 1e9, bottom=bottom, color="none", edgecolor="black", linewidth=0.5)
    ax.text(0, bottom + size / 2e9, step, ha="center", va="center", fontsize=6)
    bottom += size / 1e9
ax_ms.set_title(f"hatched: the paper's A100\nothers: {figures.machine}", fontsize=6)
fig.suptitle("GPT-2 medium, the attention of one layer, batch 64", fontsize=10)
fig.tight_layout()
show(fig, "05_account")

# %% [markdown]
# ## Profiling, first pass: which kernel?
#
# `torch.profiler` answers one question well: which operations take the time, how often, how long.
# It is not for the inside of a kernel. Warm up first, so that compiling is not in it, then profile
# a few calls, and sort by *self* time, which leaves out what an operation called. Below is standard
# attention, profiled on the machine that runs this lesson, whichever that is: the order differs
# between a CPU, where drawing dropout's random numbers is slow, and a GPU. Look for two things:
# operations that move data and compute next to nothing (copies, masks, dropout), and on a GPU gaps
# between kernels, where the host launches too slowly. `prof.export_chrome_trace("t.json")` shows
# those on a time axis, in Perfetto.

# %%
seqlen = 1024 if ON_GPU else 256
qkv_dout = torch.randn(4, 4, 8, seqlen, 64, device=DEVICE, dtype=torch.bfloat16).unbind(0)
activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if ON_GPU else [])]
gradients(standard_attention, *qkv_dout, causal=True, dropout_p=0.1)  # warm up
with profile(activities=activities) as prof:
    gradients(standard_attention, *qkv_dout, causal=True, dropout_p=0.1)
clock = "self_device_time_total" if ON_GPU else "self_cpu_time_total"
events = sorted(prof.key_averages(), key=lambda event: -getattr(event, clock))
total = sum(getattr(event, clock) for event in events)
print(f"one forward and backward of standard attention on this {DEVICE}")
for event in events[:8]:
    share = 100 * getattr(event, clock) / total
    print(f"{share:5.1f} %  {event.count:3} x  {event.key[:70]}")

# %% [markdown]
# ## Second pass: why this kernel?
#
# Nsight Compute (`ncu`) reads the counters of the hardware. It runs one launch many times, once for
# each group of counters, so give it one launch of one kernel. `-k` takes the name, `--launch-skip`
# passes over the warm-up, and `--set full` collects all sections for the viewer `ncu-ui`:
#
#     ncu --set full -k regex:attn_fwd_kernel --launch-skip 2 --launch-count 1 -o fwd python mine.py
#
# It wants access to the counters: root, or an administrator who allows it (the error is called
# ERR_NVGPUCTRPERM). Without a viewer, ask for single metrics. These ten say most of what there is
# to say about an attention kernel; the cell reads them for the library's portable forward at the
# shape above. They are recorded figures, unless you run it on a GPU with TILEWISE_NCU=1.

# %%
COUNTERS = {
    "gpu__time_duration.sum": "ns; under the profiler, caches flushed: not for comparing speed",
    "dram__bytes_read.sum": "bytes from HBM: beside your formula. Far more: L2 did not hold it",
    "dram__bytes_write.sum": "bytes to HBM: O and lse. More: spills, or a tensor too many",
    "lts__t_sector_hit_rate.pct": "% of the L2 cache's accesses that it could answer",
    "dram__throughput.avg.pct_of_peak_sustained_elapsed": "% of HBM's best: near 80, memory bounds",
    "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active": "% the matmul units work",
    "sm__throughput.avg.pct_of_peak_sustained_elapsed": "% of the busiest unit of the processors",
    "sm__warps_active.avg.pct_of_peak_sustained_active": "% of warps there: low is fine in matmuls",
    "smsp__warp_issue_stalled_long_scoreboard_per_warp_active.pct": "% waiting for a plain load",
    "launch__registers_per_thread": "at 255, look for spills in the compiler's log",
}
PROGRAM = """
import torch, tilewise
q, k, v = torch.randn(3, 64, 16, 1024, 64, device="cuda", dtype=torch.bfloat16).unbind(0)
tilewise.attention(q, k, v, causal=True, layout="bhsd", backend="portable")
"""


def read_counters(program, kernel):
    """metric -> value of the first launch of `kernel`, by ncu."""
    command = ["ncu", "--csv", "--print-units", "base", "--clock-control", "none"]
    command += ["--metrics", ",".join(COUNTERS), "-k", f"regex:{kernel}", "--launch-count", "1"]
    said = subprocess.run([*command, sys.executable, "-c", program], capture_output=True, text=True)
    rows = list(csv.DictReader(x for x in said.stdout.splitlines() if x.startswith('"')))
    if not rows:
        raise RuntimeError(f"ncu counted nothing: {said.stdout[-500:]}{said.stderr[-500:]}")
    return {row["Metric Name"]: as_number(row["Metric Value"]) for row in rows}


def as_number(text):
    """A counter's value, nan where this GPU does not have it."""
    try:
        return float(text.replace(",", ""))
    except ValueError:
        return math.nan


counted = {}
if ON_GPU and os.environ.get("TILEWISE_NCU"):
    counted = read_counters(PROGRAM, "attn_fwd_kernel")
launch = dict(kernel="attn_fwd_kernel", batch=64, nheads=16, seqlen=1024, headdim=64, causal=True)
for name, meaning in COUNTERS.items():
    if ON_GPU and math.isnan(counted.get(name, math.nan)):
        number = None
    else:
        number = figures.value(launch, name, lambda name=name: counted[name])
    shown = "not recorded" if number is None else f"{number:,.1f}"
    print(f"{name}\n    {shown:>15}  {meaning}")

# %% [markdown]
# How to read them. Start from a prediction: bytes by the account above, FLOPs by the formula, each
# over what the card can do. Then one of four things is true.
#
# - *HBM near its best.* The kernel is bound by memory. Compare the bytes with the formula: if they
#   are equal, only an algorithm that moves less will help; if not, find who reads what twice.
# - *Matmul units near their best.* You are done, or you compute what a mask throws away.
# - *Neither, and stalls at loads.* Latency: loads begin too late. More stages in the pipeline,
#   larger tiles, or TMA (lesson 07).
# - *Neither, and no stalls at loads.* In attention that is the softmax: exponentials and rescaling
#   hold the matmuls up. Remove operations (lesson 04), or let one warpgroup multiply while another
#   exponentiates (lesson 07). Or there are too few programs: count tiles over processors.
#
# **A checklist, in this order.** It is cheap at the top.
#
# 1. Is it right, at this very shape? A wrong kernel's time means nothing.
# 2. Is it timed right: warmed up, by events on the device, caches flushed, in turns with what it
#    is compared to, the median of some rounds and the spread beside it? Behind the same other in
#    every round? On an H200 one kernel under two names differed by up to 4.5 %, by whom it
#    followed: probably a slow kernel leaves power to spare, and the next one clocks higher.
# 3. Is it this kernel at all? torch.profiler, share of the whole.
# 4. Is the host in time? A kernel under 20 µs is often waiting to be launched.
# 5. dtype: bf16 or fp16 operands, fp32 accumulators. fp32 operands mean slow matmul units.
# 6. Registers and spills, from the compiler, before any run.
# 7. Tile, warps, stages: measured for the shape, not guessed.
# 8. Enough programs for the processors, and the last wave not nearly empty.
# 9. Bytes counted beside bytes by formula; contiguous last dimension; 16-byte alignment.
# 10. Skipped work: are masked blocks skipped, and full blocks free of the mask?
#
# ## Exercises
#
# **1.** *Rows of dS.* Show that every row of dS sums to 0, from the formula and by a number. What
# does it say about adding one and the same vector to all keys?
#
# <details><summary>Solution</summary>
#
# ```python
# # rowsum(P (dP - delta)) = rowsum(P dP) - delta rowsum(P) = delta - delta = 0.
# # Adding u to all keys adds q u to all scores of a row: softmax is not changed by that,
# # so the loss is not, and the gradient along that direction must be 0.
# q, k, v, dout = torch.randn(4, 40, 16, dtype=torch.float64).unbind(0)
# p = torch.softmax(q @ k.T / 4, -1)
# ds = p * (dout @ v.T - (dout * (p @ v)).sum(-1, keepdim=True))
# print(f"largest row sum of dS: {ds.sum(-1).abs().max():.1e}")
# assert ds.sum(-1).abs().max() < 1e-13
# u = torch.randn(16, dtype=torch.float64)
# moved_keys = torch.softmax(q @ (k + u).T / 4, -1)
# assert (moved_keys - p).abs().max() < 1e-13
# ```
# </details>
#
# **2.** *Dropout.* With a matrix Z that is 1 / (1 - p) where a weight is kept and else 0, the
# forward is O = (P ∘ Z) V. Find the four places in `backward_by_hand` that change, or do not. Is
# delta still rowsum(dO ∘ O)? (Z need not be stored either: `tilewise/tile/dropout.py` makes it
# again from a seed and the indices.)
#
# <details><summary>Solution</summary>
#
# ```python
# q, k, v, dout = torch.randn(4, 40, 16, dtype=torch.float64).unbind(0)
# z = (torch.rand(40, 40, dtype=torch.float64) < 0.9) / 0.9
# leaves = [x.requires_grad_() for x in (q, k, v)]
# out = (torch.softmax(q @ k.T / 4, -1) * z) @ v
# expected = torch.autograd.grad(out, leaves, dout)
# with torch.no_grad():
#     p = torch.softmax(q @ k.T / 4, -1)
#     dv = (p * z).T @ dout  # 1: the weights that were used
#     dp = z * (dout @ v.T)  # 2: a dropped weight has no gradient
#     delta = (dout * out).sum(-1, keepdim=True)  # 3: as before, with the O of the forward
#     ds = p * (dp - delta)  # 4: as before, with the P from before dropout
#     found = ds @ k / 4, ds.T @ q / 4, dv
# assert all((a - b).abs().max() < 1e-12 for a, b in zip(found, expected))
# ```
# </details>
#
# To try on the kernel itself: take dQ out of it, and write a second kernel with a program for each
# block of queries, as the library has it. Then run both versions twice, and compare bits.
