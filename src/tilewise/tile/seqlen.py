"""What one head of one sequence is: how long, where its diagonal lies, its ALiBi slope."""

import triton
import triton.language as tl

from .score import load_slope
from .types import Lengths, Sequence


@triton.jit
def lengths_of(batch, sizes, optionals, FEATURES: tl.constexpr):
    """The sequence's true lengths; the diagonal is aligned to its last key (bottom-right) or to key
    0 (top-left).
    """
    seqlen_k = sizes.seqlen_k
    if FEATURES.SEQUSED_K:
        seqlen_k = tl.load(optionals.seqused_k + batch)
    diagonal = seqlen_k - sizes.seqlen_q
    if FEATURES.TOP_LEFT:
        diagonal = 0
    return Lengths(sizes.seqlen_q, seqlen_k, diagonal)


@triton.jit
def sequence_of(batch, head, sizes, optionals, numbers, FEATURES: tl.constexpr):
    """All that the scores and masks of one head depend on."""
    lengths = lengths_of(batch, sizes, optionals, FEATURES)
    return Sequence(lengths, load_slope(optionals, batch, head, FEATURES), numbers)
