"""What lesson 04 measures and draws."""

import math
import re

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F

import tilewise
from tilewise.kernels.portable.step import attend  # noqa: F401 (for the lesson)
from tilewise.testing import SMEM_LIMIT, build, stats

from . import DEVICE, ON_GPU, library_here, machine_of, recorded_rows, show
from .flash_attention_1 import (
    fa1,
    fa1_blocks,
    fa1_kernel,
    fa1_steps,
    fa1_steps_kernel,
    power_of_two,
)

FLOPS, BANDWIDTH = 989e12, 4.8e12  # an H200's data sheet, a second
GPT2 = dict(
    batch=64, nheads=16, seqlen=1024, headdim=64, causal=True, dropout_p=0.1
)
PARTS = ("matmul Q Kᵀ", "mask", "softmax", "dropout", "matmul P V")
FUSED = "tilewise, all five"
NAMES = [
    "standard",
    "SDPA",
    "lesson FA1",
    "FA1's steps",
    "lesson FA2",
    "portable",
    "tilewise",
]
TOKENS, HEADS, HEADDIM = 16384, 16, 128
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
TILES = (
    (32, 64, 4),
    (64, 32, 4),
    (64, 64, 4),
    (64, 64, 8),
    (128, 64, 8),
    (128, 128, 8),
)


def step_counts(problems, seqlen, headdim):
    """{step: (FLOPs, bytes)} of `problems` heads, in bf16, with a mask of bytes."""
    pairs, rows = problems * seqlen**2, problems * seqlen * headdim
    counts = (
        (2 * pairs * headdim, 2 * (2 * rows + pairs)),
        (pairs, 2 * (pairs + pairs)),
        (5 * pairs, 2 * (pairs + pairs)),  # max, subtract, exp, sum, divide
        # and what was kept, for the backward
        (2 * pairs, 2 * (pairs + pairs) + pairs),
        (2 * pairs * headdim, 2 * (pairs + 2 * rows)),
    )
    return dict(zip(PARTS, counts))


def the_steps():
    """The five calls of standard attention, with their inputs, and one for all."""
    shape = [GPT2[x] for x in ("batch", "nheads", "seqlen", "headdim")]
    q, k, v = torch.randn(3, *shape, device=DEVICE, dtype=torch.bfloat16).unbind(0)
    s = q * 64**-0.5 @ k.mT
    hidden = torch.ones(s.shape[-2:], dtype=torch.bool, device=s.device).triu(1)
    p = torch.softmax(s, -1)
    calls = (
        lambda: q @ k.mT,
        lambda: s.masked_fill(hidden, float("-inf")),
        lambda: torch.softmax(s, -1),
        lambda: F.dropout(p, 0.1),
        lambda: p @ v,
        lambda: tilewise.attention(
            q, k, v, causal=True, dropout_p=0.1, layout="bhsd"
        ),
    )
    return dict(zip((*PARTS, FUSED), calls))


def steps(figures):
    """Prints and draws what each step of standard attention computes and moves."""
    counts = step_counts(64 * 16, 1024, 64)
    heads = f"{'step':12} {'GFLOP':>7} {'GB':>6} {'FLOP/byte':>10}"
    print(f"{heads} {'ms of math':>11} {'ms of HBM':>10}")
    for name, (flops, size) in counts.items():
        math_ms, hbm_ms = 1e3 * flops / FLOPS, 1e3 * size / BANDWIDTH
        counted = f"{flops / 1e9:7.1f} {size / 1e9:6.2f} {flops / size:10.1f}"
        print(f"{name:12} {counted} {math_ms:11.3f} {hbm_ms:10.3f}")
    step_ms = figures.times(
        GPT2, the_steps() if ON_GPU else dict.fromkeys((*PARTS, FUSED)), rounds=3
    )
    least = [1e3 * max(f / FLOPS, size / BANDWIDTH) for f, size in counts.values()]
    bars = {"by the count": least}
    if step_ms:
        bars |= {
            "measured": [step_ms[name] for name in PARTS],
            "one kernel": [step_ms[FUSED]],
        }
    fig, ax = plt.subplots(figsize=(8, 1.4 + 0.5 * len(bars)), layout="constrained")
    for row, parts in enumerate(bars.values()):
        left, look = 0.0, dict(edgecolor="black", height=0.7)
        names = PARTS if len(parts) == 5 else (FUSED,)
        for name, ms, hatch in zip(names, parts, ["", "//", "..", "xx", "||"]):
            color = "white" if len(parts) == 5 else "lightgray"
            label = name if row in (0, 2) else None
            ax.barh(
                row, ms, left=left, label=label, hatch=hatch, color=color, **look
            )
            left += ms
    ax.set_yticks(range(len(bars)), bars)
    ax.invert_yaxis()
    ax.set_xlabel("ms, forward")
    ax.set_title(f"Standard attention step by step ({figures.machine})", fontsize=9)
    fig.legend(fontsize=8, ncols=6, loc="outside lower center")
    show(fig, "04_steps")


def orders(blocks=8):
    """Draws when FlashAttention-1 and -2 visit each block of a causal head."""
    titles = {
        "FlashAttention-1: one program": {},
        "FlashAttention-2: a program a row": {},
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
    show(fig, "04_orders")


def tiles(figures, fa2, seqlen=4096):
    """Prints TFLOP/s by tile: the lesson's kernel on a GPU, else recorded ones."""
    flops = 4 * 4 * HEADS * seqlen**2 * HEADDIM
    if not ON_GPU:
        line = "{:>9}  {:>5}  {:>9}  {:>10}  {:>7}  {:>8}  {:>7}".format
        heads = ("registers", "shared KiB", "spilled", "programs", "TFLOP/s")
        print(line("tile", "warps", *heads))
        rows = recorded_rows("blocks")
        for row in rows:
            m, n, warps, stages, *_ = row["extra"]["config"]
            of = row["extra"]["built"]
            if stages == 3 and (m, n, warps) in TILES:
                taken = (of["registers"], of["shared_memory"] >> 10, of["spills"])
                programs = of["occupancy"]["programs"]
                print(
                    line(
                        f"{m} x {n}",
                        warps,
                        *taken,
                        programs,
                        f"{row['tflops']:.0f}",
                    )
                )
        print(
            "the library's portable kernel, 3 stages, headdim 128:",
            machine_of(rows),
        )
        return
    q, k, v = (
        torch.randn(3, 4, HEADS, seqlen, HEADDIM, device=DEVICE)
        .bfloat16()
        .unbind(0)
    )
    calls = {
        f"{m} x {n}, {warps} warps": lambda m=m, n=n, w=warps: fa2(
            q, k, v, False, (m, n), w
        )
        for m, n, warps in TILES
    }
    shape = dict(what="tiles", seqlen=seqlen, nheads=HEADS, headdim=HEADDIM)
    for name, ms in figures.times(shape, calls, flops, rounds=3).items():
        print(f"{name:>20}  {flops / ms * 1e-9:6.0f} TFLOP/s")
    print(f"the lesson's kernel: {figures.machine}")


def memory(figures, standard, fa2):
    """Prints and draws the peak memory of a forward beside its inputs, in MiB."""
    if ON_GPU:
        calls = {"standard": standard, "lesson FA2": fa2}
        found = {name: {} for name in calls}
        for name, call in calls.items():
            for seqlen in LENGTHS:
                shape = dict(
                    what="memory", seqlen=seqlen, nheads=HEADS, headdim=HEADDIM
                )
                peak = figures.value(
                    shape, name, lambda n=seqlen, call=call: peak_mib(call, n)
                )
                found[name][seqlen] = peak
        machine = figures.machine
    else:
        rows = [
            r for r in recorded_rows("memory") if r["shape"]["direction"] == "fwd"
        ]
        found, machine = (
            {"standard": {}, "flash": {}, "tilewise": {}},
            machine_of(rows),
        )
        for row in rows:
            if row["provider"] in found and "peak_bytes" in row["extra"]:
                peak = row["extra"]["peak_bytes"] / 2**20
                found[row["provider"]][row["shape"]["seqlen_q"]] = peak
    if not any(found.values()):
        print(machine)
        return
    figure, axes = plt.subplots(figsize=(6, 3.2))
    for (name, line), look in zip(found.items(), ("kx:", "k^--", "ko-")):
        axes.plot(
            list(line), list(line.values()), look, fillstyle="none", label=name
        )
        print(
            f"{name:>11}: "
            + "  ".join(f"{n}: {mib:,.0f}" for n, mib in line.items())
        )
    print("MiB beside the inputs at the peak of a forward, by length")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set(
        xlabel="sequence length, 16 heads of 128, bf16",
        ylabel="MiB beside the inputs",
    )
    axes.legend(fontsize=8)
    axes.set_title(machine, fontsize=9)
    show(figure, "04_memory")


def peak_mib(call, seqlen):
    """MiB that a forward allocates beside its inputs; nan where it does not fit."""
    q, k, v = (
        torch.randn(3, 1, HEADS, seqlen, HEADDIM, device=DEVICE)
        .bfloat16()
        .unbind(0)
    )
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    try:
        call(q, k, v, False)
    except torch.OutOfMemoryError:
        return math.nan
    return (torch.cuda.max_memory_allocated() - before) / 2**20


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


def operations(fa2_kernel, block_m=128, block_n=64, headdim=128, warps=8):
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
    heads = " ".join(f"{kind:>5}" for kind in kinds)
    print(f"{'':25} formula  counted: {heads}   registers")
    sums = {}
    for name, kernel in built.items():
        loop = innermost_loop(kernel.asm["ptx"])
        found = [len(re.findall(rf"\b{kind}\.[\w.]*f32", loop)) for kind in kinds]
        counts = [count * 32 * warps / block_m / block_n for count in found]
        sums[name] = sum(counts)
        formula = 5 + (1 if name == "FA2" else 3) * headdim / block_n
        line = " ".join(f"{count:5.2f}" for count in counts)
        registers = stats(kernel)["registers"]
        print(f"{name:25} {formula:7.1f} {sums[name]:8.2f} {line} {registers:11}")
    return sums


def block_rule():
    """Prints the blocks that FlashAttention-1's rule gives for three GPUs."""
    for gpu, arch in {"A100": "sm80", "RTX 4090": "sm89", "H200": "sm90"}.items():
        pairs = {d: fa1_blocks(SMEM_LIMIT[arch], d) for d in (64, 128)}
        kib = SMEM_LIMIT[arch] >> 10
        print(f"{gpu:9} {kib:4} KiB a program: (B_r, B_c) by headdim {pairs}")


def portable(q, k, v, causal):
    """The library's Triton kernel: compiled on a GPU, else in the interpreter."""
    with library_here():
        return tilewise.attention(
            q, k, v, causal=causal, layout="bhsd", backend="portable"
        )


def contenders(seqlen, causal, standard, fa2, tokens=TOKENS, heads=HEADS):
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


def speed(figures, standard, fa2):
    """Times all of them by length, full and causal; prints and draws TFLOP/s."""
    looks = dict(zip(NAMES, ["kx:", "k^--", "ks:", "kv-.", "ko-", "kD-", "k*-"]))
    fig, axes = plt.subplots(
        1, 2, figsize=(9, 4.2), sharey=True, layout="constrained"
    )
    print(
        f"{'TFLOP/s at':20}",
        "  ".join(f"{n:6}" for n in LENGTHS),
        f"  ({figures.machine})",
    )
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
                contenders(seqlen, causal, standard, fa2)
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
    show(fig, "04_speed")
