# %% [markdown]
# # 00. The GPU and its memory
#
# After this lesson you can say where a number lies while a GPU works on it, measure how fast your
# own card reads, starts and multiplies, and tell from two counts, operations and bytes, how fast
# an operation can be at best.
#
# You need Python and PyTorch. You need no GPU: without one, kernels run in an interpreter on small
# inputs, and the figures are those that were recorded on one machine, which is named.

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
# ## Many small processors
#
# A GPU is a chip with many processors, called streaming multiprocessors or **SMs**. An SM has its
# own arithmetic units, its own tensor cores for matrix products, and its own fast memory.
#
# Work is handed out in **programs** (CUDA says thread blocks). You write the code of one program;
# a launch runs it many times, and each copy learns its number from `tl.program_id`. A program runs
# on one SM from beginning to end. Inside, it is split into **warps** of 32 threads, which execute
# the same instruction together. Triton hides the threads: you write operations on blocks of
# numbers, and the compiler deals them out.
#
# While one warp waits for memory, its SM runs another. That is how a GPU bears slow memory: not by
# waiting less, but by always having something else to do.
#
# ## Four places for a number
#
# | place | shared by | how you use it in Triton |
# |---|---|---|
# | registers | one thread | values in your kernel |
# | shared memory | one program | the compiler puts tiles there, above all those of `tl.dot` |
# | L2 cache | the whole chip | by itself, for what was read a short while ago |
# | HBM, the card's memory | the whole chip | `tl.load`, `tl.store`, every tensor |
#
# Each place is larger than the one above it, and slower. Tensors live in HBM. Whatever a kernel
# computes, it first pays for bringing its inputs up and its results down. Here is how large the
# places are.


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
# ## A first kernel: reading with a stride
#
# This kernel copies every `stride`-th element of `x`. Each program takes `BLOCK` elements of the
# result. Lesson 01 explains it line by line; here it is a probe. Change it and see.


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
# Every copy above returns as many useful bytes as it has elements. Memory does not work in
# elements. It moves **sectors** of 32 bytes: ask for one float, and its seven neighbours come too.
# The 32 threads of a warp ask at once, so what counts is how many different sectors they touch.


# %%
def sectors_of_a_warp(stride, itemsize=4):
    """Sectors that 32 threads touch when thread i reads element i * stride."""
    return len({i * stride * itemsize // 32 for i in range(32)})


strides = (1, 2, 4, 8, 16, 32)
for stride in strides:
    print(f"stride {stride:>2}: {sectors_of_a_warp(stride):>2} sectors for 128 useful bytes")

# %% [markdown]
# Four sectors are the least for 128 bytes. From a stride of 8 on every thread needs a sector of
# its own, and seven eighths of what is moved is thrown away. So the time should rise up to a stride
# of 8 and then stay. An H200 rises once more, at 16. No count of sectors explains that; a likely
# reason is that its L2 cache fetches sectors from memory in pairs, and Nsight Compute's counters
# (lesson 05) would tell.
#
# The prediction below counts sectors read and written, and nothing else. The measured times, where
# there are some, are of copies with equally many elements.

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
# The rule to keep: **neighbouring threads read neighbouring elements**. Such reads are called
# coalesced. In Triton it means that the last axis of a block runs along the axis of the tensor
# whose stride is 1.
#
# ## Three numbers of your card
#
# **Read bandwidth**: how many bytes a second come out of HBM. The kernel reads much more than the
# L2 cache holds, and writes one number a program, so that the compiler cannot leave the reads out.


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
# **Launch cost**: the time that a kernel takes which does nothing. The host prepares a launch, puts
# it into a queue and goes on; the GPU takes launches from the queue. Many in a row show which of
# the two is the slower. An operation that moves less than the bandwidth times this cost is not
# limited by memory at all: it is limited by being started.


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
# **Matmul rate**: how many floating-point operations a second the tensor cores do. A product of two
# square matrices of side $n$ takes $2 n^3$ operations: a multiplication and an addition for each
# term. Only matrix products run on tensor cores. Everything else, exponentials among it, runs on
# the ordinary units, which are many times slower.

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
# ## Arithmetic intensity and the roofline
#
# Count two things of an operation: the floating-point operations it does, and the bytes it must
# move between HBM and the chip. Their quotient is its **arithmetic intensity**, in FLOP a byte.
#
# - A card that reads $B$ bytes a second feeds at most $B \cdot \text{intensity}$ operations.
# - A card that does $P$ operations a second does no more than $P$.
#
# The smaller of the two is the roof. Left of the **ridge**, where both are equal, memory limits the
# operation; right of it, arithmetic does. An operation on the left gets faster by moving fewer
# bytes, and by nothing else.


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
# Look at the two attentions. They do the same arithmetic. One keeps the scores on the chip, and
# its intensity is many times higher. That is all of FlashAttention's idea, and the rest of this
# tour is about how to do it.
#
# Now let torch do these operations, and see how near to the roof each comes.


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
# A triangle may lie a little above the sloping part of the roof where a kernel also writes, or
# where the L2 cache still holds something. What lies far below it has a reason, and looking for
# that reason is what optimising a kernel means. The roof tells you when to stop.
#
# ## Exercises
#
# **1.** How many sectors does a warp touch when it reads fp16 numbers with a stride of 3? And when
# it reads neighbours, but starts at element 5 and not at a sector's edge? Extend
# `sectors_of_a_warp` by a first element, and count.
#
# <details><summary>Solution</summary>
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
# **2.** Turn the kernel round: write a kernel that reads `x` in order and writes it with a stride,
# `out[i * stride] = x[i]`. Check it. Which of the two do you expect to suffer more, and why? On a
# GPU, time both with `figures.times`.
#
# <details><summary>Solution</summary>
#
# A sector that is written in part must be merged with what memory holds, so the spread of writes
# costs at least as much as that of reads.
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
