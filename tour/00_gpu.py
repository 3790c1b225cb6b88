# %% [markdown]
# # 00. The GPU and its memory
#
# **The idea:** the time of an operation is bounded by two counts, the bytes it
# moves and the floating-point operations it does, and the one that takes longer
# decides.
#
# After this lesson you can
#
# - say where a number lies while a GPU works on it,
# - measure how fast your own card reads, launches and multiplies,
# - tell from the two counts how fast an operation can be at best.
#
# You need Python and PyTorch. You need no GPU: without one, kernels run in an
# interpreter on small inputs, and the figures are those recorded on one machine,
# which is named.

# %%
import torch
import triton
import triton.language as tl
from lesson import DEVICE, ON_GPU, Figures, NotYet, here, pictures_00, solutions_00

figures = Figures("00_gpu")
print("kernels run on:", "this GPU" if ON_GPU else "the CPU, interpreted")
print("figures are from:", figures.machine)

# %% [markdown]
# ## Many small processors
#
# A GPU is a chip with many processors, called streaming multiprocessors or **SMs**.
# An SM has its own arithmetic units, its own tensor cores for matrix products, and
# its own fast memory.
#
# Work is divided into **programs** (CUDA: thread blocks). You write the code of one
# program; a launch runs it many times, and `tl.program_id` gives each run its
# number. A program runs on one SM from beginning to end. Inside, it is split into
# **warps** of 32 threads, which execute the same instruction together. In Triton
# you write operations on blocks of numbers, and the compiler distributes them over
# the threads.
#
# ```{diagram} grid
# ```
#
# While one warp waits for memory, its SM runs another. A GPU hides the latency of
# memory behind other work.
#
# ## Four places for a number
#
# | place | shared by | how you use it in Triton |
# |---|---|---|
# | registers | one thread | values in your kernel |
# | shared memory | one program | the compiler keeps tiles there, for `tl.dot` |
# | L2 cache | the whole chip | by itself, for what was read a short while ago |
# | HBM, the card's memory | the whole chip | `tl.load`, `tl.store`, every tensor |
#
# ```{diagram} memory
# ```
#
# Each place is shared by more threads than the one above it in the table, and
# slower. Tensors live in HBM: a kernel loads its inputs from there (`tl.load`) and
# stores its results there (`tl.store`). These are the sizes.

# %%
pictures_00.card(figures)

# %% [markdown]
# ## A first kernel: reading with a stride
#
# This kernel copies every `stride`-th element of `x`. Each program takes `BLOCK`
# elements of the result. Lesson 01 explains it line by line; here it probes the
# memory. Change it and see.


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
    here(strided_copy_kernel)[(triton.cdiv(n, block),)](
        x, out, n, stride, BLOCK=block
    )
    return out


x = torch.randn(5000, device=DEVICE)
for stride in (1, 2, 7, 32):
    assert torch.equal(strided_copy(x, stride), x[::stride])
print("the copies are right")

# %% [markdown]
# Memory moves **sectors** of 32 bytes: ask for one float, and its seven neighbours
# come too. The 32 threads of a warp ask at once, so what counts is how many
# different sectors they touch.


# %%
def sectors_of_a_warp(stride, itemsize=4):
    """Sectors that 32 threads touch when thread i reads element i * stride."""
    return len({i * stride * itemsize // 32 for i in range(32)})


for stride in (1, 2, 4, 8, 16, 32):
    count = sectors_of_a_warp(stride)
    print(f"stride {stride:>2}: {count:>2} sectors for 128 useful bytes")

# %% [markdown]
# Four sectors are the least for 128 bytes. From a stride of 8 on every thread needs
# a sector of its own, and seven eighths of what is moved is not used. So the time
# should rise up to a stride of 8 and then stay. An H200 rises once more, at 16. No
# count of sectors explains that; a likely reason is that its L2 cache fetches
# sectors from memory in pairs, and Nsight Compute's counters (lesson 05) would
# tell.
#
# The prediction below counts sectors read and written, and nothing else. The
# measured times are of copies with equally many elements.

# %%
pictures_00.strides(figures, strided_copy, sectors_of_a_warp)

# %% [markdown]
# The rule to keep: **neighbouring threads read neighbouring elements**. Such reads
# are called coalesced. In Triton it means that the last axis of a block runs along
# the axis of the tensor whose stride is 1.
#
# ## Exercise 1: count sectors
#
# How many sectors does a warp touch when it reads fp16 numbers with a stride of 3?
# And when it reads neighbours, but starts at element 5? Extend `sectors_of_a_warp`
# by a first element: write it in place of `raise NotYet`, run the lesson again, and
# read what it says.
#
# **Hint:** what does `first` change in the line of `sectors_of_a_warp`?


# %%
def sectors_from(first, stride, itemsize):
    """Sectors of a warp whose thread i reads element first + i * stride."""
    raise NotYet


solutions_00.check_sectors(sectors_from)

# %% [markdown]
# <details><summary>An answer</summary>
#
# ```{literalinclude} /../tour/lesson/solutions_00.py
# :pyobject: sectors_from
# :language: python
# ```
#
# </details>
#
# ## Three numbers of your card
#
# **Read bandwidth**: how many bytes per second come out of HBM. The kernel reads
# much more than the L2 cache holds, and writes one number per program, so that the
# compiler cannot leave the reads out.


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
bandwidth = pictures_00.read_bandwidth(figures, read)

# %% [markdown]
# **Launch cost**: the time of a kernel that does nothing. The host prepares a
# launch, puts it into a queue and goes on; the GPU takes launches from the queue.
# Many in a row show which of the two is the slower. An operation that moves less
# than the bandwidth times this cost is limited by neither memory nor arithmetic,
# but by its launch.


# %%
@triton.jit
def nothing_kernel(x):
    pass


pictures_00.launch_cost(figures, nothing_kernel, bandwidth)

# %% [markdown]
# **Matmul rate**: how many floating-point operations per second the tensor cores
# do. A product of two square matrices of side $n$ takes $2 n^3$ operations: a
# multiplication and an addition for each term. Only matrix products run on tensor
# cores. Everything else, exponentials among it, runs on the ordinary units, which
# are many times slower.

# %%
rates = pictures_00.matmul_rates(figures)

# %% [markdown]
# ## Arithmetic intensity and the roofline
#
# Count two things of an operation: the floating-point operations it does, and the
# bytes it must move between HBM and the chip. Their quotient is its **arithmetic
# intensity**, in FLOP per byte.
#
# - A card that reads $B$ bytes per second feeds at most $B \cdot \text{intensity}$
#   operations.
# - A card that does $P$ operations per second does no more than $P$.
#
# The smaller of the two is the roof. Left of the **ridge**, where both are equal,
# memory bounds the operation; right of it, arithmetic does. An operation on the
# left gets faster by moving fewer bytes, and by nothing else.


# %%
def add_counts(n):
    """FLOPs and bytes of z = x + y in fp32: two numbers in, one out."""
    return n, 12 * n


def softmax_counts(rows, columns):
    """Of a softmax in bf16: maximum, difference, exponential, sum, quotient."""
    return 5 * rows * columns, 4 * rows * columns


def matmul_counts(n):
    """Of a square product in bf16: each matrix is moved once."""
    return 2 * n**3, 3 * 2 * n * n


def attention_counts(seqlen, headdim, heads, stores_scores):
    """Of attention in bf16: two products; moves q, k, v, out, and scores if stored.

    Standard attention writes the scores, reads them for the softmax, and does so
    again with the probabilities: four passes over a square of side `seqlen`.
    """
    flops = 4 * heads * seqlen**2 * headdim
    moved = 4 * heads * seqlen * headdim
    moved += 4 * heads * seqlen**2 if stores_scores else 0
    return flops, 2 * moved


operations = {
    "vector add": add_counts(1 << 26),
    "softmax": softmax_counts(16384, 4096),
    "standard attention": attention_counts(4096, 128, heads=16, stores_scores=True),
    "fused attention": attention_counts(4096, 128, heads=16, stores_scores=False),
    "matmul": matmul_counts(8192),
}
for name, (flops, moved) in operations.items():
    print(f"{name:>20}: {flops / moved:8.2f} FLOP per byte")

# %% [markdown]
# Look at the two attentions. They do the same arithmetic. One keeps the scores on
# the chip, and its intensity is many times higher. That is all of FlashAttention's
# idea, and the rest of this tour is about how to do it.
#
# Now torch does these operations, and the picture shows how near to the roof each
# comes.

# %%
pictures_00.roofline(figures, operations, bandwidth, rates)

# %% [markdown]
# A triangle may lie a little above the sloping part of the roof where a kernel also
# writes, or where the L2 cache still holds something. What lies far below it has a
# reason, and to look for that reason is to optimise the kernel. The roof tells you
# when to stop.
#
# ## Exercise 2: write with a stride
#
# Write a kernel that reads `x` in order and writes it with a stride,
# `out[i * stride] = x[i]`. Which of the two do you expect to be slower on a GPU,
# and why?
#
# **Hint:** take `strided_copy_kernel`. Only one of its two addresses has the
# stride.


# %%
@triton.jit
def strided_write_kernel(x, out, n, stride, BLOCK: tl.constexpr):
    """out[i * stride] = x[i], for n elements."""
    raise NotYet


solutions_00.check_strided_write(strided_write_kernel)

# %% [markdown]
# <details><summary>An answer</summary>
#
# ```{literalinclude} /../tour/lesson/solutions_00.py
# :pyobject: strided_write_kernel
# :language: python
# ```
#
# </details>

# %%
solutions_00.exercises.show()
