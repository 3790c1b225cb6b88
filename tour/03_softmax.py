# %% [markdown]
# # 03. Softmax, online
#
# **The idea:** a running maximum and a running sum, rescaled whenever the maximum
# grows, give the exact softmax of a row in one pass.
#
# After this lesson you can
#
# - write the online softmax, and prove that it is exact,
# - find the mistakes that only rows with a late maximum show,
# - say what each way of computing a softmax reads and writes.
#
# It is the step that lets attention keep its scores on the chip.

# %%
import math

import torch
import triton
import triton.language as tl
from lesson import Figures, NotYet, expect, here, pictures_03, solutions_03

figures = Figures("03_softmax")

# %% [markdown]
# ## The formula, and why it overflows
#
# The softmax of a row $x$ is $p_i = e^{x_i} / \sum_j e^{x_j}$. Taken literally, it
# computes $e^{x_i}$, which soon exceeds the range of a format.

# %%
for dtype in (torch.float16, torch.float32):
    limit = math.log(torch.finfo(dtype).max)
    print(f"{dtype}: e^x is finite up to x = {limit:.2f}")
    x = torch.tensor([0.0, limit + 1], dtype=dtype)
    literal = x.exp() / x.exp().sum()
    print(f"  softmax of (0, {x[1]:.1f}), taken literally: {literal.tolist()}")
    assert literal.isnan().any()

# %% [markdown]
# Scores are dot products, and nothing keeps them small. So subtract the row's
# maximum $m$ from every $x_i$: numerator and denominator are both divided by $e^m$,
# so the result is the same, and no exponent is above zero.
#
# $$p_i = \frac{e^{x_i - m}}{\sum_j e^{x_j - m}}$$
#
# Now the maximum must be known before the first exponential is summed.
#
# ## Rows that show mistakes
#
# A query of attention sees scores like the following. `early`: the first key has
# nearly all of the weight, as first tokens often do. `late`: the largest score is
# near the end of the row. `rising`: near keys count for more than far ones, as
# under a bias that falls with the distance. `flat`: no score stands out.

# %%
ROWS = pictures_03.ROWS
x = pictures_03.scores(1000)
for name, row in zip(ROWS, x):
    print(f"{name:>6}: largest score {row.max():6.1f}, at key {row.argmax()}")
assert not (x.exp() / x.exp().sum(1, keepdim=True))[:2].isfinite().all()

# %% [markdown]
# ## Three passes
#
# One program computes one row. It reads the row three times in blocks: for the
# maximum, for the sum, and for the result. Offsets past the end load $-\infty$,
# whose exponential is 0.


# %%
@triton.jit
def three_pass_kernel(x, out, columns, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * columns
    lanes = tl.arange(0, BLOCK)
    m_i = -float("inf")
    for start in range(0, columns, BLOCK):
        offs = start + lanes
        block = tl.load(x + row + offs, mask=offs < columns, other=-float("inf"))
        block = block.to(tl.float32)
        m_i = tl.maximum(m_i, tl.max(block, 0))
    l_i = 0.0
    for start in range(0, columns, BLOCK):
        offs = start + lanes
        block = tl.load(x + row + offs, mask=offs < columns, other=-float("inf"))
        block = block.to(tl.float32)
        l_i += tl.sum(tl.exp(block - m_i), 0)
    for start in range(0, columns, BLOCK):
        offs = start + lanes
        block = tl.load(x + row + offs, mask=offs < columns, other=-float("inf"))
        block = block.to(tl.float32)
        p = tl.exp(block - m_i) / l_i
        tl.store(out + row + offs, p.to(out.dtype.element_ty), mask=offs < columns)


def softmax(kernel, x, block=256, out=None, **launch):
    """Row by row, by one of this lesson's kernels."""
    out = torch.empty_like(x) if out is None else out
    here(kernel)[(len(x),)](x, out, x.shape[1], BLOCK=block, **launch)
    return out


def check(name, kernel, **launch):
    """Compares the four rows with fp64: off by at most a few roundings."""
    for columns in (1, 255, 1000):
        for dtype, allowed in ((torch.float32, 2e-6), (torch.bfloat16, 4e-3)):
            x = pictures_03.scores(columns).to(dtype)
            exact = torch.softmax(x.double(), 1)
            found = softmax(kernel, x, **launch)
            expect(found, exact, f"{columns} columns, {dtype}", allowed)
    print(f"{name}: right")


check("three passes", three_pass_kernel)

# %% [markdown]
# It is right, and it reads the row three times. A softmax has next to no
# arithmetic, so by lesson 00 its time is its bytes.
#
# ## Two passes, taken literally
#
# Without the maximum two passes are enough, and overflow.


# %%
@triton.jit
def literal_kernel(x, out, columns, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * columns
    lanes = tl.arange(0, BLOCK)
    l_i = 0.0
    for start in range(0, columns, BLOCK):
        offs = start + lanes
        block = tl.load(x + row + offs, mask=offs < columns, other=-float("inf"))
        block = block.to(tl.float32)
        l_i += tl.sum(tl.exp(block), 0)
    for start in range(0, columns, BLOCK):
        offs = start + lanes
        block = tl.load(x + row + offs, mask=offs < columns, other=-float("inf"))
        block = block.to(tl.float32)
        p = tl.exp(block) / l_i
        tl.store(out + row + offs, p.to(out.dtype.element_ty), mask=offs < columns)


broken = softmax(literal_kernel, x)
for name, row in zip(ROWS, broken):
    print(f"{name:>6}: {'right' if row.isfinite().all() else 'not a number'}")
assert broken[2:].isfinite().all() and not broken[:2].isfinite().all(1).any()

# %% [markdown]
# ## Online: the maximum and the sum in one pass
#
# Read the row once and keep two numbers: $m$, the largest score so far, and $l$,
# the sum of $e^{x_i - m}$ so far. A block may bring a larger score. Then the old
# sum was taken relative to the old maximum, and one factor corrects it:
#
# $$m' = \max(m, \max_{i \in \text{block}} x_i), \qquad
# \alpha = e^{m - m'}, \qquad
# l' = \alpha\, l + \sum_{i \in \text{block}} e^{x_i - m'}$$
#
# **Claim.** After any number of blocks, $l = \sum_i e^{x_i - m}$ over all scores so
# far, with $m$ their maximum.
#
# **Proof.** Before the first block $m = -\infty$ and the sum is empty, $l = 0$. Let
# the claim hold before a block. Every old term is $e^{x_i - m}$. Multiplied by
# $\alpha = e^{m - m'}$ it is $e^{x_i - m + m - m'} = e^{x_i - m'}$. So $\alpha\, l$
# is the old sum relative to $m'$, the block's sum is taken relative to $m'$, and
# together they are the sum of all. $\square$
#
# Nothing was approximated. And as $m' \ge m$, the factor $\alpha$ lies between 0
# and 1: nothing overflows. In the first block $\alpha = e^{-\infty} = 0$, and
# $l = 0$ stays 0.


# %%
@triton.jit
def online_kernel(x, out, columns, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * columns
    lanes = tl.arange(0, BLOCK)
    m_i = -float("inf")
    l_i = 0.0
    for start in range(0, columns, BLOCK):
        offs = start + lanes
        block = tl.load(x + row + offs, mask=offs < columns, other=-float("inf"))
        block = block.to(tl.float32)
        m_new = tl.maximum(m_i, tl.max(block, 0))
        alpha = tl.exp(m_i - m_new)
        l_i = l_i * alpha + tl.sum(tl.exp(block - m_new), 0)
        m_i = m_new
    for start in range(0, columns, BLOCK):
        offs = start + lanes
        block = tl.load(x + row + offs, mask=offs < columns, other=-float("inf"))
        block = block.to(tl.float32)
        p = tl.exp(block - m_i) / l_i
        tl.store(out + row + offs, p.to(out.dtype.element_ty), mask=offs < columns)


check("online", online_kernel)

# %% [markdown]
# ## Step by step
#
# The same steps in fp64, with every number printed. The last column is the sum
# taken again from the start: the claim says that it equals $l$.


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
        afresh = (row[: start + block] - m).exp().sum().item()
        steps.append((m, alpha, total, afresh))
    return steps


traces = {name: trace(row) for name, row in zip(ROWS, x)}
for name in ("late", "rising"):
    print(f"{name:>6}: block      m         alpha             l      sum afresh")
    for number, (m, alpha, total, afresh) in enumerate(traces[name]):
        sums = f"{total:>12.6f}  {afresh:>14.6f}"
        print(f"{number:>13} {m:>6.2f}  {alpha:>12.3e}  {sums}")
for steps in traces.values():
    assert all(
        math.isclose(total, afresh, rel_tol=1e-12) for *_, total, afresh in steps
    )
pictures_03.rescaling(traces)

# %% [markdown]
# Factors multiply, so the axis of $\alpha$ is logarithmic: as far down is as small
# a factor, wherever it begins. In `late` the sum grows up to the block with the
# large score, and there $\alpha$ scales all that came before to almost nothing. In
# `rising` most blocks bring a new maximum. In `early` the maximum is in the first
# block and $\alpha$ is 1 from then on: a kernel that forgets the factor passes a
# test on such rows.


# %%
def without_alpha(row, block=125):
    """The sum without its factor, over the right one."""
    row, m, total = row.double().cpu(), -math.inf, 0.0
    for start in range(0, len(row), block):
        part = row[start : start + block]
        m = max(m, part.max().item())
        total += (part - m).exp().sum().item()
    return total / (row - row.max()).exp().sum().item()


wrong = {name: without_alpha(row) for name, row in zip(ROWS, x)}
for name, factor in wrong.items():
    print(f"{name:>6}: the sum is {factor:.6g} times what it should be")
assert math.isclose(wrong["early"], 1, rel_tol=1e-9)
assert wrong["late"] > 2 and wrong["rising"] > 2

# %% [markdown]
# ## Exercise 1: the logarithm of the sum
#
# GPUs have an instruction for $2^x$ and none for $e^x$: `tl.exp(x)` multiplies each
# element by $\log_2 e$ first. Write the online kernel with `tl.exp2`, and let it
# store $\mathrm{lse} = m + \ln l$ for each row and nothing else. (The backward pass
# of attention needs it.)
#
# **Hint:** multiply a block by $\log_2 e$ once. Then every `tl.exp` is a `tl.exp2`;
# what does the last line have to undo?


# %%
@triton.jit
def lse_kernel(x, lse, columns, BLOCK: tl.constexpr):
    """lse = the logarithm of the sum of exponentials, for each row of x."""
    raise NotYet


solutions_03.check_lse(lse_kernel)

# %% [markdown]
# <details><summary>An answer</summary>
#
# ```{literalinclude} /../tour/lesson/solutions_03.py
# :pyobject: lse_kernel
# :language: python
# ```
#
# </details>
#
# ## Two halves of a row
#
# Nothing in the proof asks for an order. Two parts of a row, each with its own $m$
# and $l$, are merged by the same rule, and so are a thousand, on as many SMs.
# Decoding with split keys rests on this, and so does attention across several GPUs.


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
    lse = m + total.log()
    torch.testing.assert_close(lse, torch.logsumexp(row, 0), rtol=1e-12, atol=0)
print(f"any order of merging gives the same logarithm of the sum: {lse:.6f}")

# %% [markdown]
# ## What each of them moves
#
# A row that fits into a program's registers needs no online softmax: read it once,
# keep it, write the result. No kernel reads less.


# %%
@triton.jit
def whole_row_kernel(x, out, columns, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * columns
    offs = tl.arange(0, BLOCK)  # the whole row
    block = tl.load(x + row + offs, mask=offs < columns, other=-float("inf"))
    block = block.to(tl.float32)
    p = tl.exp(block - tl.max(block, 0))
    p = p / tl.sum(p, 0)
    tl.store(out + row + offs, p.to(out.dtype.element_ty), mask=offs < columns)


check("a whole row at a time", whole_row_kernel, block=1024)

# %% [markdown]
# Counted in rows: three reads and a write, two and a write, one and a write. If all
# of it came from HBM, time would go as 4 : 3 : 2. But a row that was read a moment
# ago may still be in the L2 cache, as long as the rows in flight, a few for each
# SM, fit there together. Long rows do not.

# %%
kernels = {
    "three passes": three_pass_kernel,
    "two, literal": literal_kernel,
    "online": online_kernel,
    "whole row": whole_row_kernel,
}
pictures_03.bandwidth(figures, softmax, kernels)

# %% [markdown]
# The literal kernel moves as much as the online one, and overflows; the online one
# computes some exponentials more, which are free where bytes are the limit.
#
# One case is left: a row in which every score is masked, $m = -\infty$. Then
# $m - m'$ is $-\infty + \infty$, which is not a number. tilewise handles it in one
# place, `tile/softmax.py`, and such a row's result is 0.
#
# ## Exercise 2: one row of attention
#
# Attention goes one step further. There the row need not be written at all: what is
# wanted is a sum of values weighted by $p$. Given scores `x` of shape (rows,
# columns) and values `v` of shape (columns, D), compute `softmax(x) @ v` in one
# pass, without storing a probability. Beside `m_i` and `l_i` carry `acc`, the
# weighted sum of the rows of `v` so far. What happens to it when the maximum
# changes? Lesson 04 makes this kernel fast.
#
# **Hint:** every term of `acc` has the factor that the terms of `l_i` have.


# %%
@triton.jit
def weighted_sum_kernel(x, v, out, columns, BLOCK: tl.constexpr, D: tl.constexpr):
    """out = softmax(x) @ v, a row a program."""
    raise NotYet


solutions_03.check_weighted_sum(weighted_sum_kernel)

# %% [markdown]
# <details><summary>An answer</summary>
#
# ```{literalinclude} /../tour/lesson/solutions_03.py
# :pyobject: weighted_sum_kernel
# :language: python
# ```
#
# </details>

# %%
solutions_03.exercises.show()
