"""Loads the ends of a mask whose rows are intervals (`mods.ends`)."""

from typing import NamedTuple

import triton
import triton.language as tl


class RowInterval(NamedTuple):
    """The unmasked columns of each row: first <= column < stop."""

    first: tl.tensor
    stop: tl.tensor


@triton.jit
def load_ends(row, batch, head, ends):
    """The unmasked interval of each row, from the first two of these tensors; empty past the last
    row.
    """
    return RowInterval(load_end(ends[0], row, batch, head), load_end(ends[1], row, batch, head))


@triton.jit
def load_end(ends, row, batch, head):
    """One end of each row."""
    of_head = tl.minimum(batch, ends.sizes[0] - 1).to(tl.int64) * ends.strides[0]
    of_head += tl.minimum(head, ends.sizes[1] - 1).to(tl.int64) * ends.strides[1]
    return tl.load(ends.ptr + of_head + row, mask=row < ends.sizes[2], other=0)
