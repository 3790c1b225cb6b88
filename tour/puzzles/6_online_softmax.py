# %% [markdown]
# ## Puzzle 6. Online softmax
#
# The softmax of a row is exp(x - m) / l, where m is its largest element and l is
# the sum of all exp(x - m). (Without m, exp(1000) would be infinite.) Find m and l
# in one pass. When a block raises m, the terms that are in l were made with the old
# m.
#
# ```text
# BLOCK = 2
#
# block 0  | 0 | 2 |   m = 2   l =             exp(0 - 2) + exp(2 - 2) = 1.135
# block 1  | 1 | 5 |   m = 5   l = 1.135 * ? + exp(1 - 5) + exp(5 - 5) = 1.075
# ```
#
# **Hint:** exp(x - new) = exp(x - old) * exp(...). The factor is the same for all
# terms of l, so l itself can be multiplied by it.

# %%
import triton
import triton.language as tl
from checks import NotYet, check_online_softmax


@triton.jit
def online_softmax_kernel(x, m_out, l_out, columns, BLOCK: tl.constexpr):
    """m and l of the row of this program, in one pass."""
    raise NotYet


check_online_softmax(online_softmax_kernel)
