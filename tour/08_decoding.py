# %% [markdown]
# # 08. Decoding with a cache: pieces and pages
#
# After this lesson you can say why a model that writes text waits for memory and not for
# arithmetic; split the keys of one query over all of a GPU, and fold what comes back; find keys
# through a page table; and say on what the bits of a result depend, and how to make that the
# sequence alone.
#
# You need lesson 04 for the online softmax, and of lesson 00 the roofline.

# %%
import matplotlib.pyplot as plt
import torch
import triton
import triton.language as tl
from lesson import DEVICE, ON_GPU, Figures, here, show

import tilewise
from tilewise import cache
from tilewise.bench.cards import CARDS
from tilewise.testing.tolerance import assert_within

figures = Figures("08_decoding")
torch.manual_seed(0)

# %% [markdown]
# ## One query, all the keys
#
# A model writes token by token. A new token has one query a head, and the query sees the keys of
# all tokens before it. Those do not change any more, so they are kept, with their values: the
# *cache*. What is left to do for a token is to read the cache once.
#
# Count it for one key head of D columns, in bf16. A key and its value are 2 · D elements, so 4 · D
# bytes. For a query that sees them the score takes 2 · D FLOPs, and the sum of values 2 · D. That
# is one FLOP a byte for each query that shares the key: the query heads of its group, times the
# tokens.

# %%
ROOF = CARDS["h200"].roof(16)  # what a large matmul and a plain read reached


def intensity(queries, keys, group):
    """FLOPs a byte of one key head: bf16, each tensor read or written once."""
    flops = 4 * queries * group * keys
    elements = 2 * keys + 2 * queries * group  # K and V; Q and O
    return flops / (2 * elements)


KINDS = {
    "decode, a key head for each head": (1, 8192, 1),
    "decode, 4 heads share one": (1, 8192, 4),
    "8 drafted tokens, 4 heads": (8, 8192, 4),
    "training, 8192 tokens": (8192, 8192, 4),
}
points = {name: intensity(*sizes) for name, sizes in KINDS.items()}
for name, found in points.items():
    reached = min(1, found / ROOF.ridge)
    print(f"{name:34}{found:8,.0f} FLOPs a byte, {100 * reached:5.1f} % of the arithmetic")

fig, ax = plt.subplots(figsize=(7, 3.2))
xs = [0.5, ROOF.ridge, 10000.0]
ax.loglog(xs, [min(ROOF.tflops, x * ROOF.bandwidth) for x in xs], color="black")
for name, found in points.items():
    ax.loglog(found, min(ROOF.tflops, found * ROOF.bandwidth), "o", label=name)
ax.set(xlabel="FLOPs a byte", ylabel="TFLOP/s, at most", title="The roof of an H200")
ax.legend(fontsize=8)
show(fig, "08_roofline")

# %% [markdown]
# So decoding uses one or two hundredths of what the tensor cores could do, however well the kernel
# is written: its time is bytes over bandwidth. Queries that share keys cost next to nothing, which
# is why models share key heads, and why drafted tokens are verified several at a time. How many
# bytes are there? A model of 8 billion parameters, say, with 32 layers of 8 key heads of 128:

# %%
a_token = 32 * 2 * 8 * 128 * 2
for batch, length in ((1, 8192), (32, 8192), (1, 131072)):
    total = a_token * batch * length
    line = f"{batch:2} sequences of {length:6} tokens: {total / 2**30:5.1f} GiB of cache, "
    print(line + f"{total / ROOF.bandwidth / 1e9:6.2f} ms a token to read it")

# %% [markdown]
# ## Split the keys, fold the pieces
#
# To reach that time, all of the card has to read. FlashAttention gives a program a block of queries
# of one head, or of the heads that share a key head. Here is one query, and with one sequence and 8
# key heads that makes 8 programs: an H200 has 132 multiprocessors, and 124 have nothing to do. Only
# the keys are left to be split. That is FlashDecoding: each program takes one *piece* of the keys
# of one head, and of it keeps
#
#     m = the largest score,   l = the sum of exp(S - m),   O = the sum of exp(S - m) · V
#
# Two neighbouring pieces are then folded into one, as the online softmax takes one block more:

# %%


def look_at(q, k, v):
    """A piece of the keys: m, l, and O, which is not divided by l yet."""
    s = q @ k.T * q.shape[-1] ** -0.5
    m = s.amax(-1, keepdim=True)
    p = torch.exp(s - m)
    return m, p.sum(-1, keepdim=True), p @ v


def fold(left, right):
    """Two pieces as one."""
    m = torch.maximum(left[0], right[0])
    a, b = torch.exp(left[0] - m), torch.exp(right[0] - m)
    return m, a * left[1] + b * right[1], a * left[2] + b * right[2]


def in_pieces(q, k, v, size):
    """Attention of a few queries, pieces of `size` keys folded from left to right."""
    parts = [look_at(q, *part) for part in zip(k.split(size), v.split(size))]
    state = parts[0]
    for part in parts[1:]:
        state = fold(state, part)
    return state[2] / state[1]


q, k, v = torch.randn(4, 64), torch.randn(700, 64), torch.randn(700, 64)
exact = in_pieces(q.double(), k.double(), v.double(), 700)
for size in (700, 350, 128, 1):
    error = (in_pieces(q, k, v, size) - exact).abs().max().item()
    count = -(-700 // size)
    print(f"{count:3} pieces of {size:3} keys: off by {error:.1e} in fp32")
    torch.testing.assert_close(in_pieces(q, k, v, size).double(), exact, rtol=0, atol=1e-6)

# %% [markdown]
# ## Pages
#
# Nobody knows how long a text will get. A tensor with room for the longest wastes most of its
# memory, so a server cuts its memory into *pages* of, say, 16 keys, and gives a sequence one when
# it needs one. Where the pages of a sequence are says its row of the *page table*: key j is row
# j mod 16 of page table[j div 16]. (vLLM's PagedAttention; an operating system does the same.)
#
# Here are three sequences. All that is not in use is NaN, and entries of the table that are not in
# use name no page at all: whoever reads them will be seen.


# %%
def in_pages(sequences, page_size, seed=0):
    """A pool of pages, and which of them each sequence has, in no order."""
    counts = [-(-len(x) // page_size) for x in sequences]
    free = torch.randperm(sum(counts) + 2, generator=torch.Generator().manual_seed(seed)).tolist()
    pool = torch.full((len(free), page_size, *sequences[0].shape[1:]), float("nan"))
    table = torch.full((len(counts), max(counts)), -1, dtype=torch.int32)
    for b, x in enumerate(sequences):
        for i, rows in enumerate(x.split(page_size)):
            page = table[b, i] = free.pop()
            pool[page, : len(rows)] = rows
    return pool.to(DEVICE, sequences[0].dtype), table.to(DEVICE)


numbers = [torch.full((n, 1), float(b)) for b, n in enumerate((70, 25, 40))]
pool, table = in_pages(numbers, 16)
print(
    "\n".join(
        f"sequence {b}: pages {[x for x in row if x >= 0]}" for b, row in enumerate(table.tolist())
    )
)

fig, ax = plt.subplots(figsize=(8, 2))
ax.imshow(pool.cpu()[..., 0].T.numpy(), cmap="viridis", aspect="auto")
ax.set(xlabel="page of the pool", ylabel="row of the page", xticks=range(len(pool)))
ax.set_title("Three sequences in one pool; white is not in use")
show(fig, "08_pages")

# %% [markdown]
# ## The kernels
#
# Two launches. In the first a program has one piece, of one key head, of one sequence. The query
# heads that share the key head are the rows of its tile. There are 16 rows, the fewest that the
# tensor cores multiply; those left over hold zeros and cost nothing, as memory is what counts. It
# walks its keys block by block with the online softmax, and looks each key's page up. Then it
# writes m, l and O.
#
# The second launch folds: a program a query head, from left to right. The lengths lie on the GPU.
# The host launches as many programs as the cache has room for pieces, and knows nothing else: so
# the same launch, recorded in a CUDA graph, serves any lengths.


# %%
@triton.jit
def piece_kernel(
    q, k, v, page_table, lengths, maxima, sums, outs, scale_log2, pages, split_size,
    GROUP: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    piece, head_k, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    pieces, nheads_k = tl.num_programs(0), tl.num_programs(1)
    row, offs_d = tl.arange(0, 16), tl.arange(0, D)
    is_head = row < GROUP
    head = (batch * nheads_k + head_k) * GROUP + row
    q_tile = tl.load(q + head[:, None] * D + offs_d[None, :], mask=is_head[:, None], other=0.0)
    m_i = tl.full([16], float("-inf"), tl.float32)
    l_i = tl.zeros([16], tl.float32)
    acc_o = tl.zeros([16, D], tl.float32)
    stop = tl.minimum((piece + 1) * split_size, tl.load(lengths + batch))
    for start in range(piece * split_size, stop, BLOCK):
        k_idx = start + tl.arange(0, BLOCK)
        is_key = k_idx < stop
        page = tl.load(page_table + batch * pages + k_idx // PAGE, mask=is_key, other=0)
        at = ((page.to(tl.int64) * PAGE + k_idx % PAGE) * nheads_k + head_k) * D
        rows = at[:, None] + offs_d[None, :]
        k_tile = tl.load(k + rows, mask=is_key[:, None], other=0.0)
        v_tile = tl.load(v + rows, mask=is_key[:, None], other=0.0)
        s = tl.dot(q_tile, tl.trans(k_tile)) * scale_log2
        s = tl.where(is_key[None, :], s, float("-inf"))
        m_new = tl.maximum(m_i, tl.max(s, 1))
        p, alpha = tl.exp2(s - m_new[:, None]), tl.exp2(m_i - m_new)
        l_i = l_i * alpha + tl.sum(p, 1)
        acc_o = acc_o * alpha[:, None] + tl.dot(p.to(v_tile.dtype), v_tile)
        m_i = m_new
    slot = head * pieces + piece
    tl.store(maxima + slot, m_i, mask=is_head)
    tl.store(sums + slot, l_i, mask=is_head)
    tl.store(outs + slot[:, None] * D + offs_d[None, :], acc_o, mask=is_head[:, None])


@triton.jit
def fold_kernel(maxima, sums, outs, lengths, out, pieces, split_size, D: tl.constexpr):
    batch, offs_d = tl.program_id(1), tl.arange(0, D)
    head = batch * tl.num_programs(0) + tl.program_id(0)
    first = head * pieces
    m_i, l_i = tl.load(maxima + first), tl.load(sums + first)
    acc_o = tl.load(outs + first * D + offs_d)
    for piece in range(1, tl.cdiv(tl.load(lengths + batch), split_size)):
        at = first + piece
        m_p = tl.load(maxima + at)
        m_new = tl.maximum(m_i, m_p)
        a, b = tl.exp2(m_i - m_new), tl.exp2(m_p - m_new)
        l_i = a * l_i + b * tl.load(sums + at)
        acc_o = a * acc_o + b * tl.load(outs + at * D + offs_d)
        m_i = m_new
    tl.store(out + head * D + offs_d, acc_o / l_i)


def decode(q, k, v, table, lengths, split_size):
    """One query a head, (batch, nheads, headdim), beside pages; out in fp32."""
    (batch, nheads, headdim), (_, page_size, nheads_k, _) = q.shape, k.shape
    pieces = triton.cdiv(table.shape[1] * page_size, split_size)
    sizes = batch, nheads, pieces
    maxima, sums = torch.empty(2, *sizes, device=q.device)
    outs = torch.empty(*sizes, headdim, device=q.device)
    out = torch.empty(batch, nheads, headdim, device=q.device)
    scale_log2 = headdim**-0.5 * 1.4426950408889634  # exp(x) = exp2(x · log2 e)
    here(piece_kernel)[(pieces, nheads_k, batch)](
        *(q, k, v, table, lengths, maxima, sums, outs, scale_log2, table.shape[1], split_size),
        *(nheads // nheads_k, headdim, page_size, 64),
    )
    parts = maxima, sums, outs
    here(fold_kernel)[(nheads, batch)](*parts, lengths, out, pieces, split_size, headdim)
    return out


# %% [markdown]
# Three sequences, of 700 keys, 130 and one, in pages of 16, against fp64:

# %%
LENGTHS, SPLIT = (700, 130, 1), 128
keys, values = ([torch.randn(n, 2, 64).bfloat16() for n in LENGTHS] for _ in "kv")
queries = torch.randn(3, 8, 64).bfloat16()


def run(members, split_size=SPLIT, page_size=16, seed=0):
    """Attention for these sequences, which lie in a pool of their own."""
    (k, table), (v, _) = (
        in_pages([x[b] for b in members], page_size, seed) for x in (keys, values)
    )
    lengths = torch.tensor([LENGTHS[b] for b in members], dtype=torch.int32, device=DEVICE)
    return decode(queries[list(members)].to(DEVICE), k, v, table, lengths, split_size).cpu()


out = run((0, 1, 2))
for b, length in enumerate(LENGTHS):
    alone = queries[b][None, None], keys[b][None], values[b][None]
    exact = tilewise.attention_reference(*(x.double() for x in alone))[0, 0]
    plain = tilewise.attention_reference(*alone, upcast=False)[0, 0].float()
    assert_within(out[b], exact, plain, f"sequence {b}")
    error = (out[b].double() - exact).abs().max().item()
    pieces = -(-length // SPLIT)
    print(f"sequence {b}, {length:3} keys in {pieces} pieces: off by {error:.4f}")

# %% [markdown]
# ## The same bits, whoever else is served
#
# How many pieces? Enough to fill the card: so kernels choose the *number* of pieces by how many
# sequences the batch has. The sums are then the same numbers in other groups, and rounding differs.
# A text that is generated twice comes out different, because somebody else was served beside it.
#
# What if the *size* of a piece is fixed instead? A piece is then the same sum wherever it is
# computed, and the fold is in order. Who computes which piece when, in which page a key lies, who
# else is in the batch: nothing of that is in the arithmetic. Look at the bits of four numbers.


# %%
def fixed(members, **where):
    """Pieces of one size."""
    return run(members, **where)


def by_batch(members, **where):
    """As many pieces as fill eight processors: fewer for each sequence, the more there are."""
    count = max(1, 8 // len(members))
    return run(members, split_size=triton.cdiv(700, count), **where)


RUNS = {
    "alone": ((0,), {}),
    "with one mate": ((0, 1), {}),
    "with two, last": ((2, 1, 0), {}),
    "in pages of 64": ((0,), dict(page_size=64)),
    "in pages of 1": ((0,), dict(page_size=1)),
    "in other pages": ((0,), dict(seed=7)),
}


def bits(x):
    """fp32 numbers as integers."""
    return x.contiguous().view(torch.int32)


found = {}
for rule in (fixed, by_batch):
    print(f"{rule.__name__}: the first numbers of sequence 0")
    rows = []
    for name, (members, where) in RUNS.items():
        rows.append(bits(rule(members, **where)[members.index(0)].flatten()))
        print(f"  {name:15}", *(f"{x & 0xFFFFFFFF:08x}" for x in rows[-1][:4].tolist()))
    found[rule.__name__] = torch.stack(rows)

assert (found["fixed"] == found["fixed"][0]).all()
assert (found["by_batch"][1:3] != found["by_batch"][0]).any(1).all()

fig, axes = plt.subplots(1, 2, figsize=(9, 2.2), sharey=True)
for ax, (name, rows) in zip(axes, found.items()):
    each = rows[:, :3, None] >> torch.arange(31, -1, -1) & 1  # the first three numbers, bit by bit
    ax.imshow(each.flatten(1).numpy(), aspect="auto", cmap="Greys", interpolation="nearest")
    ax.set(yticks=range(len(RUNS)), yticklabels=RUNS, xticks=(0, 32, 64), xlabel="bit")
    count = (rows != rows[0]).any(1).sum().item()
    ax.set_title(f"{name}: {count} of {len(rows) - 1} rows have other bits than alone", fontsize=9)
show(fig, "08_bits")

# %% [markdown]
# The rows of a picture are runs, and black is a bit that is set. Pages never matter: a page table
# says where a key lies, not in which order keys are summed. What matters is where pieces begin.
#
# A fixed size has a price: in a large batch, where whole sequences would fill the card, there are
# still pieces to be folded. For each piece and head a state of D + 2 fp32 numbers is written and
# read again. With pieces of 512 keys and 4 heads a key head that is 1.6 % of what is read anyway.
#
# ## In the library
#
# `tilewise.attention` takes pages, lengths on the device, and a `split_size`;
# `tilewise.cache.append` writes new keys where the table says. On the CPU the promise goes further:
# all rows are computed in tiles of one shape, so a text that is read at once, in chunks, or token
# by token has the same bits.

# %%
TOKENS, ROOM = 40, 64
k_cache, v_cache = torch.full((2, ROOM // 8, 8, 2, 32), float("nan")).unbind(0)
table = torch.randperm(ROOM // 8).to(torch.int32)[None]
q, k, v = torch.randn(1, TOKENS, 8, 32), *torch.randn(2, 1, TOKENS, 2, 32).unbind(0)
rows = []
for i in range(TOKENS):
    where = dict(page_table=table, seqused_k=torch.tensor([i + 1], dtype=torch.int32))
    new = slice(i, i + 1)
    cache.append(k_cache, v_cache, k[:, new], v[:, new], **where)
    rows.append(
        tilewise.attention(q[:, new], k_cache, v_cache, causal=True, split_size=16, **where)
    )
at_once = tilewise.attention(q, k_cache, v_cache, causal=True, split_size=16, **where)
trained = tilewise.attention(q, k, v, causal=True, split_size=16)
assert torch.equal(torch.cat(rows, 1), at_once) and torch.equal(at_once, trained)
print(f"{TOKENS} tokens one by one, at once, and without a cache: the same bits")

# %% [markdown]
# ## On a GPU
#
# One sequence of 8192 keys, 32 heads on 8, headdim 128: this lesson's kernels with pieces of
# several sizes, and the library. With pieces of 8192 there are 8 programs. On an H200 the bytes
# take 7.6 µs at least.

# %%
SIZES = (8192, 2048, 512, 128)
shape = dict(batch=1, seqlen=8192, nheads=32, nheads_k=8, headdim=128, page_size=16)


def steps():
    """A step of decoding, by pieces of each size. For a GPU."""
    length = 8192 if ON_GPU else 256
    k, v = torch.randn(2, length // 16, 16, 8, 128, device=DEVICE).bfloat16().unbind(0)
    q = torch.randn(1, 32, 128, device=DEVICE).bfloat16()
    table = torch.randperm(length // 16).to(torch.int32)[None].to(DEVICE)
    used = torch.tensor([length], dtype=torch.int32, device=DEVICE)
    calls = {
        f"pieces of {size}": lambda size=size: decode(q, k, v, table, used, size) for size in SIZES
    }
    where = dict(page_table=table, seqused_k=used, causal=True)
    return calls | {"tilewise": lambda: tilewise.attention(q[:, None], k, v, **where)}


NAMES = [*(f"pieces of {size}" for size in SIZES), "tilewise"]
times = figures.times(shape, steps() if ON_GPU else dict.fromkeys(NAMES))
for name, ms in times.items():
    moved = 2 * 8192 * 8 * 128 * 2 / ms * 1e-6
    print(f"{name:15}{ms * 1e3:8.1f} us, {moved:7,.0f} GB/s of keys and values")
print(f"times: {figures.machine}")

# %% [markdown]
# ## Exercises
#
# **1.** *A prefix that two sequences share.* Two users ask about one document. Let a second
# sequence have the pages of the first one's 640 first keys and its own for the rest, without
# copying a key. Are its bits those that it has in pages of its own? How many pages are saved?
#
# <details><summary>Solution</summary>
#
# A page may stand in any number of rows of the table. The pages hold whole pieces here, so the two
# sequences even compute the same pieces: a kernel could read them once for both.
#
# ```python
# tail = torch.randn(2, 60, 2, 64).bfloat16()
# second = [torch.cat([x[0][:640], new]) for x, new in zip((keys, values), tail)]
# pairs = [[x[0], y] for x, y in zip((keys, values), second)]
# (k, table), (v, _) = (in_pages(pair, 16) for pair in pairs)
# both = queries[:2].to(DEVICE)
# used = torch.tensor([700, 700], dtype=torch.int32, device=DEVICE)
# apart = decode(both, k, v, table, used, SPLIT)
# shared = table.clone()
# shared[1, :40] = shared[0, :40]
# assert torch.equal(decode(both, k, v, shared, used, SPLIT), apart)
# saved = table.unique().numel() - shared.unique().numel()
# print(f"{saved} of {table.unique().numel()} pages are saved")
# assert saved == 40
# ```
#
# </details>
#
# **2.** *How long should a piece be?* What a piece leaves behind for one query head is D + 2
# numbers of fp32, written once and read once. Beside the keys and values of the piece in bf16, what
# share is that, for a group of G heads? Is it at most 1.62 % in the sizes that the library chooses
# (`tilewise.tile.split_kv.default_split_size`)?
#
# <details><summary>Solution</summary>
#
# A piece of n keys has 4 · n · D bytes; its states, written and read, 2 · G · 4 · (D + 2). For a
# large D that is the share 2 · G / n: n of about 125 · G makes it 1.6 %.
#
# ```python
# from tilewise.tile.split_kv import default_split_size
#
#
# def share(n, group, headdim=128):
#     return 2 * group * 4 * (headdim + 2) / (4 * n * headdim)
#
#
# for group in (1, 4, 8, 16):
#     size = default_split_size(group)
#     print(f"{group:2} heads a key head: pieces of {size}, {100 * share(size, group):.2f} %")
#     assert share(size, group) < 0.0162
# assert share(256, 4) > 0.03
# ```
#
# </details>
#
# To try on the kernels: give `piece_kernel` several tokens for each head, the last ones of their
# sequence, as rows of the tile. Which keys does each see? Up to 16 rows they cost what one costs.
