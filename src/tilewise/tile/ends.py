"""The ends of a mask whose rows are intervals, where they are kept in memory (`mods.ends`)."""

from typing import NamedTuple

import triton
import triton.language as tl


class RowInterval(NamedTuple):
    """What each row sees of its columns: first <= column < stop."""

    first: tl.tensor
    stop: tl.tensor


@triton.jit
def load_ends(row, batch, head, ends):
    """What each row sees, by the first two of these tensors; nothing past the last row."""
    return RowInterval(load_end(ends[0], row, batch, head), load_end(ends[1], row, batch, head))


@triton.jit
def load_end(ends, row, batch, head):
    """One end of each row."""
    of_head = tl.minimum(batch, ends.sizes[0] - 1).to(tl.int64) * ends.strides[0]
    of_head += tl.minimum(head, ends.sizes[1] - 1).to(tl.int64) * ends.strides[1]
    return tl.load(ends.ptr + of_head + row, mask=row < ends.sizes[2], other=0)
