# %% [markdown]
# ## Puzzle 4. A tile of a matrix product
#
# C = A B, where A has shape (M, K) and B (K, N). A program (i, j) computes one tile
# of C: BLOCK rows of A times BLOCK columns of B. It walks along K, and adds the
# product of two tiles in each step. All sizes are multiples of BLOCK: no mask.
#
# ```text
#                            +-----+######+-----+
#                            |     #  B0  #     |   k = 0
#                            +-----+######+-----+
#                            |     #  B1  #     |   k = 16
#                            +-----+######+-----+
#      k = 0  k = 16
#     +######+######+        +-----+######+-----+
#     #  A0  #  A1  #        |     #  C   #     |   C = A0 B0 + A1 B1
#     +######+######+        +-----+######+-----+
#     |      |      |        |     |      |     |
#     +------+------+        +-----+------+-----+
# ```
#
# **Hint:** `acc` starts as `tl.zeros((BLOCK, BLOCK), tl.float32)`, and
# `tl.dot(a_tile, b_tile, acc)` is acc with a product added.

# %%
import triton
import triton.language as tl
from checks import NotYet, check_matmul_tile


@triton.jit
def matmul_tile_kernel(a, b, c, M, N, K, BLOCK: tl.constexpr):
    """Tile (i, j) of C = A B, of contiguous matrices."""
    raise NotYet


check_matmul_tile(matmul_tile_kernel)
