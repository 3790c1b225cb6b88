# %% [markdown]
# # 02. 矩阵乘法
#
# 学完本课，你能写出按分块 (tile) 计算的矩阵乘法，为分块选一个能共用 L2 缓存的顺序，
# 按寄存器和共享内存 (shared memory) 的开销挑选分块，让 Triton 在其中搜索，
# 并说出每种数值格式换来什么、代价是什么。最后是一个与 cuBLAS 相比较的内核 (kernel)。

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
# ## C 的一个分块
#
# C = A B，其中 A 的形状是 (M, K)，B 是 (K, N)，C 是 (M, N)。C 的一个元素是 K 个乘积之和。
# 如果每个程序只算一个元素，就要为它读 A 的一行和 B 的一列：每两次运算搬运两个数。
# 如果一个程序计算 C 的一个**分块** (tile)，它读 `BLOCK_M` 行和 `BLOCK_N`
# 列，读来的每个数都用上许多次。
#
# 分块的累加和留在寄存器里，用 fp32，程序则沿着 K 一步步走，每步 `BLOCK_K`。`tl.dot` 在 Tensor Core
# 上把两个分块相乘。
#
# 程序取哪个分块，由单独的函数 `tile_of` 决定。后面会再谈到它。


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
# 许多乘积之和与求和的顺序有关，所以结果不会与 torch 逐位相等。这里改为对照 fp64，允许的误差约为
# torch 自己的乘积误差的两倍。
#
# ## 一个分块读多少
#
# C 的一个分块要读 `(BLOCK_M + BLOCK_N) * K` 个数，做 `2 * BLOCK_M * BLOCK_N * K`
# 次运算。所有分块合起来，每个矩阵都被反复读取：每有一列分块，A 就读一遍；每有一行分块，B 就读一遍。
# 分块越大，读得越少。


# %%
def gigabytes_read(n, block_m, block_n, itemsize=2):
    """What the tiles of a square product ask for, all in all."""
    tiles = triton.cdiv(n, block_m) * triton.cdiv(n, block_n)
    return tiles * (block_m + block_n) * n * itemsize * 1e-9


for shape in ((16, 16), (64, 64), (128, 128), (128, 256)):
    print(f"tiles of {shape[0]:>3} x {shape[1]:>3}: {gigabytes_read(8192, *shape):6.1f} GB")
print(f"the matrices themselves: {3 * 8192**2 * 2e-9:.1f} GB")

# %% [markdown]
# 即使是好的分块，要读的数据也是矩阵本身的许多倍。这不能都靠 HBM 送来：大部分必须来自 L2 缓存。
# 而这取决于哪些分块同时计算。
#
# ## 分块的顺序
#
# 一个 SM 做完一个程序，就取下一个。所以正在运行的程序编号相邻：在有 132 个 SM
# 的卡上，最先是 0 到 131。朴素的顺序是逐行的，此时它们是长长的几行分块，需要 A 的少数几行，
# 却需要 B 的每一列。
#
# **超级分组** (super-grouping) 以 `GROUP_M` 行为一组给分块编号：先沿着组内第一列往下，
# 再沿着第二列往下，依此类推。正在计算的分块就构成一个矩形，而分块数相同时，矩形需要的行和列更少。
# 除了 `tile_of`，什么都不变。`GROUP_M = 1` 就是朴素的顺序。
#
# 下面的图由内核自己的函数画出。


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
# 高度为 g 的一组，大约有 132 / g 列正在计算：共 g + 132 / g 个条带 (strip)，两项相等时最少，
# 在 11 附近。曲线在那里很平，取整齐的 8 就行。
#
# ## 一个分块的开销
#
# 为什么不用 512 的分块？累加和放在寄存器里：128 x 256 的 fp32 分块占去一个 SM 一半的寄存器。而
# Tensor Core 处理 K 的一步时，后几步的分块已在路上，各占一份共享内存：`num_stages`
# 说明有几份。两者都会用完。
#
# 一个内核各用多少，编译器会告诉你，并不需要 GPU。


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
# 一个线程最多有 255 个寄存器。放不下的就在循环当中**溢出** (spill) 到显存。在这种 GPU 上，一个 SM
# 能给一个程序 227 KiB 的共享内存，另有 65,536 个寄存器：8 个 warp，每个 32 个线程，
# 每个线程 255 个寄存器，那就只容得下一个程序，再放不下别的。
#
# ## 让 Triton 来选
#
# 哪种分块最快，取决于尺寸和卡。`@triton.autotune` 每当首次遇到 `key` 的新值，
# 就把一串配置逐个试一遍，留下最快的。有两点要知道。第一次调用很慢。另外，
# 下一次运行可能选出别的配置，于是今天和明天的结果在最后几位上会有差别：所以 tilewise
# 改为自带配置表，只在你要求时才调优。

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
# ## 最终的内核
#
# 普通内核为什么达不到 Tensor Core 的全速？它的线程要计算地址和掩码。沿着 K 的头几步要等显存，
# 最后几步又没有东西可加载：在每个分块的两头，Tensor Core 都闲着。在 Hopper 上，这两样都可以去掉。
#
# - **张量描述符** (tensor descriptor) 把矩阵的形状告诉 GPU 的拷贝引擎 (TMA)。
#   一个线程给出分块的一角，就能要来整个分块；地址、边界和边界外的零都由引擎负责。
# - **持久化** (persistent) 内核为每个 SM 启动一个程序，它一个接一个地处理分块。加上
#   `flatten=True`，编译器把两层循环合成一层，上一个分块还在累加和写出时，下一个分块就已开始加载。
# - C 分两半写出，经过一个只有一半大的缓冲区，腾出的空间可以再放一级流水 (stage)。
#
# 这就是库里的那个内核。没有 GPU 时，它和别的内核一样由解释器运行。

# %%
print(inspect.getsource(final.matmul_kernel.fn))
for kind in FORMATS:
    a, b = operands(Product(200, 144, 80, kind), DEVICE)
    exact, plain = a.double() @ b.double(), plain_product(kind, a, b)
    held = tolerance.judge(our_product(KINDS[kind], None)(a, b), exact, plain)
    print(f"{kind}: {held}")
    assert held.max_error <= held.max_bound

# %% [markdown]
# 它的分块顺序就是你画过的那一种。

# %%
chosen = final.CONFIGS[final.CHOICE["bfloat16"]]
print(f"for bf16: {chosen}")
assert order(20, 16, 8, final.grouped_tile) == order(20, 16, 8)

# %% [markdown]
# ## 与 cuBLAS 比较
#
# 所有内核都用 bf16，在同一块 GPU 上轮流测量。`torch.matmul` 调用的就是 cuBLAS。

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
# 怎么读这张图。小分块为同样的乘积要读更多的字节，从 2048 起一直很慢。在 H200 上，
# 大分块的两种顺序几乎没有差别：各个程序并排沿 K 前进，缓存不必装下整条的数据，
# 只要装下它们正在读的那一段。缓存更小，或者程序之间拉开了距离，就需要更好的顺序。
# （若 8192 处两者有别，先问其中之一是否总排在慢的内核之后：原因见第 05 课。）
# 边长 1024 时，132 个 SM 只有 32 个 128 x 256 的分块，什么顺序都帮不上忙。
# cuBLAS 在那里遥遥领先：你会把什么切小，让每个 SM 都有活干？
#
# ## 一种格式换来什么，代价是什么
#
# Tensor Core 乘窄的数更快。除 fp8 外，这些格式都以 fp32 累加；精度是在输入舍入时损失的。Hopper 的
# Tensor Core 累加 fp8 的乘积时位数更少：这份损失另算，求和越长越大，不在下表之中。**tf32** 是
# Tensor Core 眼里的 fp32：范围与 fp32 相同，尾数 10 位。**fp16** 也有这 10 位，但范围小。**bf16**
# 有 fp32 的范围和 7 位尾数。**fp8** (e4m3) 有 3 位。真正的 **fp32** 则完全用不上 Tensor Core。
#
# 下面的误差，是输入舍入之后的乘积与原数的乘积之差：取均方根，再除以结果的均方根。没有 GPU
# 的机器也能测它，因为这是算术，不是速度。（Tensor Core 把得到的 fp32 数在 10 位之后截断，
# 这个单元格也一样。）


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
# 注意力用 bf16 训练：字节数是 fp32 的一半，有 Tensor Core 的速度，范围也大到不必操心。它的累加，
# 以及两次乘法之间的 softmax，仍然用 fp32。
#
# ## 练习
#
# **1.** 带激活函数的线性层是 `relu(A B + bias)`。在 torch 里这是三个操作，C 要往返显存两次。
# 把后两个操作都加到普通内核的末尾，那时分块还在寄存器里。可以复制一份内核，或者传入一个形状为 (N,)
# 的 `bias`。
#
# <details><summary>答案</summary>
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
# **2.** 分块按波次 (wave) 计算，每一波里每个 SM 一个分块，最后一波很少是满的。写出
# `efficiency(n, block_m, block_n, sms)`：假定每个分块用时相同，SM 的时间有多大比例得到利用。
# 边长 4096 的方阵相乘，用 128 x 256 的分块，在 132 个 SM 上能达到多少？边长 2048 呢？
# 为后者找一种更合适的分块。这种分块在别处的代价是什么？
#
# <details><summary>答案</summary>
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
# 对这些尺寸来说，很难胜过 128 x 256：它们适合 132 个 SM。试试 2304 和 5120。
#
# </details>
