"""Copies of rows of a sequence that ends anywhere: past its end they read zeros and write nothing.

What lies behind a sequence is the next one, or padding, and may be NaN. Zero times NaN is NaN, so a
mask on P is not enough: none of it may reach a matmul. TMA takes care of that by itself, at the end
of a tensor. `ragged_by_head` (descriptors.py) describes tensors so that every sequence ends at the
end of one.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .compat import tma_load, tma_store

BILLION = gl.constexpr(2**30)


@gluon.jit
def load_ragged(desc, stop, size, head, row, full, buffer, pred=True, column=0):
    """Rows from `row` on of the `size` rows before row `stop` of the tensor, columns from `column`
    on.
    """
    shape: gl.constexpr = desc.block_type.shape
    at = [BILLION, stop, head, BILLION - size + row, column]
    tma_load(desc, at, full, buffer.reshape(shape), pred=pred)


@gluon.jit
def store_ragged(desc, stop, size, head, row, buffer, column=0):
    """The same from shared memory; columns from `column` on."""
    shape: gl.constexpr = desc.block_type.shape
    at = [BILLION, stop, head, BILLION - size + row, column]
    tma_store(desc, at, buffer.reshape(shape))
