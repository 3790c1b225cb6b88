# %% [markdown]
# ## Puzzle 5. Online maximum
#
# The rows of puzzle 2 are now longer than a block. The program of a row visits
# block after block and keeps one number, `m`: the largest element **so far**.
# Nothing is read twice. An algorithm like this is called **online**.
#
# ```text
# columns = 10, BLOCK = 4             m = -inf
#
# block 0  | -9 | -4 | -7 | -5 |      m = max(-inf, -4) = -4
# block 1  | -6 | -8 | -2 | -9 |      m = max(  -4, -2) = -2
# block 2  | -3 | -6 |  .    .        m = max(  -2, -3) = -2
# ```
#
# **Hint:** `for start in range(0, columns, BLOCK)`. All these numbers are negative:
# with which `other` do masked elements never win?

# %%
import triton
import triton.language as tl
from checks import NotYet, check_online_max


@triton.jit
def online_max_kernel(x, out, columns, BLOCK: tl.constexpr):
    """out[row] = the largest element of the row of this program."""
    raise NotYet


check_online_max(online_max_kernel)
