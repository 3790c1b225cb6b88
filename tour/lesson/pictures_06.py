"""What lesson 06 measures and draws, and the batches on which it does."""

import matplotlib.pyplot as plt
import torch

import tilewise
from tilewise.testing.schedule import busy, key_blocks, makespan, simulate, tiles

from . import DEVICE, ON_GPU, show

# Okabe and Ito's colours, which colour-blind readers can tell apart; letters say it
# again
COLOURS = (
    "#56B4E9",
    "#E69F00",
    "#009E73",
    "#CC79A7",
    "#F0E442",
    "#D55E00",
    "#0072B2",
)
BLOCK, NHEADS, PROCESSORS = 128, 2, 8
FORMS = ["padded", "one by one", "packed, portable", "packed"]
TOKENS = 65536


def _generator():
    return torch.Generator().manual_seed(1)


def _zipf(count, exponent):
    """TOKENS in lengths proportional to 1 / rank^exponent, shuffled."""
    weights = [rank**-exponent for rank in range(1, count + 1)]
    lengths = [round(TOKENS * weight / sum(weights)) for weight in weights]
    lengths[0] += TOKENS - sum(lengths)
    return tuple(
        lengths[i] for i in torch.randperm(count, generator=_generator()).tolist()
    )


SETS = {
    "prefill-chat": tuple(
        torch.randint(16, 2048, (64,), generator=_generator()).tolist()
    ),
    "zipf": _zipf(64, 1.1),
    "one-long": (32768, *(256,) * 128),
}


def padding():
    """Prints what share of a padded batch is real."""
    print(f"{'':13} sequences  longest  real: rows        pairs")
    for name, lengths in SETS.items():
        rows = sum(lengths) / (len(lengths) * max(lengths))
        pairs = sum(n * n for n in lengths) / (len(lengths) * max(lengths) ** 2)
        line = f"{name:13} {len(lengths):9} {max(lengths):8}"
        print(f"{line} {100 * rows:10.1f} % {100 * pairs:10.1f} %")


def tile_numbers(lengths):
    """Draws the tiles of two heads in the order of their numbers."""
    fig, ax = plt.subplots(figsize=(9, 1.9))
    for tile, batch, head, block, _ in tiles(lengths, NHEADS, BLOCK):
        rows = min(BLOCK, lengths[batch] - block * BLOCK)
        box = dict(facecolor=COLOURS[batch], edgecolor="black")
        ax.add_patch(plt.Rectangle((tile, 0), 1, rows / BLOCK, **box))
        ax.add_patch(
            plt.Rectangle((tile, 0), 1, 1, facecolor="none", edgecolor="black")
        )
        text = f"{tile}\nseq {batch}\nhead {head}\nblock {block}"
        around = dict(facecolor="white", edgecolor="none", pad=1)
        ax.text(
            tile + 0.5, 0.5, text, ha="center", va="center", fontsize=8, bbox=around
        )
    ax.set(xlim=(0, tile + 1), ylim=(0, 1), xticks=[], yticks=[])
    title = f"Tiles of sequences of {lengths}, two heads"
    ax.set_title(f"{title}; coloured as far as they are full")
    show(fig, "06_tiles")


def plan(lengths, longest_first, dynamic):
    """The tiles, and which processor computes them when."""
    numbered = list(tiles(lengths, NHEADS, BLOCK, longest_first=longest_first))
    costs = [
        key_blocks(lengths[t.batch], t.m_block, BLOCK, causal=True)
        for t in numbered
    ]
    return numbered, simulate(costs, PROCESSORS, dynamic)


def timelines(lengths):
    """Draws four schedules of a causal batch; returns when each is done."""
    plans = {
        "static": plan(lengths, False, False),
        "static, longest first": plan(lengths, True, False),
        "dynamic": plan(lengths, False, True),
        "dynamic, longest first": plan(lengths, True, True),
    }
    latest = max(makespan(runs) for _, runs in plans.values())
    fig, axes = plt.subplots(4, 1, figsize=(9, 7.5), sharex=True)
    for ax, (name, (numbered, runs)) in zip(axes, plans.items()):
        for run in runs:
            of, wide = numbered[run.tile].batch, run.stop - run.start
            box = dict(
                color=COLOURS[of], edgecolor="black", linewidth=0.5, height=0.9
            )
            box |= dict(hatch="////" if of == 1 else "")
            ax.barh(run.processor, wide, left=run.start, **box)
            if wide > 2:
                place = dict(ha="center", va="center", fontsize=6)
                ax.text(run.start + wide / 2, run.processor, "abcdefg"[of], **place)
        end, share = makespan(runs), busy(runs, PROCESSORS)
        print(f"{name:23} done at {end}, {100 * share:.0f} % busy")
        ax.axvline(end, color="black", linestyle="--")
        ax.set_title(
            f"{name}: done at {end}, {100 * share:.0f} % busy",
            fontsize=9,
            loc="left",
        )
        ax.set(ylim=(PROCESSORS - 0.5, -0.5), yticks=[], xlim=(0, latest * 1.02))
        ax.set_ylabel("processors", fontsize=8)
    axes[-1].set_xlabel("time, in blocks of keys; a, b, c: sequences")
    show(fig, "06_timelines")
    work = sum(run.stop - run.start for run in runs)
    longest = max(run.stop - run.start for run in runs)
    print(f"no schedule is done before {max(work / PROCESSORS, longest):.0f}")
    return {name: makespan(runs) for name, (_, runs) in plans.items()}


def schedules(launcher):
    """The four schedules of zipf's tiles. For a GPU; `launcher` is the lesson's."""
    processors = (
        torch.cuda.get_device_properties(0).multi_processor_count if ON_GPU else 8
    )
    v = torch.randn(sum(SETS["zipf"]), 16, 128, device=DEVICE, dtype=torch.bfloat16)
    launch = launcher(v, SETS["zipf"], processors, 64)
    return {name: lambda way=way: launch(*way) for name, way in WAYS.items()}


WAYS = {  # dynamic, longest first
    "static": (False, False),
    "static, longest first": (False, True),
    "dynamic": (True, False),
    "dynamic, longest first": (True, True),
}


def batches(cumulative):
    """prefill-chat in four forms. For a GPU."""
    chat = SETS["prefill-chat"]
    shape = len(chat), max(chat), 16, 128
    padded = torch.randn(3, *shape, device=DEVICE, dtype=torch.bfloat16).unbind(0)
    real = [torch.cat([x[b, :n] for b, n in enumerate(chat)]) for x in padded]
    starts = cumulative(chat)
    alone = [[x[b : b + 1, :n] for x in padded] for b, n in enumerate(chat)]
    packed = dict(cu_seqlens_q=starts, cu_seqlens_k=starts, causal=True)
    return {
        "padded": lambda: tilewise.attention(*padded, causal=True),
        "one by one": lambda: [
            tilewise.attention(*each, causal=True) for each in alone
        ],
        "packed, portable": lambda: tilewise.attention(
            *real, **packed, backend="portable"
        ),
        "packed": lambda: tilewise.attention(*real, **packed),
    }


def times(figures, launcher, cumulative):
    """Times the schedules of the lesson's kernel, and one batch in four forms."""
    measured = (
        ("zipf", "running mean", WAYS, lambda: schedules(launcher)),
        ("prefill-chat", "attention", FORMS, lambda: batches(cumulative)),
    )
    for lengths, what, names, calls in measured:
        shape = dict(lengths=lengths, nheads=16, headdim=128, what=what)
        found = figures.times(
            shape, calls() if ON_GPU else dict.fromkeys(names), rounds=3
        )
        for name, ms in found.items():
            print(f"{what}, {lengths}: {name:23} {ms:8.3f} ms")
    print(f"times: {figures.machine}")
