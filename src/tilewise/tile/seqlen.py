"""How long one sequence of the batch is, and where its diagonal lies."""

import triton
import triton.language as tl

from .types import Lengths


@triton.jit
def lengths_of(batch, sizes, optionals, FEATURES: tl.constexpr):
    """The sequence's true lengths; the diagonal is aligned to its last key (bottom-right) or to key 0 (top-left)."""
    seqlen_k = sizes.seqlen_k
    if FEATURES.SEQUSED_K:
        seqlen_k = tl.load(optionals.seqused_k + batch)
    diagonal = seqlen_k - sizes.seqlen_q
    if FEATURES.TOP_LEFT:
        diagonal = 0
    return Lengths(sizes.seqlen_q, seqlen_k, diagonal)
