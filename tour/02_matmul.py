# %% [markdown]
# # 02. Matrix multiplication
#
# **The idea:** a program that computes a tile of the result uses every number it
# reads many times.
#
# After this lesson you can
#
# - write a tiled matrix product and say what it reads,
# - choose a tile by what it costs in registers and shared memory, or let Triton
#   choose,
# - do more work on a tile while it is in registers.
#
# You need lesson 01.

# %%
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from lesson import DEVICE, Figures, NotYet, expect, here, pictures_02, solutions_02

figures = Figures("02_matmul")

# %% [markdown]
# ## One tile of C
#
# C = A B, with A of shape (M, K), B (K, N) and C (M, N). An element of C is a sum
# of K products. If each program computed one element, it would read a row of A and
# a column of B for it: two numbers moved for two operations. A program that
# computes a **tile** of C reads `BLOCK_M` rows and `BLOCK_N` columns, and uses
# every number it reads many times.
#
# The tile's sum stays in registers, in fp32, while the program steps along K by
# `BLOCK_K`. `tl.dot` multiplies two tiles on the tensor cores.
#
# ```{diagram} tile
# ```
#
# Which tile a program computes is decided by a function of its own, `tile_of`.
# Lesson 02b is about this function; here any order will do.


# %%
@triton.jit
def tile_of(number, tiles_m, tiles_n, GROUP_M: tl.constexpr):
    """Row and column of the tile with this number."""
    in_group = GROUP_M * tiles_n
    first_m = number // in_group * GROUP_M
    height = tl.minimum(tiles_m - first_m, GROUP_M)
    within = number % in_group
    return first_m + within % height, within // height


@triton.jit
def plain_matmul_kernel(
    a, b, c, M, N, K, stride_a, stride_b, stride_c,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
):  # fmt: skip
    tiles_m, tiles_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    m_block, n_block = tile_of(tl.program_id(0), tiles_m, tiles_n, GROUP_M)
    offs_m = m_block * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = n_block * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_k = tl.arange(0, BLOCK_K)
    rows, columns = offs_m[:, None] < M, offs_n[None, :] < N
    # (BLOCK_M, BLOCK_K) addresses
    a_at = a + offs_m[:, None] * stride_a + offs_k[None, :]
    b_at = b + offs_k[:, None] * stride_b + offs_n[None, :]  # (BLOCK_K, BLOCK_N)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k in range(0, K, BLOCK_K):
        # past the end of K there must be zeros: they are summed
        a_tile = tl.load(a_at, mask=rows & (offs_k[None, :] < K - k), other=0.0)
        b_tile = tl.load(b_at, mask=columns & (offs_k[:, None] < K - k), other=0.0)
        acc = tl.dot(a_tile, b_tile, acc, input_precision="ieee")
        a_at += BLOCK_K
        b_at += BLOCK_K * stride_b
    c_at = c + offs_m[:, None] * stride_c + offs_n[None, :]
    tl.store(c_at, acc.to(c.dtype.element_ty), mask=rows & columns)


# %%
class Blocks(NamedTuple):
    """A tile's shape, its warps, its stages: tiles kept in shared memory."""

    m: int
    n: int
    k: int
    warps: int = 4
    stages: int = 3


SMALL = Blocks(64, 64, 32)


def plain_matmul(a, b, blocks=SMALL, group=8):
    """A B, by the kernel above."""
    (m, k), n = a.shape, b.shape[1]
    c = torch.empty(m, n, dtype=a.dtype, device=a.device)
    tiles = triton.cdiv(m, blocks.m) * triton.cdiv(n, blocks.n)
    here(plain_matmul_kernel)[(tiles,)](
        a, b, c, m, n, k, a.stride(0), b.stride(0), c.stride(0),
        BLOCK_M=blocks.m, BLOCK_N=blocks.n, BLOCK_K=blocks.k, GROUP_M=group,
        num_warps=blocks.warps, num_stages=blocks.stages,
    )  # fmt: skip
    return c


def check(name, multiply, a, b):
    """Compares with fp64: off by at most twice torch's own error and a rounding."""
    exact, torchs = a.double() @ b.double(), a @ b
    rounding = torch.finfo(a.dtype).eps * exact.abs().max().item()
    allowed = 2 * (torchs.double() - exact).abs().max().item() + rounding
    expect(multiply(a, b), exact, name, atol=allowed)
    print(f"{name} is right: off by at most {allowed:.1e}")


for dtype in (torch.float32, torch.float16, torch.bfloat16):
    a = torch.randn(200, 72, device=DEVICE).to(dtype)
    b = torch.randn(72, 136, device=DEVICE).to(dtype)
    check(f"plain matmul, {dtype}", plain_matmul, a, b)

# %% [markdown]
# A sum of many products depends on its order, so the result does not equal torch's
# bit by bit. It is compared with fp64, and may be off by twice what torch's own
# product is off, and one rounding.
#
# ## How much a tile reads
#
# A tile of C costs `(BLOCK_M + BLOCK_N) * K` numbers read, and
# `2 * BLOCK_M * BLOCK_N * K` operations. All tiles together read each matrix many
# times: A once for each column of tiles, B once for each row. Large tiles read
# less.


# %%
def gigabytes_read(n, block_m, block_n, itemsize=2):
    """What the tiles of a square product ask for, all in all."""
    tiles = triton.cdiv(n, block_m) * triton.cdiv(n, block_n)
    return tiles * (block_m + block_n) * n * itemsize * 1e-9


for shape in ((16, 16), (64, 64), (128, 128), (128, 256)):
    size = gigabytes_read(8192, *shape)
    print(f"tiles of {shape[0]:>3} x {shape[1]:>3}: {size:6.1f} GB")
print(f"the matrices themselves: {3 * 8192**2 * 2e-9:.1f} GB")

# %% [markdown]
# Even good tiles ask for many times the size of the matrices. Most of it has to
# come from the L2 cache. Lesson 02b orders the tiles so that it does.
#
# ## What a tile costs
#
# Why not tiles of 512? The sum lives in registers: a tile of 128 x 256 in fp32
# takes half of those of an SM. And while the tensor cores work on one step of K,
# the tiles of the next steps are loaded, each into a **stage** of shared memory:
# `num_stages` says how many. Both run out.
#
# The compiler says how much of each a kernel takes. It needs no GPU for that.

# %%
TRIED = (
    SMALL,
    Blocks(128, 128, 32, 4, 3),
    Blocks(128, 128, 64, 8, 3),
    Blocks(128, 256, 64, 8, 3),
    Blocks(256, 128, 64, 8, 3),
)
costs = pictures_02.costs(plain_matmul_kernel, TRIED)

# %% [markdown]
# A thread has at most 255 registers. What does not fit is **spilled** to memory, in
# the middle of the loop. An SM of this GPU has 227 KiB of shared memory for a
# program, and 65,536 registers: with 8 warps of 32 threads, 255 registers each,
# there is room for one program and no other.
#
# ## Let Triton choose
#
# Which tile is the fastest depends on the sizes and the card. `@triton.autotune`
# tries a list of configurations for every new value of `key`, and keeps the best.
# Two things to know. The first call is slow. And another run may choose otherwise,
# so that results differ in their last bits from one day to the next: this is why
# tilewise ships tables instead, and tunes only when asked.

# %%
tuned_kernel = triton.autotune(
    configs=[
        triton.Config(
            dict(BLOCK_M=of.m, BLOCK_N=of.n, BLOCK_K=of.k, GROUP_M=8),
            num_warps=of.warps,
            num_stages=of.stages,
        )
        for of in TRIED
    ],
    key=["M", "N", "K"],
)(plain_matmul_kernel)


def tuned_matmul(a, b):
    """A B, by whichever configuration was fastest."""
    (m, k), n = a.shape, b.shape[1]
    c = torch.empty(m, n, dtype=a.dtype, device=a.device)

    def grid(of):
        return (triton.cdiv(m, of["BLOCK_M"]) * triton.cdiv(n, of["BLOCK_N"]),)

    strides = (a.stride(0), b.stride(0), c.stride(0))
    here(tuned_kernel)[grid](a, b, c, m, n, k, *strides)
    return c


a, b = (torch.randn(128, 128, device=DEVICE).bfloat16() for _ in range(2))
check("autotuned matmul", tuned_matmul, a, b)

# %% [markdown]
# ## How fast
#
# Each line below is the same kernel with other tiles, or Triton's choice among
# those above. cuBLAS is what `torch.matmul` calls.

# %%
pictures_02.speeds(figures, plain_matmul, tuned_matmul, tuned_kernel, TRIED)

# %% [markdown]
# Small tiles ask for more bytes for the same product, and from a side of 2048 on
# stay slow. At 1024 there are 32 tiles of 128 x 256 for 132 SMs: most of the card
# is idle. What still separates large tiles from cuBLAS is the subject of lesson
# 02b.
#
# ## Exercise 1: fuse the end
#
# A linear layer with an activation is `relu(A B + bias)`. In torch these are three
# operations, and C goes to memory and back twice. Do both at the end of a matmul,
# where the tile is still in registers; `bias` has shape (N,).
#
# **Hint:** copy `plain_matmul_kernel`. Between the loop over K and the store, `acc`
# is a tile in fp32, and the bias of its columns a row.


# %%
@triton.jit
def linear_relu_kernel(
    a, b, bias, c, M, N, K, stride_a, stride_b, stride_c,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """C = relu(A B + bias): one tile per program."""
    raise NotYet


solutions_02.check_linear_relu(linear_relu_kernel)

# %% [markdown]
# <details><summary>An answer</summary>
#
# ```{literalinclude} /../tour/lesson/solutions_02.py
# :pyobject: linear_relu_kernel
# :language: python
# ```
#
# </details>

# %%
solutions_02.exercises.show()
