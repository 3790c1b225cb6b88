"""One head of one sequence: its offsets, lengths, diagonal and ALiBi slope.

Lengths come from the device and are not validated. So they are clamped where they are read: a wrong
length makes a wrong result, and no out-of-bounds access.
"""

import triton
import triton.language as tl

from .bounds import clamp
from .dropout import stream_of
from .score import load_slope
from .types import Lengths, Sequence, SequenceOffsets


@triton.jit
def offsets_of(batch, sizes, optionals, FEATURES: tl.constexpr):
    """The offsets of the sequence: a row of the batch, or rows of packed tensors."""
    if FEATURES.PACKED:
        first_q, seqlen_q = rows_of(optionals.cu_seqlens_q, batch, batch + 1, sizes.seqlen_q)
        if FEATURES.CHUNK > 0:  # keys are those of a cache, and rows behind the last no one's
            first_k, seqlen_k = batch * 0, sizes.seqlen_k
            rows_q, rows_k = seqlen_q, seqlen_k
        else:
            first_k, seqlen_k = rows_of(optionals.cu_seqlens_k, batch, batch + 1, sizes.seqlen_k)
            rows_q = with_tail(seqlen_q, first_q, batch, sizes.packed, sizes.seqlen_q)
            rows_k = with_tail(seqlen_k, first_k, batch, sizes.packed, sizes.seqlen_k)
        return SequenceOffsets(batch * 0, first_q, first_k, rows_q, rows_k, seqlen_q, seqlen_k)
    else:
        seqlen_q, seqlen_k = sizes.seqlen_q, sizes.seqlen_k
        return SequenceOffsets(batch, batch * 0, batch * 0, seqlen_q, seqlen_k, seqlen_q, seqlen_k)


@triton.jit
def with_tail(rows, first, batch, sequences, total):
    """The rows of a packed sequence. The last one's include those behind `cu_seqlens[-1]`, which
    are padding as rows past `seqused` are: only the device knows how many these are. Written as it
    is for a register of the Hopper backward.
    """
    return tl.where(batch < sequences - 1, rows, total - first)


@triton.jit
def rows_of(starts, this, following, total):
    """Where a packed sequence begins and how many rows it has, of `total`, whatever its start and
    the following one's are.
    """
    first = clamp(tl.load(starts + this), 0, high=total)
    return first, clamp(tl.load(starts + following), first, high=total) - first


@triton.jit
def lengths_of(batch, sizes, optionals, FEATURES: tl.constexpr):
    """The sequence's true lengths; the diagonal is aligned to its last key (bottom-right) or to key
    0 (top-left).
    """
    return lengths_in(offsets_of(batch, sizes, optionals, FEATURES), batch, optionals, FEATURES)


@triton.jit
def lengths_in(offsets, batch, optionals, FEATURES: tl.constexpr):
    """The sequence's true lengths and diagonal, given its offsets."""
    seqlen_q = offsets.seqlen_q
    if FEATURES.SEQUSED_Q:
        seqlen_q = clamp(tl.load(optionals.seqused_q + batch), 0, high=seqlen_q)
    seqlen_k = offsets.seqlen_k
    if FEATURES.SEQUSED_K:
        seqlen_k = clamp(tl.load(optionals.seqused_k + batch), 0, high=seqlen_k)
    diagonal = seqlen_k - seqlen_q
    if FEATURES.TOP_LEFT:
        diagonal = 0
    return Lengths(seqlen_q, seqlen_k, diagonal=diagonal)


@triton.jit
def padded_row(first_row, sequence, ROWS: tl.constexpr):
    """The row where a packed sequence begins in memory that has whole blocks of ROWS for each, so
    that no block holds rows of two; with the total and the number of sequences, the end of it.

    One row past `first_row` for each ROWS of it, and one block for each sequence before: a sequence
    takes one block more than its rows fill, and that is where its ragged end goes. So it takes
    neither the lengths of others nor their sum to know where a sequence begins (FlashAttention-3).
    """
    return (first_row // ROWS + sequence) * ROWS


@triton.jit
def modifiers_of(optionals):
    """The modifiers, to be called before any loop: in a loop Triton (3.6 to 3.9) forgets the values
    of the constants that it found in tuples of tuples, strides of 1, unless a function has returned
    them.
    """
    return optionals.modifiers


@triton.jit
def sequence_of(batch, head, sizes, optionals, modifiers, numbers, FEATURES: tl.constexpr):
    """All that the scores and masks of one head depend on."""
    lengths = lengths_of(batch, sizes, optionals=optionals, FEATURES=FEATURES)
    slope = load_slope(optionals, batch, head=head, FEATURES=FEATURES)
    drawn = 0
    if FEATURES.DROPOUT:
        drawn = stream_of(optionals.dropout_rng, batch, head=head)
    return Sequence(lengths, slope, numbers, batch, head, modifiers, drawn)
