"""What lesson 04b measures and draws."""

import math
import re

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F

import tilewise
from tilewise.kernels.portable.step import attend  # noqa: F401 (for the lesson)
from tilewise.testing import SMEM_LIMIT, build, stats

from . import DEVICE, ON_GPU, library_here, show
from .flash_attention_1 import (
    fa1_blocks,
    fa1_steps,
    fa1_steps_kernel,
    power_of_two,
)
from .pictures_04 import HEADDIM, HEADS, LENGTHS

NAMES = [
    "standard",
    "SDPA",
    "lesson FA1",
    "FA1's steps",
    "lesson FA2",
    "portable",
    "tilewise",
]
TOKENS = 16384


def orders(blocks=8):
    """Draws when FlashAttention-1 and -2 visit each block of a causal head."""
    titles = {
        "FlashAttention-1: one program": {},
        "FlashAttention-2: a program per row": {},
    }
    one, two = titles.values()
    for j in range(blocks):
        for i in range(blocks):
            one[i, j] = len(one)
            if j <= i:
                # the partial block first, then the full ones
                two[i, j] = 0 if j == i else j + 1
    fig, axes = plt.subplots(1, 2, figsize=(8, 4.2))
    for ax, (title, order) in zip(axes, titles.items()):
        for (i, j), moment in order.items():
            hatch = "////" if i == j or order is one else ""
            box = dict(facecolor="white", edgecolor="gray", hatch=hatch)
            ax.add_patch(plt.Rectangle((j, i), 1, 1, **box))
            around = dict(facecolor="white", edgecolor="none", pad=1)
            place = dict(ha="center", va="center", fontsize=9, bbox=around)
            ax.text(j + 0.5, i + 0.5, moment, **place)
        ax.set(xlim=(0, blocks), ylim=(blocks, 0), xlabel="block of keys")
        ax.set(ylabel="block of queries", aspect="equal", xticks=[], yticks=[])
        ax.set_facecolor("lightgray")
        ax.set_title(title, fontsize=10)
    fig.suptitle(
        "When each block is visited; hatched: with a mask; gray: never", fontsize=10
    )
    show(fig, "04b_orders")


def innermost_loop(ptx):
    """The text of the last loop that has none inside."""
    loops = []
    for label in re.finditer(r"^(\$L\w+):", ptx, re.MULTILINE):
        backward = list(
            re.finditer(rf"bra[.\w]*\s+{re.escape(label[1])};", ptx[label.end() :])
        )
        if backward:
            body = ptx[label.end() : label.end() + backward[-1].end()]
            loops = [loop for loop in loops if body not in loop] + [body]
    return loops[-1]


def operations(
    fa1_kernel, fa2_kernel, block_m=128, block_n=64, headdim=128, warps=8
):
    """Counts the fp32 instructions per score in the PTX of three kernels.

    Those of the loop over full blocks; returns the sums.
    """
    x = torch.empty(4096, headdim, dtype=torch.bfloat16)
    rows, fp32 = torch.empty(4096), torch.empty(4096, headdim)
    sizes = dict(D=headdim, BLOCK_M=block_m, BLOCK_N=block_n, CAUSAL=False)
    sizes |= dict(num_warps=warps, num_stages=2, on="sm90")
    steps = build(fa1_steps_kernel, x, x, x, x, rows, 4096, 0.1, **sizes)
    built = {
        "FA1": build(fa1_kernel, x, x, x, fp32, rows, rows, 4096, 0.1, **sizes),
        "FA1's steps, FA2's loops": steps,
        "FA2": build(fa2_kernel, x, x, x, x, rows, 4096, 0.1, **sizes),
    }
    kinds = ("mul", "fma", "add", "sub", "max", "ex2", "div")
    heads = " ".join(f"{kind:>4}" for kind in kinds)
    print(f"{'':24} formula  counted {heads} registers")
    sums = {}
    for name, kernel in built.items():
        loop = innermost_loop(kernel.asm["ptx"])
        found = [len(re.findall(rf"\b{kind}\.[\w.]*f32", loop)) for kind in kinds]
        counts = [count * 32 * warps / block_m / block_n for count in found]
        sums[name] = sum(counts)
        formula = 5 + (1 if name == "FA2" else 3) * headdim / block_n
        line = " ".join(f"{count:4.2f}" for count in counts)
        registers = stats(kernel)["registers"]
        print(f"{name:24} {formula:7.1f} {sums[name]:8.2f} {line} {registers:9}")
    return sums


def block_rule():
    """Prints the blocks that FlashAttention-1's rule gives for three GPUs."""
    for gpu, arch in {"A100": "sm80", "RTX 4090": "sm89", "H200": "sm90"}.items():
        pairs = {d: fa1_blocks(SMEM_LIMIT[arch], d) for d in (64, 128)}
        kib = SMEM_LIMIT[arch] >> 10
        print(f"{gpu:9} {kib:4} KiB per program: (B_r, B_c) by headdim {pairs}")


def portable(q, k, v, causal):
    """The library's Triton kernel: compiled on a GPU, else in the interpreter."""
    with library_here():
        return tilewise.attention(
            q, k, v, causal=causal, layout="bhsd", backend="portable"
        )


def contenders(seqlen, causal, standard, fa1, fa2, tokens=TOKENS, heads=HEADS):
    """name -> call, of those that fit into this GPU's memory."""
    shape = tokens // seqlen, heads, seqlen, HEADDIM
    q, k, v = torch.randn(3, *shape, device=DEVICE, dtype=torch.bfloat16).unbind(0)
    sram = SMEM_LIMIT["sm90"]
    if ON_GPU:
        sram = torch.cuda.get_device_properties(0).shared_memory_per_block_optin
    rule = [power_of_two(n) for n in fa1_blocks(sram, HEADDIM)]
    calls = {
        "standard": lambda: standard(q, k, v, causal),
        "SDPA": lambda: F.scaled_dot_product_attention(q, k, v, is_causal=causal),
        "lesson FA1": lambda: fa1(q, k, v, causal, *rule),
        "FA1's steps": lambda: fa1_steps(q, k, v, causal, (128, 64)),
        "lesson FA2": lambda: fa2(q, k, v, causal, (128, 64)),
        "portable": lambda: portable(q, k, v, causal),
        "tilewise": lambda: tilewise.attention(
            q, k, v, causal=causal, layout="bhsd"
        ),
    }
    if ON_GPU and 4 * 2 * tokens * heads * seqlen > torch.cuda.mem_get_info()[0]:
        del calls["standard"]  # it holds up to four matrices of scores
    return calls


def speed(figures, standard, fa1, fa2):
    """Times all of them by length, full and causal; prints and draws TFLOP/s."""
    looks = dict(zip(NAMES, ["kx:", "k^--", "ks:", "kv-.", "ko-", "kD-", "k*-"]))
    fig, axes = plt.subplots(
        1, 2, figsize=(9, 4.2), sharey=True, layout="constrained"
    )
    print(figures.machine)
    print(f"{'TFLOP/s at':20}", "  ".join(f"{n:6}" for n in LENGTHS))
    for ax, causal in zip(axes, (False, True)):
        kind, speeds = "causal" if causal else "full", {name: {} for name in NAMES}
        for seqlen in LENGTHS:
            pairs = seqlen * (seqlen + 1) / 2 if causal else seqlen**2
            flops = 4 * (TOKENS // seqlen) * HEADS * pairs * HEADDIM
            shape = dict(
                seqlen=seqlen,
                tokens=TOKENS,
                nheads=HEADS,
                headdim=HEADDIM,
                causal=causal,
            )
            calls = (
                contenders(seqlen, causal, standard, fa1, fa2)
                if ON_GPU
                else dict.fromkeys(NAMES)
            )
            for name, ms in figures.times(
                shape, calls, flops, rounds=3, round_ms=12
            ).items():
                speeds[name][seqlen] = flops / ms * 1e-9
        for name, of in speeds.items():
            ax.plot(
                of.keys(),
                of.values(),
                looks[name],
                label=name,
                markersize=5,
                linewidth=1,
            )
        ax.set_xscale("log", base=2)
        ax.set(title=kind, xlabel="sequence length", ylim=(0, None))
        for name in NAMES if any(speeds.values()) else ():
            line = "  ".join(
                f"{speeds[name].get(n, math.nan):6.0f}" for n in LENGTHS
            )
            print(f"{kind:7} {name:12} {line}")
    axes[0].set_ylabel("TFLOP/s, forward")
    handles = axes[0].get_legend_handles_labels()
    fig.legend(*handles, ncols=7, loc="outside lower center", fontsize=8)
    fig.suptitle(
        f"16Ki tokens, 16 heads of 128, bf16 ({figures.machine})", fontsize=9
    )
    show(fig, "04b_speed")
