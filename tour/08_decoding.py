# %% [markdown]
# # 08. Decoding with a cache: splits and pages
#
# **The idea:** a new token reads all keys once, so decoding is bound by memory; to
# read at full speed its keys are split over the whole GPU, and the parts are
# merged.
#
# After this lesson you can
#
# - say why a model that generates text waits for memory and not for arithmetic,
# - split the keys of one query, find them through a page table, and merge the
#   parts,
# - say what the bits of a result depend on, and make that the sequence alone.
#
# You need lesson 04 for the online softmax, and of lesson 00 the roofline.

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
    pictures_08,
    solutions_08,
)

import tilewise

figures = Figures("08_decoding")
torch.manual_seed(0)

# %% [markdown]
# ## One query, all the keys
#
# A model generates token by token. A new token has one query per head, and the
# query attends to the keys of all tokens before it. Those do not change any more,
# so they are kept, with their values: the **KV cache**. What is left to do for a
# token is to read the cache once.
#
# Count it for one key head of D columns, in bf16. A key and its value are 2 · D
# elements, so 4 · D bytes. For a query the score takes 2 · D FLOPs, and the sum of
# values 2 · D. That is one FLOP per byte for each query that shares the key: the
# query heads of its group, times the tokens.


# %%
def intensity(queries, keys, group):
    """FLOPs per byte of one key head: bf16, each tensor read or written once."""
    flops = 4 * queries * group * keys
    elements = 2 * keys + 2 * queries * group  # K and V; Q and O
    return flops / (2 * elements)


KINDS = {
    "decode, a key head for each head": intensity(1, 8192, 1),
    "decode, 4 heads share one": intensity(1, 8192, 4),
    "8 drafted tokens, 4 heads": intensity(8, 8192, 4),
    "training, 8192 tokens": intensity(8192, 8192, 4),
}
pictures_08.roofline(KINDS)

# %% [markdown]
# So decoding uses one or two hundredths of what the tensor cores could do, however
# well the kernel is written: its time is bytes over bandwidth. Queries that share
# keys cost next to nothing, which is why models share key heads, and why drafted
# tokens are verified several at a time. How many bytes are there? A model of 8
# billion parameters, say, with 32 layers of 8 key heads of 128:

# %%
a_token = 32 * 2 * 8 * 128 * 2
for batch, length in ((1, 8192), (32, 8192), (1, 131072)):
    total = a_token * batch * length
    line = f"{batch:2} sequences of {length:6} tokens: {total / 2**30:5.1f} GiB of "
    ms = total / pictures_08.BANDWIDTH / 1e9
    print(line + f"cache, {ms:6.2f} ms per token to read it")

# %% [markdown]
# ## Split the keys, merge the parts
#
# To reach that time, all of the card has to read. FlashAttention gives a program a
# block of queries of one head, or of the heads that share a key head. Here is one
# query, and with one sequence and 8 key heads that makes 8 programs: an H200 has
# 132 SMs, and 124 are idle. Only the keys are left to be split. That is
# FlashDecoding (split-KV): each program computes one split of the keys of one head,
# and stores
#
#     m = the largest score
#     l = the sum of exp(S - m)
#     O = the sum of exp(S - m) · V
#
# Two neighbouring splits are then merged, as the online softmax takes one block
# more:


# %%
def attend_split(q, k, v):
    """A split of the keys: m, l, and O, which is not divided by l yet."""
    s = q @ k.T * q.shape[-1] ** -0.5
    m = s.amax(-1, keepdim=True)
    p = torch.exp(s - m)
    return m, p.sum(-1, keepdim=True), p @ v


def merge(left, right):
    """Two splits as one."""
    m = torch.maximum(left[0], right[0])
    a, b = torch.exp(left[0] - m), torch.exp(right[0] - m)
    return m, a * left[1] + b * right[1], a * left[2] + b * right[2]


def in_splits(q, k, v, size):
    """Attention of a few queries; splits of `size` keys, merged left to right."""
    parts = [attend_split(q, *part) for part in zip(k.split(size), v.split(size))]
    state = parts[0]
    for part in parts[1:]:
        state = merge(state, part)
    return state[2] / state[1]


q, k, v = torch.randn(4, 64), torch.randn(700, 64), torch.randn(700, 64)
exact = in_splits(q.double(), k.double(), v.double(), 700)
for size in (700, 350, 128, 1):
    error = (in_splits(q, k, v, size) - exact).abs().max().item()
    count = -(-700 // size)
    print(f"{count:3} splits of {size:3} keys: off by {error:.1e} in fp32")
    found = in_splits(q, k, v, size).double()
    torch.testing.assert_close(found, exact, rtol=0, atol=1e-6)

# %% [markdown]
# ## Exercise 1: what the merge costs
#
# For one query head a split writes D + 2 numbers of fp32, and the merge reads them.
# Beside the keys and values of a split of n keys in bf16, what share of bytes is
# that, for a group of G heads?
#
# **Hint:** count for one key head: G query heads on one side, n keys and n values
# of D numbers on the other.


# %%
def state_share(n, group, headdim):
    """Bytes of states, written and read, over bytes of keys and values."""
    raise NotYet


solutions_08.check_state_share(state_share)

# %% [markdown]
# <details><summary>An answer</summary>
#
# ```{literalinclude} /../tour/lesson/solutions_08.py
# :pyobject: state_share
# :language: python
# ```
#
# </details>
#
# ## Pages
#
# The length of a text is not known in advance. A tensor with room for the longest
# wastes most of its memory, so a server cuts its memory into **pages** of, say, 16
# keys, and gives a sequence one when it needs one. A sequence's row of the **page
# table** has the numbers of its pages: key j is row j mod 16 of page table[j div
# 16]. (vLLM's PagedAttention; an operating system does the same.)
#
# Here are three sequences. All that is not in use is NaN, and entries of the table
# that are not in use are -1: a kernel that reads either gives a wrong result.

# %%
pictures_08.pages()

# %% [markdown]
# ## The kernels
#
# Two launches. In the first a program computes one split, of one key head, of one
# sequence. The query heads that share the key head are the rows of its tile. There
# are 16 rows, the fewest that the tensor cores multiply; those left over hold
# zeros, which costs nothing, as memory is what counts. The program loops over its
# keys block by block with the online softmax, and looks each key's page up. Then it
# stores m, l and O.
#
# The second launch merges: a program per query head, from left to right. The
# lengths are on the GPU. The host launches as many programs as the cache has room
# for splits, and knows nothing else: so the same launch, recorded in a CUDA graph,
# serves any lengths.


# %%
@triton.jit
def split_kernel(
    q, k, v, page_table, lengths, maxima, sums, outs, scale_log2, pages, split_size,
    GROUP: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    split_idx, head_k, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    num_splits, nheads_k = tl.num_programs(0), tl.num_programs(1)
    row, offs_d = tl.arange(0, 16), tl.arange(0, D)
    is_head = row < GROUP
    head = (batch * nheads_k + head_k) * GROUP + row
    of_heads = head[:, None] * D + offs_d[None, :]
    q_tile = tl.load(q + of_heads, mask=is_head[:, None], other=0.0)
    m_i = tl.full([16], float("-inf"), tl.float32)
    l_i = tl.zeros([16], tl.float32)
    acc_o = tl.zeros([16, D], tl.float32)
    stop = tl.minimum((split_idx + 1) * split_size, tl.load(lengths + batch))
    for start in range(split_idx * split_size, stop, BLOCK):
        k_idx = start + tl.arange(0, BLOCK)
        is_key = k_idx < stop
        number = batch * pages + k_idx // PAGE
        page = tl.load(page_table + number, mask=is_key, other=0)
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
    slot = head * num_splits + split_idx
    tl.store(maxima + slot, m_i, mask=is_head)
    tl.store(sums + slot, l_i, mask=is_head)
    of_slots = slot[:, None] * D + offs_d[None, :]
    tl.store(outs + of_slots, acc_o, mask=is_head[:, None])


@triton.jit
def merge_kernel(
    maxima, sums, outs, lengths, out, num_splits, split_size, D: tl.constexpr
):
    batch, offs_d = tl.program_id(1), tl.arange(0, D)
    head = batch * tl.num_programs(0) + tl.program_id(0)
    first = head * num_splits
    m_i, l_i = tl.load(maxima + first), tl.load(sums + first)
    acc_o = tl.load(outs + first * D + offs_d)
    for split_idx in range(1, tl.cdiv(tl.load(lengths + batch), split_size)):
        at = first + split_idx
        m_p = tl.load(maxima + at)
        m_new = tl.maximum(m_i, m_p)
        a, b = tl.exp2(m_i - m_new), tl.exp2(m_p - m_new)
        l_i = a * l_i + b * tl.load(sums + at)
        acc_o = a * acc_o + b * tl.load(outs + at * D + offs_d)
        m_i = m_new
    tl.store(out + head * D + offs_d, acc_o / l_i)


def decode(q, k, v, table, lengths, split_size):
    """One query per head, (batch, nheads, headdim), beside pages; out in fp32."""
    (batch, nheads, headdim), (_, page_size, nheads_k, _) = q.shape, k.shape
    num_splits = triton.cdiv(table.shape[1] * page_size, split_size)
    sizes = batch, nheads, num_splits
    maxima, sums = torch.empty(2, *sizes, device=q.device)
    outs = torch.empty(*sizes, headdim, device=q.device)
    out = torch.empty(batch, nheads, headdim, device=q.device)
    scale_log2 = headdim**-0.5 * 1.4426950408889634  # exp(x) = exp2(x · log2 e)
    here(split_kernel)[(num_splits, nheads_k, batch)](
        *(q, k, v, table, lengths, maxima, sums, outs),
        *(scale_log2, table.shape[1], split_size),
        *(nheads // nheads_k, headdim, page_size, 64),
    )
    here(merge_kernel)[(nheads, batch)](
        *(maxima, sums, outs, lengths, out, num_splits, split_size, headdim)
    )
    return out


# %% [markdown]
# Three sequences, of 700 keys, 130 and one, in pages of 16, against fp64:

# %%
LENGTHS, SPLIT = (700, 130, 1), 128
keys, values = ([torch.randn(n, 2, 64).bfloat16() for n in LENGTHS] for _ in "kv")
queries = torch.randn(3, 8, 64).bfloat16()


def run(members, split_size=SPLIT, page_size=16, seed=0):
    """Attention for these sequences, which lie in a pool of their own."""
    parts = ([x[b] for b in members] for x in (keys, values))
    pools = [pictures_08.in_pages(part, page_size, seed) for part in parts]
    (k, table), (v, _) = pools
    lengths = torch.tensor([LENGTHS[b] for b in members], device=DEVICE).int()
    q = queries[list(members)].to(DEVICE)
    return decode(q, k, v, table, lengths, split_size).cpu()


out = run((0, 1, 2))
for b, length in enumerate(LENGTHS):
    alone = queries[b][None, None], keys[b][None], values[b][None]
    exact = tilewise.attention_reference(*(x.double() for x in alone))[0, 0]
    plain = tilewise.attention_reference(*alone, upcast=False)[0, 0].float()
    assert_within(out[b], exact, plain, f"sequence {b}")
    error = (out[b].double() - exact).abs().max().item()
    num_splits = -(-length // SPLIT)
    line = f"sequence {b}, {length:3} keys in {num_splits} splits"
    print(f"{line}: off by {error:.4f}")

# %% [markdown]
# ## The same bits in any batch
#
# How many splits? Enough to fill the card: so kernels choose the *number* of splits
# by how many sequences the batch has. The sums are then the same numbers in other
# groups, and rounding differs. A text that is generated twice comes out different,
# because the batch was another.
#
# What if the *size* of a split is fixed instead? A split is then the same sum
# wherever it is computed, and the merge is in order. Neither pages nor the batch
# enter the arithmetic. Look at the bits of four numbers.

# %%
RUNS = {
    "alone": ((0,), {}),
    "in a batch of two": ((0, 1), {}),
    "in one of three": ((2, 1, 0), {}),
    "in pages of 64": ((0,), dict(page_size=64)),
    "in pages of 1": ((0,), dict(page_size=1)),
    "in other pages": ((0,), dict(seed=7)),
}


def fixed(members, **where):
    """Splits of one size."""
    return run(members, **where)


def by_batch(members, **where):
    """As many splits as fill eight SMs: fewer per sequence, the more there are."""
    count = max(1, 8 // len(members))
    return run(members, split_size=triton.cdiv(700, count), **where)


found = pictures_08.bits(RUNS, (fixed, by_batch))
assert (found["fixed"] == found["fixed"][0]).all()
assert (found["by_batch"][1:3] != found["by_batch"][0]).any(1).all()

# %% [markdown]
# The rows of a picture are runs, and black is a bit that is set. Pages never
# matter: a page table says where a key lies, not in which order keys are summed.
# What matters is where splits begin.
#
# A fixed size has a price: in a large batch, where whole sequences would fill the
# card, there are still splits to be merged. By exercise 1, with splits of 512 keys
# and 4 heads per key head, that is 1.6 % of what is read anyway.
#
# ## Exercise 2: a prefix that two sequences share
#
# Two requests begin with the same document. Let the second sequence use the pages
# of the first one's leading keys, and its own for the rest, without copying a key.
# Its bits must be those that it has in pages of its own.
#
# **Hint:** a page table is numbers. Which entries of one row become those of
# another?


# %%
def share_prefix(table, pages):
    """A table in which sequence 1 has the first `pages` pages of sequence 0."""
    raise NotYet


solutions_08.check_share_prefix(share_prefix, decode)

# %% [markdown]
# <details><summary>An answer</summary>
#
# ```{literalinclude} /../tour/lesson/solutions_08.py
# :pyobject: share_prefix
# :language: python
# ```
#
# </details>
#
# ## In the library
#
# `tilewise.attention` takes pages, lengths on the device, and a `split_size`;
# `tilewise.cache.append` writes new keys where the table says. On the CPU all rows
# are computed in tiles of one shape, so a text that is read at once, in chunks, or
# token by token has the same bits. `split_size` asks for that on a GPU, too: Hopper
# may otherwise sum the keys of a long chunk in another order.

# %%
TOKENS, ROOM = 40, 64
k_cache, v_cache = torch.full((2, ROOM // 8, 8, 2, 32), float("nan")).unbind(0)
table = torch.randperm(ROOM // 8).to(torch.int32)[None]
q, k, v = torch.randn(1, TOKENS, 8, 32), *torch.randn(2, 1, TOKENS, 2, 32).unbind(0)
rows, how = [], dict(causal=True, split_size=16)
for i in range(TOKENS):
    used = torch.tensor([i + 1], dtype=torch.int32)
    where = dict(page_table=table, seqused_k=used)
    new = slice(i, i + 1)
    tilewise.cache.append(k_cache, v_cache, k[:, new], v[:, new], **where)
    rows.append(tilewise.attention(q[:, new], k_cache, v_cache, **how, **where))
at_once = tilewise.attention(q, k_cache, v_cache, **how, **where)
trained = tilewise.attention(q, k, v, **how)
assert torch.equal(torch.cat(rows, 1), at_once) and torch.equal(at_once, trained)
print(f"{TOKENS} tokens one by one, at once, and without a cache: the same bits")

# %% [markdown]
# ## On a GPU
#
# One sequence of 8192 keys, 32 heads on 8, headdim 128: this lesson's kernels with
# splits of several sizes, and the library. With splits of 8192 there are 8
# programs. On an H200 the bytes take 7.6 µs at least.

# %%
pictures_08.times(figures, decode)

# %% [markdown]
# To try on the kernels: give `split_kernel` several tokens for each head, the last
# ones of their sequence, as rows of the tile. Which keys does each attend to? Up to
# 16 rows they cost what one costs.

# %%
solutions_08.exercises.show()
