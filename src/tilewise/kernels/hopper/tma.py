"""TMA loads and stores of ragged sequences: past a sequence's end they read zeros and write
nothing.

After a sequence comes the next one, or padding, which may be NaN. Zero times NaN is NaN, so masking
P is not enough: none of it may reach a matmul. TMA clamps at the end of a tensor, and
`ragged_by_head` (descriptors.py) builds descriptors in which every sequence ends at the end of a
tensor.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .compat import tma_load, tma_store

BILLION = gl.constexpr(2**30)


@gluon.jit
def load_ragged(desc, stop, size, head, row, full, buffer, pred=True, column=0):
    """Rows from `row` on of the `size` rows before row `stop`, columns from `column` on."""
    shape: gl.constexpr = desc.block_type.shape
    coordinates = [BILLION, stop, head, BILLION - size + row, column]
    tma_load(desc, coordinates, full, buffer.reshape(shape), pred=pred)


@gluon.jit
def store_ragged(desc, stop, size, head, row, buffer, column=0):
    """Stores from shared memory the rows that `load_ragged` loads; columns from `column` on."""
    shape: gl.constexpr = desc.block_type.shape
    coordinates = [BILLION, stop, head, BILLION - size + row, column]
    tma_store(desc, coordinates, buffer.reshape(shape))
