# %% [markdown]
# # 09. What 8 bits keep
#
# **The idea:** numbers of 8 bits halve the bytes and double the arithmetic, and
# what they lose is decided by scales, by what is taken off before rounding, and by
# how sums are kept.
#
# After this lesson you can
#
# - say which numbers e4m3 has, and choose a scale for tensors and for
#   probabilities,
# - explain why a long sum in a short accumulator is wrong, and repair it,
# - take outliers and means away before you round, and put back what must be put
#   back.
#
# You need lesson 04 for FlashAttention; the caches of lesson 08 come at the end.
# All of it runs on a CPU: torch rounds to 8 bits exactly as a GPU does.

# %%
import torch
import triton
import triton.language as tl
from lesson import DEVICE, Figures, NotYet, here, pictures_09, solutions_09

import tilewise

figures = Figures("09_eight_bits")
torch.manual_seed(0)
E4M3 = torch.float8_e4m3fn

# %% [markdown]
# ## The grid
#
# **e4m3** has a sign, 4 bits of exponent and 3 of the significand: 253 numbers and
# two NaN, no infinity. Between two powers of two there are 8 of them, so a number
# is rounded by at most 1/16 of itself, wherever it lies between 2^-6 and 448. Below
# that the steps stay 2^-9.

# %%
values = pictures_09.grid()
print(f"largest {values.max():g}, smallest above zero {values[1]:g}")
print("from 8 to 16:", *(f"{x:g}" for x in values if 8 <= x <= 16))


def relative(x, exact):
    """The norm of an error over the norm of what is right."""
    return ((x.double() - exact.double()).norm() / exact.double().norm()).item()


x = torch.randn(1 << 16)
for size in (1e-3, 1.0, 448 / x.abs().max().item(), 1000.0):
    rounded = (x * size).clamp(-448, 448).to(E4M3).float() / size
    error = 100 * relative(rounded, x)
    print(f"normal numbers times {size:7.3f}: off by {error:5.2f} %")

# %% [markdown]
# A **scale** moves a tensor to where the grid is: store x / scale, and multiply by
# it again after the sum. As the grid is relative, most scales do equally well, 2.6
# % for normal numbers. What is wrong is to be too small, where steps no longer
# shrink, or too large, where numbers are cut off. The largest magnitude / 448 is
# always safe.
#
# ## Probabilities at 2^8
#
# P is rounded, too, as the second product, P V, is of 8 bits. In FlashAttention P =
# exp(S - m) is at most 1, and many probabilities are small: below 2^-10 they would
# become 0. So kernels compute 2^8 · P, at most 256, and l with the same factor: O /
# l is as it was. It costs nothing, as 8 is added to an exponent that is computed
# anyway. (GPUs before sm_89 do not convert to e4m3: start Python with
# CUDA_VISIBLE_DEVICES= there, and the kernel is interpreted.)


# %%
@triton.jit
def round_p_kernel(s, out, seqlen, shift, BLOCK: tl.constexpr):
    """A row of P times 2^shift in e4m3, and its sum before it is rounded."""
    row, offs = tl.program_id(0) * seqlen, tl.arange(0, BLOCK)
    inside = offs < seqlen
    scores = tl.load(s + row + offs, mask=inside, other=-float("inf"))
    p = tl.exp2((scores - tl.max(scores, 0)) * 1.4426950408889634 + shift)
    kept = p.to(tl.float8e4nv).to(tl.float32)
    tl.store(out + row + offs, kept / tl.sum(p, 0), mask=inside)


def rounded_p(s, shift):
    """P of rows of scores, each rounded to e4m3 at 2^shift."""
    out = torch.empty_like(s)
    block = triton.next_power_of_2(s.shape[1])
    here(round_p_kernel)[(len(s),)](s, out, s.shape[1], shift, block)
    return out


s = 3 * torch.randn(16, 500, device=DEVICE)
exact = s.double().softmax(-1)
for shift in (0, 8):
    p = rounded_p(s, shift)
    error = 100 * relative(p, exact)
    print(f"P at 2^{shift}: off by {error:.2f} %, {(p == 0).sum()} are 0")
zeros = [(rounded_p(s, shift) == 0).sum().item() for shift in (0, 8)]
assert zeros[1] < zeros[0] / 4

# %% [markdown]
# ## Short accumulators
#
# A tensor core multiplies numbers of 8 bits exactly, and adds the products in a
# register. On Hopper that register keeps some 14 bits of 8-bit products. Each
# product is cut where the sum's last bit is. That does no harm to a sum of 32, or
# of numbers that cancel. But values often have a mean: then O grows with each key,
# and its last bit with it, until most of each product is cut away.
#
# `tilewise.testing.fp8` computes so: steps of 32 keys, every product cut 13 bits
# below the largest term. **Two-level** accumulation gives each block of 128 keys an
# accumulator of its own, which begins at zero, and adds blocks in fp32.

# %%
fp8 = pictures_09.fp8  # tilewise.testing.fp8
SHORT = fp8.Arithmetic(accumulator_bits=fp8.HOPPER_BITS)
WAYS = {
    "one short accumulator": SHORT._replace(two_level=False),
    "two-level": SHORT,
    "fp32": fp8.Arithmetic(),
}


def error(x, by):
    """Of FP8 products, beside fp64 of the same numbers."""
    q, k = (
        t.double() * t_scale
        for t, t_scale in ((x.q, x.scales.q), (x.k, x.scales.k))
    )
    v = fp8.natural_values(x.v_t, x.k.shape[1], None).double() * x.scales.v
    if x.v_mean is not None:
        v = v + x.v_mean.double()
    return relative(
        fp8.attention(x, by=by)[0], tilewise.attention_reference(q, k, v)
    )


LENGTHS = (256, 1024, 4096, 16384)
found = {name: [] for name in WAYS}
for seqlen in LENGTHS:
    q, k, v = torch.randn(1, 4, 1, 16), *torch.randn(2, 1, seqlen, 1, 16).unbind(0)
    x = tilewise.quantize(q, k, v + 1, rotate=False, smooth=False)
    for name, by in WAYS.items():
        found[name].append(error(x, by))
for name, errors in found.items():
    print(f"{name:22}", *(f"{100 * e:7.2f} %" for e in errors))
pictures_09.errors_by_length(LENGTHS, found)
assert found["one short accumulator"][-1] > 0.1 and found["two-level"][-1] < 5e-3

# %% [markdown]
# At 16,384 keys a sixth of the result is gone, and the error still grows. With two
# levels it does not grow at all: rounding averages out. Kernels pay one
# multiply-add a value for it, where they rescaled O by a multiplication before.
#
# ## Outliers and means
#
# Models have channels of q and k that are ten times as large as the others. One
# scale has to hold them, and does. But rounding errors are relative: a large number
# brings a large error into *all* scores. A **rotation** spreads it. For an
# orthogonal matrix R, (q R) · (k R) = q · k, and Hadamard's matrix, of entries 1
# and -1 over the root of D, makes of one large channel D of middling size.
#
# ## Exercise 1: Hadamard's transform
#
# H of 2 n channels is made of H of n: [[H, H], [H, -H]]. Transform the last
# dimension, without making the matrix, in log2 D steps of sums and differences.
#
# **Hint:** step i adds and subtracts channels that are 2^i apart. `unflatten` puts
# them beside each other.


# %%
def hadamard(x):
    """x times Hadamard's matrix, over the root of its size."""
    raise NotYet


solutions_09.check_hadamard(hadamard)

# %% [markdown]
# <details><summary>An answer</summary>
#
# ```{literalinclude} /../tour/lesson/solutions_09.py
# :pyobject: hadamard
# :language: python
# ```
#
# </details>
#
# Numbers with rare outliers, one in a thousand ten times as large, as
# FlashAttention-3's paper has them. The root of the mean squared error of
# attention, beside fp64 of what was quantised:

# %%
shape = (3, 1, 1024, 1, 128)
rare = 10 * torch.randn(shape) * (torch.rand(shape) < 0.001)
q, k, v = (torch.randn(shape) + rare).unbind(0)
pictures_09.channels(k[0, :, 0], solutions_09.hadamard(k[0, :, 0]))
exact = tilewise.attention_reference(q.double(), k.double(), v.double())
rmse = {}
for name, rotate in (("as they come", False), ("rotated", True)):
    x = tilewise.quantize(q, k, v, rotate=rotate)
    rmse[name] = (fp8.attention(x)[0] - exact).square().mean().sqrt().item()
    print(f"{name:13}: {rmse[name]:.2e}")
assert rmse["rotated"] < 0.75 * rmse["as they come"]

# %% [markdown]
# A **mean** is the other thing that can be taken off: keys of a model are often a
# common vector with small differences, and the differences are what softmax sees. k
# minus its mean over keys rounds the differences alone. All scores of a query fall
# by the same number, so P does not change; the log-sum-exp does. v minus its mean
# is added to O again, in fp32, as P sums to 1.
#
# ## Exercise 2: what the log-sum-exp lost
#
# Scores are scale · q · k. Given q (queries, D), the mean of k that was taken off
# (D,) and the scale, what is to be added to the log-sum-exp of each query?
#
# **Hint:** by how much did each score of a query fall?


# %%
def shift_of_lse(q, k_mean, scale):
    """By how much the log-sum-exp of each query is too small."""
    raise NotYet


solutions_09.check_shift_of_lse(shift_of_lse)

# %% [markdown]
# <details><summary>An answer</summary>
#
# ```{literalinclude} /../tour/lesson/solutions_09.py
# :pyobject: shift_of_lse
# :language: python
# ```
#
# </details>

# %%
q, k, v = torch.randn(3, 1, 512, 2, 64).unbind(0)
k = k + 8 * torch.randn(64)
exact = tilewise.attention_reference(q.double(), k.double(), v.double())
smooth = {}
for is_smooth in (False, True):
    x = tilewise.quantize(q, k, v, smooth=is_smooth)
    smooth[is_smooth] = relative(fp8.attention(x)[0], exact)
    print(f"smooth={is_smooth!s:5}: off by {100 * smooth[is_smooth]:.1f} %")
assert smooth[True] < smooth[False] / 3

# %% [markdown]
# ## In the library
#
# `tilewise.quantize` does all of this, and `tilewise.attention` takes what it
# returns in place of q, k and v. On a CPU it dequantises, so that nothing is gained
# but the same numbers.
#
# Where 8 bits are for the bytes alone, in the cache of lesson 08, no product need
# be of 8 bits: a cache in e4m3 under q of bf16 is dequantised tile by tile. There
# is no short accumulator then and P is not rounded to 8 bits, so that the error is
# that of the stored numbers.

# %%
k_scale, v_scale = (x.abs().max() / 448 for x in (k, v))
cached = (k / k_scale).to(E4M3), (v / v_scale).to(E4M3)
out = tilewise.attention(
    q.bfloat16(), *cached, k_descale=k_scale, v_descale=v_scale
)
meant = cached[0].double() * k_scale, cached[1].double() * v_scale
stored = tilewise.attention_reference(q.bfloat16().double(), *meant)
error = 100 * relative(out, stored)
print(f"8-bit cache: {error:.2f} % beside fp64 of what is stored")
fp8_out = tilewise.attention(tilewise.quantize(q, k, v))
error = 100 * relative(fp8_out, exact)
print(f"quantize and attention: {error:.2f} % beside fp64 of q, k and v")
assert relative(out, stored) < 1e-2

# %% [markdown]
# ## On a GPU
#
# 16,384 tokens, 16 heads, headdim 128. Quantising is counted apart: it reads
# everything once or twice, and its share falls as sequences grow.

# %%
pictures_09.times(figures)

# %% [markdown]
# To try on the kernel: what becomes of `rounded_p` with a shift of 9? Which number
# of e4m3 is the largest, and which probability does that cut off?

# %%
solutions_09.exercises.show()
