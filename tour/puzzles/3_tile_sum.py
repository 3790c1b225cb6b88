# %% [markdown]
# ## Puzzle 3. Sum of a tile
#
# `x` is a matrix of `M` rows and `N` columns. Tiles of BLOCK_M x BLOCK_N cover it,
# and program (i, j) adds up tile (i, j). `out` has a row for each row of tiles, and
# `tl.num_programs(1)` columns. Tiles at the edges are not full: below, `#` is an
# element and `.` an offset to mask.
#
# ```text
# M = 3, N = 5, BLOCK_M = 2, BLOCK_N = 4
#
#          j = 0       j = 1
#        +---------+---------+
# i = 0  | # # # # | # . . . |
#        | # # # # | # . . . |
#        +---------+---------+
# i = 1  | # # # # | # . . . |
#        | . . . . | . . . . |
#        +---------+---------+
# ```
#
# **Hint:** `offs_m[:, None]` is a column and `offs_n[None, :]` a row. An operation
# on both makes a tile: one of offsets, and one of booleans.

# %%
import triton
import triton.language as tl
from checks import NotYet, check_tile_sum


@triton.jit
def tile_sum_kernel(x, out, M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """out[i, j] = the sum of tile (i, j)."""
    raise NotYet


check_tile_sum(tile_sum_kernel)
