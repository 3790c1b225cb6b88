"""What lesson 09 measures and draws."""

import matplotlib.pyplot as plt
import torch

import tilewise
from tilewise.testing import fp8 as fp8

from . import DEVICE, ON_GPU, show

NAMES = ["bf16", "Quantized", "quantize, then attention"]


def grid():
    """Draws the numbers of e4m3 up to 16, and how far apart they are."""
    bits = torch.arange(127, dtype=torch.uint8)  # positive ones; 127 is NaN
    values = bits.view(torch.float8_e4m3fn).float()
    fig, axes = plt.subplots(2, 1, figsize=(8, 2.8), height_ratios=[1, 3])
    axes[0].vlines(values.numpy(), 0, 1, linewidth=0.6, color="black")
    axes[0].set(xlim=(0, 16), yticks=[], title="The numbers of e4m3 up to 16")
    axes[1].loglog(
        values[1:-1].numpy(), values.diff()[1:].numpy(), drawstyle="steps-post"
    )
    axes[1].set(xlabel="a number of e4m3", ylabel="to the next one")
    fig.tight_layout()
    show(fig, "09_grid")
    return values


def errors_by_length(lengths, found):
    """Draws the error of each way to sum, by length."""
    fig, ax = plt.subplots(figsize=(7, 3.2))
    for name, errors in found.items():
        ax.loglog(lengths, errors, "o-", label=name)
    ax.set(
        xlabel="keys", ylabel="norm of the error / norm of out", title="V of mean 1"
    )
    ax.legend(fontsize=8)
    show(fig, "09_accumulators")


def channels(before, after):
    """Draws the largest magnitude of each channel, before and after a rotation."""
    fig, axes = plt.subplots(1, 2, figsize=(8, 2.4), sharey=True)
    for ax, x, title in zip(axes, (before, after), ("as it comes", "rotated")):
        ax.bar(
            range(x.shape[-1]), x.abs().amax(0).numpy(), width=1.0, color="black"
        )
        ax.set(xlabel="channel", title=title)
    axes[0].set_ylabel("largest magnitude")
    show(fig, "09_channels")


def calls(seqlen=16384):
    """The forward in bf16 and in FP8, quantising apart."""
    q, k, v = torch.randn(3, 1, seqlen, 16, 128, device=DEVICE).bfloat16().unbind(0)
    x = tilewise.quantize(q, k, v)
    return {
        "bf16": lambda: tilewise.attention(q, k, v),
        "Quantized": lambda: tilewise.attention(x),
        "quantize, then attention": lambda: tilewise.attention(
            tilewise.quantize(q, k, v)
        ),
    }


def times(figures):
    """Times them, and prints their rates."""
    shape = dict(batch=1, seqlen=16384, nheads=16, headdim=128)
    found = figures.times(shape, calls() if ON_GPU else dict.fromkeys(NAMES))
    for name, ms in found.items():
        print(f"{name:26}{4 * 16384**2 * 2048 / ms * 1e-9:8,.0f} TFLOP/s")
    print(f"times: {figures.machine}")
