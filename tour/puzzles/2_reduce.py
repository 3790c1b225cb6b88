# %% [markdown]
# ## Puzzle 2. Reduce a row
#
# `x` has rows of `columns` numbers, which lie in memory one row after the other.
# There are as many programs as rows. Each adds up its own row and stores one
# number: `out[row] = x[row, 0] + x[row, 1] + ...`
#
# ```text
# columns = 5, BLOCK = 8
#
# program 0  |  3 |  1 |  4 |  1 |  5 | .  .  .   ->  out[0] = 14
# program 1  |  9 |  2 |  6 |  5 |  3 | .  .  .   ->  out[1] = 25
# program 2  |  5 |  8 |  9 |  7 |  9 | .  .  .   ->  out[2] = 38
# ```
#
# **Hint:** `tl.program_id(0)` is the number of the program, and so of its row. Give
# `tl.load` an `other` that does not change a sum.

# %%
import triton
import triton.language as tl
from checks import NotYet, check_reduce


@triton.jit
def reduce_kernel(x, out, columns, BLOCK: tl.constexpr):
    """out[row] = the sum of the row of this program."""
    raise NotYet


check_reduce(reduce_kernel)
