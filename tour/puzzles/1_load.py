# %% [markdown]
# ## Puzzle 1. Load with a mask
#
# One program multiplies the `n` numbers of `x` by 10: `y[i] = 10 * x[i]`. A block
# has `BLOCK` offsets, a power of two, and `n` may be less. The memory behind `x`
# and `y` is not yours: a mask keeps the load and the store away from it.
#
# ```text
# n = 5, BLOCK = 8
#
# offsets     0    1    2    3    4    5    6    7
# x        |  3 |  1 |  4 |  1 |  5 |  ? |  ? |  ? |
# mask        1    1    1    1    1    0    0    0
# y        | 30 | 10 | 40 | 10 | 50 |  ? |  ? |  ? |
# ```
#
# **Hint:** `tl.arange(0, BLOCK)` makes the offsets, a comparison with `n` the mask.

# %%
import triton
import triton.language as tl
from checks import NotYet, check_load


@triton.jit
def load_kernel(x, y, n, BLOCK: tl.constexpr):
    """y[i] = 10 * x[i], for n elements."""
    raise NotYet


check_load(load_kernel)
