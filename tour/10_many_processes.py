# %% [markdown]
# # 10. One sequence over many processes
#
# **The idea:** keys travel and queries stay: which rank has which tokens decides
# the work of each, and the order in which keys are summed decides whether the bits
# are those of one process.
#
# After this lesson you can
#
# - count the tiles of each rank under a causal mask, and choose a layout that makes
#   them equal,
# - merge results over shards of keys by their log-sum-exp, in a kernel,
# - say why whole keys in order give the bits of one process, and merged shards do
#   not.
#
# You need lesson 04 for the online softmax and its log-sum-exp. Two processes of a
# CPU are enough: they exchange keys as GPUs do, over gloo, PyTorch's communication
# backend for CPUs.

# %%
import torch
import triton
import triton.language as tl
from lesson import DEVICE, Figures, NotYet, here, pictures_10, solutions_10

import tilewise.distributed

td = tilewise.distributed
figures = Figures("10_many_processes")
torch.manual_seed(0)

# %% [markdown]
# ## What has to travel
#
# The activations of a million tokens do not fit on one GPU. So each process, a
# **rank**, has some of the tokens: a **shard**. Norms, projections and the MLP
# compute on a token alone, and nothing changes for them. Attention does not: a
# query sees keys of other ranks.
#
# Either queries go to the keys, and outputs come back with their log-sum-exp, or
# keys and values go to the queries. Count elements for one token, with headdim 128:


# %%
def queries_travel(nheads, nheads_k, headdim):
    """q, out and lse of a token; the numbers of heads of keys do not matter."""
    return nheads * (2 * headdim + 1)


def keys_travel(nheads, nheads_k, headdim):
    """k and v of a token."""
    return nheads_k * 2 * headdim


for heads in ((32, 32), (32, 8), (64, 8)):
    found = [count(*heads, 128) for count in (queries_travel, keys_travel)]
    line = f"{heads[0]} heads on {heads[1]:2}: queries {found[0]:6}"
    print(f"{line}, keys {found[1]:5} elements")

# %% [markdown]
# Models share key heads, so keys are several times fewer. They have no result to
# bring back either: a rank has all that it needs for its own rows of `out`. Keys
# travel, queries stay.
#
# ## Which rank has which tokens
#
# Under a causal mask, query i sees i + 1 keys. In runs of equal length, the last
# rank's queries see most. The kernel computes tiles, so count those: 1024 tokens,
# tiles of 64 queries by 64 keys, four ranks. A **layout** of `tilewise.distributed`
# says which rank has which tokens; it is made from lengths alone, and needs no
# process.


# %%
def tiles_of(layout, rank, block=64):
    """The tiles (m_block, n_block) of a rank that a causal mask leaves."""
    rows = layout.at(rank).positions.split(block)
    last = [int(x.max()) // block for x in rows]
    return [
        (m_block, n_block) for m_block in last for n_block in range(m_block + 1)
    ]


LAYOUTS = td.contiguous(1024, 4), td.zigzag(1024, 4)
tiles = {x.kind: [tiles_of(x, rank) for rank in range(4)] for x in LAYOUTS}
counts = pictures_10.tiles(tiles)
assert len(set(counts["zigzag"])) == 1, "the same for every rank"
assert sum(counts["zigzag"]) == sum(counts["contiguous"])
print(td.contiguous(1024, 4).explain())

# %% [markdown]
# All wait for the slowest rank. With contiguous shards it computes 1.7 times the
# mean, and with more ranks almost twice the mean. **Zigzag** gives a rank one chunk
# from the front and one from the back, and all ranks have the same number of tiles.
#
# ## Exercise 1: zigzag
#
# Cut the sequence into 2 N chunks for N ranks. Which two has rank r, so that all
# have the same number of tiles?
#
# **Hint:** the later a chunk, the more tiles it has. Which two have the same sum on
# every rank?


# %%
def chunks_of(rank, ranks):
    """The two chunks of a rank, of 2 * ranks, in the order of the sequence."""
    raise NotYet


solutions_10.check_chunks(chunks_of)

# %% [markdown]
# <details><summary>An answer</summary>
#
# ```{literalinclude} /../tour/lesson/solutions_10.py
# :pyobject: chunks_of
# :language: python
# ```
#
# </details>
#
# ## Exercise 2: rows to pull
#
# With a sliding window a rank needs few keys of others: query i sees keys i -
# window to i. Given the runs [start, stop) of tokens that a rank has, how many rows
# of keys of other ranks do its queries see?
#
# **Hint:** a key that two queries see is pulled once.


# %%
def rows_to_pull(runs, window):
    """How many keys the queries of these runs see that are not among the runs."""
    raise NotYet


solutions_10.check_rows_to_pull(rows_to_pull)

# %% [markdown]
# <details><summary>An answer</summary>
#
# ```{literalinclude} /../tour/lesson/solutions_10.py
# :pyobject: rows_to_pull
# :language: python
# ```
#
# </details>
#
# ## Ring: merge the results of shards
#
# **Ring attention** needs room for one shard of keys at a time. A rank attends to
# its own shard, then to that of rank r - 1, then r - 2, and so on around the ring.
# Each shard gives a partial result: `out` over these keys alone, and `lse`, the
# log-sum-exp of their scores. As exp(lse) is the sum that `out` was divided by, two
# partial results are one:
#
#     lse = log(exp(lse1) + exp(lse2))
#     out = exp(lse1 - lse) · out1 + exp(lse2 - lse) · out2
#
# The kernel folds a partial result into what a rank has so far. Exponentials are of
# differences to the larger of the two, which cannot overflow. A query that sees no
# key of a shard has lse = -inf and weight 0 there; as long as it has seen no key at
# all, both are -inf, and -inf - -inf would be NaN: so 0 stands in place of their
# maximum.


# %%
@triton.jit
def fold_kernel(
    out, lse, part_out, part_lse, rows, D: tl.constexpr, BLOCK: tl.constexpr
):
    offs_m = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_row = offs_m < rows
    offs = offs_m[:, None] * D + tl.arange(0, D)[None, :]
    lse_1 = tl.load(lse + offs_m, mask=is_row, other=0.0)
    lse_2 = tl.load(part_lse + offs_m, mask=is_row, other=0.0)
    m_i = tl.maximum(lse_1, lse_2)
    m_i = tl.where(m_i == float("-inf"), 0.0, m_i)
    a, b = tl.exp(lse_1 - m_i), tl.exp(lse_2 - m_i)
    l_i = a + b
    divisor = tl.where(l_i == 0.0, 1.0, l_i)
    out_1 = tl.load(out + offs, mask=is_row[:, None], other=0.0)
    out_2 = tl.load(part_out + offs, mask=is_row[:, None], other=0.0)
    total = (a / divisor)[:, None] * out_1 + (b / divisor)[:, None] * out_2
    tl.store(out + offs, total, mask=is_row[:, None])
    tl.store(lse + offs_m, m_i + tl.log(l_i), mask=is_row)


def fold(state, part):
    """Folds a partial (out, lse), (rows, D) and (rows,) in fp32, into another."""
    rows, headdim = state[0].shape
    here(fold_kernel)[(triton.cdiv(rows, 32),)](*state, *part, rows, headdim, 32)


# %% [markdown]
# Here is a ring without processes: the ranks of a loop, one head, 500 tokens over
# three ranks.


# %%
def attend_shard(q, k, v, q_idx, k_idx):
    """out and lse of some queries over some keys, causal; 0 and -inf of none."""
    s = q @ k.T * q.shape[-1] ** -0.5
    s = s.masked_fill(k_idx > q_idx[:, None], float("-inf"))
    return s.softmax(-1).nan_to_num(0.0) @ v, s.logsumexp(-1)


def ring(q, k, v, layout, rank, order):
    """The rows of `out` of one rank, which meets the shards in this order."""
    mine = layout.at(rank)
    rows = mine.shard(q, 0)
    state = torch.zeros_like(rows), torch.full_like(rows[:, 0], float("-inf"))
    for its in map(layout.at, order):
        idx = mine.positions.to(DEVICE), its.positions.to(DEVICE)
        fold(state, attend_shard(rows, its.shard(k, 0), its.shard(v, 0), *idx))
    return state[0]


layout = td.zigzag(500, 3)
q, k, v = torch.randn(3, 500, 64, device=DEVICE).unbind(0)
inputs = (x.cpu().double()[None, :, None] for x in (q, k, v))
exact = tilewise.attention(*inputs, causal=True)[0, :, 0]
found = {}
for name, step in (("to the rank before", -1), ("to the rank after", 1)):
    orders = [[(rank + step * i) % 3 for i in range(3)] for rank in range(3)]
    parts = [
        ring(q, k, v, layout, rank, order) for rank, order in enumerate(orders)
    ]
    found[name] = layout.unshard(parts, 0).cpu()
    error = (found[name] - exact).abs().max().item()
    print(f"{name:18}: off by {error:.1e}")
    assert error < 5e-6
before, after = found.values()
print(f"{(before != after).sum()} of {before.numel()} numbers have other bits")
assert not torch.equal(before, after)

# %% [markdown]
# Both are right, and not the same. Each fold rounds, and which shards are folded
# first depends on the rank, so the bits of a row depend on the number of ranks and
# on the layout.
#
# ## Stream: whole keys, in order
#
# With **stream** a rank pulls the keys that its queries see, whole, and puts them
# in the order of the sequence. Then it computes its rows as one process does: block
# after block of keys from the first, with the same tiles. A row of `out` is
# computed from its query and its keys, other rows do not enter. So there is nothing
# to merge, and the bits are those of one process.
#
# What it takes is room for the keys and values that are seen, of one layer at a
# time. On a CPU it takes time, too: there the library leaves products to BLAS,
# which chooses how to sum by the shape of a product, so that each rank makes a call
# of the shape of one process.
#
# Now for real. This is the program of a process. Every rank makes the same layout,
# takes its shards and calls `td.attention`, which waits for the others' keys.

# %%
pictures_10.listing(pictures_10.program)

# %% [markdown]
# Two processes are started as `torchrun` starts them, with their rank and the
# number of ranks in the environment. **heads** is the library's third method: an
# exchange gives each rank the whole sequence of some heads.

# %%
HOW = {
    "stream": dict(method="stream", causal=True),
    "heads": dict(method="heads", causal=True),
    "ring": dict(method="ring", causal=True, bitwise=False),
}
q, k, v = torch.randn(1, 300, 4, 32), *torch.randn(2, 1, 300, 2, 32).unbind(0)
alone = tilewise.attention(q, k, v, causal=True)
results = pictures_10.on_ranks(2, (q, k, v), HOW)
same = {}
for name in HOW:
    out = td.zigzag(300, 2).unshard([result[name] for result in results])
    same[name] = torch.equal(out, alone)
    count, error = (out != alone).sum(), (out - alone).abs().max()
    line = f"{name:6}: {count:5} of {out.numel()} numbers differ"
    print(f"{line}, by {error:.1e} at most")
    assert error < 5e-6
assert same == {"stream": True, "heads": True, "ring": False}

# %% [markdown]
# ## In a model
#
# Inside `td.context_parallel(layout)`, `tilewise.attention` is of the whole
# sequence, so that a model needs no change: `examples/long_sequence.py` trains one,
# with the losses of one process. The gradients of a key are sums over ranks whose
# queries saw it. By stream its owner adds them in fp32, in the order of the ranks:
# the same bits in every run, and within the tolerance of those of one process.
#
# ## On a GPU
#
# What does the merge cost beside what it merges? 4096 queries of 16 heads, headdim
# 128, attend to a shard of as many keys; then one fold in fp32.

# %%
pictures_10.times(figures, fold)

# %% [markdown]
# To try on the kernel: keep `out` without its division by the sum, as
# FlashAttention does between two blocks of keys, and divide once after the last
# shard. What has to travel with it in place of `lse`?

# %%
solutions_10.exercises.show()
