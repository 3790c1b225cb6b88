# %% [markdown]
# # 08. 带缓存的解码：片段与页
#
# 学完本课，你能说清楚生成文本的模型为什么等待的是显存，而不是计算；能把一个查询的所有键分给整块
# GPU，再把结果折叠 (fold) 起来；能通过页表找到键；还能说出一个结果的比特取决于什么，
# 以及怎样让它只取决于序列本身。
#
# 你需要第 04 课的在线 softmax，以及第 00 课的屋顶线 (roofline)。

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
# ## 一个查询，所有的键
#
# 模型一个 token 接一个 token 地生成。新的 token 在每个头上有一个查询，这个查询看得到之前所有 token
# 的键。那些键不会再变，所以连同它们的值一起保存下来：这就是**缓存**。于是生成一个 token 要做的，
# 就是把缓存读一遍。
#
# 以一个键头为例，D 列，bf16。一个键和它的值共 2 · D 个元素，即 4 · D 字节。对看到它们的一个查询，
# 算分数要 2 · D 次浮点运算，对值求和又是 2 · D 次。也就是说，共用这个键的每个查询，
# 每字节做一次浮点运算：查询的个数是一组中的查询头数乘以 token 数。

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
# 所以无论内核写得多好，解码只用得上 Tensor Core 能力的百分之一二：它的时间就是字节数除以带宽。
# 共用键的查询几乎不花代价，所以模型让多个头共用一个键头，也所以起草的 (drafted) token
# 几个一起验证。一共有多少字节？例如一个 80 亿参数的模型，32 层，每层 8 个键头，headdim 为 128：

# %%
a_token = 32 * 2 * 8 * 128 * 2
for batch, length in ((1, 8192), (32, 8192), (1, 131072)):
    total = a_token * batch * length
    line = f"{batch:2} sequences of {length:6} tokens: {total / 2**30:5.1f} GiB of cache, "
    print(line + f"{total / ROOF.bandwidth / 1e9:6.2f} ms a token to read it")

# %% [markdown]
# ## 把键切开，把片段折叠
#
# 要达到这个时间，整块卡都得在读。FlashAttention 让一个程序 (program) 处理一个头的一个查询块，
# 或者共用一个键头的几个头的查询块。这里只有一个查询，一条序列、8 个键头就只有 8 个程序：H200 有 132
# 个 SM，其中 124 个无事可做。能切开的只剩下键。这就是 FlashDecoding：
# 每个程序负责一个头的键的一个**片段** (piece)，并为它保留
#
#     m = 最大的分数，   l = exp(S - m) 之和，   O = exp(S - m) · V 之和
#
# 然后把相邻的两个片段折叠成一个，就像在线 softmax 再接一个块那样：

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
# ## 页
#
# 谁也不知道一段文本会有多长。按最长的来分配张量，大部分显存都会浪费。所以服务器把显存切成**页**
# (page)，比如每页 16 个键，序列需要时才给它一页。一条序列的页在哪里，由它在**页表** (page table)
# 中的那一行说明：键 j 是页 table[j div 16] 的第 j mod 16 行。（这是 vLLM 的 PagedAttention；
# 操作系统也是这样做的。）
#
# 下面有三条序列。凡是没有用到的地方都是 NaN，页表中没有用到的项也不指向任何一页：谁读了它们，
# 一眼就能看出来。


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
# ## 内核
#
# 启动两次。第一次，一个程序负责一条序列的一个键头的一个片段。共用这个键头的查询头就是它的分块
# (tile) 的各行。分块有 16 行，这是 Tensor Core 相乘的最少行数；多出来的行填零，不花代价，
# 因为要紧的是显存。它用在线 softmax 逐块走过自己的键，并为每个键查出它的页，最后写出 m、l 和 O。
#
# 第二次启动做折叠：每个查询头一个程序，从左到右。长度留在 GPU 上。缓存放得下多少个片段，
# 主机就启动多少个程序，此外什么也不知道：所以同一次启动录进 CUDA graph 以后，对任何长度都适用。


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
# 三条序列，分别有 700 个、130 个和一个键，每页 16 个，与 fp64 对照：

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
# ## 同样的比特，不管同时还有谁
#
# 要几个片段？够填满整块卡就行：所以一般的内核按批次里有几条序列来选择片段的**个数**。
# 于是同样的数分成了不同的组来求和，舍入也就不同。同一段文本生成两次，结果会不一样，
# 只因为旁边还有别人的请求。
#
# 如果固定的是片段的**大小**呢？那么一个片段不管在哪里计算，都是同一个和，而折叠按次序进行。
# 谁在什么时候计算哪个片段，键在哪一页，批次里还有谁：这些都不进入算术。看看四个数的比特。


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
# 图中的每一行是一次运行，黑色是值为 1 的比特。页从来不起作用：页表只说键在哪里，
# 不说键按什么次序求和。起作用的是片段从哪里开始。
#
# 固定的大小有它的代价：在大的批次里，整条整条的序列就足以填满整块卡，却仍然有片段要折叠。每个片段、
# 每个头要写出一个 D + 2 个 fp32 数的状态，再读回来。片段为 512 个键、4 个查询头共用一个键头时，
# 这是本来就要读的字节的 1.6 %。
#
# ## 在本库里
#
# `tilewise.attention` 接受页、留在设备上的长度和 `split_size`；`tilewise.cache.append`
# 把新的键写到页表所说的地方。在 CPU 上的保证更进一步：所有的行都用同一种形状的分块计算，
# 所以一段文本无论是一次读完、分段读，还是逐个 token 读，比特都相同。

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
# ## 在 GPU 上
#
# 一条 8192 个键的序列，32 个头共用 8 个键头，headdim 为 128：本课的内核用几种大小的片段，以及本库。
# 片段为 8192 时只有 8 个程序。在 H200 上，读这些字节至少要 7.6 µs。

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
# ## 练习
#
# **1. 两条序列共用的前缀。** 两个用户就同一份文档提问。让第二条序列用第一条的前 640 个键所在的页，
# 其余用自己的页，一个键也不复制。它的比特与全部用自己的页时一样吗？省下了几页？
#
# <details><summary>答案</summary>
#
# 一页可以出现在页表的任意多行里。这里那些页正好组成完整的片段，所以两条序列计算的甚至是同样的片段：
# 内核可以为两者只读一遍。
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
# **2. 一个片段该有多长？** 一个片段为一个查询头留下 D + 2 个 fp32 数，写一次，读一次。与这个片段的
# bf16 键和值相比，一组有 G 个头时，
# 它占多大比例？用本库选择的大小（`tilewise.tile.split_kv.default_split_size`），它是否不超过 1.62
# %？
#
# <details><summary>答案</summary>
#
# n 个键的片段有 4 · n · D 字节；它的状态一写一读，共 2 · G · 4 · (D + 2) 字节。D 较大时，比例就是 2
# · G / n：n 约为 125 · G 时是 1.6 %。
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
# 还可以在内核上试试：给 `piece_kernel` 的每个头几个 token，即序列的最后几个，作为分块的行。每个
# token 看得到哪些键？不超过 16 行时，代价与一个 token 相同。
