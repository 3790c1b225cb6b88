# %% [markdown]
# # 00. GPU 与存储层次
#
# 学完本课，你能说出 GPU 处理一个数时这个数放在哪里，能测出自己的卡读取、启动和做乘法各有多快，
# 还能只凭运算次数和字节数这两个计数，判断一个操作最快能有多快。
#
# 你需要会 Python 和 PyTorch，不需要有 GPU：没有 GPU 时，内核 (kernel) 在解释器里以较小的输入运行，
# 数据则采用事先在某台机器上记录的，并注明是哪台机器。

# %%
import time

import matplotlib.pyplot as plt
import torch
import triton
import triton.language as tl
from lesson import DEVICE, ON_GPU, Figures, here, show

import tilewise

figures = Figures("00_gpu")
print("kernels run on:", "this GPU" if ON_GPU else "the CPU, interpreted")
print("figures are from:", figures.machine)

# %% [markdown]
# ## 许多小处理器
#
# GPU 是一块装有许多处理器的芯片，这些处理器叫流式多处理器 (streaming multiprocessor)，简称
# **SM**。每个 SM 都有自己的算术单元、自己的用于矩阵乘法的 Tensor Core，以及自己的高速存储。
#
# 任务以**程序** (program) 为单位分发（CUDA 里叫线程块，thread block）。你写的是一个程序的代码；
# 一次启动 (launch) 把它运行许多遍，每一份都从 `tl.program_id` 得知自己的编号。
# 一个程序自始至终在同一个 SM 上运行。在内部，它分成若干 **warp**，每个 warp
# 有 32 个线程，一起执行同一条指令。Triton 把线程藏了起来：你写的是对一块块数的操作，
# 编译器把它们分给各个线程。
#
# 一个 warp 等待访存时，它的 SM 就去运行另一个 warp。GPU 就是这样忍受慢速存储的：不是等得更少，
# 而是总有别的事可做。
#
# ## 一个数可以待的四个地方
#
# | 位置 | 由谁共用 | 在 Triton 里怎样使用 |
# |---|---|---|
# | 寄存器 (register) | 一个线程 | 内核里的值 |
# | 共享内存 (shared memory) | 一个程序 | 编译器把分块 (tile) 放在这里，主要是 `tl.dot` 的分块 |
# | L2 缓存 | 整块芯片 | 自动生效，留着不久前读过的内容 |
# | HBM，即显存 | 整块芯片 | `tl.load`、`tl.store`，所有张量 |
#
# 每个位置都比上面一个更大，也更慢。张量放在 HBM 里。不管内核算什么，都要先付出把输入搬上来、
# 把结果搬下去的代价。下面看看这些位置各有多大。


# %%
def card() -> dict:
    """What the driver says of the card."""
    of = torch.cuda.get_device_properties(0)
    return {
        "SMs": of.multi_processor_count,
        "registers of an SM, KiB": of.regs_per_multiprocessor * 4 / 2**10,
        "shared memory of an SM, KiB": of.shared_memory_per_multiprocessor / 2**10,
        "L2, MiB": of.L2_cache_size / 2**20,
        "HBM, GiB": of.total_memory / 2**30,
    }


sizes = ("SMs", "registers of an SM, KiB", "shared memory of an SM, KiB", "L2, MiB", "HBM, GiB")
for name in sizes:
    number = figures.value({"what": "card"}, name, lambda name=name: card()[name])
    print(f"{name:>28}: {'not recorded' if number is None else f'{number:,.0f}'}")

# %% [markdown]
# ## 第一个内核：按步长读取
#
# 这个内核从 `x` 中每 `stride` 个元素复制一个。每个程序负责结果中的 `BLOCK`
# 个元素。第 01 课会逐行讲解它；在这里它只是一个探针。动手改改看。


# %%
@triton.jit
def strided_copy_kernel(x, out, n, stride, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = offs < n
    tl.store(out + offs, tl.load(x + offs * stride, mask=inside), mask=inside)


def strided_copy(x, stride, out=None, block=1024):
    """x[::stride], by our kernel."""
    n = triton.cdiv(x.numel(), stride)
    out = torch.empty(n, dtype=x.dtype, device=x.device) if out is None else out
    here(strided_copy_kernel)[(triton.cdiv(n, block),)](x, out, n, stride, BLOCK=block)
    return out


x = torch.randn(5000, device=DEVICE)
for stride in (1, 2, 7, 32):
    assert torch.equal(strided_copy(x, stride), x[::stride])
print("the kernel copies what it should")

# %% [markdown]
# 上面的每次复制，得到多少有用的字节，只看有多少个元素。但显存不按元素工作，
# 它搬运的是 32 字节的**扇区** (sector)：要一个 float，它的七个邻居也一起来。一个 warp
# 的 32 个线程同时发出请求，所以要紧的是它们一共碰到多少个不同的扇区。


# %%
def sectors_of_a_warp(stride, itemsize=4):
    """Sectors that 32 threads touch when thread i reads element i * stride."""
    return len({i * stride * itemsize // 32 for i in range(32)})


strides = (1, 2, 4, 8, 16, 32)
for stride in strides:
    print(f"stride {stride:>2}: {sectors_of_a_warp(stride):>2} sectors for 128 useful bytes")

# %% [markdown]
# 128 字节最少需要四个扇区。步长 (stride) 从 8 起，每个线程都需要一个自己的扇区，
# 搬来的数据有八分之七白白扔掉。所以时间应当随步长上升，到 8 为止，此后不变。H200
# 到 16 时又上升一次，这是数扇区解释不了的：很可能它的 L2 缓存从内存成对地取扇区，Nsight Compute
# 的计数器（第 05 课）可以证实。
#
# 下面的预测只数读写的扇区，别的一概不管。实测时间（如果有的话）都是复制同样多元素的时间。

# %%
COPIED = 1 << 24


def copy_times():
    """Milliseconds of a copy for each stride, of those that are known."""
    source = torch.zeros(COPIED * max(strides) if ON_GPU else 0, device=DEVICE)
    target = torch.empty(COPIED if ON_GPU else 0, device=DEVICE)
    known = {}
    for stride in strides:
        part = source[: COPIED * stride]
        calls = {"tour": lambda part=part, stride=stride: strided_copy(part, stride, target)}
        shape = {"what": "strided copy", "n": COPIED, "stride": stride}
        found = figures.times(shape, calls, rounds=3, round_ms=10.0)
        known |= {stride: found["tour"]} if found else {}
    return known


copy_ms = copy_times()
least = 2 * sectors_of_a_warp(1)
predicted = [(sectors_of_a_warp(stride) + sectors_of_a_warp(1)) / least for stride in strides]
figure, axes = plt.subplots(figsize=(6, 3.2))
axes.plot(strides, predicted, "k--", label="sectors moved, counted")
if copy_ms:
    against = [copy_ms[stride] / copy_ms[1] for stride in copy_ms]
    axes.plot(list(copy_ms), against, "ko-", label="time, measured")
axes.set_xscale("log", base=2)
axes.set_xticks(strides, [str(stride) for stride in strides])
axes.set(xlabel="stride", ylabel="times that of stride 1", ylim=(0, None))
axes.set_title(f"Copying one element in `stride`\n({figures.machine})", fontsize=9)
axes.legend()
show(figure, "00_gpu_stride")

# %% [markdown]
# 要记住的规则：**相邻的线程读相邻的元素**。这样的读取叫合并访问 (coalesced access)。在 Triton
# 里，这意味着块 (block) 的最后一个轴要沿着张量中步长为 1 的那个轴。
#
# ## 你的卡的三个数
#
# **读带宽**：HBM 每秒送出多少字节。这个内核读取的数据远远超过 L2 缓存的容量，
# 并且每个程序写出一个数，这样编译器就不能把读取省掉。


# %%
@triton.jit
def read_kernel(x, sums, n, BLOCK: tl.constexpr):
    program = tl.program_id(0)
    offs = program.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(sums + program, tl.sum(tl.load(x + offs, mask=offs < n, other=0.0)))


def read(x, sums, block=4096):
    """A sum for each block of x: all of it is read."""
    here(read_kernel)[(sums.numel(),)](x, sums, x.numel(), BLOCK=block)
    return sums


x = torch.randn(10_000, device=DEVICE)
sums = read(x, torch.empty(3, device=DEVICE))
torch.testing.assert_close(sums.double().sum(), x.double().sum(), rtol=0, atol=1e-3)

READ_BYTES = 2 << 30


def read_bandwidth():
    """TB/s, or None where nobody measured it."""
    x = torch.ones(READ_BYTES // 4 if ON_GPU else 0, device=DEVICE)
    sums = torch.empty(triton.cdiv(READ_BYTES // 4, 4096) if ON_GPU else 0, device=DEVICE)
    calls = {"tour": lambda: read(x, sums)}
    found = figures.times({"what": "read", "bytes": READ_BYTES}, calls)
    return READ_BYTES / found["tour"] * 1e-9 if found else None


bandwidth = read_bandwidth()
print("read bandwidth:", f"{bandwidth:.2f} TB/s" if bandwidth else figures.machine)

# %% [markdown]
# **启动开销**：一个什么都不做的内核要花多少时间。主机准备好一次启动，把它放进队列，就继续往下走；
# GPU 从队列里取出启动来执行。连续启动许多次，就能看出两者之中哪个更慢。
# 如果一个操作搬运的数据少于带宽乘以这个开销，那么限制它的根本不是显存，而是启动本身。


# %%
@triton.jit
def nothing_kernel(x):
    pass


def launch_microseconds(launches=2000):
    """Wall time of one of many launches in a row."""
    x = torch.empty(1, device=DEVICE)
    for _ in range(20):
        nothing_kernel[(1,)](x)
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(launches):
        nothing_kernel[(1,)](x)
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / launches * 1e6


launch_us = figures.value({"what": "launch"}, "microseconds", launch_microseconds)
print("a launch:", f"{launch_us:.1f} microseconds" if launch_us else figures.machine)
if launch_us and bandwidth:
    print(f"in that time HBM delivers {bandwidth * launch_us:.1f} MB")

# %% [markdown]
# **矩阵乘速率**：Tensor Core 每秒做多少次浮点运算。两个边长为 $n$ 的方阵相乘，需要 $2 n^3$
# 次运算：每一项一次乘法、一次加法。只有矩阵乘法在 Tensor Core 上运行。其余的一切，包括指数函数，
# 都在普通单元上运行，要慢许多倍。

# %%
SIDE = 8192
rates = {}
for dtype in (torch.bfloat16, torch.float32):
    a, b = (torch.randn(*(2 * [SIDE if ON_GPU else 0]), device=DEVICE).to(dtype) for _ in range(2))
    name = str(dtype).removeprefix("torch.")
    found = figures.times(
        {"what": "matmul", "n": SIDE, "dtype": name},
        {"torch": lambda a=a, b=b: torch.matmul(a, b)},
        flops=2 * SIDE**3,
    )
    if found:
        rates[name] = 2 * SIDE**3 / found["torch"] * 1e-9  # TFLOP/s
        print(f"{name:>9}: {rates[name]:6.0f} TFLOP/s")
    else:
        print(f"{name:>9}: {figures.machine}")

# %% [markdown]
# ## 算术强度与屋顶线
#
# 对一个操作数两样东西：它做的浮点运算，以及它必须在 HBM 与芯片之间搬运的字节。
# 两者之商就是它的**算术强度** (arithmetic intensity)，单位是 FLOP/字节。
#
# - 一块每秒读 $B$ 字节的卡，每秒最多供得上 $B \cdot \text{intensity}$ 次运算（intensity
#   即算术强度）。
# - 一块每秒做 $P$ 次运算的卡，不会做得比 $P$ 更多。
#
# 两者中较小的那个就是屋顶 (roof)，这种图因此叫屋顶线 (roofline)。两者相等之处是**脊点** (ridge)：
# 在它左边，操作受显存限制；在它右边，受算术限制。左边的操作要变快，只有少搬字节这一条路。


# %%
def add_counts(n):
    """FLOPs and bytes of z = x + y in fp32: two numbers in, one out."""
    return n, 12 * n


def softmax_counts(rows, columns):
    """Of a softmax in bf16: maximum, difference, exponential, sum, quotient; in and out once."""
    return 5 * rows * columns, 4 * rows * columns


def matmul_counts(n):
    """Of a square product in bf16: each matrix is moved once."""
    return 2 * n**3, 3 * 2 * n * n


def attention_counts(seqlen, headdim, heads, stores_scores):
    """Of attention in bf16: two products; q, k, v and out are moved, and the scores if stored.

    Standard attention writes the scores, reads them for the softmax, and does so again with the
    probabilities: four passes over a square of side `seqlen`.
    """
    flops = 4 * heads * seqlen**2 * headdim
    moved = 4 * heads * seqlen * headdim
    moved += 4 * heads * seqlen**2 if stores_scores else 0
    return flops, 2 * moved


ADDED, ROWS, COLUMNS = 1 << 26, 16384, 4096
SEQLEN, HEADDIM, HEADS = 4096, 128, 16
operations = {
    "vector add": add_counts(ADDED),
    "softmax": softmax_counts(ROWS, COLUMNS),
    "standard attention": attention_counts(SEQLEN, HEADDIM, HEADS, stores_scores=True),
    "fused attention": attention_counts(SEQLEN, HEADDIM, HEADS, stores_scores=False),
    "matmul": matmul_counts(SIDE),
}
for name, (flops, moved) in operations.items():
    print(f"{name:>20}: {flops / moved:8.2f} FLOP a byte")

# %% [markdown]
# 看看那两种注意力。它们做的算术一样多。其中一种把分数 (score) 留在芯片上，强度就高出许多倍。这就是
# FlashAttention 的全部思想，本教程余下的部分讲的就是怎样做到。
#
# 现在让 torch 来做这些操作，看看每个离屋顶有多近。


# %%
def standard_attention(q, k, v):
    """Three kernels, with the scores in HBM between them; (heads, seqlen, headdim)."""
    scores = torch.matmul(q * HEADDIM**-0.5, k.transpose(1, 2))
    return torch.matmul(torch.softmax(scores, -1), v)


def measured_calls():
    """The operations at the sizes above."""
    bf16 = dict(device=DEVICE, dtype=torch.bfloat16)
    x, y = torch.ones(2, ADDED, device=DEVICE)
    rows = torch.randn(ROWS, COLUMNS, **bf16)
    a, b = torch.randn(2, SIDE, SIDE, **bf16)
    q, k, v = torch.randn(3, HEADS, SEQLEN, HEADDIM, **bf16)
    batch = [t.transpose(0, 1)[None] for t in (q, k, v)]  # (1, seqlen, heads, headdim)
    expected = tilewise.attention(*batch)[0].transpose(0, 1)
    torch.testing.assert_close(standard_attention(q, k, v), expected, rtol=0, atol=2e-2)
    return {
        "vector add": lambda: torch.add(x, y),
        "softmax": lambda: torch.softmax(rows, -1),
        "standard attention": lambda: standard_attention(q, k, v),
        "fused attention": lambda: tilewise.attention(*batch),
        "matmul": lambda: torch.matmul(a, b),
    }


calls = measured_calls() if ON_GPU else dict.fromkeys(operations)
reached = {}
for name, (flops, _) in operations.items():
    shape = {"what": "roofline", "operation": name}
    found = figures.times(shape, {name: calls[name]}, flops=flops, rounds=3)
    reached |= {name: flops / found[name] * 1e-9} if found else {}
del calls


# %%
def draw_roofline(operations, bandwidth, peak, reached):
    """The roof, and each operation under it; without a card's numbers intensities alone."""
    figure, axes = plt.subplots(figsize=(7, 4))
    axes.set_xscale("log")
    axes.set_xlabel("arithmetic intensity, FLOP a byte")
    intensities = {name: flops / moved for name, (flops, moved) in operations.items()}
    known = bandwidth is not None and peak is not None
    if known:
        ends = [0.03, peak / bandwidth, 30_000]
        roof = [min(peak, bandwidth * intensity) for intensity in ends]
        axes.plot(ends, roof, "k-", label=f"{bandwidth:.2f} TB/s and {peak:.0f} TFLOP/s, measured")
        axes.set_yscale("log")
        axes.set_ylabel("TFLOP/s")
    else:
        axes.set_yticks([])
    for place, (name, intensity) in enumerate(intensities.items()):
        height = min(peak, bandwidth * intensity) if known else place
        axes.plot(intensity, height, "ko", fillstyle="none")
        if name in reached:
            axes.plot(intensity, reached[name], "k^")
            axes.plot([intensity] * 2, [height, reached[name]], "k:", linewidth=0.8)
        shift, side = (5, "left") if name == "matmul" else (-5, "right")
        label = dict(xytext=(shift, 6), textcoords="offset points", ha=side, fontsize=8)
        axes.annotate(name, (intensity, height), **label)
    axes.plot([], [], "ko", fillstyle="none", label="as the two counts allow")
    if reached:
        axes.plot([], [], "k^", label="as measured")
    axes.margins(0.15, 0.25)
    axes.legend(loc="lower right", fontsize=7)
    axes.set_title(f"Roofline ({figures.machine})", fontsize=9)
    return figure


show(draw_roofline(operations, bandwidth, rates.get("bfloat16"), reached), "00_gpu_roofline")
if bandwidth and rates:
    print(f"the ridge: {rates['bfloat16'] / bandwidth:.0f} FLOP a byte")

# %% [markdown]
# 如果内核还要写数据，或者 L2 缓存里还留着一些内容，三角形可能略高于屋顶的斜坡部分。
# 远低于屋顶的点必有原因，优化一个内核，就是去找这个原因。屋顶告诉你何时可以停手。
#
# ## 练习
#
# **1.** 一个 warp 以步长 3 读 fp16 的数，会碰到多少个扇区？如果读的是相邻的数，
# 但从元素 5 而不是从扇区边界开始呢？给 `sectors_of_a_warp` 加一个参数，表示第一个元素，再数一数。
#
# <details><summary>答案</summary>
#
# ```python
# def sectors_from(first, stride, itemsize):
#     return len({(first + i * stride) * itemsize // 32 for i in range(32)})
#
# print("fp16, stride 3:", sectors_from(0, 3, 2))
# print("fp16, from element 5:", sectors_from(5, 1, 2))
# assert sectors_from(0, 1, 4) == sectors_of_a_warp(1) == 4
# assert sectors_from(0, 3, 2) == 6  # 94 elements of 2 bytes, all in a row
# assert sectors_from(5, 1, 2) == 3  # one more than two: the ends share sectors with neighbours
# ```
#
# </details>
#
# **2.** 把内核反过来：写一个按顺序读 `x`、按步长写出的内核，即 `out[i * stride] = x[i]`。
# 检查它的结果。你预计两者之中哪个更吃亏，为什么？有 GPU 的话，用 `figures.times` 给两者计时。
#
# <details><summary>答案</summary>
#
# 只写了一部分的扇区，必须与显存里原有的内容合并，所以分散写入的代价至少和分散读取一样大。
#
# ```python
# @triton.jit
# def strided_write_kernel(x, out, n, stride, BLOCK: tl.constexpr):
#     offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
#     inside = offs < n
#     tl.store(out + offs * stride, tl.load(x + offs, mask=inside), mask=inside)
#
#
# x = torch.randn(1000, device=DEVICE)
# out = torch.zeros(7000, device=DEVICE)
# here(strided_write_kernel)[(4,)](x, out, 1000, 7, BLOCK=256)
# assert torch.equal(out[::7], x)
# assert out.count_nonzero() == x.count_nonzero()  # and nothing else was written
# ```
#
# </details>
