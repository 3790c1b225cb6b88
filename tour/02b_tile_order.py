# %% [markdown]
# # 02b. The order of the tiles
#
# **The idea:** a right kernel becomes fast by what happens at the same time: tiles
# in flight share what they read through the L2 cache, and the next tile is loaded
# while this one is multiplied.
#
# After this lesson you can
#
# - order the tiles of a product so that they share the L2 cache,
# - count waves, and say how much of a card they use,
# - say what a persistent kernel with the TMA changes, and what number formats cost.
#
# You need lesson 02, whose kernel is used here: what you change there changes here.

# %%
import torch
import triton
import triton.language as tl
from lesson import (
    DEVICE,
    Figures,
    NotYet,
    definitions_of,
    here,
    listing,
    pictures_02b,
    solutions_02b,
)
from lesson.matmul import final_matmul, grouped_tile, matmul_kernel, operands

figures = Figures("02b_tile_order")
lesson_02 = definitions_of("02_matmul")  # its functions; its cells do not run

# %% [markdown]
# ## Which tiles are in flight
#
# The tiles of lesson 02 ask for many times the size of the matrices. Most of it has
# to come from the L2 cache, and whether it does depends on which tiles are computed
# at the same time.
#
# An SM starts the next program when one ends. So the programs in flight are
# neighbours by number: 0 to 131 first, on a card with 132 SMs. In row-major order
# these are a few long rows of tiles. They need few rows of A, but every column of
# B.
#
# **Grouped ordering** numbers the tiles in groups of `GROUP_M` rows: down the
# group's first column, down its second, and so on. The tiles in flight then form a
# rectangle, and a rectangle needs fewer rows and columns for as many tiles. Nothing
# but `tile_of` changes. With `GROUP_M = 1` the order is row by row.
#
# The kernel's own function, `tile_of` of lesson 02, draws the picture. A tile of
# the first wave is darker, the later it starts.


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


def order(tiles_m, tiles_n, group, function=lesson_02.tile_of):
    """(row, column) of every tile, in the order in which they are computed."""
    count = tiles_m * tiles_n
    rows, columns = torch.empty(2, count, dtype=torch.int32, device=DEVICE).unbind()
    block = triton.next_power_of_2(count)
    numbers = dict(GROUP_M=group, BLOCK=block)
    here(order_kernel)[(1,)](
        rows, columns, tiles_m, tiles_n, TILE_OF=function, **numbers
    )
    return list(zip(rows.tolist(), columns.tolist()))


assert order(3, 4, 1) == [(m, n) for m in range(3) for n in range(4)]
for group in (1, 3, 8):
    every = [(m, n) for m in range(20) for n in range(16)]
    assert sorted(order(20, 16, group)) == every
pictures_02b.orders(order)

# %% [markdown]
# A group of height g has about 132 / g columns in flight: g + 132 / g strips, which
# is least where both are equal, near 11. The curve is flat there, so a round 8 will
# do.
#
# ## Exercise 1: waves
#
# Tiles are computed in **waves** of one per SM, and the last wave is rarely full.
# What share of SM time is used, if every tile takes equally long? What does a
# square product of side 4096 reach with tiles of 128 x 256 on 132 SMs? And one of
# side 1024?
#
# **Hint:** count tiles with `triton.cdiv`, then waves, then the places that these
# waves have.


# %%
def efficiency(n, block_m, block_n, sms):
    """The share of SM time that a square product of side n uses."""
    raise NotYet


solutions_02b.check_efficiency(efficiency)

# %% [markdown]
# <details><summary>An answer</summary>
#
# ```{literalinclude} /../tour/lesson/solutions_02b.py
# :pyobject: efficiency
# :language: python
# ```
#
# </details>
#
# ## Against cuBLAS
#
# What keeps the plain kernel from the tensor cores' full speed? Its threads compute
# addresses and masks. Its first steps along K wait for memory, and its last ones
# have nothing left to load: at both ends of each tile the tensor cores stand still.
# The final kernel changes both. A **tensor descriptor** gives the TMA (tensor
# memory accelerator) the shape of a matrix, and one thread asks for a whole tile by
# its corner. And a **persistent** kernel launches one program for each SM, which
# computes tile after tile, and loads the next one while the last one is still
# written. Its order of tiles is the one that you have drawn.

# %%
listing(matmul_kernel)
assert order(20, 16, 8, grouped_tile) == order(20, 16, 8)
a, b = operands(200, 144, 80, "bf16", DEVICE)
lesson_02.check("final matmul", final_matmul, a, b)
pictures_02b.speeds(figures, lesson_02.plain_matmul, lesson_02.TRIED)

# %% [markdown]
# Between the two orders of large tiles there is next to nothing on an H200: its
# programs step along K side by side, so that the cache need not hold whole strips,
# only the parts in use. A smaller cache, or
# programs that drift apart, need the grouped order. (Where they differ at 8192, ask
# first whether one of them always ran behind the slow kernel: lesson 05 says why.)
# At 1024 there are 32 tiles of 128 x 256 for 132 SMs, and no order helps.
#
# ## The same kernel in five formats
#
# The tensor cores multiply narrow numbers faster. **tf32** is fp32 cut to 10 bits
# of fraction, **fp16** has these 10 bits and a small range, **bf16** has fp32's
# range and 7 bits, **fp8** (e4m3) has 3. In **fp32** proper there are no tensor
# cores at all. All but fp8 are summed in fp32, so what they lose, they lose when
# the inputs are rounded: the table has the root of the mean square error, over that
# of the result. Hopper sums products of fp8 with fewer bits, which costs more with
# longer sums, and is not in the table.

# %%
pictures_02b.formats(figures)

# %% [markdown]
# Attention is trained in bf16: half the bytes of fp32, the tensor cores' speed, and
# a range that needs no care. Its sums, and the softmax between its two products,
# stay in fp32.

# %%
solutions_02b.exercises.show()
