"""The order in which V^T of an FP8 call has its keys (`kernels/common/quantized.py`)."""

import triton
import triton.language as tl

from ..common import quantized

COLUMNS = tl.constexpr(quantized.COLUMNS)  # of which each sequence has a multiple


@triton.jit
def key_of_column(column):
    """Column 4 t + 2 i + b of every 16 is key 8 i + 2 t + b: `KEY_ORDER`."""
    return column // 16 * 16 + column // 2 % 2 * 8 + column // 4 % 4 * 2 + column % 2


@triton.jit
def first_column(first_k, sequence):
    """The column at which a packed sequence begins, by the key at which it does."""
    return (first_k // COLUMNS + sequence) * COLUMNS
