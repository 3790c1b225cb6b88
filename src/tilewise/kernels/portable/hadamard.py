"""The Hadamard transform of channels, with signs: an outlier of one is spread over all, and
products of two rows that are mixed alike stay as they are.

Hadamard's matrix of 64 multiplies CHUNK channels at a time on the tensor cores. A wider one is made
of it: blocks that are all it, or minus it. So tiles of a result are sums and differences of
products. The signs are in the matrix: rows of x are multiplied as they lie in memory.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from triton.language.target_info import current_target

CHUNK = tl.constexpr(64)  # columns of a head that a tile has


class Rotation(NamedTuple):
    """Constexprs: the head dim, how its channels are mixed, and which pairs of them are turned."""

    D: int
    HADAMARD: int  # channels of a block, a power of two; 0 for none
    FACTOR: float  # its inverse square root
    HALF: int = 0  # pairs
    INTERLEAVED: bool = True  # pairs are of neighbours


@triton.constexpr_function
def tiles_at_once(hadamard):
    """Tiles of CHUNK columns that are computed together, of channels that are mixed."""
    target = current_target()
    # There every warp has the matrices in registers
    is_amd = target is not None and target.backend == "hip"
    return min(max(hadamard // CHUNK.value, 1), 2 if is_amd else 4)


@triton.constexpr_function
def dtype_of_matrix(dtype, half):
    """The dtype in which elements of this dtype are multiplied; with rotary tables elements are
    fp32.
    """
    return tl.float16 if dtype == tl.float16 and half == 0 else tl.bfloat16


@triton.constexpr_function
def one_of(dtype):
    """The bits of 1 in a 16-bit dtype."""
    return 0x3C00 if dtype == tl.float16 else 0x3F80


@triton.jit
def is_odd(bits):
    """Whether an odd number of 16 bits is 1."""
    bits = bits ^ (bits >> 8)
    bits = bits ^ (bits >> 4)
    bits = bits ^ (bits >> 2)
    return ((bits ^ (bits >> 1)) & 1) == 1


@triton.jit
def hadamard(i, j, HADAMARD: tl.constexpr, ONE: tl.constexpr):
    """The matrix that mixes the CHUNK channels of a tile, of indices i and j that broadcast, as
    bits: blocks of Hadamard's, minus where an odd number of bits is 1 in both indices.
    """
    # Bit n of 0x96 says whether n, of 3 bits, has an odd number of them; halves of 6 bits are
    # apart as neighbours share one
    both = i & j & (HADAMARD - 1)
    odd = (0x96 >> (both & 7)) ^ (0x96 >> ((both & 56) >> 3))
    bits = ((odd << 15) | ONE).to(tl.int16)
    if HADAMARD < CHUNK:
        bits = tl.where(i // HADAMARD == j // HADAMARD, bits, 0)
    return bits


@triton.jit
def signs_of(channel):
    """The sign bits of channels, Rudin and Shapiro's: 1 where an odd number of pairs of adjacent
    bits of the channel's number is 1.
    """
    return (is_odd(channel & (channel >> 1)).to(tl.int32) << 15).to(tl.int16)


@triton.jit
def add_product(acc, x, matrix, BY_CHANNEL: tl.constexpr):
    """acc + x matrix, or its transpose of a matrix that is: products with 1 and -1 are exact in any
    dtype. fp32 is the sum of three bf16 numbers, and so multiplies in the tensor cores.
    """
    for _ in tl.static_range(3 if x.dtype == tl.float32 else 1):
        part = x.to(matrix.dtype)
        if BY_CHANNEL:
            acc = tl.dot(matrix, tl.trans(part), acc)
        else:
            acc = tl.dot(part, matrix, acc)
        if x.dtype == tl.float32:
            x -= part.to(tl.float32)
    return acc


@triton.jit
def mixed(products):
    """The tiles of a result: signed sums of the products of one tile of channels each."""
    if len(products) == 1:
        return products
    elif len(products) == 2:
        return products[0] + products[1], products[0] - products[1]
    else:
        a, b = products[0] + products[1], products[0] - products[1]
        c, d = products[2] + products[3], products[2] - products[3]
        return a + c, b + d, a - c, b - d
