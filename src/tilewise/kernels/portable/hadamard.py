"""The Hadamard transform of channels, with signs: an outlier of one is spread over all, and
products of two rows that are mixed alike stay as they are.

Hadamard's matrix of 64 multiplies CHUNK channels at a time on the tensor cores. A wider one is made
of it: blocks that are all it, or minus it. So each product serves two tiles of the result.
"""

from typing import NamedTuple

import triton
import triton.language as tl

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
    return min(max(hadamard // CHUNK.value, 1), 2)


@triton.jit
def is_odd(bits):
    """Whether an odd number of 16 bits is 1."""
    bits = bits ^ (bits >> 8)
    bits = bits ^ (bits >> 4)
    bits = bits ^ (bits >> 2)
    return ((bits ^ (bits >> 1)) & 1) == 1


@triton.jit
def hadamard(first, COUNT: tl.constexpr, HADAMARD: tl.constexpr):
    """COUNT rows of the matrix that mixes the CHUNK channels of a tile, (COUNT, CHUNK): blocks of
    Hadamard's, minus where an odd number of bits is 1 in both indices.
    """
    i, j = tl.arange(0, CHUNK)[None, :], first + tl.arange(0, COUNT)[:, None]
    sign = tl.where(is_odd(i & j & (HADAMARD - 1)), -1.0, 1.0)
    return tl.where(i // HADAMARD == j // HADAMARD, sign, 0.0)


@triton.jit
def with_signs(x, columns):
    """Channels times their signs, Rudin and Shapiro's: minus where an odd number of pairs of
    adjacent bits of the channel's number is 1.
    """
    return tl.where(is_odd(columns & (columns >> 1))[None, :], -x, x)


@triton.jit
def add_product(acc, x, matrix):
    """acc + x matrix, whose products with 1 and -1 are exact in any dtype. fp32 is the sum of three
    bf16 numbers, and so multiplies in the tensor cores.
    """
    if x.dtype == tl.float32:
        matrix = matrix.to(tl.bfloat16)
        for _ in tl.static_range(3):
            part = x.to(tl.bfloat16)
            acc = tl.dot(part, matrix, acc)
            x -= part.to(tl.float32)
        return acc
    else:
        return tl.dot(x, matrix.to(x.dtype), acc)
