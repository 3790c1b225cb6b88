# %% [markdown]
# # 03. Softmax, online
#
# After this lesson you can compute a softmax in one walk over a row of any length, never holding
# more than a block of it, prove that this is exact, and say what each way of doing it reads and
# writes. It is the step that lets attention keep its scores on the chip.

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
# ## The formula, and why it breaks
#
# The softmax of a row $x$ is $p_i = e^{x_i} / \sum_j e^{x_j}$. Taken literally, it asks for
# $e^{x_i}$, and that leaves a format's range soon.

# %%
for dtype in (torch.float16, torch.float32):
    limit = math.log(torch.finfo(dtype).max)
    print(f"{dtype}: e^x is finite up to x = {limit:.2f}")
    x = torch.tensor([0.0, limit + 1], dtype=dtype)
    literal = x.exp() / x.exp().sum()
    print(f"  softmax of (0, {x[1]:.1f}), taken literally: {literal.tolist()}")
    assert literal.isnan().any()

# %% [markdown]
# Scores are dot products, and nothing keeps them small. The way out is old. Subtract the row's
# maximum $m$ from every $x_i$: numerator and denominator are both divided by $e^m$, so nothing
# changes, and no exponent is above zero.
#
# $$p_i = \frac{e^{x_i - m}}{\sum_j e^{x_j - m}}$$
#
# Now the maximum must be known before the first exponential is summed.
#
# ## Rows that make it matter
#
# We shall need rows on which mistakes show. A query of attention sees scores like the following.
# `early`: the first key draws all attention, as first tokens often do. `late`: near the end of the
# row stands the key that the query looks for. `rising`: near keys count for more than far ones, as
# under a bias that falls with the distance. `flat`: nothing stands out.


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
# ## Three passes
#
# One program takes one row. It walks over it three times in blocks: for the maximum, for the sum,
# and for the result. Lanes past the end load $-\infty$, whose exponential is 0.


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
# It is right, and it reads the row three times. Lesson 00 says what to think of that: a softmax has
# next to no arithmetic, so its time is its bytes.
#
# ## Two passes, taken literally
#
# Without the maximum two passes do, and break.


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
# ## Online: the maximum and the sum in one pass
#
# Walk over the row once and keep two numbers: $m$, the largest score so far, and $l$, the sum of
# $e^{x_i - m}$ so far. A block may bring a larger score. Then the old sum was taken relative to the
# wrong maximum, and is put right by one factor:
#
# $$m' = \max(m, \max_{i \in \text{block}} x_i), \qquad
# \alpha = e^{m - m'}, \qquad
# l' = \alpha\, l + \sum_{i \in \text{block}} e^{x_i - m'}$$
#
# **Claim.** After any number of blocks, $l = \sum_i e^{x_i - m}$ over all scores seen, with $m$
# their maximum.
#
# **Proof.** Before the first block $m = -\infty$ and the sum is empty, $l = 0$. Let the claim hold
# before a block. Every old term is $e^{x_i - m}$. Multiplied by $\alpha = e^{m - m'}$ it is
# $e^{x_i - m + m - m'} = e^{x_i - m'}$. So $\alpha\, l$ is the old sum relative to $m'$, the
# block's sum is taken relative to $m'$, and together they are the sum of all. $\square$
#
# Nothing was approximated. And as $m' \ge m$, the factor $\alpha$ lies between 0 and 1: nothing
# overflows. In the first block $\alpha = e^{-\infty} = 0$, which does no harm to $l = 0$.


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
# ## Watch it happen
#
# The same steps, in fp64, with every number written down. The last column is the sum taken over
# again from the start: the claim says that it equals $l$.


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
# In the row `late` the sum grows as if nothing were to come, up to the block with the large score.
# Then one number arrives beside which all before it are nothing, and $\alpha$ says so. In `rising`
# most blocks bring a new maximum, and the factor works on the way.
#
# What if you leave the factor out? On `early` the maximum is there from the first block on,
# $\alpha$ is 1 ever after, and a test on such rows passes. The mistake needs a late maximum to be
# seen.


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
# ## Two halves of a row
#
# Nothing in the proof asks for an order. Two parts of a row, each with its own $m$ and $l$, are
# merged by the same rule, and so are three, or a thousand, on as many SMs. It does not matter which
# are merged first. Decoding with split keys rests on this, and so does attention across several
# GPUs.


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
# ## A row that fits
#
# If a row fits into a program's registers, there is nothing to be online about: read it once, keep
# it, write the result. No kernel reads less. Its limit is the length.


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
# ## What each of them moves
#
# Counted in rows: three reads and a write, two and a write, one and a write. If all of it came from
# HBM, time would go as 4 : 3 : 2. But a row that was read a moment ago may still be in the L2
# cache, where the second reading costs much less. That holds as long as the rows in flight, a few
# for each SM, fit there together. Long rows do not.

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
# The literal way moves as much as the online one, and breaks; the online one costs some
# exponentials more, which are free where bytes are the limit.
#
# Attention goes one step further. There the row need not be written at all: what is wanted is a sum
# of values weighted by $p$, and such a sum can be rescaled on the way exactly as $l$ is. Then one
# walk over the keys does everything. You write this kernel in the second exercise, and lesson 04
# makes it fast.
#
# One case is left: a row in which every score is masked, $m = -\infty$. Then $m - m'$ is
# $-\infty + \infty$, which is not a number. tilewise handles it in one place, `tile/softmax.py`,
# and such a row's result is 0.
#
# ## Exercises
#
# **1.** GPUs have an instruction for $2^x$ and none for $e^x$: `tl.exp(x)` multiplies each element
# by $\log_2 e$ first. Write the online kernel with `tl.exp2`, and let it return
# the logarithm of the sum, $\mathrm{lse} = m + \ln l$, for each row and nothing else. (The backward
# pass of attention needs it.) Fold $\log_2 e$ in as early as you can.
#
# <details><summary>Solution</summary>
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
# **2.** Write a kernel for one row of attention: given scores `x` of shape (rows, columns) and
# values `v` of shape (columns, D), compute `softmax(x) @ v` in one walk, without storing a
# probability. Beside `m_i` and `l_i` carry `acc`, the weighted sum of the rows of `v` so far. What
# happens to it when the maximum changes?
#
# <details><summary>Solution</summary>
#
# Every term of `acc` holds a factor $e^{x_i - m}$, as every term of `l_i` does. So it is multiplied
# by the same $\alpha$, and divided by `l_i` once, at the end.
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
