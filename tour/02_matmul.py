# %% [markdown]
# # 02. Matrix multiplication
#
# After this lesson you can write a tiled matrix product, choose the order of its tiles so that they
# share the L2 cache, choose tiles by what they cost in registers and shared memory, let Triton
# search among them, and say what each number format buys and costs. At the end stands a kernel that
# is held against cuBLAS.

# %%
import inspect
from typing import NamedTuple

import matplotlib.pyplot as plt
import torch
import triton
import triton.language as tl
from lesson import DEVICE, ON_GPU, Figures, here, show

from benchmarks import matmul as final
from benchmarks.products import (
    KINDS,
    Product,
    operands,
    our_product,
    plain_product,
    torch_product,
)
from tilewise.testing import build, stats, tolerance

figures = Figures("02_matmul")
CAPABILITY = torch.cuda.get_device_capability() if ON_GPU else (9, 0)
FORMATS = ["fp32", "tf32", "fp16", "bf16", *(["fp8"] if CAPABILITY >= (8, 9) else [])]

# %% [markdown]
# ## One tile of C
#
# C = A B, with A of shape (M, K), B (K, N) and C (M, N). An element of C is a sum of K products. If
# each program computed one element, it would read a row of A and a column of B for it: two numbers
# moved for two operations. A program that computes a **tile** of C reads `BLOCK_M` rows and
# `BLOCK_N` columns, and uses every number it reads many times.
#
# The tile's sum stays in registers, in fp32, while the program walks along K in steps of `BLOCK_K`.
# `tl.dot` multiplies two tiles on the tensor cores.
#
# Which tile a program takes is decided by a function of its own, `tile_of`. We come back to it.


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
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    tiles_m, tiles_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    m_block, n_block = tile_of(tl.program_id(0), tiles_m, tiles_n, GROUP_M)
    offs_m = m_block * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = n_block * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_k = tl.arange(0, BLOCK_K)
    rows, columns = offs_m[:, None] < M, offs_n[None, :] < N
    a_at = a + offs_m[:, None] * stride_a + offs_k[None, :]  # (BLOCK_M, BLOCK_K) addresses
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
    """A tile's shape, and how many warps and loads in flight it gets."""

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


for dtype in (torch.float32, torch.float16, torch.bfloat16):
    a = torch.randn(200, 72, device=DEVICE).to(dtype)
    b = torch.randn(72, 136, device=DEVICE).to(dtype)
    held = tolerance.judge(plain_matmul(a, b), a.double() @ b.double(), a @ b)
    print(f"{dtype}: {held}")
    assert held.max_error <= held.max_bound

# %% [markdown]
# A sum of many products depends on its order, so the result is not torch's bit by bit. It is held
# to fp64 instead, and allowed about twice the error that torch's own product has there.
#
# ## How much a tile reads
#
# A tile of C costs `(BLOCK_M + BLOCK_N) * K` numbers read, and `2 * BLOCK_M * BLOCK_N * K`
# operations. All tiles together read each matrix over and over: A once for each column of tiles,
# B once for each row. Large tiles read less.


# %%
def gigabytes_read(n, block_m, block_n, itemsize=2):
    """What the tiles of a square product ask for, all in all."""
    tiles = triton.cdiv(n, block_m) * triton.cdiv(n, block_n)
    return tiles * (block_m + block_n) * n * itemsize * 1e-9


for shape in ((16, 16), (64, 64), (128, 128), (128, 256)):
    print(f"tiles of {shape[0]:>3} x {shape[1]:>3}: {gigabytes_read(8192, *shape):6.1f} GB")
print(f"the matrices themselves: {3 * 8192**2 * 2e-9:.1f} GB")

# %% [markdown]
# Even good tiles ask for many times the size of the matrices. HBM must not deliver all of that:
# most of it has to come from the L2 cache. And this depends on which tiles are computed at the same
# time.
#
# ## The order of the tiles
#
# An SM takes the next program when it is done with one. So the programs in flight are neighbours by
# number: 0 to 131 first, on a card with 132 SMs. In the naive order, row by row, these are a few
# long rows of tiles. They need few rows of A, but every column of B.
#
# **Super-grouping** numbers the tiles in groups of `GROUP_M` rows: down the group's first column,
# down its second, and so on. The tiles in flight then form a rectangle, and a rectangle needs
# fewer rows and columns for as many tiles. Nothing but `tile_of` changes. With `GROUP_M = 1` it is
# the naive order.
#
# The kernel's own function draws the picture.


# %%
@triton.jit
def order_kernel(
    rows, columns, tiles_m, tiles_n,
    TILE_OF: tl.constexpr, GROUP_M: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    number = tl.arange(0, BLOCK)
    m_block, n_block = TILE_OF(number, tiles_m, tiles_n, GROUP_M)
    inside = number < tiles_m * tiles_n
    tl.store(rows + number, m_block, mask=inside)
    tl.store(columns + number, n_block, mask=inside)


def order(tiles_m, tiles_n, group, function=tile_of):
    """(row, column) of every tile, in the order in which they are computed."""
    rows, columns = torch.empty(2, tiles_m * tiles_n, dtype=torch.int32, device=DEVICE).unbind()
    block = triton.next_power_of_2(tiles_m * tiles_n)
    numbers = dict(GROUP_M=group, BLOCK=block)
    here(order_kernel)[(1,)](rows, columns, tiles_m, tiles_n, TILE_OF=function, **numbers)
    return list(zip(rows.tolist(), columns.tolist()))


def strips_in_flight(tiles, sms):
    """Rows of A and columns of B that `sms` tiles at a time need, on average over the waves."""
    waves = [tiles[start : start + sms] for start in range(0, len(tiles), sms)]
    needed = [len({m for m, _ in wave}) + len({n for _, n in wave}) for wave in waves]
    return sum(needed) / len(needed)


SMS = 132
assert order(3, 4, 1) == [(m, n) for m in range(3) for n in range(4)]
for group in (1, 3, 8):
    assert sorted(order(20, 16, group)) == [(m, n) for m in range(20) for n in range(16)]
naive, grouped = order(32, 32, 1), order(32, 32, 8)
print(f"row by row: {strips_in_flight(naive, SMS):.1f} strips of A and B for {SMS} tiles")
print(f"in groups:  {strips_in_flight(grouped, SMS):.1f}")


# %%
def draw_order(axes, tiles, side, title):
    """The path through the first tiles, those of the first wave in grey."""
    for number, (m, n) in enumerate(tiles):
        shade = "0.75" if number < SMS else "white"
        axes.add_patch(plt.Rectangle((n, m), 1, 1, facecolor=shade, edgecolor="0.5", linewidth=0.4))
    path = tiles[:SMS]
    axes.plot([n + 0.5 for _, n in path], [m + 0.5 for m, _ in path], "k-", linewidth=0.8)
    axes.set(xlim=(0, side), ylim=(side, 0), xticks=[], yticks=[], aspect="equal")
    axes.set_xlabel("columns of tiles: strips of B")
    axes.set_title(title, fontsize=9)


GROUPS = (1, 2, 4, 8, 12, 16, 32)
figure, (left, middle, right) = plt.subplots(1, 3, figsize=(11, 3.6))
draw_order(left, naive, 32, f"row by row: {strips_in_flight(naive[:SMS], SMS):.0f} strips")
draw_order(middle, grouped, 32, f"GROUP_M = 8: {strips_in_flight(grouped[:SMS], SMS):.0f} strips")
left.set_ylabel("rows of tiles: strips of A")
for side, look in ((32, "ko-"), (64, "k^--")):
    counts = [strips_in_flight(order(side, side, group), SMS) for group in GROUPS]
    right.plot(GROUPS, counts, look, fillstyle="none", label=f"{side} x {side} tiles")
right.set(xlabel="GROUP_M", ylabel="strips in flight", ylim=(0, None))
right.legend(fontsize=8)
figure.suptitle(f"The first {SMS} tiles, one an SM", fontsize=9)
show(figure, "02_matmul_order")

# %% [markdown]
# A group of height g has about 132 / g columns in flight: g + 132 / g strips, which is least where
# both are equal, near 11. The curve is flat there, so a round 8 will do.
#
# ## What a tile costs
#
# Why not take tiles of 512? The sum lives in registers: a tile of 128 x 256 in fp32 takes half of
# those of an SM. And while the tensor cores work on one step of K, the tiles of the next steps are
# on their way, each in shared memory of its own: `num_stages` says how many. Both run out.
#
# The compiler says how much of each a kernel takes. It needs no GPU for that.


# %%
def cost(blocks, on="sm90"):
    """Registers a thread, shared memory and spills, compiled for an H100 or H200."""
    a = torch.empty(512, 512, dtype=torch.bfloat16)
    shape = dict(BLOCK_M=blocks.m, BLOCK_N=blocks.n, BLOCK_K=blocks.k, GROUP_M=8)
    launch = dict(num_warps=blocks.warps, num_stages=blocks.stages)
    sizes = (512, 512, 512, 512, 512, 512)  # M, N, K and the strides
    return stats(build(plain_matmul_kernel, a, a, a, *sizes, **shape, **launch, on=on))


TRIED = (
    Blocks(64, 64, 32, 4, 3),
    Blocks(128, 128, 32, 4, 3),
    Blocks(128, 128, 64, 8, 3),
    Blocks(128, 256, 64, 8, 3),
    Blocks(256, 128, 64, 8, 3),
)
costs = {blocks: cost(blocks) for blocks in TRIED}
print("      tile       warps  registers  shared KiB  spilled bytes")
for blocks, of in costs.items():
    tile = f"{blocks.m} x {blocks.n} x {blocks.k}"
    figures_of = f"{of['registers']:>9}  {of['smem'] / 1024:>10.0f}  {of['spill_stores']:>13}"
    print(f"{tile:>15}  {blocks.warps:>6}  {figures_of}")

# %% [markdown]
# A thread has at most 255 registers. What does not fit is **spilled** to memory, in the middle of
# the loop. An SM of this GPU has 227 KiB of shared memory for a program, and 65,536 registers: with
# 8 warps of 32 threads, 255 registers each, there is room for one program and no other.
#
# ## Let Triton choose
#
# Which tile is the fastest depends on the sizes and the card. `@triton.autotune` tries a list of
# configurations the first time it meets new values of `key`, and keeps the best. Two things to
# know. The first call is slow. And another run may choose otherwise, so that results differ in
# their last bits from one day to the next: this is why tilewise ships tables instead, and tunes
# only when asked.

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
held = tolerance.judge(tuned_matmul(a, b), a.double() @ b.double(), a @ b)
assert held.max_error <= held.max_bound

# %% [markdown]
# ## The final kernel
#
# What keeps the plain kernel from the tensor cores' full speed? Its threads compute addresses and
# masks. Its first steps along K wait for memory, and its last ones have nothing left to load: at
# both ends of each tile the tensor cores stand still. On Hopper both can go.
#
# - A **tensor descriptor** tells the GPU's copy engine (TMA) the shape of a matrix. One thread asks
#   for a whole tile by its corner; addresses, edges and zeros past them are the engine's business.
# - A **persistent** kernel launches one program for each SM, which takes tile after tile. With
#   `flatten=True` the compiler makes one loop of the two, and the loads of the next tile start
#   while the last one is still being summed up and written.
# - C leaves in two halves, through a buffer half as large. That makes room for one stage more.
#
# This is the kernel, as the library has it. Without a GPU it is interpreted, like any other.

# %%
print(inspect.getsource(final.matmul_kernel.fn))
for kind in FORMATS:
    a, b = operands(Product(200, 144, 80, kind), DEVICE)
    exact, plain = a.double() @ b.double(), plain_product(kind, a, b)
    held = tolerance.judge(our_product(KINDS[kind], None)(a, b), exact, plain)
    print(f"{kind}: {held}")
    assert held.max_error <= held.max_bound

# %% [markdown]
# Its order of tiles is the one that you have drawn.

# %%
chosen = final.CONFIGS[final.CHOICE["bfloat16"]]
print(f"for bf16: {chosen}")
assert order(20, 16, 8, final.grouped_tile) == order(20, 16, 8)

# %% [markdown]
# ## Against cuBLAS
#
# All of them, in bf16, taken in turns on one GPU. cuBLAS is what `torch.matmul` calls.

# %%
SIZES = (512, 1024, 2048, 4096, 8192)
BIG = TRIED[3] if CAPABILITY >= (9, 0) else TRIED[1]  # older cards have less shared memory


def bf16_calls(n):
    """Everybody's product of the same two matrices."""
    a, b = operands(Product(*(3 * [n if ON_GPU else 16]), "bf16"), DEVICE)
    return {
        "small tiles, row by row": lambda: plain_matmul(a, b, TRIED[0], group=1),
        "large tiles, row by row": lambda: plain_matmul(a, b, BIG, group=1),
        "large tiles, grouped": lambda: plain_matmul(a, b, BIG, group=8),
        "autotuned": lambda: tuned_matmul(a, b),
        "final kernel": lambda: final.matmul(a, b),
        "cuBLAS": lambda: torch.matmul(a, b),
    }


speeds = {}  # TFLOP/s by name and size
for n in SIZES:
    shape = {"what": "bf16", "n": n}
    found = figures.times(shape, bf16_calls(n), flops=2 * n**3, round_ms=15.0)
    for name, ms in found.items():
        speeds.setdefault(name, {})[n] = 2 * n**3 / ms * 1e-9


def choice_at(n):
    """The place in TRIED of what autotuning chose."""
    bf16_calls(n)["autotuned"]()
    return tuned_kernel.configs.index(tuned_kernel.best_config)


for n in SIZES:
    place = figures.value({"what": "autotuned", "n": n}, "place", lambda n=n: choice_at(n))
    if place is not None:
        print(f"{n:>5}: autotuning chose {TRIED[int(place)]}")


# %%
def draw_speeds(speeds):
    """TFLOP/s against the size, a line a kernel."""
    figure, axes = plt.subplots(figsize=(7, 4))
    looks = ("k:", "k-.", "k--", "ks--", "ko-", "k^-")
    for (name, line), look in zip(speeds.items(), looks):
        axes.plot(list(line), list(line.values()), look, label=name, fillstyle="none")
    axes.set_xscale("log", base=2)
    axes.set_xticks(SIZES, [str(size) for size in SIZES])
    axes.set(xlabel="side of the square matrices, bf16", ylabel="TFLOP/s", ylim=(0, None))
    axes.set_title(figures.machine, fontsize=9)
    axes.legend(fontsize=8)
    return figure


if speeds:
    show(draw_speeds(speeds), "02_matmul_speed")
    for name, line in speeds.items():
        of_cublas = {n: line[n] / speeds["cuBLAS"][n] for n in line if n in speeds["cuBLAS"]}
        print(f"{name:>24}: " + "  ".join(f"{n}: {x:.2f}" for n, x in of_cublas.items()))
    print("each over cuBLAS, by size")
else:
    print(figures.machine)

# %% [markdown]
# How to read it. Small tiles ask for more bytes for the same product, and from 2048 on stay low.
# Between the two orders of large tiles there is next to nothing on an H200: its programs walk along
# K side by side, so that the cache need not hold whole strips, only the parts where they are. A
# smaller cache, or programs that drift apart, need the better order. (Where they differ at 8192,
# ask first whether one of them always ran behind the slow kernel: lesson 05 says why.) At 1024
# there are 32 tiles of 128 x 256 for 132 SMs, and no order helps. cuBLAS is far ahead there: what
# would you cut to give every SM work?
#
# ## What a format buys, and what it costs
#
# The tensor cores multiply narrow numbers faster. All of these formats but fp8 are summed in fp32;
# what they lose, they lose when the inputs are rounded. Hopper's tensor cores add up products of
# fp8 with fewer bits: that loss comes on top, the longer the sum the more of it, and is not in the
# table below. **tf32** is what they make of fp32: its range, with 10 bits of fraction. **fp16** has
# these 10 bits and a small range. **bf16** has fp32's range and 7 bits. **fp8** (e4m3) has 3. In
# **fp32** proper there are no tensor cores at all.
#
# The error below is that of a product whose inputs were rounded, against the product of the numbers
# as they were: the root of the mean square, over that of the result. A machine without a GPU
# measures it as well, since it is arithmetic and not speed. (Tensor cores cut the fp32 numbers they
# are given off after 10 bits; so does this cell.)


# %%
def rounded(x, kind):
    """x as a kind's tensor cores see it, in fp64."""
    if kind == "tf32":
        return (x.view(torch.int32) & ~0x1FFF).view(torch.float32).double()
    return x.to(KINDS[kind].dtype).double()


def loss(kind, n=512):
    """Relative error that comes of rounding normal inputs."""
    generator = torch.Generator().manual_seed(0)
    a, b = torch.randn(2, n, n, generator=generator)
    exact = a.double() @ b.double()
    error = rounded(a, kind) @ rounded(b, kind) - exact
    return (error.square().mean() / exact.square().mean()).sqrt().item()


losses = {kind: loss(kind) for kind in FORMATS}
assert losses["fp32"] == 0 and losses["fp16"] < losses["bf16"]

FORMATS_AT = 4096
rates = {}
for kind in losses:
    a, b = operands(Product(*(3 * [FORMATS_AT if ON_GPU else 16]), kind), DEVICE)
    ours, theirs = our_product(KINDS[kind], None), torch_product(KINDS[kind])
    calls = {"tour": lambda ours=ours, a=a, b=b: ours(a, b)}
    calls["cuBLAS"] = lambda theirs=theirs, a=a, b=b: theirs(a, b)
    shape = {"what": "formats", "n": FORMATS_AT, "kind": kind}
    found = figures.times(shape, calls, flops=2 * FORMATS_AT**3)
    rates[kind] = {name: 2 * FORMATS_AT**3 / ms * 1e-9 for name, ms in found.items()}

print("format  bits  lost by rounding   TFLOP/s: ours  cuBLAS")
for kind, lost in losses.items():
    speed = [f"{rates[kind][name]:.0f}" if name in rates[kind] else "-" for name in calls]
    bits = KINDS[kind].dtype.itemsize * 8
    print(f"{kind:>6}  {bits:>4}  {lost:>16.1e}  {speed[0]:>14}  {speed[1]:>6}")
print(figures.machine)

# %% [markdown]
# Attention is trained in bf16: half the bytes of fp32, the tensor cores' speed, and a range that
# needs no care. Its sums, and the softmax between its two products, stay in fp32.
#
# ## Exercises
#
# **1.** A linear layer with an activation is `relu(A B + bias)`. In torch these are three
# operations, and C goes to memory and back twice. Add both to the end of the plain kernel, where
# the tile is still in registers. Copy the kernel, or pass a `bias` of shape (N,).
#
# <details><summary>Solution</summary>
#
# ```python
# @triton.jit
# def linear_relu_kernel(
#     a, b, bias, c, M, N, K, stride_a, stride_b, stride_c,
#     BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
# ):
#     tiles_m, tiles_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
#     m_block, n_block = tile_of(tl.program_id(0), tiles_m, tiles_n, GROUP_M)
#     offs_m = m_block * BLOCK_M + tl.arange(0, BLOCK_M)
#     offs_n = n_block * BLOCK_N + tl.arange(0, BLOCK_N)
#     offs_k = tl.arange(0, BLOCK_K)
#     rows, columns = offs_m[:, None] < M, offs_n[None, :] < N
#     a_at = a + offs_m[:, None] * stride_a + offs_k[None, :]
#     b_at = b + offs_k[:, None] * stride_b + offs_n[None, :]
#     acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
#     for k in range(0, K, BLOCK_K):
#         a_tile = tl.load(a_at, mask=rows & (offs_k[None, :] < K - k), other=0.0)
#         b_tile = tl.load(b_at, mask=columns & (offs_k[:, None] < K - k), other=0.0)
#         acc = tl.dot(a_tile, b_tile, acc, input_precision="ieee")
#         a_at += BLOCK_K
#         b_at += BLOCK_K * stride_b
#     acc += tl.load(bias + offs_n, mask=offs_n < N, other=0.0)[None, :]
#     acc = tl.maximum(acc, 0.0)
#     c_at = c + offs_m[:, None] * stride_c + offs_n[None, :]
#     tl.store(c_at, acc.to(c.dtype.element_ty), mask=rows & columns)
#
#
# a, b = torch.randn(100, 48, device=DEVICE), torch.randn(48, 80, device=DEVICE)
# bias, c = torch.randn(80, device=DEVICE), torch.empty(100, 80, device=DEVICE)
# here(linear_relu_kernel)[(4 * 3,)](
#     a, b, bias, c, 100, 80, 48, 48, 80, 80, BLOCK_M=32, BLOCK_N=32, BLOCK_K=16, GROUP_M=4
# )
# expected = torch.relu(a.double() @ b.double() + bias.double())
# torch.testing.assert_close(c.double(), expected, rtol=0, atol=1e-4)
# ```
#
# </details>
#
# **2.** Tiles are computed in waves of one an SM, and the last wave is rarely full. Write
# `efficiency(n, block_m, block_n, sms)`: the share of SM time that is used, if every tile takes
# equally long. What does a square product of side 4096 reach with tiles of 128 x 256 on 132 SMs?
# And one of side 2048? Look for a tile that serves the second better. What does that tile cost
# elsewhere?
#
# <details><summary>Solution</summary>
#
# ```python
# def efficiency(n, block_m, block_n, sms=SMS):
#     tiles = triton.cdiv(n, block_m) * triton.cdiv(n, block_n)
#     return tiles / (triton.cdiv(tiles, sms) * sms)
#
#
# for n in (2048, 4096, 8192):
#     for tile in ((128, 256), (128, 128), (64, 128)):
#         read = gigabytes_read(n, *tile)
#         print(f"{n} by {tile}: {efficiency(n, *tile):.2f} of the SMs, {read:.1f} GB read")
# assert efficiency(4096, 128, 256) == 512 / 528  # four waves, the last nearly full
# assert efficiency(2048, 128, 256) == 128 / 132
# assert efficiency(2048, 128, 128) == 256 / 264  # two waves: no better, and more is read
# assert gigabytes_read(2048, 128, 128) > gigabytes_read(2048, 128, 256)
# ```
#
# For these sizes 128 x 256 is hard to beat: they suit 132 SMs. Try 2304 and 5120.
#
# </details>
