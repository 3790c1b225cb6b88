"""What lesson 01 measures and draws."""

import matplotlib.pyplot as plt
import torch

from . import DEVICE, ON_GPU, show

# sizes that are timed, as powers of two
LOGS = (12, 14, 16, 18, 20, 22, 24, 26, 28)
N = 1 << 26
BLOCKS = (128, 256, 512, 1024, 2048, 4096, 8192, 16384)


def programs(offsets, masks):
    """Draws the offsets of each program, those that are masked off hatched."""
    figure, axes = plt.subplots(figsize=(5, 2.2))
    for program, (row, kept) in enumerate(zip(offsets, masks)):
        for place, (offset, keep) in enumerate(zip(row, kept)):
            look = (
                dict(facecolor="0.9")
                if keep
                else dict(facecolor="white", hatch="///")
            )
            axes.add_patch(
                plt.Rectangle((place, program), 1, 1, edgecolor="black", **look)
            )
            around = dict(facecolor="white", edgecolor="none", pad=1)
            axes.text(
                place + 0.5,
                program + 0.5,
                offset,
                ha="center",
                va="center",
                bbox=around,
            )
    count = len(offsets)
    axes.set(xlim=(0, len(offsets[0])), ylim=(count, 0), xticks=[])
    axes.set_yticks(
        [p + 0.5 for p in range(count)], [f"program {p}" for p in range(count)]
    )
    axes.set_title("offsets of each program; hatched: masked off", fontsize=9)
    show(figure, "01_vector_add_programs")


def bandwidth(figures, add, bytes_moved):
    """Times `add(x, y, block, z)` and torch by size, and by block; draws GB/s."""
    room = torch.ones(3, 1 << max(LOGS) if ON_GPU else 0, device=DEVICE)
    by_size = {"tour": {}, "torch": {}}
    for log in LOGS:
        x, y, z = (part[: 1 << log] for part in room)
        calls = {
            "tour": lambda x=x, y=y, z=z: add(x, y, z=z),
            "torch": lambda x=x, y=y, z=z: torch.add(x, y, out=z),
        }
        shape = {"what": "sizes", "n": 1 << log, "dtype": "float32"}
        for name, ms in figures.times(
            shape, calls, rounds=3, round_ms=10.0
        ).items():
            # GB/s
            by_size[name][1 << log] = (
                bytes_moved(1 << log, torch.float32) / ms * 1e-6
            )
    by_block = {"float32": {}, "float16": {}}
    for name in by_block:
        dtype = getattr(torch, name)
        x, y, z = (part[:N].to(dtype) for part in room)
        for block in BLOCKS:
            shape = {"what": "blocks", "n": N, "dtype": name, "block": block}
            calls = {"tour": lambda x=x, y=y, z=z, block=block: add(x, y, block, z)}
            for ms in figures.times(shape, calls, rounds=3, round_ms=10.0).values():
                by_block[name][block] = bytes_moved(N, dtype) / ms * 1e-6
    if not by_size["tour"]:
        print(figures.machine)
        return
    show(
        draw_bandwidth(by_size, by_block, figures.machine),
        "01_vector_add_bandwidth",
    )
    largest = 1 << max(LOGS)
    print(figures.machine)
    for name, line in by_size.items():
        print(f"{name:>7}: {line[largest]:6.0f} GB/s for {largest:,} elements")
    for place, (name, line) in enumerate(by_block.items()):
        if not place:
            print("  block" + "".join(f"{block:7}" for block in line))
        print(
            f"{name}" + "".join(f"{speed:7.0f}" for speed in line.values()), "GB/s"
        )


def draw_bandwidth(by_size, by_block, machine):
    """GB/s against the size, and against the block."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.2), sharey=True)
    looks = {"tour": "ko-", "torch": "k^--", "float32": "ko-", "float16": "ks--"}
    for axes, lines in ((left, by_size), (right, by_block)):
        for name, line in lines.items():
            axes.plot(
                list(line),
                list(line.values()),
                looks[name],
                label=name,
                fillstyle="none",
            )
        axes.set_xscale("log", base=2)
        axes.legend(fontsize=8)
    left.set(xlabel="elements, fp32", ylabel="GB/s", ylim=(0, None))
    right.set(xlabel=f"BLOCK, for {N:,} elements")
    figure.suptitle(f"Vector add ({machine})", fontsize=9)
    return figure
