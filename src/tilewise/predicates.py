"""Which keys a query sees: the band mask, written once for torch tensors and for Triton tiles.

Query i sees key j where all of these hold:

    j >= i + diagonal - left        within_left, where the band is closed on the left
    j <= i + diagonal + right       within_right, where it is closed on the right (causal: 0)
    j <  seqlen_k                   is_key

`diagonal` is the key that query 0 stands on: seqlen_k - seqlen_q (bottom-right) or 0 (top-left).
`q_idx` and `k_idx` are positions, shaped to broadcast into a tile: (BLOCK_M, 1) and (1, BLOCK_N).

The bodies hold operators that torch and Triton share and nothing else, so that `triton.jit` can
compile these very functions and the oracle can call them: join two with `&`, never with `and`.
"""


def within_left(q_idx, k_idx, diagonal, left):
    """The key is at most `left` before the query's diagonal."""
    return k_idx >= q_idx + diagonal - left


def within_right(q_idx, k_idx, diagonal, right):
    """The key is at most `right` after the query's diagonal."""
    return k_idx <= q_idx + diagonal + right


def is_key(k_idx, seqlen_k):
    """The key is real: neither padding nor past the end."""
    return k_idx < seqlen_k
