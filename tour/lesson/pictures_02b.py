"""What lesson 02b measures and draws."""

import matplotlib.pyplot as plt
import torch

from . import DEVICE, ON_GPU, show
from .matmul import FORMATS, final_matmul, operands, rounded, torch_matmul
from .pictures_02 import CAPABILITY, compare, large_tile

SMS = 132  # of an H100 or H200
GROUPS = (1, 2, 4, 8, 12, 16, 32)
FORMATS_AT = 4096


def strips_in_flight(tiles, sms):
    """Strips of A and B that `sms` tiles at a time need: the mean over waves."""
    waves = [tiles[start : start + sms] for start in range(0, len(tiles), sms)]
    needed = [
        len({m for m, _ in wave}) + len({n for _, n in wave}) for wave in waves
    ]
    return sum(needed) / len(needed)


def orders(order):
    """Draws the first tiles of `order(tiles_m, tiles_n, group)`."""
    figure, (left, middle, right) = plt.subplots(
        1, 3, figsize=(11, 3.9), layout="constrained"
    )
    for axes, group, name in ((left, 1, "row by row"), (middle, 8, "GROUP_M = 8")):
        tiles = order(32, 32, group)
        strips = strips_in_flight(tiles, SMS)
        print(f"{name:>11}: {strips:.1f} strips of A and B for {SMS} tiles")
        draw_wave(axes, tiles[:SMS], 32, name)
    for side, look in ((32, "ko-"), (64, "k^--")):
        counts = [
            strips_in_flight(order(side, side, group), SMS) for group in GROUPS
        ]
        label = f"{side} x {side} tiles"
        right.plot(GROUPS, counts, look, fillstyle="none", label=label)
    right.set(xlabel="GROUP_M", ylabel="strips in flight", ylim=(0, None))
    right.legend(fontsize=8)
    figure.suptitle(f"The first {SMS} tiles, one per SM", fontsize=9)
    show(figure, "02b_order")


def draw_wave(axes, wave, side, name):
    """A wave's tiles, darker the later they start, and the strips they need."""
    for number, (m, n) in enumerate(wave):
        shade = str(0.85 - 0.6 * number / len(wave))
        axes.add_patch(plt.Rectangle((n, m), 1, 1, facecolor=shade))
    strip = dict(facecolor="white", edgecolor="black", hatch="////", linewidth=0.6)
    of_a, of_b = {m for m, _ in wave}, {n for _, n in wave}
    for m in of_a:
        axes.add_patch(plt.Rectangle((-2.5, m), 1.8, 1, **strip))
    for n in of_b:
        axes.add_patch(plt.Rectangle((n, -2.5), 1, 1.8, **strip))
    (m, n), (to_m, to_n) = wave[0], wave[7]
    axes.annotate(
        "",
        xy=(to_n + 0.5, to_m + 0.5),
        xytext=(n + 0.5, m + 0.5),
        arrowprops=dict(arrowstyle="->", linewidth=1.5),
    )
    axes.set(xlim=(-3, side), ylim=(side, -3), xticks=[], yticks=[], aspect="equal")
    axes.set(xlabel="columns of tiles", ylabel="rows of tiles")
    title = f"{name}: {len(of_a)} strips of A and {len(of_b)} of B (hatched)"
    axes.set_title(title, fontsize=9)


def speeds(figures, plain_matmul, tried):
    """Times both orders, the final kernel and cuBLAS; draws TFLOP/s by size."""

    def calls_of(n):
        a, b = operands(n, n, n, "bf16", DEVICE)
        large = large_tile(tried)
        return {
            "large tiles, row by row": lambda: plain_matmul(a, b, large, group=1),
            "large tiles, grouped": lambda: plain_matmul(a, b, large, group=8),
            "final kernel": lambda: final_matmul(a, b),
            "cuBLAS": lambda: torch.matmul(a, b),
        }

    compare(figures, calls_of, "02b_speed")


def loss(name, n=512):
    """The relative error of rounding normal inputs, by root mean squares."""
    generator = torch.Generator().manual_seed(0)
    a, b = torch.randn(2, n, n, generator=generator)
    exact = a.double() @ b.double()
    error = rounded(a, name) @ rounded(b, name) - exact
    return (error.square().mean() / exact.square().mean()).sqrt().item()


def formats(figures):
    """Prints, by format, what rounding loses and the speed of both kernels."""
    names = [name for name in FORMATS if name != "fp8" or CAPABILITY >= (8, 9)]
    flops = 2 * FORMATS_AT**3
    print("format  bits  lost by rounding   TFLOP/s: final kernel  cuBLAS")
    for name in names:
        a, b = operands(*(3 * [FORMATS_AT if ON_GPU else 16]), name, DEVICE)
        calls = {
            "tour": lambda a=a, b=b, name=name: final_matmul(a, b, name),
            "cuBLAS": lambda a=a, b=b, name=name: torch_matmul(a, b, name),
        }
        shape = {"what": "formats", "n": FORMATS_AT, "kind": name}
        times = figures.times(shape, calls, flops=flops)
        speed = [
            f"{flops / times[x] * 1e-9:.0f}" if x in times else "-" for x in calls
        ]
        bits = FORMATS[name].dtype.itemsize * 8
        speeds = f"{speed[0]:>21}  {speed[1]:>6}"
        print(f"{name:>6}  {bits:>4}  {loss(name):>16.1e}  {speeds}")
    print(figures.machine)
