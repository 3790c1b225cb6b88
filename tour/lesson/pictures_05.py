"""What lesson 05 measures and draws: costs, the account of bytes, two profilers."""

import csv
import math
import os
import subprocess
import sys

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from torch.profiler import ProfilerActivity, profile

import tilewise
from tilewise.testing import build, stats

from . import DEVICE, ON_GPU, library_here, show

HEADS, SEQLEN, HEADDIM = 64 * 16, 1024, 64
GPT2 = dict(
    batch=64, nheads=16, seqlen=SEQLEN, headdim=HEADDIM, causal=True, dropout_p=0.1
)
NAMES = ["standard", "SDPA", "portable", "tilewise"]
# The FlashAttention paper's table, on an A100: GFLOP, GB, ms
PAPER = {"standard": (66.6, 40.3, 41.7), "FlashAttention": (75.2, 4.4, 7.3)}
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
    # reads P and dP, writes dS; the mask's gradient is 0 in it
    "softmax's": (3, 0, 0),
    "dQ = dS K": (1, 2, 1),
    "dK = dSᵀ Q": (1, 2, 1),
}
COUNTERS = {
    "gpu__time_duration.sum": (
        "ns; under the profiler, caches flushed: not for comparing speed"
    ),
    "dram__bytes_read.sum": (
        "bytes from HBM: beside your formula. Far more: L2 did not hold it"
    ),
    "dram__bytes_write.sum": (
        "bytes to HBM: O and lse. More: spills, or a tensor too many"
    ),
    "lts__t_sector_hit_rate.pct": (
        "% of the L2 cache's accesses that it could answer"
    ),
    "dram__throughput.avg.pct_of_peak_sustained_elapsed": (
        "% of HBM's best: near 80, memory bounds"
    ),
    "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active": (
        "% the matmul units work"
    ),
    "sm__throughput.avg.pct_of_peak_sustained_elapsed": (
        "% of the busiest unit of the processors"
    ),
    "sm__warps_active.avg.pct_of_peak_sustained_active": (
        "% of warps there: low is fine in matmuls"
    ),
    "smsp__warp_issue_stalled_long_scoreboard_per_warp_active.pct": (
        "% waiting for a plain load"
    ),
    "launch__registers_per_thread": "at 255, look for spills in the compiler's log",
}
PROGRAM = """
import torch, tilewise
qkv = torch.randn(3, 64, 16, 1024, 64, device="cuda", dtype=torch.bfloat16)
tilewise.attention(*qkv, causal=True, layout="bhsd", backend="portable")
"""


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


def portable_gradients(inputs, causal):
    """By the library's Triton kernels, compiled or in the interpreter."""
    with library_here():
        how = dict(causal=causal, layout="bhsd", backend="portable")
        return gradients(tilewise.attention, *inputs, **how)


def cost(kernel, sides=(64, 128)):
    """Prints what a tile of the backward costs on an H200: headdim 64, 4 warps."""
    x, row = (
        torch.empty(1, 1, 4096, 64, dtype=torch.bfloat16),
        torch.empty(1, 1, 4096),
    )
    arguments = (
        (x, x, x, x),
        (row, row),
        (torch.empty(1, 1, 4096, 64), x, x),
        4096,
        0.125,
    )
    for side in sides:
        meta = dict(
            D=64, BLOCK_M=side, BLOCK_N=side, CAUSAL=True, num_warps=4, num_stages=2
        )
        needs = stats(build(kernel, *arguments, on="sm90", **meta))
        line = (
            f"{needs['registers']} registers per thread, {needs['smem'] >> 10} KiB"
        )
        spills = f"{needs['spill_stores']} bytes spilled"
        print(f"{side} x {side}: {line} of shared memory, {spills}")


def count():
    """GB of standard attention, FlashAttention-1 and the portable kernels; by step.

    FlashAttention-1 makes T = 4 passes on an A100: 6 + 8 T tensors. The portable
    kernels read and write 4, 2, 6 and 5 tensors: forward, delta, dK and dV, dQ.
    """
    moved = {step: m * MATRIX + t * TENSOR for step, (m, t, _) in STANDARD.items()}
    sizes = (sum(moved.values()), (6 + 8 * 4) * TENSOR, (4 + 2 + 6 + 5) * TENSOR)
    return [size / 1e9 for size in sizes], moved


def account(figures):
    """Prints and draws operations, bytes and times, and the paper's."""
    matrices, tensors, matmuls = (sum(x) for x in zip(*STANDARD.values()))
    (standard_gb, fa1_gb, portable_gb), moved = count()
    parts = f"{matrices} matrices and {tensors} tensors"
    print(f"standard: {parts} are {standard_gb:.1f} GB")
    flops = {
        "standard": matmuls,
        "FlashAttention, 1 and 2": 7,
        "tilewise, portable": 9,
    }
    print(f"{'':24} {'GFLOP':>7} {'GB':>6}")
    for (name, number), gb in zip(
        flops.items(), (standard_gb, fa1_gb, portable_gb)
    ):
        print(f"{name:24} {number * MATMUL / 1e9:7.1f} {gb:6.1f}")
    for name, (gflop, gb, ms) in PAPER.items():
        print(f"the paper's {name:15} {gflop:4.1f} {gb:6.1f}   {ms} ms on an A100")
    train_ms = figures.times(
        GPT2, trainings() if ON_GPU else dict.fromkeys(NAMES), rounds=3
    )
    fig, (ax, ax_ms) = plt.subplots(1, 2, figsize=(9.5, 4), width_ratios=(3, 2))
    gb_of = {"standard": standard_gb, "paper:\nstandard": PAPER["standard"][1]}
    gb_of |= {"FA1 by\nformula": fa1_gb, "paper:\nFA1": PAPER["FlashAttention"][1]}
    gb_of |= {"portable,\nat least": portable_gb}
    ms_of = {
        "paper:\nstandard": PAPER["standard"][2],
        "paper:\nFA1": PAPER["FlashAttention"][2],
    }
    for axes, of, unit in (
        (ax, gb_of, "GB from and to HBM"),
        (ax_ms, ms_of | train_ms, "ms"),
    ):
        hatches = ["//" if "paper" in name else "" for name in of]
        axes.bar(
            of.keys(), of.values(), color="white", edgecolor="black", hatch=hatches
        )
        for place, value in enumerate(of.values()):
            axes.text(
                place, value, f"{value:.1f}", ha="center", va="bottom", fontsize=8
            )
        axes.set_ylabel(f"{unit}, forward and backward")
        axes.tick_params(axis="x", labelsize=6.5)
    bottom = 0.0
    for step, size in moved.items():  # what the first bar is made of
        part = dict(bottom=bottom, color="none", edgecolor="black", linewidth=0.5)
        ax.bar("standard", size / 1e9, **part)
        ax.text(0, bottom + size / 2e9, step, ha="center", va="center", fontsize=6)
        bottom += size / 1e9
    ax_ms.set_title(
        f"hatched: the paper's A100\nothers: {figures.machine}", fontsize=6
    )
    fig.suptitle("GPT-2 medium, the attention of one layer, batch 64", fontsize=10)
    fig.tight_layout()
    show(fig, "05_account")
    print(figures.machine)
    for name, ms in train_ms.items():
        print(f"{name:10} {ms:6.2f} ms forward and backward")


def trainings():
    """name -> forward and backward of GPT2's shape. For a GPU."""
    shape = [GPT2[x] for x in ("batch", "nheads", "seqlen", "headdim")]
    qkv_dout = torch.randn(4, *shape, device=DEVICE, dtype=torch.bfloat16).unbind(0)
    own = dict(causal=True, dropout_p=0.1, layout="bhsd")
    sdpa = F.scaled_dot_product_attention
    return {
        "standard": lambda: gradients(
            standard_attention, *qkv_dout, causal=True, dropout_p=0.1
        ),
        "SDPA": lambda: gradients(sdpa, *qkv_dout, is_causal=True, dropout_p=0.1),
        "portable": lambda: gradients(
            tilewise.attention, *qkv_dout, backend="portable", **own
        ),
        "tilewise": lambda: gradients(tilewise.attention, *qkv_dout, **own),
    }


def profiled():
    """Profiles standard attention here and prints its longest operations."""
    seqlen = 1024 if ON_GPU else 256
    qkv_dout = torch.randn(
        4, 4, 8, seqlen, 64, device=DEVICE, dtype=torch.bfloat16
    ).unbind(0)
    activities = [
        ProfilerActivity.CPU,
        *([ProfilerActivity.CUDA] if ON_GPU else []),
    ]
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


def counters(figures):
    """Prints Nsight Compute's counters of the portable forward, recorded or new."""
    counted = {}
    if ON_GPU and os.environ.get("TILEWISE_NCU"):
        counted = read_counters(PROGRAM, "attn_fwd_kernel")
    launch = dict(
        kernel="attn_fwd_kernel", batch=64, nheads=16, seqlen=1024, headdim=64
    )
    launch |= dict(causal=True)
    for name, meaning in COUNTERS.items():
        if ON_GPU and math.isnan(counted.get(name, math.nan)):
            number = None
        else:
            number = figures.value(launch, name, lambda name=name: counted[name])
        shown = "not recorded" if number is None else f"{number:,.1f}"
        print(f"{name}\n    {shown:>15}  {meaning}")


def read_counters(program, kernel):
    """metric -> value of the first launch of `kernel`, by ncu."""
    command = ["ncu", "--csv", "--print-units", "base", "--clock-control", "none"]
    command += [
        "--metrics",
        ",".join(COUNTERS),
        "-k",
        f"regex:{kernel}",
        "--launch-count",
        "1",
    ]
    said = subprocess.run(
        [*command, sys.executable, "-c", program], capture_output=True, text=True
    )
    rows = list(
        csv.DictReader(x for x in said.stdout.splitlines() if x.startswith('"'))
    )
    if not rows:
        raise RuntimeError(
            f"ncu counted nothing: {said.stdout[-500:]}{said.stderr[-500:]}"
        )
    return {row["Metric Name"]: as_number(row["Metric Value"]) for row in rows}


def as_number(text):
    """A counter's value, nan where this GPU does not have it."""
    try:
        return float(text.replace(",", ""))
    except ValueError:
        return math.nan
