# %% [markdown]
# # 06. Sequences of any length: the tile scheduler
#
# After this lesson you can pack sequences of different lengths into one call, with no padding; say
# which sequence, head and block of queries a tile number stands for, and how a warp finds out on
# its own; write a persistent kernel that takes tile after tile from a counter; and judge from a
# timeline when that is worth it.
#
# You need lesson 04: a program of FlashAttention-2 does one block of queries of one head.

# %%
import contextlib

import matplotlib.pyplot as plt
import torch
import triton
import triton.language as tl
from lesson import DEVICE, ON_GPU, Figures, here, show

import tilewise
from benchmarks.timeline import COLOURS, letter
from tilewise.bench.lengths import SETS
from tilewise.testing import use_interpreter
from tilewise.testing.schedule import busy, key_blocks, makespan, simulate, tiles
from tilewise.testing.tolerance import assert_within
from tilewise.tile.varlen import Hint, varlen_tile

figures = Figures("06_varlen")
torch.manual_seed(0)

# %% [markdown]
# ## Padding, and how not to pay for it
#
# Texts have different lengths, and a tensor has one. Padding makes all as long as the longest, and
# the work of attention grows with the square of the length. What share of the work is real?

# %%
for name in ("prefill-chat", "zipf", "one-long"):
    lengths = SETS[name]
    rows = sum(lengths) / (len(lengths) * max(lengths))
    pairs = sum(n * n for n in lengths) / (len(lengths) * max(lengths) ** 2)
    print(f"{name:13} {len(lengths):3} sequences, longest {max(lengths):5}: padded, ", end="")
    print(f"{100 * rows:4.1f} % of the rows are real and {100 * pairs:4.1f} % of the pairs")

# %% [markdown]
# So the sequences are packed: one behind the other in a tensor (total, nheads, headdim), with
# `cu_seqlens`, which says where each begins and ends: 0, then the running sum of the lengths. It
# lives on the GPU, and that is the point. The host would have to wait for the GPU to learn a
# length, so it launches without knowing any, and the kernel finds its way on its own.


# %%
def cumulative(lengths):
    """cu_seqlens: where sequence b begins (at b) and ends (at b + 1)."""
    return torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32).to(DEVICE)


lengths = [160, 300]
cu_seqlens = cumulative(lengths)
q, k, v = torch.randn(3, sum(lengths), 2, 64).to(DEVICE, torch.bfloat16).unbind(0)
packed = dict(cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens, causal=True)
with contextlib.nullcontext() if ON_GPU else use_interpreter():
    out = tilewise.attention(q, k, v, **packed, backend="portable")

for start, stop in zip(cu_seqlens.tolist(), cu_seqlens.tolist()[1:]):
    alone = [x[None, start:stop] for x in (q, k, v)]
    exact = tilewise.attention_reference(*(x.double() for x in alone), causal=True)[0]
    plain = tilewise.attention_reference(*alone, causal=True, upcast=False)[0]
    assert_within(out[start:stop], exact, plain, f"sequence at {start}")
    error = (out[start:stop].double() - exact).abs().max().item()
    print(f"rows {start} to {stop - 1}, against the sequence alone in fp64: off by {error:.4f}")

# %% [markdown]
# ## What a tile number stands for
#
# With equal lengths a program divides its number by the blocks of a sequence and has everything.
# Here the blocks of each sequence differ: 160 queries are 2 blocks of 128, 300 are 3. Tiles are
# numbered by sequence, then head, then block, so that neighbours share keys and values in the L2
# cache. With one head, tiles 0 and 1 are sequence 0, tiles 2, 3 and 4 are sequence 1. With more:
#
#     tile = block + head · blocks(sequence) + nheads · (blocks of all sequences before)
#
# `tilewise.testing.schedule.tiles` gives the numbers out in plain Python. Two heads:

# %%
BLOCK, NHEADS = 128, 2
before = [0, 2]  # blocks of the sequences before
for tile, batch, head, block, _ in tiles(lengths, NHEADS, BLOCK):
    blocks = -(-lengths[batch] // BLOCK)
    formula = f"{block} + {head} * {blocks} + {NHEADS} * {before[batch]}"
    assert tile == block + head * blocks + NHEADS * before[batch]
    print(f"tile {tile} = {formula}: sequence {batch}, head {head}, block {block}")

fig, ax = plt.subplots(figsize=(9, 1.9))
for tile, batch, head, block, _ in tiles(lengths, NHEADS, BLOCK):
    rows = min(BLOCK, lengths[batch] - block * BLOCK)
    box = dict(facecolor=COLOURS[batch], edgecolor="black")
    ax.add_patch(plt.Rectangle((tile, 0), 1, rows / BLOCK, **box))
    ax.add_patch(plt.Rectangle((tile, 0), 1, 1, facecolor="none", edgecolor="black"))
    text = f"{tile}\nseq {batch}\nhead {head}\nblock {block}"
    ax.text(tile + 0.5, 0.5, text, ha="center", va="center", fontsize=8,
            bbox=dict(facecolor="white", edgecolor="none", pad=2))  # fmt: skip
ax.set(xlim=(0, 10), ylim=(0, 1), xticks=[], yticks=[])
ax.set_title("Tiles of sequences of 160 and 300, two heads; coloured as far as they are full")
show(fig, "06_tiles")

# %% [markdown]
# ## The way back, by one warp
#
# A program is given 9 and needs (1, 1, 2). It cannot divide, and reading the lengths one after the
# other would be a slow walk for a batch of hundreds. But the 32 threads of a warp, its lanes, do
# the same thing at the same time, and pass numbers among each other fast. So each lane takes one
# sequence:
#
# 1. Lane b loads the two ends of sequence b and computes its blocks.
# 2. The sum over the lanes, times the heads, is how many tiles these 32 sequences have. If the tile
#    is not among them, subtract, and load the next 32.
# 3. A prefix sum gives each lane the tiles up to and with its own sequence: its end.
# 4. The number of ends at or before the tile is the number of sequences that it has passed, and so
#    its own sequence. (An empty sequence ends where it begins: it is always passed over.)
# 5. What is left after the largest passed end is divided by the blocks of that sequence.
#
# Step by step in torch, for five sequences of which one is empty, and tile 12:

# %%
some, tile = [160, 0, 300, 500, 90], 12
lane = torch.arange(32)
ends_of = torch.tensor([0, *some]).cumsum(0)
blocks = (ends_of[(lane + 1).clamp(max=5)] - ends_of[lane.clamp(max=5)] + BLOCK - 1) // BLOCK
ends = blocks.cumsum(0) * NHEADS
is_passed = ends <= tile
batch = is_passed.sum().item()
within = tile - ends[is_passed].max().item()
head, block = divmod(within, blocks[batch].item())
for what, values in dict(blocks=blocks, ends=ends, passed=is_passed.int()).items():
    print(f"{what:7}", " ".join(f"{x:3}" for x in values[:8].tolist()), " ... in lanes 0 to 31")
split = f"{within} = {head} * {blocks[batch]} + {block}"
print(f"tile {tile}: {batch} ends are passed, so sequence {batch}; what is left is {split}")
assert (tile, batch, head, block, 0) == list(tiles(some, NHEADS, BLOCK))[tile]

# %% [markdown]
# `tilewise.tile.varlen.varlen_tile` is these steps as a function that kernels call: Triton's, and
# on Hopper the warp that loads. Give it a tile number and 32 lanes. It says which
# tile that is, or that there is none (`is_tile`), and a hint where to begin the next search, for
# kernels that take ever larger numbers. FlashAttention-3's VarlenDynamicPersistentTileScheduler
# works in this way.
#
# ## Who takes which tile
#
# The kernel needs as many programs as there are tiles, and the host does not know how many those
# are. But it knows that a sequence has at most one block that is not full, so
# (total // BLOCK + batch) · nheads is enough for any lengths. There are three ways to hand out:
#
# - *One program a tile.* Launch that many; those past the end leave at once. The GPU gives the next
#   program to whichever processor has room. The library's portable kernels do this.
# - *Persistent, static.* Launch one program a processor, and let program i take tiles i, i + P,
#   i + 2P, ... A program that lives on can load its next tile while it still finishes the last one.
#   But nobody looks at how long tiles take.
# - *Persistent, dynamic.* The same, but the next number comes from a counter in memory, which
#   everybody increases by one atomically: who is free first gets the next tile.
#
# Here are the last two as one kernel. To keep the eye on the schedule, a tile's work is less than
# attention but costs in the same way: the mean of all values that a query may see, causally, block
# of keys by block of keys.


# %%
@triton.jit
def mean_of_tile(v, out, cu_seqlens, found, nheads, D: tl.constexpr, BLOCK: tl.constexpr):
    """out = the mean of v up to each row, for one block of rows of one head of one sequence."""
    start = tl.load(cu_seqlens + found.batch)
    length = tl.load(cu_seqlens + found.batch + 1) - start
    first = found.m_block * BLOCK
    q_idx, offs_d = first + tl.arange(0, BLOCK), found.head * D + tl.arange(0, D)[None, :]
    acc = tl.zeros([BLOCK, D], tl.float32)
    for n_start in range(0, tl.minimum(first + BLOCK, length), BLOCK):
        k_idx = n_start + tl.arange(0, BLOCK)
        of_keys = (start + k_idx)[:, None] * nheads * D + offs_d
        v_tile = tl.load(v + of_keys, mask=(k_idx < length)[:, None], other=0.0)
        seen = q_idx[:, None] >= k_idx[None, :]
        acc = tl.dot(seen.to(v_tile.dtype), v_tile, acc)
    of_rows = (start + q_idx)[:, None] * nheads * D + offs_d
    mean = acc / (q_idx + 1).to(tl.float32)[:, None]
    tl.store(out + of_rows, mean.to(v.dtype.element_ty), mask=(q_idx < length)[:, None])


@triton.jit
def mean_kernel(
    v, out, cu_seqlens, counter, taken_by, total, batch_size, nheads, bound,
    D: tl.constexpr, BLOCK: tl.constexpr, DYNAMIC: tl.constexpr, LONGEST_FIRST: tl.constexpr,
):  # fmt: skip
    lane = tl.arange(0, 32)
    if DYNAMIC:
        tile = tl.atomic_add(counter, 1)  # what it was before
    else:
        tile = tl.program_id(0)
    while tile < bound:
        found = varlen_tile(
            tile, Hint(0, 0), lane, cu_seqlens, total, batch_size, nheads, BLOCK, 1, LONGEST_FIRST
        )
        if found.is_tile:
            mean_of_tile(v, out, cu_seqlens, found, nheads, D, BLOCK)
            tl.store(taken_by + tile, tl.program_id(0))
        if DYNAMIC:
            tile = tl.atomic_add(counter, 1)
        else:
            tile += tl.num_programs(0)


def running_mean(v, lengths, programs, dynamic, longest_first=False, block=64):
    """The causal mean of packed values, and which program took which tile (-1: no tile)."""
    return launcher(v, lengths, programs, block)(dynamic, longest_first)


def launcher(v, lengths, programs, block):
    """Launches of `mean_kernel` for these sequences, without making tensors each time."""
    total, nheads, headdim = v.shape
    bound = (total // block + len(lengths)) * nheads
    counter = torch.zeros(1, dtype=torch.int32, device=v.device)
    taken_by = torch.full((bound,), -1, dtype=torch.int32, device=v.device)
    out, starts = torch.empty_like(v), cumulative(lengths)

    def launch(dynamic, longest_first):
        counter.zero_()
        here(mean_kernel)[(programs,)](
            *(v, out, starts, counter, taken_by, total, len(lengths), nheads, bound),
            *(headdim, block, dynamic, longest_first),
        )
        return out, taken_by

    return launch


# %% [markdown]
# Checked against torch's running sum, with more sequences than a warp has lanes, some of them
# empty, on four programs:

# %%
ragged = [70, 0, 1, 130, *[9] * 30, 64, 0, 100]
values = torch.randn(sum(ragged), 2, 32).to(DEVICE, torch.bfloat16)
parts = values.double().split(ragged)
means = [x.cumsum(0) / torch.arange(1, len(x) + 1, device=DEVICE)[:, None, None] for x in parts]
expected = torch.cat(means)
for dynamic in (False, True):
    mean, taken_by = running_mean(values, ragged, 4, dynamic)
    kind = "dynamic" if dynamic else "static"
    error = (mean.double() - expected).abs().max().item()
    print(f"{kind:7}, {len(ragged)} sequences: off by {error:.4f}; ", end="")
    print(f"tiles 0 to 11 went to programs {taken_by[:12].tolist()}")
    assert_within(mean, expected, expected.bfloat16(), kind)  # rounded once, at the end
    assert (taken_by >= 0).sum() == len(list(tiles(ragged, 2, 64)))

# %% [markdown]
# On a CPU the dynamic line shows program 0 alone. The interpreter runs one program after the other,
# so the first one takes every number that the counter has, and the rest find nothing. The results
# must not depend on it, and do not. On a GPU you see who came when.
#
# ## Timelines
#
# When is the counter worth it? `simulate` gives tiles to processors, each tile costing as many
# units as it visits blocks of keys, and nothing else costs anything. A batch with one long
# sequence, causal, on eight processors. (`python -m benchmarks schedule --lengths 160,300,4096
# --nheads 2 --causal` prints it in the terminal, for any lengths.)

# %%
PROCESSORS, mixed = 8, [160, 300, 4096]


def timeline(longest_first, dynamic):
    """The tiles, and who runs them when."""
    numbered = list(tiles(mixed, NHEADS, BLOCK, longest_first=longest_first))
    costs = [key_blocks(mixed[tile.batch], tile.m_block, BLOCK, causal=True) for tile in numbered]
    return numbered, simulate(costs, PROCESSORS, dynamic)


plans = {
    "static": timeline(False, False),
    "static, longest first": timeline(True, False),
    "dynamic": timeline(False, True),
    "dynamic, longest first": timeline(True, True),
}
latest = max(makespan(runs) for _, runs in plans.values())
fig, axes = plt.subplots(4, 1, figsize=(9, 7.5), sharex=True)
for ax, (name, (numbered, runs)) in zip(axes, plans.items()):
    for run in runs:
        of, wide = numbered[run.tile].batch, run.stop - run.start
        box = dict(color=COLOURS[of], edgecolor="black", linewidth=0.5, height=0.9)
        box |= dict(hatch="////" if of == 1 else "")
        ax.barh(run.processor, wide, left=run.start, **box)
        if wide > 2:
            ax.text(run.start + wide / 2, run.processor, letter(of), ha="center", va="center",
                    fontsize=6)  # fmt: skip
    end, share = makespan(runs), busy(runs, PROCESSORS)
    ax.axvline(end, color="black", linestyle="--")
    ax.set_title(f"{name}: done at {end}, {100 * share:.0f} % busy", fontsize=9, loc="left")
    ax.set(ylim=(PROCESSORS - 0.5, -0.5), yticks=[], xlim=(0, latest * 1.02))
    ax.set_ylabel("processors", fontsize=8)
axes[-1].set_xlabel("time, in blocks of keys; a, b, c: sequences")
show(fig, "06_timelines")

work = sum(run.stop - run.start for run in runs)
longest = max(run.stop - run.start for run in runs)
print(f"nobody can be done before {max(work / PROCESSORS, longest):.0f}")

# %% [markdown]
# Static plans suffer from the rhythm of the tiles: the long sequence has 32 blocks, four rounds of
# eight, so in every round the longest tile of the eight falls to the same processor. The counter
# evens that out. But look at the end of *dynamic*: the last tiles of a causal head are its
# longest, and whoever starts one when the others are nearly done lets them all wait. With the
# longest first the small ones come at the end, and fill the gaps as sand does between stones. This
# costs nothing: inside a head the block number is counted from the other side. Sequences keep their
# order, as sorting them would need another kernel.
#
# The rule behind it is Graham's, of 1969: a list given out to whoever is free is done at latest at
# (2 - 1/P) times the best possible moment, and at (4/3 - 1/3P) if the list goes from long to short.
#
# ## On a GPU
#
# The lesson's kernel on 64 sequences whose lengths fall like 1/rank, one program a processor, in
# four ways; and attention on a chat server's batch as one padded call, as a call for each sequence,
# and as one packed call.

# %%
WAYS = {name: (name.startswith("dynamic"), "longest" in name) for name in plans}


def schedules():
    """The four plans with the lesson's kernel. For a GPU."""
    processors = torch.cuda.get_device_properties(0).multi_processor_count if ON_GPU else 8
    zipf = SETS["zipf"]
    v = torch.randn(sum(zipf), 16, 128, device=DEVICE, dtype=torch.bfloat16)
    launch = launcher(v, zipf, processors, 64)
    return {name: lambda way=way: launch(*way) for name, way in WAYS.items()}


def batches():
    """One batch in three forms. For a GPU."""
    chat = SETS["prefill-chat"]
    shape = len(chat), max(chat), 16, 128
    padded = torch.randn(3, *shape, device=DEVICE, dtype=torch.bfloat16).unbind(0)
    real = [torch.cat([x[b, :n] for b, n in enumerate(chat)]) for x in padded]
    starts = cumulative(chat)
    alone = [[x[b : b + 1, :n] for x in padded] for b, n in enumerate(chat)]
    ends = dict(cu_seqlens_q=starts, cu_seqlens_k=starts)
    return {
        "padded": lambda: tilewise.attention(*padded, causal=True),
        "one by one": lambda: [tilewise.attention(*each, causal=True) for each in alone],
        "packed, portable": lambda: tilewise.attention(
            *real, **ends, causal=True, backend="portable"
        ),
        "packed": lambda: tilewise.attention(*real, **ends, causal=True),
    }


FORMS = ["padded", "one by one", "packed, portable", "packed"]
zipf_shape = dict(lengths="zipf", nheads=16, headdim=128, what="running mean")
chat_shape = dict(lengths="prefill-chat", nheads=16, headdim=128, what="attention")
mean_ms = figures.times(zipf_shape, schedules() if ON_GPU else dict.fromkeys(WAYS), rounds=3)
chat_ms = figures.times(chat_shape, batches() if ON_GPU else dict.fromkeys(FORMS), rounds=3)
for title, times in (("running mean, zipf", mean_ms), ("attention, prefill-chat", chat_ms)):
    for name, ms in times.items():
        print(f"{title}: {name:23} {ms:8.3f} ms   ({figures.machine})")
if not mean_ms:
    print(f"times: {figures.machine}")

# %% [markdown]
# Before you trust such a comparison, ask what else differs. Here a tile also searches for itself
# from the first sequence, an atomic travels to the L2 cache and back before each tile, and one
# program a processor with small tiles leaves the matmul units waiting. A schedule matters as much
# as the tiles at the end of the launch do: with 128 tiles a processor, as here, little. On the H200
# the order that wins the simulation, *dynamic, longest first*, was even the slowest of the four, by
# 8 %. What the simulation leaves out (caches, and which rows are read side by side) weighs more.
#
# ## Exercises
#
# **1.** *The way back in plain Python.* Write `find(tile, lengths, nheads, block)` that returns
# (batch, head, block) or None past the last tile, without listing tiles, and hold it to `tiles`.
#
# <details><summary>Solution</summary>
#
# ```python
# def find(tile, lengths, nheads, block):
#     for batch, length in enumerate(lengths):
#         blocks = -(-length // block)
#         if tile < blocks * nheads:
#             head, m_block = divmod(tile, blocks)
#             return batch, head, m_block
#         tile -= blocks * nheads
#     return None
#
# for nheads in (1, 2, 3):
#     numbered = list(tiles(ragged, nheads, 64))
#     for tile, batch, head, m_block, _ in numbered:
#         assert find(tile, ragged, nheads, 64) == (batch, head, m_block)
#     assert find(len(numbered), ragged, nheads, 64) is None
# ```
# </details>
#
# **2.** *Sort everything.* If the host knew the lengths, it could hand out all tiles from the
# longest to the shortest, across heads and sequences. How much earlier is the batch above done than
# by *dynamic, longest first*? Does it keep Graham's promise? Then make the static plan as good as
# you can by order alone.
#
# <details><summary>Solution</summary>
#
# ```python
# numbered, runs = plans["dynamic, longest first"]
# costs = sorted((run.stop - run.start for run in runs), reverse=True)
# best = max(-(-sum(costs) // PROCESSORS), max(costs))
# ideal = makespan(simulate(costs, PROCESSORS, dynamic=True))
# print(f"sorted: {ideal}, longest first in each head: {makespan(runs)}, bound {best}")
# assert best <= ideal <= (4 / 3 - 1 / (3 * PROCESSORS)) * best
#
# # Static: deal the sorted tiles as in a draft, forwards and then backwards, so that who
# # got the longest of one round gets the shortest of the next.
# rounds = [costs[i : i + PROCESSORS] for i in range(0, len(costs), PROCESSORS)]
# snake = [cost for i, each in enumerate(rounds) for cost in (each[::-1] if i % 2 else each)]
# static = makespan(simulate(snake, PROCESSORS, dynamic=False))
# print(f"static, dealt as a snake: {static}")
# assert static < makespan(plans["static"][1])
# ```
# </details>
#
# To try on the kernel itself: pass `found.hint` on from tile to tile, with 1,000 sequences. In the
# dynamic kernel, count with `tl.atomic_add(counter, 2)` and do two neighbours each time: fewer
# trips to the counter, and a coarser schedule.
