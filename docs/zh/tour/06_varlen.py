# %% [markdown]
# # 06. 任意长度的序列：分块调度器
#
# 学完本课，你能把长度不同的序列打包进一次调用，不用填充；能说出一个分块 (tile)
# 的编号代表哪条序列、哪个头、哪个查询块，以及一个 warp 怎样自己算出来；能写一个持久化 (persistent)
# 内核，从计数器里一个接一个地领取分块；还能从时间线判断什么时候值得这样做。
#
# 你需要第 04 课：FlashAttention-2 的一个程序 (program) 处理一个头的一个查询块。

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
# ## 填充，以及怎样不为它付出代价
#
# 文本长短不一，张量却只有一个长度。填充 (padding) 让所有序列都与最长的一样长，
# 而注意力的工作量随长度的平方增长。其中真正的工作占多少？

# %%
for name in ("prefill-chat", "zipf", "one-long"):
    lengths = SETS[name]
    rows = sum(lengths) / (len(lengths) * max(lengths))
    pairs = sum(n * n for n in lengths) / (len(lengths) * max(lengths) ** 2)
    print(f"{name:13} {len(lengths):3} sequences, longest {max(lengths):5}: padded, ", end="")
    print(f"{100 * rows:4.1f} % of the rows are real and {100 * pairs:4.1f} % of the pairs")

# %% [markdown]
# 所以把序列打包 (packed)：首尾相接地放进一个张量 (total, nheads, headdim)，另有
# `cu_seqlens` 说明每条序列从哪里开始、到哪里结束：先是 0，然后是长度的累加和。它留在 GPU
# 上，这正是关键。主机要知道一个长度，就得等待 GPU；所以它一个长度也不知道就启动，由内核自己找到路。


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
# ## 分块的编号代表什么
#
# 长度都相等时，程序用自己的编号除以一条序列的块数，就什么都有了。这里各条序列的块数不同：一块是
# 128 个查询，160 个查询有 2 块，300 个有 3 块。编号先按序列，再按头，再按块，这样相邻的分块在 L2
# 缓存里共用键和值。只有一个头时，分块 0 和 1 属于序列 0，分块 2、3 和 4 属于序列 1。头更多时：
#
#     tile = block + head · blocks(sequence) + nheads · (blocks of all sequences before)
#
# `tilewise.testing.schedule.tiles` 用纯 Python 给出这些编号。两个头：

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
# ## 由一个 warp 反查
#
# 一个程序拿到的是 9，需要的是 (1, 1, 2)。光靠除法不行；批次里有几百条序列时，
# 一个接一个地读长度又太慢。但一个 warp 的 32 个线程，即它的各个通道 (lane)，同时做同样的事，
# 彼此之间传递数字也很快。所以每个通道负责一条序列：
#
# 1. 通道 b 加载序列 b 的两端，算出它的块数。
# 2. 把各个通道的块数相加，再乘以头数，就是这 32 条序列的分块数。如果要找的分块不在其中，就减去它，
#    再加载下 32 条。
# 3. 前缀和 (prefix sum) 告诉每个通道，到它自己的序列为止（含）有多少个分块：这是它的终点。
# 4. 不大于该分块编号的终点有多少个，就越过了多少条序列，这也就是它所在序列的编号。
#    （空序列的终点就是起点：它总会被越过。）
# 5. 减去越过的最大终点，余下的除以该序列的块数。
#
# 用 torch 一步一步来，五条序列，其中一条是空的，找分块 12：

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
# `tilewise.tile.varlen.varlen_tile` 把这些步骤写成一个供内核调用的函数：Triton
# 内核自己调用它；在 Hopper 内核里，由负责加载的 warp 调用。给它一个分块编号和
# 32 个通道，它就说出这是哪个分块，或者没有这个分块（`is_tile`），并给出一个提示
# (hint)，说明下一次从哪里找起，供领取的编号越来越大的内核使用。FlashAttention-3 的
# VarlenDynamicPersistentTileScheduler 也这样工作。
#
# ## 谁领取哪个分块
#
# 有多少个分块，就需要多少个程序，而主机不知道有多少。但它知道，一条序列最多有一个不满的块，
# 所以不论长度如何，(total // BLOCK + batch) · nheads 都够用。分发有三种方式：
#
# - **每个分块一个程序。** 就启动这么多；超出末尾的立即退出。哪个处理器有空位，GPU
#   就把下一个程序给它。本库的可移植内核就是这样。
# - **持久化，静态。** 每个处理器启动一个程序，让程序 i 领取分块 i、i + P、i + 2P……
#   一直在运行的程序可以一边收尾上一个分块，一边加载下一个。但谁也不看各个分块要花多久。
# - **持久化，动态。** 同上，但下一个编号来自显存里的计数器，大家都用原子操作 (atomic)
#   给它加一：谁先空出来，谁就得到下一个分块。
#
# 下面用一个内核写出后两种。为了只看调度，这里一个分块的工作比注意力少，但开销的规律相同：
# 对一个查询能看到的所有值求平均（因果），逐个键块进行。


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
# 与 torch 的累加和对照，序列比一个 warp 的通道还多，其中有空的，用四个程序：

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
# 在 CPU 上，dynamic 一行里只有程序 0。解释器一个接一个地运行程序，
# 所以第一个领走了计数器里的所有编号，其余的什么也没有。结果不能依赖于此，也确实不依赖。在 GPU
# 上，你能看到谁在什么时候来领。
#
# ## 时间线
#
# 什么时候值得用计数器？`simulate` 把分块分给处理器，一个分块访问几个键块就花几个单位的时间，
# 此外什么都不花时间。这个批次里有一条长序列，因果，八个处理器。
# （`python -m benchmarks schedule --lengths 160,300,4096 --nheads 2 --causal`
# 在终端里打印它，长度可以任选。）

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
# 静态方案吃亏在分块的节奏上：长序列有 32 块，八个一轮，共四轮，于是每一轮的八个分块中，
# 最长的总落到同一个处理器上。计数器把这一点拉平。但是看看 *dynamic*
# 的末尾：一个因果头的最后几个分块最长，别人都快做完时才有人开始做它，大家就都得等。从最长的做起，
# 短的就落在最后，像沙子填进石缝那样填满空隙。这不花任何代价：在一个头之内，块号倒着数就行。
# 序列的次序不变，因为给它们排序需要另一个内核。
#
# 背后的规律是 Graham 在 1969 年给出的：把一列任务依次分给先空出来的一方，完成时刻最晚是最优时刻的
# (2 - 1/P) 倍；如果这列任务从长到短，最晚是 (4/3 - 1/3P) 倍。
#
# ## 在 GPU 上
#
# 先是本课的内核：64 条序列，长度按 1/rank（名次的倒数）递减，每个处理器一个程序，四种方式。
# 再是一个聊天服务器的批次上的注意力：填充后一次调用，每条序列一次调用，以及打包后一次调用。

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
# 相信这样的比较之前，先问一问还有什么不同。这里每个分块还要从第一条序列起自己查找，
# 每个分块之前都有一次原子操作往返 L2 缓存，而且每个处理器只有一个程序，分块又小，
# 矩阵乘单元只好等待。调度有多重要，取决于启动末尾的那些分块有多重要：像这里每个处理器有
# 128 个分块时，几乎不重要。在 H200 上，模拟中最好的次序
# *dynamic, longest first* 反而是四者中最慢的，慢 8 %。模拟没有考虑的东西
# （缓存，以及哪些行同时被读）影响更大。
#
# ## 练习
#
# **1. 用纯 Python 反查。** 写出 `find(tile, lengths, nheads, block)`，返回 (batch, head, block)，
# 超过最后一个分块则返回 None；不要把分块列出来，并与 `tiles` 对照。
#
# <details><summary>答案</summary>
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
# **2. 全部排序。** 如果主机知道长度，就可以跨越头和序列，从最长到最短分发所有分块。
# 上面的批次会比 *dynamic, longest first* 早完成多少？Graham 的保证成立吗？然后只靠改变次序，
# 把静态方案做到尽可能好。
#
# <details><summary>答案</summary>
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
# 还可以在内核上试试：用 1,000 条序列，把 `found.hint` 从一个分块传给下一个。在动态内核里用
# `tl.atomic_add(counter, 2)` 计数，每次做相邻的两个：去计数器的次数更少，调度也更粗。
