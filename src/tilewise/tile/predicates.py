"""Which keys a query sees: the band mask, for torch tensors (kernels: `tile.mask`).

Query i sees key j where all of these hold:

    j >= i + diagonal - left        within_left, where the band is closed on the left
    j <= i + diagonal + right       within_right, where it is closed on the right (causal: 0)
    j <  seqlen_k                   is_key

`diagonal` is the key on the diagonal of query 0: seqlen_k - seqlen_q (bottom-right) or 0
(top-left). `q_idx` and `k_idx` are positions, shaped to broadcast into a tile.

Join two with `&`, never with `and`.
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
