# %% [markdown]
# # 06. Sequences of any length: the tile scheduler
#
# **The idea:** sequences lie end to end in one tensor, every block of queries of
# every head is a tile with a number, and each program takes numbers and finds out
# on the GPU what they stand for.
#
# After this lesson you can
#
# - put sequences of different lengths into one call, with no padding,
# - say which sequence, head and block a tile number stands for, and how a warp
#   computes it,
# - write a persistent kernel that takes tiles from a counter, and judge when that
#   is worth it.
#
# You need lesson 04: a program of FlashAttention-2 computes one block of queries of
# one head.

# %%
import torch
import triton
import triton.language as tl
from lesson import (
    DEVICE,
    Figures,
    NotYet,
    assert_within,
    here,
    pictures_06,
    solutions_06,
    varlen,
)

figures = Figures("06_varlen")
torch.manual_seed(0)

# %% [markdown]
# ## Padding
#
# Texts have different lengths, and a tensor has one. Padding makes all as long as
# the longest, and the work of attention grows with the square of the length. What
# share of the work is real?

# %%
pictures_06.padding()

# %% [markdown]
# So the sequences are packed end to end into a tensor (total, nheads, headdim),
# with `cu_seqlens`, which says where each begins and ends: 0, then the running sum
# of the lengths. It is on the GPU. The host would have to wait for the GPU to learn
# a length, so it launches without knowing any, and the kernel computes what each
# program has to do.


# %%
def cumulative(lengths):
    """cu_seqlens: where sequence b begins (at b) and ends (at b + 1)."""
    starts = torch.tensor([0, *lengths], dtype=torch.int32, device=DEVICE)
    return starts.cumsum(0, dtype=torch.int32)


lengths = [160, 300]
cu_seqlens = cumulative(lengths)
q, k, v = torch.randn(3, sum(lengths), 2, 64).to(DEVICE, torch.bfloat16).unbind(0)
# tilewise.attention(q, k, v, cu_seqlens_q=..., ...)
out = varlen.attention(q, k, v, cu_seqlens)
for start, stop in zip(cu_seqlens.tolist(), cu_seqlens.tolist()[1:]):
    error = varlen.error_of(out, q, k, v, start, stop)
    rows = f"rows {start} to {stop - 1}"
    print(f"{rows}, against the sequence alone in fp64: off by {error:.4f}")

# %% [markdown]
# ## What a tile number stands for
#
# With equal lengths a program divides its number by the blocks of a sequence and
# has everything. Here the blocks of each sequence differ: 160 queries are 2 blocks
# of 128, 300 are 3. Tiles are numbered by sequence, then head, then block, so that
# neighbours share keys and values in the L2 cache. With one head, tiles 0 and 1 are
# sequence 0, tiles 2, 3 and 4 are sequence 1. With more:
#
#     tile = block + head · blocks(sequence)
#            + nheads · (blocks of all sequences before)
#
# With two heads, tile 9 is 2 + 1 · 3 + 2 · 2: sequence 1, head 1, block 2.

# %%
BLOCK, NHEADS = 128, 2
before = [0, 2]  # blocks of the sequences before
for tile, batch, head, block, _ in varlen.tiles(lengths, NHEADS, BLOCK):
    blocks = -(-lengths[batch] // BLOCK)
    assert tile == block + head * blocks + NHEADS * before[batch]
    print(f"tile {tile}: sequence {batch}, head {head}, block {block}")
pictures_06.tile_numbers(lengths)

# %% [markdown]
# ## Exercise 1: from a number to a tile
#
# Write `find(tile, lengths, nheads, block)` in plain Python. It returns (batch,
# head, block), or None past the last tile, without listing tiles.
#
# **Hint:** take the tiles of one sequence after the other off the number, until it
# falls into one.


# %%
def find(tile, lengths, nheads, block):
    """(batch, head, block) of this tile, or None."""
    raise NotYet


solutions_06.check_find(find)

# %% [markdown]
# <details><summary>An answer</summary>
#
# ```{literalinclude} /../tour/lesson/solutions_06.py
# :pyobject: find
# :language: python
# ```
#
# </details>
#
# ## The same by one warp
#
# To read the lengths one after the other would be slow for a batch of hundreds. But
# the 32 threads of a warp, its lanes, do the same thing at the same time, and
# exchange numbers fast. So each lane has one sequence:
#
# 1. Lane b loads the two ends of sequence b and computes its blocks.
# 2. The sum over the lanes, times the heads, is how many tiles these 32 sequences
#    have. If the tile is not among them, subtract, and load the next 32.
# 3. A prefix sum gives each lane the tiles up to and with its own sequence: its
#    end.
# 4. The number of ends at or before the tile is the number of sequences before it,
#    and so its own sequence. (An empty sequence ends where it begins.)
# 5. What is left after the largest of these ends is divided by the blocks of that
#    sequence.
#
# Step by step in torch, for five sequences of which one is empty, and tile 12:

# %%
some, tile = [160, 0, 300, 500, 90], 12
lane = torch.arange(32)
ends_of = torch.tensor([0, *some]).cumsum(0)
length = ends_of[(lane + 1).clamp(max=5)] - ends_of[lane.clamp(max=5)]
blocks = (length + BLOCK - 1) // BLOCK
ends = blocks.cumsum(0) * NHEADS
is_before = ends <= tile
batch = is_before.sum().item()
within = tile - ends[is_before].max().item()
head, block = divmod(within, blocks[batch].item())
for what, values in dict(blocks=blocks, ends=ends, before=is_before.int()).items():
    first = " ".join(f"{x:3}" for x in values[:8].tolist())
    print(f"{what:7} {first}  ... in lanes 0 to 31")
split = f"{within} = {head} * {blocks[batch]} + {block}"
line = f"tile {tile}: {batch} ends are before it, so sequence {batch}; "
print(line + f"what is left is {split}")
assert (batch, head, block) == solutions_06.find(tile, some, NHEADS, BLOCK)

# %% [markdown]
# `tilewise.tile.varlen.varlen_tile` is these steps as a function that kernels call:
# Triton's, and on Hopper the warp that loads. Give it a tile number and 32 lanes.
# It returns the tile, whether there is one (`is_tile`), and a hint where to begin
# the next search, for kernels that take ever larger numbers. FlashAttention-3's
# VarlenDynamicPersistentTileScheduler works in this way.
#
# ## Which program takes which tile
#
# The host does not know how many tiles there are. But a sequence has at most one
# block that is not full, so (total // BLOCK + batch) · nheads is enough for any
# lengths. There are three ways:
#
# - *One program per tile.* Launch that many; those past the end return at once. The
#   GPU starts the next program on any SM with room. The library's portable kernels
#   do this.
# - *Persistent, static.* Launch one program per SM, and let program i take tiles i,
#   i + P, i + 2P, ... A persistent program can load its next tile while it still
#   finishes the last one.
# - *Persistent, dynamic.* The same, but the next number comes from a counter in
#   memory, which each program increases by one atomically: the first to be done
#   gets the next tile.
#
# Here are the last two as one kernel. To keep the eye on the schedule, a tile's
# work is less than attention but costs in the same way: the causal mean of the
# values, block of keys by block.


# %%
@triton.jit
def mean_of_tile(
    v, out, cu_seqlens, found, nheads, D: tl.constexpr, BLOCK: tl.constexpr
):
    """out = the mean of v up to each row, for the rows of one tile."""
    start = tl.load(cu_seqlens + found.batch)
    length = tl.load(cu_seqlens + found.batch + 1) - start
    first = found.m_block * BLOCK
    q_idx = first + tl.arange(0, BLOCK)
    offs_d = found.head * D + tl.arange(0, D)[None, :]
    acc = tl.zeros([BLOCK, D], tl.float32)
    for n_start in range(0, tl.minimum(first + BLOCK, length), BLOCK):
        k_idx = n_start + tl.arange(0, BLOCK)
        of_keys = (start + k_idx)[:, None] * nheads * D + offs_d
        v_tile = tl.load(v + of_keys, mask=(k_idx < length)[:, None], other=0.0)
        seen = q_idx[:, None] >= k_idx[None, :]
        acc = tl.dot(seen.to(v_tile.dtype), v_tile, acc)
    of_rows = (start + q_idx)[:, None] * nheads * D + offs_d
    mean = acc / (q_idx + 1).to(tl.float32)[:, None]
    tl.store(
        out + of_rows, mean.to(v.dtype.element_ty), mask=(q_idx < length)[:, None]
    )


@triton.jit
def mean_kernel(
    v, out, cu_seqlens, counter, taken_by, total, batch_size, nheads, bound,
    D: tl.constexpr, BLOCK: tl.constexpr,
    DYNAMIC: tl.constexpr, LONGEST_FIRST: tl.constexpr,
):  # fmt: skip
    lane = tl.arange(0, 32)
    if DYNAMIC:
        tile = tl.atomic_add(counter, 1)  # what it was before
    else:
        tile = tl.program_id(0)
    while tile < bound:
        found = varlen.varlen_tile(
            tile,
            varlen.Hint(0, 0),
            lane,
            cu_seqlens,
            total,
            batch_size,
            nheads,
            BLOCK,
            1,
            LONGEST_FIRST,
        )
        if found.is_tile:
            mean_of_tile(v, out, cu_seqlens, found, nheads, D, BLOCK)
            tl.store(taken_by + tile, tl.program_id(0))
        if DYNAMIC:
            tile = tl.atomic_add(counter, 1)
        else:
            tile += tl.num_programs(0)


def running_mean(v, lengths, programs, dynamic, longest_first=False, block=64):
    """The causal mean of packed values, and the program of each tile (-1: none)."""
    return launcher(v, lengths, programs, block)(dynamic, longest_first)


def launcher(v, lengths, programs, block):
    """Launches of `mean_kernel` for these sequences; tensors are made once."""
    total, nheads, headdim = v.shape
    bound = (total // block + len(lengths)) * nheads
    counter = torch.zeros(1, dtype=torch.int32, device=v.device)
    taken_by = torch.full((bound,), -1, dtype=torch.int32, device=v.device)
    out, starts = torch.empty_like(v), cumulative(lengths)

    def launch(dynamic, longest_first):
        counter.zero_()
        here(mean_kernel)[(programs,)](
            *(v, out, starts, counter, taken_by),
            *(total, len(lengths), nheads, bound),
            *(headdim, block, dynamic, longest_first),
        )
        return out, taken_by

    return launch


# %% [markdown]
# Compared with torch's running sum, with more sequences than a warp has lanes, some
# of them empty, on four programs:

# %%
ragged = [70, 0, 1, 130, *[9] * 30, 64, 0, 100]
values = torch.randn(sum(ragged), 2, 32).to(DEVICE, torch.bfloat16)
parts = values.double().split(ragged)
means = [
    x.cumsum(0) / torch.arange(1, len(x) + 1, device=DEVICE)[:, None, None]
    for x in parts
]
expected = torch.cat(means)
for dynamic in (False, True):
    mean, taken_by = running_mean(values, ragged, 4, dynamic)
    kind = "dynamic" if dynamic else "static"
    error = (mean.double() - expected).abs().max().item()
    print(f"{kind:7}, {len(ragged)} sequences: off by {error:.4f}")
    print(f"    tiles 0 to 11 went to programs {taken_by[:12].tolist()}")
    # rounded once, at the end
    assert_within(mean, expected, expected.bfloat16(), kind)
    assert (taken_by >= 0).sum() == len(list(varlen.tiles(ragged, 2, 64)))

# %% [markdown]
# On a CPU the dynamic line shows program 0 alone. The interpreter runs one program
# after the other, so the first one takes every number that the counter has. The
# results must not depend on it, and do not. On a GPU you see in which order
# programs came.
#
# ## Timelines
#
# When is the counter worth it? The simulation gives tiles to processors, each tile
# costing as many units as it visits blocks of keys, and nothing else costs
# anything. A batch with one long sequence, causal, on eight processors:

# %%
done = pictures_06.timelines([160, 300, 4096])

# %% [markdown]
# In the static schedules the long sequence has 32 blocks, four rounds of eight, so
# in every round the longest tile of the eight falls to the same processor. The
# counter evens that out. But the last tiles of a causal head are its longest, and
# one that starts when the others are nearly done makes all wait. With the longest
# first the short ones come at the end, and fill the gaps. This costs nothing:
# inside a head the block number is counted from the other side.
#
# The bound is Graham's (1969): tiles in any order, each to the first processor that
# is free, are done at latest at (2 - 1/P) times the best possible moment, and at
# (4/3 - 1/3P) if they go from long to short.
#
# ## Exercise 2: a good static order
#
# If the host knew the lengths, it could order all tiles, across heads and
# sequences. Write `static_order(costs, processors)`: the costs in an order in which
# the static schedule, tile i on processor i mod P, is done at most 5 % after the
# bound.
#
# **Hint:** sort the costs and take them in rounds of P. Which processor should have
# the longest tile of the next round?


# %%
def static_order(costs, processors):
    """The same costs in another order."""
    raise NotYet


solutions_06.check_static_order(static_order)

# %% [markdown]
# <details><summary>An answer</summary>
#
# ```{literalinclude} /../tour/lesson/solutions_06.py
# :pyobject: static_order
# :language: python
# ```
#
# </details>
#
# ## On a GPU
#
# The lesson's kernel on 64 sequences whose lengths fall like 1/rank, one program an
# SM, in four ways; and attention on a chat server's batch as one padded call, as a
# call for each sequence, and as one packed call.

# %%
pictures_06.times(figures, launcher, cumulative)

# %% [markdown]
# Before you trust such a comparison, ask what else differs. Here a tile also
# searches from the first sequence, an atomic travels to the L2 cache and back
# before each tile, and one program per SM with small tiles leaves the tensor cores
# waiting. A schedule matters as much as the tiles at the end of the launch do: with
# 128 tiles per SM, as here, little. On the H200 the order that wins the simulation,
# *dynamic, longest first*, was even the slowest of the four, by 8 %. What the
# simulation leaves out (caches, and which rows are read side by side) weighs more.
#
# To try on the kernel itself: pass `found.hint` on from tile to tile, with 1,000
# sequences. In the dynamic kernel, count with `tl.atomic_add(counter, 2)` and
# compute two neighbours each time.

# %%
solutions_06.exercises.show()
