"""What lesson 04 measures and draws."""

import math

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F

import tilewise

from . import DEVICE, ON_GPU, machine_of, recorded_rows, show

FLOPS, BANDWIDTH = 989e12, 4.8e12  # an H200's data sheet, per second
GPT2 = dict(
    batch=64, nheads=16, seqlen=1024, headdim=64, causal=True, dropout_p=0.1
)
PARTS = ("matmul Q Kᵀ", "mask", "softmax", "dropout", "matmul P V")
FUSED = "tilewise, all five"
HEADS, HEADDIM = 16, 128
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
        print("the library's portable kernel, 3 stages, headdim 128")
        print(machine_of(rows))
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
