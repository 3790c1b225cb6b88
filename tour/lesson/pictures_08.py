"""What lesson 08 measures and draws, and its pool of pages."""

import matplotlib.pyplot as plt
import torch

import tilewise

from . import DEVICE, ON_GPU, show

# TB/s: measured on an H200, matmul of 8192^3, a plain read
TFLOPS, BANDWIDTH = 744.0, 4.42
SIZES = (8192, 2048, 512, 128)
NAMES = [*(f"splits of {size}" for size in SIZES), "tilewise"]


def roofline(intensities):
    """Prints and draws what share of an H200's arithmetic each intensity uses."""
    fig, ax = plt.subplots(figsize=(7, 3.2))
    ridge = TFLOPS / BANDWIDTH
    xs = [0.5, ridge, 10000.0]
    ax.loglog(xs, [min(TFLOPS, x * BANDWIDTH) for x in xs], color="black")
    for name, found in intensities.items():
        share = 100 * min(1, found / ridge)
        line = f"{name:34}{found:8,.0f} FLOPs per byte"
        print(f"{line}, {share:5.1f} % of the arithmetic")
        ax.loglog(found, min(TFLOPS, found * BANDWIDTH), "o", label=name)
    ax.set(
        xlabel="FLOPs per byte",
        ylabel="TFLOP/s, at most",
        title="The roof of an H200",
    )
    ax.legend(fontsize=8)
    show(fig, "08_roofline")


def in_pages(sequences, page_size, seed=0):
    """A pool of pages, and which of them each sequence has, in no order."""
    counts = [-(-len(x) // page_size) for x in sequences]
    free = torch.randperm(
        sum(counts) + 2, generator=torch.Generator().manual_seed(seed)
    ).tolist()
    pool = torch.full((len(free), page_size, *sequences[0].shape[1:]), float("nan"))
    table = torch.full((len(counts), max(counts)), -1, dtype=torch.int32)
    for b, x in enumerate(sequences):
        for i, rows in enumerate(x.split(page_size)):
            page = table[b, i] = free.pop()
            pool[page, : len(rows)] = rows
    return pool.to(DEVICE, sequences[0].dtype), table.to(DEVICE)


def pages():
    """Draws three sequences in pages of 16, and prints their page table."""
    numbers = [torch.full((n, 1), float(b)) for b, n in enumerate((70, 25, 40))]
    pool, table = in_pages(numbers, 16)
    for b, row in enumerate(table.tolist()):
        print(f"sequence {b}: pages {[x for x in row if x >= 0]}")
    fig, ax = plt.subplots(figsize=(8, 2))
    ax.imshow(pool.cpu()[..., 0].T.numpy(), cmap="viridis", aspect="auto")
    ax.set(
        xlabel="page of the pool", ylabel="row of the page", xticks=range(len(pool))
    )
    ax.set_title("Three sequences in one pool; white is not in use")
    show(fig, "08_pages")


def bits(runs, rules):
    """Prints, draws and returns the bits of sequence 0 in every run, by rule."""
    found = {}
    for rule in rules:
        print(f"{rule.__name__}: the first numbers of sequence 0")
        rows = []
        for name, (members, where) in runs.items():
            row = rule(members, **where)[members.index(0)].flatten()
            rows.append(row.contiguous().view(torch.int32))
            print(
                f"  {name:17}",
                *(f"{x & 0xFFFFFFFF:08x}" for x in rows[-1][:4].tolist()),
            )
        found[rule.__name__] = torch.stack(rows)
    fig, axes = plt.subplots(1, 2, figsize=(9, 2.2), sharey=True)
    for ax, (name, rows) in zip(axes, found.items()):
        # the first three, bit by bit
        each = rows[:, :3, None] >> torch.arange(31, -1, -1) & 1
        look = dict(aspect="auto", cmap="Greys", interpolation="nearest")
        ax.imshow(each.flatten(1).numpy(), **look)
        ax.set(
            yticks=range(len(runs)),
            yticklabels=runs,
            xticks=(0, 32, 64),
            xlabel="bit",
        )
        count = (rows != rows[0]).any(1).sum().item()
        title = (
            f"{name}: {count} of {len(rows) - 1} rows have other bits than alone"
        )
        ax.set_title(title, fontsize=9)
    show(fig, "08_bits")
    return found


def steps(decode, length=8192):
    """A step of decoding, by splits of each size, and by the library."""
    k, v = (
        torch.randn(2, length // 16, 16, 8, 128, device=DEVICE).bfloat16().unbind(0)
    )
    q = torch.randn(1, 32, 128, device=DEVICE).bfloat16()
    table = torch.randperm(length // 16).to(torch.int32)[None].to(DEVICE)
    used = torch.tensor([length], dtype=torch.int32, device=DEVICE)
    calls = {
        f"splits of {size}": lambda size=size: decode(q, k, v, table, used, size)
        for size in SIZES
    }
    where = dict(page_table=table, seqused_k=used, causal=True)
    return calls | {
        "tilewise": lambda: tilewise.attention(q[:, None], k, v, **where)
    }


def times(figures, decode):
    """Times the steps, and prints what each reads a second."""
    shape = dict(
        batch=1, seqlen=8192, nheads=32, nheads_k=8, headdim=128, page_size=16
    )
    found = figures.times(shape, steps(decode) if ON_GPU else dict.fromkeys(NAMES))
    for name, ms in found.items():
        moved = 2 * 8192 * 8 * 128 * 2 / ms * 1e-6
        print(f"{name:15}{ms * 1e3:8.1f} us, {moved:7,.0f} GB/s of keys and values")
    print(f"times: {figures.machine}")
