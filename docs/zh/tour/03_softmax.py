# %% [markdown]
# # 03. 在线 softmax
#
# 学完本课，你能只走一遍就算出任意长的一行的 softmax，手里始终不超过一块，能证明这样做是精确的，
# 还能说出每种做法读写多少。正是这一步，让注意力可以把分数留在芯片上。

# %%
import math

import matplotlib.pyplot as plt
import torch
import triton
import triton.language as tl
from lesson import DEVICE, ON_GPU, Figures, here, show

from tilewise.testing import tolerance

figures = Figures("03_softmax")

# %% [markdown]
# ## 公式，以及它为什么会失效
#
# 一行 $x$ 的 softmax 是 $p_i = e^{x_i} / \sum_j e^{x_j}$。照字面计算就要求出
# $e^{x_i}$，它很快就超出格式的范围。

# %%
for dtype in (torch.float16, torch.float32):
    limit = math.log(torch.finfo(dtype).max)
    print(f"{dtype}: e^x is finite up to x = {limit:.2f}")
    x = torch.tensor([0.0, limit + 1], dtype=dtype)
    literal = x.exp() / x.exp().sum()
    print(f"  softmax of (0, {x[1]:.1f}), taken literally: {literal.tolist()}")
    assert literal.isnan().any()

# %% [markdown]
# 分数 (score) 是点积，没有什么能保证它们很小。办法由来已久。从每个 $x_i$ 中减去这一行的最大值
# $m$：分子和分母都除以了 $e^m$，所以结果不变，而且没有一个指数大于零。
#
# $$p_i = \frac{e^{x_i - m}}{\sum_j e^{x_j - m}}$$
#
# 这样一来，累加第一项之前就必须知道最大值。
#
# ## 能分出对错的行
#
# 我们需要几行能暴露错误的数据。注意力的一个查询 (query) 看到的分数就像下面这样。`early`：
# 第一个键 (key) 引走了全部注意力，开头的 token 常常如此。`late`：查询要找的键靠近行末。`rising`：
# 近处的键比远处的更有分量，就像加上了随距离下降的偏置 (bias)。`flat`：没有哪个突出。


# %%
def scores(columns, headdim=64, seed=0):
    """Four rows of q k / sqrt(headdim), in the order of ROWS."""
    generator = torch.Generator().manual_seed(seed)
    q = 3 * torch.randn(headdim, generator=generator)
    keys = torch.randn(4, columns, headdim, generator=generator)
    keys[0, 0] = 4 * q / 3
    keys[1, columns - 1 - columns // 8] = 4 * q / 3
    rows = keys @ q * headdim**-0.5
    rows[2] += torch.linspace(-20, 0, columns)
    return rows.to(DEVICE)


ROWS = ("early", "late", "rising", "flat")
x = scores(1000)
for name, row in zip(ROWS, x):
    print(f"{name:>6}: largest score {row.max():6.1f}, at key {row.argmax()}")
assert not (x.exp() / x.exp().sum(1, keepdim=True))[:2].isfinite().all()

# %% [markdown]
# ## 三趟
#
# 一个程序处理一行。它逐块走过这一行三趟：求最大值，求和，求结果。超出行末的通道 (lane) 加载
# $-\infty$，取指数后是 0。


# %%
@triton.jit
def three_pass_kernel(x, out, columns, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * columns
    lanes = tl.arange(0, BLOCK)
    m_i = -float("inf")
    for start in range(0, columns, BLOCK):
        offs = start + lanes
        block = tl.load(x + row + offs, mask=offs < columns, other=-float("inf")).to(tl.float32)
        m_i = tl.maximum(m_i, tl.max(block, 0))
    l_i = 0.0
    for start in range(0, columns, BLOCK):
        offs = start + lanes
        block = tl.load(x + row + offs, mask=offs < columns, other=-float("inf")).to(tl.float32)
        l_i += tl.sum(tl.exp(block - m_i), 0)
    for start in range(0, columns, BLOCK):
        offs = start + lanes
        block = tl.load(x + row + offs, mask=offs < columns, other=-float("inf")).to(tl.float32)
        p = tl.exp(block - m_i) / l_i
        tl.store(out + row + offs, p.to(out.dtype.element_ty), mask=offs < columns)


def softmax(kernel, x, block=256, out=None, **launch):
    """Row by row, by one of this lesson's kernels."""
    out = torch.empty_like(x) if out is None else out
    here(kernel)[(len(x),)](x, out, x.shape[1], BLOCK=block, **launch)
    return out


def check(kernel, **launch):
    """The four rows at ragged lengths, held to fp64 and allowed about twice torch's error."""
    for columns in (1, 255, 1000):
        for dtype in (torch.float32, torch.bfloat16):
            x = scores(columns).to(dtype)
            exact, plain = torch.softmax(x.double(), 1), torch.softmax(x, 1)
            held = tolerance.judge(softmax(kernel, x, **launch), exact, plain)
            assert held.max_error <= held.max_bound, f"{columns} columns, {dtype}: {held}"


check(three_pass_kernel)
print("three passes: right")

# %% [markdown]
# 结果是对的，但这一行读了三遍。第 00 课说过该怎样看待这一点：softmax 几乎没有算术，
# 它的时间就是它的字节。
#
# ## 两趟，照字面计算
#
# 不求最大值，两趟就够，但会出错。


# %%
@triton.jit
def literal_kernel(x, out, columns, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * columns
    lanes = tl.arange(0, BLOCK)
    l_i = 0.0
    for start in range(0, columns, BLOCK):
        offs = start + lanes
        block = tl.load(x + row + offs, mask=offs < columns, other=-float("inf")).to(tl.float32)
        l_i += tl.sum(tl.exp(block), 0)
    for start in range(0, columns, BLOCK):
        offs = start + lanes
        block = tl.load(x + row + offs, mask=offs < columns, other=-float("inf")).to(tl.float32)
        p = tl.exp(block) / l_i
        tl.store(out + row + offs, p.to(out.dtype.element_ty), mask=offs < columns)


broken = softmax(literal_kernel, x)
for name, row in zip(ROWS, broken):
    print(f"{name:>6}: {'right' if row.isfinite().all() else 'not a number'}")
assert broken[2:].isfinite().all() and not broken[:2].isfinite().all(1).any()

# %% [markdown]
# ## 在线：一趟求出最大值与和
#
# 沿着这一行只走一趟，记住两个数：$m$ 是到目前为止最大的分数，$l$ 是到目前为止 $e^{x_i - m}$
# 之和。新的一块可能带来更大的分数。这时旧的和是相对于错误的最大值求的，乘一个因子就能改正：
#
# $$m' = \max(m, \max_{i \in \text{block}} x_i), \qquad
# \alpha = e^{m - m'}, \qquad
# l' = \alpha\, l + \sum_{i \in \text{block}} e^{x_i - m'}$$
#
# **命题**：处理完任意多块之后，都有 $l = \sum_i e^{x_i - m}$，求和遍及已经看到的所有分数，$m$
# 是它们的最大值。
#
# **证明**：第一块之前 $m = -\infty$，和是空的，$l = 0$。设命题在某一块之前成立。旧的每一项都是
# $e^{x_i - m}$。乘以 $\alpha = e^{m - m'}$ 之后，它是 $e^{x_i - m + m - m'} = e^{x_i - m'}$。所以
# $\alpha\, l$ 是相对于 $m'$ 的旧的和，这一块的和也是相对于 $m'$ 求的，两者相加就是全部之和。
# $\square$
#
# 没有任何近似。又因为 $m' \ge m$，因子 $\alpha$ 在 0 与 1 之间：什么都不会上溢。在第一块里
# $\alpha = e^{-\infty} = 0$，对 $l = 0$ 没有妨碍。


# %%
@triton.jit
def online_kernel(x, out, columns, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * columns
    lanes = tl.arange(0, BLOCK)
    m_i = -float("inf")
    l_i = 0.0
    for start in range(0, columns, BLOCK):
        offs = start + lanes
        block = tl.load(x + row + offs, mask=offs < columns, other=-float("inf")).to(tl.float32)
        m_new = tl.maximum(m_i, tl.max(block, 0))
        alpha = tl.exp(m_i - m_new)
        l_i = l_i * alpha + tl.sum(tl.exp(block - m_new), 0)
        m_i = m_new
    for start in range(0, columns, BLOCK):
        offs = start + lanes
        block = tl.load(x + row + offs, mask=offs < columns, other=-float("inf")).to(tl.float32)
        p = tl.exp(block - m_i) / l_i
        tl.store(out + row + offs, p.to(out.dtype.element_ty), mask=offs < columns)


check(online_kernel)
print("online: right")

# %% [markdown]
# ## 看着它发生
#
# 同样的步骤，用 fp64，把每个数都写下来。最后一列是从头重新求的和：命题说它等于 $l$。


# %%
def trace(row, block=125):
    """m, alpha and l after each block, and the sum taken afresh."""
    row, m, total, steps = row.double().cpu(), -math.inf, 0.0, []
    for start in range(0, len(row), block):
        part = row[start : start + block]
        m_new = max(m, part.max().item())
        alpha = math.exp(m - m_new)
        total = total * alpha + (part - m_new).exp().sum().item()
        m = m_new
        steps.append((m, alpha, total, (row[: start + block] - m).exp().sum().item()))
    return steps


traces = {name: trace(row) for name, row in zip(ROWS, x)}
for name in ("late", "rising"):
    print(f"{name:>6}: block      m         alpha             l      sum afresh")
    for number, (m, alpha, total, afresh) in enumerate(traces[name]):
        print(f"{number:>13} {m:>6.2f}  {alpha:>12.3e}  {total:>12.6f}  {afresh:>14.6f}")
for steps in traces.values():
    assert all(math.isclose(total, afresh, rel_tol=1e-12) for *_, total, afresh in steps)

# %% [markdown]
# 在 `late` 这一行，和一路增长，仿佛后面什么都不会来，直到有大分数的那一块。这时来了一个数，
# 在它旁边，先前的一切都微不足道，$\alpha$ 说的就是这个。在 `rising` 里，多数块都带来新的最大值，
# 因子一路都在起作用。
#
# 漏掉这个因子会怎样？在 `early` 上，最大值从第一块起就在，此后 $\alpha$
# 一直是 1，用这样的行来测试就会通过。最大值来得晚，才能看出这个错误。


# %%
def forgetful(row, block=125):
    """The sum without its factor, over the right one."""
    m, total = -math.inf, 0.0
    row = row.double().cpu()
    for start in range(0, len(row), block):
        part = row[start : start + block]
        m = max(m, part.max().item())
        total += (part - m).exp().sum().item()
    return total / (row - row.max()).exp().sum().item()


wrong = {name: forgetful(row) for name, row in zip(ROWS, x)}
for name, factor in wrong.items():
    print(f"{name:>6}: the sum is {factor:.6g} times what it should be")
assert math.isclose(wrong["early"], 1, rel_tol=1e-9)
assert wrong["late"] > 2 and wrong["rising"] > 2

figure, (top, bottom) = plt.subplots(2, 1, figsize=(7, 4.4), sharex=True)
looks = {"early": "ks:", "late": "ko-", "rising": "kd-.", "flat": "k^--"}
for name, steps in traces.items():
    blocks = range(1, len(steps) + 1)
    top.plot(blocks, [m for m, *_ in steps], looks[name], label=name, fillstyle="none")
    shown = [(block, step[1]) for block, step in zip(blocks, steps) if step[1] > 0]
    bottom.plot(*zip(*shown), looks[name], fillstyle="none")
top.set(ylabel="largest score so far")
top.legend(fontsize=8)
bottom.set(ylabel="alpha, the factor", xlabel="blocks of 125 keys", yscale="log", ylim=(1e-3, 2))
lowest = min(alpha for _, alpha, *_ in traces["late"][1:])
bottom.text(5.9, 2e-3, f"late: down to {lowest:.0e}", ha="right")
figure.suptitle("Online softmax over four rows of 1000 scores", fontsize=9)
show(figure, "03_softmax_rescaling")

# %% [markdown]
# ## 一行的两半
#
# 证明里没有哪一步要求特定的顺序。一行的两部分各有自己的 $m$ 和 $l$，按同样的规则合并；三部分、
# 一千部分也一样，分在多少个 SM 上都行。先合并哪些无关紧要。把键切开的解码（split-KV
# 解码）靠的就是这一点，跨多块 GPU 的注意力也是。


# %%
def state(row):
    """Maximum and sum of a part."""
    m = row.max()
    return m, (row - m).exp().sum()


def merge(one, other):
    """The state of both parts together."""
    m = torch.maximum(one[0], other[0])
    return m, one[1] * (one[0] - m).exp() + other[1] * (other[0] - m).exp()


row = x[1].double()
parts = [state(part) for part in row.split(300)]
left = merge(merge(merge(parts[0], parts[1]), parts[2]), parts[3])
right = merge(parts[0], merge(parts[1], merge(parts[2], parts[3])))
for m, total in (left, right):
    torch.testing.assert_close(m + total.log(), torch.logsumexp(row, 0), rtol=1e-12, atol=0)
print("any order of merging gives the same logarithm of the sum:", f"{(m + total.log()):.6f}")

# %% [markdown]
# ## 放得下的一行
#
# 如果一行放得进程序的寄存器，就没有什么需要在线的：读一遍，留住，写出结果。没有哪个内核能读得更少。
# 它的限制是长度。


# %%
@triton.jit
def whole_row_kernel(x, out, columns, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * columns
    offs = tl.arange(0, BLOCK)  # the whole row
    block = tl.load(x + row + offs, mask=offs < columns, other=-float("inf")).to(tl.float32)
    p = tl.exp(block - tl.max(block, 0))
    p = p / tl.sum(p, 0)
    tl.store(out + row + offs, p.to(out.dtype.element_ty), mask=offs < columns)


check(whole_row_kernel, block=1024)
print("a whole row at a time: right")

# %% [markdown]
# ## 每种做法搬运多少
#
# 以行来数：三读一写，两读一写，一读一写。如果全都来自 HBM，时间之比就是 4 : 3 : 2。
# 但刚读过的一行可能还在 L2 缓存里，再读一遍就便宜得多。只要正在处理的行（每个 SM
# 有几行）合起来放得进缓存，就是如此。长的行放不进。

# %%
ELEMENTS = 1 << 26
COLUMNS = (1 << 10, 1 << 12, 1 << 14, 1 << 16, 1 << 18)
WHOLE = 1 << 14  # longer rows do not fit
PASSES = {"three passes": 4, "two, literal": 3, "online": 3, "whole row": 2}
print("rows moved:", PASSES)


def softmax_calls(columns):
    """Everybody's softmax of the same fp32 matrix; one of nothing where there is no GPU."""
    rows = ELEMENTS // columns if ON_GPU else 0
    x = torch.randn(rows, columns, device=DEVICE)
    out = torch.empty_like(x)
    loop = dict(block=min(columns, 4096), out=out, num_warps=8)
    calls = {
        "three passes": lambda: softmax(three_pass_kernel, x, **loop),
        "two, literal": lambda: softmax(literal_kernel, x, **loop),
        "online": lambda: softmax(online_kernel, x, **loop),
    }
    if columns <= WHOLE:
        whole = dict(block=columns, out=out, num_warps=16 if columns > 4096 else 8)
        calls["whole row"] = lambda: softmax(whole_row_kernel, x, **whole)
    return calls | {"torch": lambda: torch.softmax(x, 1)}


speeds = {}  # GB/s of what must be moved at least, by name and length
for columns in COLUMNS:
    shape = {"what": "rows", "elements": ELEMENTS, "columns": columns, "dtype": "float32"}
    found = figures.times(shape, softmax_calls(columns), rounds=3, round_ms=15.0)
    for name, ms in found.items():
        speeds.setdefault(name, {})[columns] = 8 * ELEMENTS / ms * 1e-6


# %%
def draw_speeds(speeds):
    """Useful GB/s against the length of a row."""
    figure, axes = plt.subplots(figsize=(7, 3.6))
    looks = ("ks--", "k+:", "ko-", "kd-.", "k^:")
    for (name, line), look in zip(speeds.items(), looks):
        axes.plot(list(line), list(line.values()), look, label=name, fillstyle="none")
    axes.set_xscale("log", base=2)
    axes.set(xlabel="columns, fp32, 2^26 elements in all", ylabel="useful GB/s", ylim=(0, None))
    axes.set_title(f"Softmax: a read and a write over the time\n({figures.machine})", fontsize=9)
    axes.legend(fontsize=8)
    return figure


if speeds:
    show(draw_speeds(speeds), "03_softmax_bandwidth")
    for name, line in speeds.items():
        print(f"{name:>13}: " + "  ".join(f"{n}: {speed:.0f}" for n, speed in line.items()))
    print("useful GB/s, by columns")
else:
    print(figures.machine)

# %% [markdown]
# 照字面的做法与在线的做法搬运得一样多，却会出错；在线的做法多算一些指数，而在受字节限制的地方，
# 这不花代价。
#
# 注意力更进一步。在那里，这一行根本不必写出：要的是以 $p$ 加权的值 (value)
# 之和，这样的和可以在途中重新缩放 (rescale)，与 $l$ 完全一样。于是沿着键走一遍，就做完了一切。
# 第二道练习要你写出这个内核，第 04 课让它变快。
#
# 还剩一种情况：一行里每个分数都被掩码遮住，$m = -\infty$。这时 $m - m'$ 是
# $-\infty + \infty$，不是一个数 (NaN)。tilewise 只在一个地方处理它，即 `tile/softmax.py`，
# 这样一行的结果是 0。
#
# ## 练习
#
# **1.** GPU 有计算 $2^x$ 的指令，却没有计算 $e^x$ 的：`tl.exp(x)` 先把每个元素乘以 $\log_2 e$。用
# `tl.exp2` 写出在线内核，让它对每一行返回和的对数 $\mathrm{lse} = m + \ln l$，别的都不返回。
# （注意力的反向要用到它。）把 $\log_2 e$ 尽可能早地并进去。
#
# <details><summary>答案</summary>
#
# ```python
# @triton.jit
# def lse_kernel(x, lse, columns, BLOCK: tl.constexpr):
#     LOG2E: tl.constexpr = 1.4426950408889634
#     row = tl.program_id(0).to(tl.int64) * columns
#     lanes = tl.arange(0, BLOCK)
#     m_i = -float("inf")
#     l_i = 0.0
#     for start in range(0, columns, BLOCK):
#         offs = start + lanes
#         block = tl.load(x + row + offs, mask=offs < columns, other=-float("inf"))
#         block = block * LOG2E  # in attention this is folded into the scores' scale: it is free
#         m_new = tl.maximum(m_i, tl.max(block, 0))
#         l_i = l_i * tl.exp2(m_i - m_new) + tl.sum(tl.exp2(block - m_new), 0)
#         m_i = m_new
#     tl.store(lse + tl.program_id(0), (m_i + tl.log2(l_i)) / LOG2E)
#
#
# x = scores(1000)
# lse = torch.empty(4, device=DEVICE)
# here(lse_kernel)[(4,)](x, lse, 1000, BLOCK=256)
# torch.testing.assert_close(lse.double(), torch.logsumexp(x.double(), 1), rtol=0, atol=1e-4)
# ```
#
# </details>
#
# **2.** 为注意力的一行写一个内核：给定形状为 (rows, columns) 的分数 `x` 和形状为 (columns, D) 的值
# `v`，走一遍就算出 `softmax(x) @ v`，不存任何概率。除了 `m_i` 和 `l_i`，还要带着
# `acc`，即到目前为止 `v` 各行的加权和。最大值变了，它该怎么变？
#
# <details><summary>答案</summary>
#
# `acc` 的每一项都含有因子 $e^{x_i - m}$，就像 `l_i` 的每一项那样。所以它乘以同一个
# $\alpha$，最后再除以 `l_i`，只除一次。
#
# ```python
# @triton.jit
# def weighted_sum_kernel(x, v, out, columns, BLOCK: tl.constexpr, D: tl.constexpr):
#     row = tl.program_id(0).to(tl.int64) * columns
#     lanes, offs_d = tl.arange(0, BLOCK), tl.arange(0, D)
#     m_i = -float("inf")
#     l_i = 0.0
#     acc = tl.zeros((D,), tl.float32)
#     for start in range(0, columns, BLOCK):
#         offs = start + lanes
#         inside = offs < columns
#         block = tl.load(x + row + offs, mask=inside, other=-float("inf"))
#         values = tl.load(v + offs[:, None] * D + offs_d[None, :], mask=inside[:, None], other=0.0)
#         m_new = tl.maximum(m_i, tl.max(block, 0))
#         alpha = tl.exp(m_i - m_new)
#         p = tl.exp(block - m_new)
#         l_i = l_i * alpha + tl.sum(p, 0)
#         acc = acc * alpha + tl.sum(p[:, None] * values, 0)
#         m_i = m_new
#     tl.store(out + tl.program_id(0) * D + offs_d, acc / l_i)
#
#
# x, v = scores(1000), torch.randn(1000, 16, device=DEVICE)
# out = torch.empty(4, 16, device=DEVICE)
# here(weighted_sum_kernel)[(4,)](x, v, out, 1000, BLOCK=128, D=16)
# expected = torch.softmax(x.double(), 1) @ v.double()
# torch.testing.assert_close(out.double(), expected, rtol=0, atol=1e-5)
# ```
#
# </details>
