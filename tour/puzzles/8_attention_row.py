# %% [markdown]
# ## Puzzle 8. A row of attention
#
# Each program has one query, a row of `q`. Its score with a key is q · k. Its
# output is the mean of all values, weighted by the softmax of the scores. The keys
# are visited once, in blocks, and no score is stored. One block is drawn below.
# When m rises, l and acc are rescaled; at the end, out = acc / l. This is
# FlashAttention, with blocks of a single query.
#
# ```text
#        k                s             p               v
#   +---------+         +---+         +---+        +---------+
#   |  k_0    |  q · k  | s |   exp   | p |        |  v_0    |
#   |  k_1    |   ->    | s |   ->    | p |   ->   |  v_1    |   ->   acc
#   |  k_2    |         | s |  s - m  | p |   p v  |  v_2    |
#   +---------+         +---+         +---+        +---------+
#    (BLOCK, D)        (BLOCK,)      (BLOCK,)       (BLOCK, D)       (D,)
# ```
#
# **Hint:** all scores of a block are `tl.sum(q_row[None, :] * k_tile, 1)`. Every
# term of acc has the factor that the terms of l have (puzzle 6).

# %%
import triton
import triton.language as tl
from checks import NotYet, check_attention_row


@triton.jit
def attention_row_kernel(q, k, v, out, n, D: tl.constexpr, BLOCK: tl.constexpr):
    """out = softmax(q K^T) V for the query of this program; n keys of D numbers."""
    raise NotYet


check_attention_row(attention_row_kernel)
