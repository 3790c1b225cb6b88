# %% [markdown]
# # 01. Vector add
#
# After this lesson you can write a Triton kernel: split work into programs, compute which elements
# a program owns, guard the ragged end with a mask, launch it, check it, and judge its speed by the
# bytes it moves.

# %%
import matplotlib.pyplot as plt
import torch
import triton
import triton.language as tl
from lesson import DEVICE, ON_GPU, Figures, here, show

from tilewise.testing import interpret

figures = Figures("01_vector_add")

# %% [markdown]
# ## The kernel
#
# `z = x + y` for two vectors of `n` elements. Each program adds `BLOCK` of them.
#
# - `tl.program_id(0)` is the number of this program. It is all that tells one from another.
# - `tl.arange(0, BLOCK)` is the block 0, 1, ..., BLOCK - 1. With the start of this program added,
#   these are the **offsets** of its elements.
# - `x + offs` is a block of addresses: `x` is the address of the first element. `tl.load` reads
#   what lies there, `tl.store` writes.
# - `BLOCK` is a `tl.constexpr`: known when the kernel is compiled, as shapes of blocks must be. It
#   is a power of two. Another value is another kernel, compiled when it is first launched.


# %%
@triton.jit
def add_kernel(x, y, z, n, BLOCK: tl.constexpr):
    start = tl.program_id(0) * BLOCK
    offs = start + tl.arange(0, BLOCK)  # (BLOCK,)
    inside = offs < n  # (BLOCK,) of booleans
    total = tl.load(x + offs, mask=inside) + tl.load(y + offs, mask=inside)
    tl.store(z + offs, total, mask=inside)


# %% [markdown]
# The host allocates the result, says how many programs there are, and launches. The square
# brackets hold that number, the **grid**. A tensor is handed over as an address, a number as it is.
#
# `here` comes from this tour: on a GPU it is the kernel itself, without one an interpreter that
# runs program after program on CPU tensors.


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
# Bit by bit, because one addition, rounded once, leaves no choice. Later kernels sum in another
# order than torch does; they will need a bound on the error.
#
# ## Programs, offsets and the mask
#
# Ten elements in blocks of four take three programs. The last one has two offsets too many. To see
# what each program sees, let the kernel write it down: a kernel is a program like any other, and
# may store what you want to know.


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
# ## What a missing mask does
#
# Leave the mask out, and program 2 reads and writes two elements that are nobody's, or somebody
# else's. On a GPU that is often no error: the memory behind a tensor belongs to the process, too.
# The kernel returns, results are right, and another tensor has changed. Such a bug shows up days
# later, in another place.
#
# The interpreter knows which memory belongs to the arguments, and refuses.


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
# Now let the memory be there, as on a GPU: `z` is the front of a longer tensor, whose tail belongs
# to somebody else. Nothing complains, and the neighbour is overwritten.

# %%
memory = torch.full((12,), 7.0)
x, y = torch.zeros(12), torch.ones(12)
interpret(unmasked_kernel)[(3,)](x[:10], y[:10], memory[:10], BLOCK=4)
print("the neighbour's two numbers were 7, 7 and are", memory[10:].tolist())
assert memory[10:].tolist() == [1.0, 1.0]

# %% [markdown]
# This is why every kernel of tilewise runs in this interpreter before a GPU sees it.
#
# ## Bytes are the price
#
# The kernel does one addition for three numbers moved. Its intensity is so low (lesson 00) that
# arithmetic is free: only bytes count. For fp32 these are 12 an element, for fp16 6. So its speed
# is said in bytes a second, and held against what the card can do and what `torch.add` does.


# %%
def bytes_moved(n, dtype):
    """Two vectors in, one out."""
    return 3 * n * dtype.itemsize


assert bytes_moved(1000, torch.float32) == 2 * bytes_moved(1000, torch.float16) == 12_000

# %% [markdown]
# ### From small to large
#
# A small vector does not keep the card busy: the time is that of a launch, whatever the size. With
# size the bandwidth rises, until memory is the limit. The L2 cache is emptied before each
# measurement; else vectors that fit into it would seem to come from memory.

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
# ### Which block, which dtype
#
# A block is spread over the threads of a program: 4 warps, 128 threads, unless `num_warps` says
# otherwise. `BLOCK=128` gives each thread a single number, and a great many programs to start.
# `BLOCK=16384` gives each thread 128 numbers in three vectors, which take so many registers that
# fewer programs fit on an SM. Between the two lies a wide plain.

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
# Two things to read off it. Halving the bytes halves the time: in fp16 as many GB/s are reached,
# with twice the elements. And no kernel can beat another here by being clever about additions. The
# only way to make vector addition cheaper is not to run it alone: to do more with each number while
# it is on the chip. That is called **fusion**, and the first exercise is one.
#
# ## Exercises
#
# **1.** Write a kernel for `z = a * x + y`, with a number `a`. In torch, `a * x + y` is two
# operations. Count the bytes of both ways for fp32.
#
# <details><summary>Solution</summary>
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
# With `a = 2` the product is exact, and the results are equal bit by bit. With `a = 0.1` a GPU
# differs in the last bit: it multiplies and adds in one instruction, and rounds once.
#
# </details>
#
# **2.** Launch a fixed number of programs, say 3, whatever `n` is. Each takes one block, then the
# block three further on, and so on: `for start in range(first, n, step)`. Such a kernel is called
# **persistent**. Lesson 02 ends with one.
#
# <details><summary>Solution</summary>
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
