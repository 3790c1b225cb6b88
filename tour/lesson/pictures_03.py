"""What lesson 03 measures and draws, and the rows on which it does."""

import matplotlib.pyplot as plt
import torch

from . import DEVICE, ON_GPU, show

ROWS = ("early", "late", "rising", "flat")
ELEMENTS = 1 << 26
COLUMNS = (1 << 10, 1 << 12, 1 << 14, 1 << 16, 1 << 18)
FLOOR = 1e-3  # a smaller alpha is drawn here, and its value written
WHOLE = 1 << 14  # longer rows do not fit into registers


def scores(columns, headdim=64, seed=0):
    """Four rows of q k / sqrt(headdim), in the order of ROWS."""
    generator = torch.Generator().manual_seed(seed)
    q = 3 * torch.randn(headdim, generator=generator)
    keys = torch.randn(4, columns, headdim, generator=generator)
    keys[0, 0] = 4 * q / 3
    keys[1, columns - 1 - columns // 8] = 4 * q / 3
    rows = keys @ q * headdim**-0.5
    rows[2] += torch.linspace(-20, 0, columns)
    return rows.to(DEVICE)


def rescaling(traces):
    """Draws m and alpha after each block, for each row."""
    figure, (top, bottom) = plt.subplots(2, 1, figsize=(7, 4.4), sharex=True)
    looks = {"early": "ks:", "late": "ko-", "rising": "kd-.", "flat": "k^--"}
    for name, steps in traces.items():
        blocks = range(1, len(steps) + 1)
        top.plot(
            blocks,
            [m for m, *_ in steps],
            looks[name],
            label=name,
            fillstyle="none",
        )
        shown = [
            (x, alpha) for x, (_, alpha, *_) in zip(blocks, steps) if alpha > 0
        ]
        places, alphas = zip(*shown)
        kept = [max(alpha, FLOOR) for alpha in alphas]
        bottom.plot(places, kept, looks[name], fillstyle="none")
        for place, alpha in shown:
            if alpha < FLOOR:
                bottom.plot(place, FLOOR, "kv", markersize=9)
                text = f"{name}: {alpha:.0e},\nfar below this axis"
                bottom.text(place - 0.2, 1.3 * FLOOR, text, ha="right", fontsize=9)
    top.set(ylabel="largest score so far")
    top.legend(fontsize=8)
    bottom.set(xlabel="blocks of 125 keys", yscale="log", ylim=(FLOOR / 2, 2))
    bottom.set(ylabel="alpha, log scale")
    figure.suptitle("Online softmax over four rows of 1000 scores", fontsize=9)
    show(figure, "03_softmax_rescaling")


def softmax_calls(columns, softmax, kernels, elements):
    """Softmax of the same fp32 matrix by each kernel and by torch."""
    x = torch.randn(elements // columns, columns, device=DEVICE)
    out = torch.empty_like(x)
    loop = dict(block=min(columns, 4096), out=out, num_warps=8)
    whole = dict(block=columns, out=out, num_warps=16 if columns > 4096 else 8)
    calls = {}
    for name, kernel in kernels.items():
        if name != "whole row":
            calls[name] = lambda kernel=kernel: softmax(kernel, x, **loop)
        elif columns <= WHOLE:
            calls[name] = lambda kernel=kernel: softmax(kernel, x, **whole)
    return calls | {"torch": lambda: torch.softmax(x, 1)}


def bandwidth(figures, softmax, kernels):
    """Times every kernel at every length; draws useful GB/s, of one read and write.

    `softmax(kernel, x, block, out)` launches one of the `kernels`.
    """
    speeds = {}
    for columns in COLUMNS:
        shape = {
            "what": "rows",
            "elements": ELEMENTS,
            "columns": columns,
            "dtype": "float32",
        }
        calls = softmax_calls(columns, softmax, kernels, ELEMENTS if ON_GPU else 0)
        found = figures.times(shape, calls, rounds=3, round_ms=15.0)
        for name, ms in found.items():
            speeds.setdefault(name, {})[columns] = 8 * ELEMENTS / ms * 1e-6
    if not speeds:
        print(figures.machine)
        return
    figure, axes = plt.subplots(figsize=(7, 3.6))
    looks = ("ks--", "k+:", "ko-", "kd-.", "k^:")
    for (name, line), look in zip(speeds.items(), looks):
        axes.plot(
            list(line), list(line.values()), look, label=name, fillstyle="none"
        )
        print(
            f"{name:>13}: "
            + "  ".join(f"{n}: {speed:.0f}" for n, speed in line.items())
        )
    print("useful GB/s, by columns")
    axes.set_xscale("log", base=2)
    axes.set(
        xlabel="columns, fp32, 2^26 elements in all",
        ylabel="useful GB/s",
        ylim=(0, None),
    )
    title = f"Softmax: a read and a write over the time\n({figures.machine})"
    axes.set_title(title, fontsize=9)
    axes.legend(fontsize=8)
    show(figure, "03_softmax_bandwidth")
