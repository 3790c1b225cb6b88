# %% [markdown]
# # 01. Vector add
#
# **The idea:** a kernel is the code of one program, which computes the offsets of
# its own block from its number and masks those past the end.
#
# After this lesson you can
#
# - write, launch and check a Triton kernel,
# - say what a missing mask does, and find it without a GPU,
# - judge the speed of a kernel by the bytes it moves.

# %%
import torch
import triton
import triton.language as tl
from lesson import DEVICE, Figures, NotYet, here, pictures_01, solutions_01

from tilewise.testing import interpret

figures = Figures("01_vector_add")

# %% [markdown]
# ## The kernel
#
# `z = x + y` for two vectors of `n` elements. Each program adds `BLOCK` of them.
#
# - `tl.program_id(0)` is the number of this program. Programs differ in nothing
#   else.
# - `tl.arange(0, BLOCK)` is the block 0, 1, ..., BLOCK - 1. With the start of this
#   program added, these are the **offsets** of its elements.
# - `x + offs` is a block of addresses: `x` is the address of the first element.
#   `tl.load` reads what lies there, `tl.store` writes.
# - `BLOCK` is a `tl.constexpr`: known when the kernel is compiled, as shapes of
#   blocks must be. It is a power of two. Another value is another kernel, compiled
#   when it is first launched.


# %%
@triton.jit
def add_kernel(x, y, z, n, BLOCK: tl.constexpr):
    start = tl.program_id(0) * BLOCK
    offs = start + tl.arange(0, BLOCK)  # (BLOCK,)
    inside = offs < n  # (BLOCK,) of booleans
    total = tl.load(x + offs, mask=inside) + tl.load(y + offs, mask=inside)
    tl.store(z + offs, total, mask=inside)


# %% [markdown]
# The host allocates the result, says how many programs there are, and launches. The
# square brackets hold that number, the **grid**. A tensor is passed as an address,
# a number as it is.
#
# `here` comes from this tour: on a GPU it is the kernel itself, without one an
# interpreter that runs program after program on CPU tensors.


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
# Bit by bit, because one addition, rounded once, leaves no choice. Later kernels
# sum in another order than torch does; they will need a bound on the error.
#
# ## Programs, offsets and the mask
#
# Ten elements in blocks of four take three programs. The last one has two offsets
# too many. A kernel may store whatever you want to know: this one stores its
# offsets and masks.


# %%
@triton.jit
def offsets_kernel(offsets, masks, n, BLOCK: tl.constexpr):
    program = tl.program_id(0)
    place = tl.arange(0, BLOCK)
    offs = program * BLOCK + place
    tl.store(offsets + program * BLOCK + place, offs)
    tl.store(masks + program * BLOCK + place, (offs < n).to(tl.int32))


def offsets_of(n, block):
    """Offsets and masks of each program, a row each."""
    both = torch.empty(
        2, triton.cdiv(n, block), block, dtype=torch.int32, device=DEVICE
    )
    offsets, masks = both.unbind()
    here(offsets_kernel)[(len(offsets),)](offsets, masks, n, BLOCK=block)
    return offsets.tolist(), masks.tolist()


offsets, masks = offsets_of(n=10, block=4)
assert offsets[2] == [8, 9, 10, 11] and masks[2] == [1, 1, 0, 0]
pictures_01.programs(offsets, masks)

# %% [markdown]
# ## What a missing mask does
#
# Leave the mask out, and program 2 reads and writes two elements past the end. On a
# GPU that is often no error: the memory behind a tensor belongs to the process,
# too. The kernel returns, its result is right, and another tensor has changed. Such
# a bug shows up days later, elsewhere.
#
# The interpreter knows which memory belongs to the arguments, and raises an error.


# %%
@triton.jit
def unmasked_kernel(x, y, z, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(z + offs, tl.load(x + offs) + tl.load(y + offs))


# on the CPU, on any machine
x, y, z = torch.zeros(10), torch.ones(10), torch.empty(10)
try:
    interpret(unmasked_kernel)[(3,)](x, y, z, BLOCK=4)
    caught = ""
except IndexError as error:
    caught = str(error)
print(caught)
assert "outside" in caught

# %% [markdown]
# Now let the memory be there, as on a GPU: `z` is the front of a longer tensor.
# There is no error, and the two elements behind `z` are overwritten.

# %%
memory = torch.full((12,), 7.0)
x, y = torch.zeros(12), torch.ones(12)
interpret(unmasked_kernel)[(3,)](x[:10], y[:10], memory[:10], BLOCK=4)
print("the two numbers behind z were 7, 7 and are", memory[10:].tolist())
assert memory[10:].tolist() == [1.0, 1.0]

# %% [markdown]
# This is why every kernel of tilewise runs in this interpreter before it runs on a
# GPU.
#
# ## The time is the bytes
#
# The kernel does one addition for three numbers moved. Its intensity is so low
# (lesson 00) that only bytes count: 12 per element for fp32, 6 for fp16. So its
# speed is given in bytes per second, and compared with that of `torch.add`.
#
# *From small to large.* The time of a small vector is that of a launch, whatever
# its size. With size the bandwidth rises, until memory is the limit. The L2 cache
# is emptied before each measurement; else vectors that fit into it would seem to
# come from memory.
#
# *Which block.* A block is spread over the threads of a program: 4 warps, 128
# threads, unless `num_warps` says otherwise. `BLOCK=128` gives each thread one
# number, and launches very many programs. `BLOCK=16384` gives each thread 128
# numbers in three vectors, which take so many registers that fewer programs fit on
# an SM. Between the two the time hardly changes.


# %%
def bytes_moved(n, dtype):
    """Two vectors in, one out."""
    return 3 * n * dtype.itemsize


pictures_01.bandwidth(figures, add, bytes_moved)

# %% [markdown]
# Two things to read off it. Halving the bytes halves the time: in fp16 as many GB/s
# are reached, with twice the elements. And no cleverness about additions makes a
# kernel faster here. The only way to make vector addition cheaper is to do more
# with each number while it is on the chip. That is called **fusion**.
#
# ## Exercise 1: a fused kernel
#
# Write a kernel for `z = a * x + y`, with a number `a`. In torch, `a * x + y` is
# two operations. Count the bytes of both ways for fp32.
#
# **Hint:** copy the body of `add_kernel`. One line changes.


# %%
@triton.jit
def axpy_kernel(a, x, y, z, n, BLOCK: tl.constexpr):
    """z = a * x + y, for n elements."""
    raise NotYet


solutions_01.check_axpy(axpy_kernel)

# %% [markdown]
# <details><summary>An answer</summary>
#
# ```{literalinclude} /../tour/lesson/solutions_01.py
# :pyobject: axpy_kernel
# :language: python
# ```
#
# </details>
#
# ## Exercise 2: a persistent kernel
#
# Launch a fixed number of programs, say 3, whatever `n` is. Each takes one block,
# then the block `tl.num_programs(0)` further on, and so on:
# `for start in range(first, n, step)`. Such a kernel is called **persistent**.
# Lesson 02b has one.
#
# **Hint:** the body of `add_kernel` becomes the body of the loop, and `start` its
# variable.


# %%
@triton.jit
def persistent_add_kernel(x, y, z, n, BLOCK: tl.constexpr):
    """z = x + y, for n elements, by any number of programs."""
    raise NotYet


solutions_01.check_persistent_add(persistent_add_kernel)

# %% [markdown]
# <details><summary>An answer</summary>
#
# ```{literalinclude} /../tour/lesson/solutions_01.py
# :pyobject: persistent_add_kernel
# :language: python
# ```
#
# </details>

# %%
solutions_01.exercises.show()
