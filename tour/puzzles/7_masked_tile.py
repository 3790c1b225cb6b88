# %% [markdown]
# ## Puzzle 7. A masked tile
#
# `s` has a score for each query (its rows) and key (its columns), seqlen x seqlen.
# A query may not look ahead: it keeps the keys up to its own position. A program
# has one tile of scores and stores its weights, `p = exp(s - m)`, where m is the
# largest score that this row of the tile keeps. A masked weight is 0. Below, `#` is
# kept and `.` is masked.
#
# ```text
# seqlen = 6, BLOCK_M = 2, BLOCK_N = 4
#
# k_idx      0 1 2 3     4 5
#
# q_idx   0  # . . .  |  . .
#         1  # # . .  |  . .
#         -----------------------
#         2  # # # .  |  . .
#         3  # # # #  |  . .
#         -----------------------
#         4  # # # #  |  # .
#         5  # # # #  |  # #
# ```
#
# **Hint:** `tl.where` puts -inf in place of a masked score. Then the largest score
# of a row without a key is -inf, too, and -inf minus -inf is nan. Which m would do?

# %%
import triton
import triton.language as tl
from checks import NotYet, check_masked_tile


@triton.jit
def masked_tile_kernel(s, p, seqlen, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """p = exp(s - m) where the key is not after the query, else 0."""
    raise NotYet


check_masked_tile(masked_tile_kernel)
