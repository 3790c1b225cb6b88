# %% [markdown]
# # 01. 向量加法
#
# 学完本课，你能写出一个 Triton 内核 (kernel)：把任务拆成若干程序 (program)，
# 算出每个程序负责哪些元素，用掩码 (mask) 护住不整齐的末尾，启动它，检查它，
# 并按它搬运的字节数评判它的速度。

# %%
import matplotlib.pyplot as plt
import torch
import triton
import triton.language as tl
from lesson import DEVICE, ON_GPU, Figures, here, show

from tilewise.testing import interpret

figures = Figures("01_vector_add")

# %% [markdown]
# ## 内核
#
# 对两个各有 `n` 个元素的向量计算 `z = x + y`。每个程序负责其中 `BLOCK` 个元素的加法。
#
# - `tl.program_id(0)` 是本程序的编号。程序之间的区别仅此而已。
# - `tl.arange(0, BLOCK)` 是由 0, 1, ..., BLOCK - 1 组成的块 (block)。加上本程序的起点，
#   就是它的各个元素的**偏移** (offset)。
# - `x + offs` 是一块地址：`x` 是第一个元素的地址。`tl.load` 读出那里的内容，`tl.store` 写入。
# - `BLOCK` 是 `tl.constexpr`：编译内核时就已确定，块的形状必须如此。它是 2 的幂。
#   换一个值就是另一个内核，在第一次启动时编译。


# %%
@triton.jit
def add_kernel(x, y, z, n, BLOCK: tl.constexpr):
    start = tl.program_id(0) * BLOCK
    offs = start + tl.arange(0, BLOCK)  # (BLOCK,)
    inside = offs < n  # (BLOCK,) of booleans
    total = tl.load(x + offs, mask=inside) + tl.load(y + offs, mask=inside)
    tl.store(z + offs, total, mask=inside)


# %% [markdown]
# 主机为结果分配内存，说明有多少个程序，然后启动内核。方括号里就是这个个数，叫做**网格** (grid)。
# 张量以地址传入，数则原样传入。
#
# `here` 由本教程提供：有 GPU 时它就是内核本身，没有时则是一个解释器，在 CPU
# 张量上一个接一个地运行程序。


# %%
def add(x, y, block=1024, z=None):
    """x + y, by our kernel."""
    z = torch.empty_like(x) if z is None else z
    programs = triton.cdiv(x.numel(), block)  # rounded up
    here(add_kernel)[(programs,)](x, y, z, x.numel(), BLOCK=block)
    return z


for dtype in (torch.float32, torch.float16, torch.bfloat16):
    for n in (1, 1000, 4096):
        x, y = torch.randn(2, n, device=DEVICE).to(dtype)
        assert torch.equal(add(x, y, block=256), x + y)
print("equal to torch, bit by bit")

# %% [markdown]
# 能做到逐位相等，是因为一次加法只舍入一次，没有别的可能。后面的内核求和的顺序与 torch
# 不同，那时就需要一个误差界。
#
# ## 程序、偏移与掩码
#
# 十个元素，每块四个，需要三个程序。最后一个程序多出两个偏移。想看每个程序看到了什么，
# 就让内核写下来：内核也是普通的代码，你想知道什么，它就可以存什么。


# %%
@triton.jit
def diary_kernel(offsets, masks, n, BLOCK: tl.constexpr):
    program = tl.program_id(0)
    lanes = tl.arange(0, BLOCK)
    offs = program * BLOCK + lanes
    tl.store(offsets + program * BLOCK + lanes, offs)
    tl.store(masks + program * BLOCK + lanes, (offs < n).to(tl.int32))


def diary(n, block):
    """Offsets and masks of each program, a row each."""
    offsets, masks = torch.empty(
        2, triton.cdiv(n, block), block, dtype=torch.int32, device=DEVICE
    ).unbind()
    here(diary_kernel)[(len(offsets),)](offsets, masks, n, BLOCK=block)
    return offsets.tolist(), masks.tolist()


offsets, masks = diary(n=10, block=4)
assert offsets[2] == [8, 9, 10, 11] and masks[2] == [1, 1, 0, 0]

figure, axes = plt.subplots(figsize=(5, 2.2))
for program, (row, kept) in enumerate(zip(offsets, masks)):
    for lane, (offset, keep) in enumerate(zip(row, kept)):
        look = dict(facecolor="0.9") if keep else dict(facecolor="white", hatch="///")
        box = plt.Rectangle((lane, program), 1, 1, edgecolor="black", **look)
        axes.add_patch(box)
        around = dict(facecolor="white", edgecolor="none", pad=1)
        axes.text(lane + 0.5, program + 0.5, offset, ha="center", va="center", bbox=around)
axes.set(xlim=(0, 4), ylim=(3, 0), xticks=[], yticks=[0.5, 1.5, 2.5])
axes.set_yticklabels([f"program {number}" for number in range(3)])
axes.set_title("n = 10, BLOCK = 4: offsets; hatched ones are masked off", fontsize=9)
show(figure, "01_vector_add_programs")

# %% [markdown]
# ## 缺了掩码会怎样
#
# 去掉掩码，程序 2 就会读写两个元素，它们不属于任何人，或者属于别人。在 GPU
# 上这往往不报错：张量后面的显存同样属于这个进程。内核正常返回，结果也对，而另一个张量已经变了。
# 这样的 bug 几天之后才在别处冒出来。
#
# 解释器知道哪些内存属于传入的参数，并拒绝其余的访问。


# %%
@triton.jit
def unmasked_kernel(x, y, z, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(z + offs, tl.load(x + offs) + tl.load(y + offs))


x, y, z = torch.zeros(10), torch.ones(10), torch.empty(10)  # on the CPU, on any machine
try:
    interpret(unmasked_kernel)[(3,)](x, y, z, BLOCK=4)
    caught = ""
except IndexError as error:
    caught = str(error)
print(caught)
assert "outside" in caught

# %% [markdown]
# 现在让那段内存真的存在，就像在 GPU 上一样：`z` 是一个更长的张量的前一段，尾部属于别人。
# 没有谁报错，邻居却被改写了。

# %%
memory = torch.full((12,), 7.0)
x, y = torch.zeros(12), torch.ones(12)
interpret(unmasked_kernel)[(3,)](x[:10], y[:10], memory[:10], BLOCK=4)
print("the neighbour's two numbers were 7, 7 and are", memory[10:].tolist())
assert memory[10:].tolist() == [1.0, 1.0]

# %% [markdown]
# 正因如此，tilewise 的每个内核在上 GPU 之前，都先在这个解释器里运行。
#
# ## 代价就是字节
#
# 这个内核每搬运三个数才做一次加法。它的强度太低（第 00 课），算术等于免费，要紧的只有字节。
# fp32 时每个元素 12 字节，fp16 时 6 字节。所以它的速度用每秒字节数来表示，并与这块卡的能力、与
# `torch.add` 的速度相比较。


# %%
def bytes_moved(n, dtype):
    """Two vectors in, one out."""
    return 3 * n * dtype.itemsize


assert bytes_moved(1000, torch.float32) == 2 * bytes_moved(1000, torch.float16) == 12_000

# %% [markdown]
# ### 从小到大
#
# 小向量喂不饱整块卡：不论大小，时间都是一次启动的时间。随着尺寸增大，带宽上升，直到受显存限制。
# 每次测量之前都清空 L2 缓存；否则，放得进缓存的向量看上去也像是来自显存。

# %%
LOGS = (12, 14, 16, 18, 20, 22, 24, 26, 28)
room = torch.ones(3, 1 << max(LOGS) if ON_GPU else 0, device=DEVICE)
by_size = {"tour": {}, "torch": {}}
for log in LOGS:
    x, y, z = (part[: 1 << log] for part in room)
    calls = {
        "tour": lambda x=x, y=y, z=z: add(x, y, z=z),
        "torch": lambda x=x, y=y, z=z: torch.add(x, y, out=z),
    }
    shape = {"what": "sizes", "n": 1 << log, "dtype": "float32"}
    for name, ms in figures.times(shape, calls, rounds=3, round_ms=10.0).items():
        by_size[name][1 << log] = bytes_moved(1 << log, torch.float32) / ms * 1e-6  # GB/s

# %% [markdown]
# ### 多大的块，哪种 dtype
#
# 一个块分摊到程序的各个线程：除非 `num_warps` 另有指定，就是 4 个 warp，128 个线程。`BLOCK=128`
# 让每个线程只有一个数，要启动的程序也就极多。`BLOCK=16384` 让每个线程在三个向量里各有 128 个数，
# 占用的寄存器太多，一个 SM 容得下的程序就少了。两者之间是一片宽阔的平地。

# %%
N = 1 << 26
BLOCKS = (128, 256, 512, 1024, 2048, 4096, 8192, 16384)
by_block = {"float32": {}, "float16": {}}
for name in by_block:
    dtype = getattr(torch, name)
    x, y, z = (part[:N].to(dtype) for part in room)
    for block in BLOCKS:
        shape = {"what": "blocks", "n": N, "dtype": name, "block": block}
        calls = {"tour": lambda x=x, y=y, z=z, block=block: add(x, y, block, z)}
        for ms in figures.times(shape, calls, rounds=3, round_ms=10.0).values():
            by_block[name][block] = bytes_moved(N, dtype) / ms * 1e-6
del room, x, y, z


# %%
def draw_bandwidth(by_size, by_block):
    """GB/s against the size, and against the block."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.2), sharey=True)
    looks = {"tour": "ko-", "torch": "k^--", "float32": "ko-", "float16": "ks--"}
    for axes, lines in ((left, by_size), (right, by_block)):
        for name, line in lines.items():
            axes.plot(list(line), list(line.values()), looks[name], label=name, fillstyle="none")
        axes.set_xscale("log", base=2)
        axes.legend(fontsize=8)
    left.set(xlabel="elements, fp32", ylabel="GB/s", ylim=(0, None))
    right.set(xlabel=f"BLOCK, for {N:,} elements")
    figure.suptitle(f"Vector add ({figures.machine})", fontsize=9)
    return figure


if by_size["tour"]:
    show(draw_bandwidth(by_size, by_block), "01_vector_add_bandwidth")
    largest = 1 << max(LOGS)
    for name, line in by_size.items():
        print(f"{name:>6}: {line[largest]:6.0f} GB/s for {largest:,} elements")
else:
    print(figures.machine)

# %% [markdown]
# 从中可以读出两点。字节减半，时间也减半：fp16 达到的 GB/s 一样多，元素却多了一倍。另外，
# 在这里没有哪个内核能靠更巧妙的加法胜过别的内核。要让向量加法更便宜，唯一的办法是不单独运行它：
# 趁一个数还在芯片上，多对它做些事。这叫**融合** (fusion)，第一道练习就是一例。
#
# ## 练习
#
# **1.** 写一个内核计算 `z = a * x + y`，其中 `a` 是一个数。在 torch 里，`a * x + y`
# 是两个操作。数一数 fp32 时两种做法各搬运多少字节。
#
# <details><summary>答案</summary>
#
# ```python
# @triton.jit
# def axpy_kernel(a, x, y, z, n, BLOCK: tl.constexpr):
#     offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
#     inside = offs < n
#     scaled = a * tl.load(x + offs, mask=inside)
#     tl.store(z + offs, scaled + tl.load(y + offs, mask=inside), mask=inside)
#
#
# x, y = torch.randn(2, 1000, device=DEVICE)
# z = torch.empty_like(x)
# here(axpy_kernel)[(triton.cdiv(1000, 256),)](2.0, x, y, z, 1000, BLOCK=256)
# assert torch.equal(z, 2.0 * x + y)
#
# fused = 3 * 4  # x and y in, z out
# apart = 2 * 4 + 3 * 4  # a * x: one in, one out; then a sum
# assert apart / fused == 20 / 12
# ```
#
# `a = 2` 时乘积是精确的，结果逐位相等。`a = 0.1` 时，GPU 的结果在最后一位上有差别：
# 它用一条指令完成乘和加，只舍入一次。
#
# </details>
#
# **2.** 不管 `n` 是多少，都启动固定个数的程序，比如 3 个。每个程序先取一个块，
# 再取往后数的第三个块，依此类推：`for start in range(first, n, step)`。
# 这样的内核叫**持久化** (persistent) 内核。第 02 课以一个这样的内核收尾。
#
# <details><summary>答案</summary>
#
# ```python
# @triton.jit
# def persistent_add_kernel(x, y, z, n, BLOCK: tl.constexpr):
#     for start in range(tl.program_id(0) * BLOCK, n, tl.num_programs(0) * BLOCK):
#         offs = start + tl.arange(0, BLOCK)
#         inside = offs < n
#         total = tl.load(x + offs, mask=inside) + tl.load(y + offs, mask=inside)
#         tl.store(z + offs, total, mask=inside)
#
#
# x, y = torch.randn(2, 3000, device=DEVICE)
# z = torch.empty_like(x)
# here(persistent_add_kernel)[(3,)](x, y, z, 3000, BLOCK=256)
# assert torch.equal(z, x + y)
# ```
#
# </details>
