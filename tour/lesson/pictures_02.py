"""What lesson 02 measures and draws."""

import matplotlib.pyplot as plt
import torch

from tilewise.testing import build, stats

from . import DEVICE, ON_GPU, show
from .matmul import operands

SIZES = (512, 1024, 2048, 4096, 8192)
CAPABILITY = torch.cuda.get_device_capability() if ON_GPU else (9, 0)


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
    """Times the lesson's kernel and cuBLAS; prints and draws TFLOP/s by size."""

    def calls_of(n):
        a, b = operands(n, n, n, "bf16", DEVICE)
        small, large = tried[0], large_tile(tried)
        return {
            "small tiles, row by row": lambda: plain_matmul(a, b, small, group=1),
            "large tiles, row by row": lambda: plain_matmul(a, b, large, group=1),
            "autotuned": lambda: tuned_matmul(a, b),
            "cuBLAS": lambda: torch.matmul(a, b),
        }

    compare(figures, calls_of, "02_matmul_speed")

    def choice():
        return tuned_kernel.configs.index(tuned_kernel.best_config)

    for n in SIZES:
        if ON_GPU:
            calls_of(n)["autotuned"]()
        place = figures.value({"what": "autotuned", "n": n}, "place", choice)
        if place is not None:
            print(f"{n:>5}: autotuning chose {tried[int(place)]}")


def large_tile(tried):
    """The tile of 128 x 256; a smaller one before Hopper, for its shared memory."""
    return tried[3] if CAPABILITY >= (9, 0) else tried[1]


def compare(figures, calls_of, picture):
    """Times `calls_of(n)` for every side n; prints ratios and draws TFLOP/s."""
    found = {}
    for n in SIZES:
        shape = {"what": "bf16", "n": n}
        calls = calls_of(n if ON_GPU else 16)
        times = figures.times(shape, calls, flops=2 * n**3, round_ms=15.0)
        for name, ms in times.items():
            found.setdefault(name, {})[n] = 2 * n**3 / ms * 1e-9
    if not found:
        print(figures.machine)
        return
    show(draw_speeds(found, figures.machine), picture)
    for name, line in found.items():
        ratios = {
            n: line[n] / found["cuBLAS"][n] for n in line if n in found["cuBLAS"]
        }
        said = "  ".join(f"{n}: {ratio:.2f}" for n, ratio in ratios.items())
        print(f"{name:>24}: {said}")
    print("each over cuBLAS, by size")


def draw_speeds(found, machine):
    """TFLOP/s against the size, a line per kernel."""
    figure, axes = plt.subplots(figsize=(7, 4))
    looks = ("k:", "k-.", "k--", "k^-")
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
