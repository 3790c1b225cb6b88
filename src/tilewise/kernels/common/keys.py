"""Tile views of the keys and values of a tile of queries, for forward and backward."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ...tile.seqlen import modifiers_of, offsets_of, sequence_of
from ...tile.types import Sequence, SequenceOffsets
from .io import from_row, open_rows


class Keys(NamedTuple):
    """A sequence, where it lies, and its keys and values, opened."""

    offsets: SequenceOffsets
    seq: Sequence
    k: Any
    v: Any


@triton.jit
def open_keys(
    k, v, head, sequence, optionals, sizes, numbers, FEATURES: tl.constexpr, TILE: tl.constexpr
):
    """The keys and values that a query head attends to."""
    modifiers = modifiers_of(optionals)
    seq = sequence_of(sequence, head, sizes, optionals, modifiers, numbers, FEATURES)
    offsets = offsets_of(sequence, sizes, optionals, FEATURES)
    k, v = from_row(k, offsets.first_k), from_row(v, offsets.first_k)
    batch, head_k, seqlen_k = offsets.batch, head // FEATURES.GROUP, seq.lengths.seqlen_k
    N: tl.constexpr = TILE.BLOCK_N
    D: tl.constexpr = FEATURES.HEADDIM
    DV: tl.constexpr = FEATURES.HEADDIM_V
    k_rows = open_rows(k, batch, head_k, seqlen_k, N, D, TILE.BLOCK_D, TILE.DESCRIPTORS)
    v_rows = open_rows(v, batch, head_k, seqlen_k, N, DV, TILE.BLOCK_DV, TILE.DESCRIPTORS)
    return Keys(offsets, seq, k_rows, v_rows)
