"""What lesson 02 measures and draws."""

import matplotlib.pyplot as plt
import torch

from tilewise.testing import build, stats

from . import DEVICE, ON_GPU, show
from .matmul import FORMATS, final_matmul, operands, rounded, torch_matmul

SMS = 132  # of an H100 or H200
GROUPS = (1, 2, 4, 8, 12, 16, 32)
SIZES = (512, 1024, 2048, 4096, 8192)
FORMATS_AT = 4096
CAPABILITY = torch.cuda.get_device_capability() if ON_GPU else (9, 0)


def strips_in_flight(tiles, sms):
    """Strips of A and B that `sms` tiles at a time need: the mean over waves."""
    waves = [tiles[start : start + sms] for start in range(0, len(tiles), sms)]
    needed = [
        len({m for m, _ in wave}) + len({n for _, n in wave}) for wave in waves
    ]
    return sum(needed) / len(needed)


def orders(order):
    """Draws the first tiles of `order(tiles_m, tiles_n, group)`."""
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(11, 3.6))
    for axes, group, name in ((left, 1, "row by row"), (middle, 8, "GROUP_M = 8")):
        tiles = order(32, 32, group)
        strips = strips_in_flight(tiles, SMS)
        print(f"{name:>11}: {strips:.1f} strips of A and B for {SMS} tiles")
        first = strips_in_flight(tiles[:SMS], SMS)
        draw_order(axes, tiles, 32, f"{name}: {first:.0f} strips in the first wave")
    left.set_ylabel("rows of tiles: strips of A")
    for side, look in ((32, "ko-"), (64, "k^--")):
        counts = [
            strips_in_flight(order(side, side, group), SMS) for group in GROUPS
        ]
        right.plot(
            GROUPS, counts, look, fillstyle="none", label=f"{side} x {side} tiles"
        )
    right.set(xlabel="GROUP_M", ylabel="strips in flight", ylim=(0, None))
    right.legend(fontsize=8)
    figure.suptitle(f"The first {SMS} tiles, one an SM", fontsize=9)
    show(figure, "02_matmul_order")


def draw_order(axes, tiles, side, title):
    """The path through the first wave, whose tiles are grey."""
    for number, (m, n) in enumerate(tiles):
        shade = "0.75" if number < SMS else "white"
        axes.add_patch(
            plt.Rectangle(
                (n, m), 1, 1, facecolor=shade, edgecolor="0.5", linewidth=0.4
            )
        )
    path = tiles[:SMS]
    axes.plot(
        [n + 0.5 for _, n in path], [m + 0.5 for m, _ in path], "k-", linewidth=0.8
    )
    axes.set(xlim=(0, side), ylim=(side, 0), xticks=[], yticks=[], aspect="equal")
    axes.set_xlabel("columns of tiles: strips of B")
    axes.set_title(title, fontsize=9)


def costs(kernel, tried):
    """Prints registers, shared memory and spills, compiled for Hopper."""
    a, found = torch.empty(512, 512, dtype=torch.bfloat16), {}
    print("      tile       warps  registers  shared KiB  spilled bytes")
    for blocks in tried:
        shape = dict(
            BLOCK_M=blocks.m, BLOCK_N=blocks.n, BLOCK_K=blocks.k, GROUP_M=8
        )
        launch = dict(num_warps=blocks.warps, num_stages=blocks.stages)
        sizes = (512, 512, 512, 512, 512, 512)  # M, N, K and the strides
        found[blocks] = of = stats(
            build(kernel, a, a, a, *sizes, **shape, **launch, on="sm90")
        )
        tile, kib = f"{blocks.m} x {blocks.n} x {blocks.k}", of["smem"] / 1024
        rest = f"{of['registers']:>9}  {kib:>10.0f}  {of['spill_stores']:>13}"
        print(f"{tile:>15}  {blocks.warps:>6}  {rest}")
    return found


def speeds(figures, plain_matmul, tuned_matmul, tuned_kernel, tried):
    """Times every kernel of the lesson and cuBLAS; draws TFLOP/s by size."""
    # older cards have less shared memory
    big = tried[3] if CAPABILITY >= (9, 0) else tried[1]
    found = {}
    for n in SIZES:
        calls = bf16_calls(
            n if ON_GPU else 16, plain_matmul, tuned_matmul, tried[0], big
        )
        shape = {"what": "bf16", "n": n}
        times = figures.times(shape, calls, flops=2 * n**3, round_ms=15.0)
        for name, ms in times.items():
            found.setdefault(name, {})[n] = 2 * n**3 / ms * 1e-9

        def choice(calls=calls):
            calls["autotuned"]()
            return tuned_kernel.configs.index(tuned_kernel.best_config)

        place = figures.value({"what": "autotuned", "n": n}, "place", choice)
        if place is not None:
            print(f"{n:>5}: autotuning chose {tried[int(place)]}")
    if not found:
        print(figures.machine)
        return
    show(draw_speeds(found, figures.machine), "02_matmul_speed")
    for name, line in found.items():
        ratios = {
            n: line[n] / found["cuBLAS"][n] for n in line if n in found["cuBLAS"]
        }
        print(
            f"{name:>24}: " + "  ".join(f"{n}: {x:.2f}" for n, x in ratios.items())
        )
    print("each over cuBLAS, by size")


def bf16_calls(n, plain_matmul, tuned_matmul, small, big):
    """All products of the same two matrices."""
    a, b = operands(n, n, n, "bf16", DEVICE)
    return {
        "small tiles, row by row": lambda: plain_matmul(a, b, small, group=1),
        "large tiles, row by row": lambda: plain_matmul(a, b, big, group=1),
        "large tiles, grouped": lambda: plain_matmul(a, b, big, group=8),
        "autotuned": lambda: tuned_matmul(a, b),
        "final kernel": lambda: final_matmul(a, b),
        "cuBLAS": lambda: torch.matmul(a, b),
    }


def draw_speeds(found, machine):
    """TFLOP/s against the size, a line a kernel."""
    figure, axes = plt.subplots(figsize=(7, 4))
    looks = ("k:", "k-.", "k--", "ks--", "ko-", "k^-")
    for (name, line), look in zip(found.items(), looks):
        axes.plot(
            list(line), list(line.values()), look, label=name, fillstyle="none"
        )
    axes.set_xscale("log", base=2)
    axes.set_xticks(SIZES, [str(size) for size in SIZES])
    axes.set(
        xlabel="side of the square matrices, bf16", ylabel="TFLOP/s", ylim=(0, None)
    )
    axes.set_title(machine, fontsize=9)
    axes.legend(fontsize=8)
    return figure


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
