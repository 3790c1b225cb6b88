"""Which pairs of a tile dropout keeps: the map of `tilewise.tile.random_bytes`, for kernels.

Every element computes the words of its group. The compiler merges the equal computations of
elements of one group in one thread: in wgmma's accumulator layout, queries down, a thread has all
16 of a group; keys down (the backward's S^T) it has four.
"""

import triton
import triton.language as tl

from . import random_bytes
from .random_bytes import Stream

query_group = triton.jit(random_bytes.query_group)
key_group = triton.jit(random_bytes.key_group)
word_of = triton.jit(random_bytes.word_of)
byte_of = triton.jit(random_bytes.byte_of)

ROUNDS = tl.constexpr(random_bytes.ROUNDS)
MULTIPLIER_0 = tl.constexpr(random_bytes.MULTIPLIERS[0])
MULTIPLIER_1 = tl.constexpr(random_bytes.MULTIPLIERS[1])
KEY_STEP_0 = tl.constexpr(random_bytes.KEY_STEPS[0])
KEY_STEP_1 = tl.constexpr(random_bytes.KEY_STEPS[1])
MIXES = tl.constexpr(random_bytes.MIXES)
STEPS_K = tl.constexpr(random_bytes.STEPS_K)
STEPS_Q = tl.constexpr(random_bytes.STEPS_Q)


@triton.jit
def stream_of(rng, batch, head):
    """The random numbers of a head; rng points to seed and offset, int64."""
    seed = tl.load(rng)
    offset = tl.load(rng + 1)
    batch = tl.cast(batch, tl.uint32)
    head = tl.cast(head, tl.uint32)
    a0, a1, a2, a3 = philox(batch, head, low(offset), high(offset), low(seed), high(seed), ROUNDS)
    return Stream(a0, a1, a2=a2, a3=a3)


@triton.jit
def keep_mask(stream, m_start, n_start, offs_m, offs_n, threshold):
    """Whether each pair (m_start + offs_m, n_start + offs_n) is kept: bool.

    offs_m and offs_n are shaped to broadcast over the tile, whichever of its sides is which.
    m_start is a multiple of 16, and n_start of 32, or of 16 where a tile has no more keys: apart
    from the offsets, since the compiler knows these to the bit and so sees which pairs share a
    group.
    """
    group_q = (query_group(m_start) + query_group(offs_m)).to(tl.uint32)
    group_k = (key_group(n_start) + key_group(offs_n)).to(tl.uint32)
    w0, w1, w2, w3 = group_words(stream, group_q, group_k=group_k)
    index = word_of(offs_n)
    if offs_n.shape[0] * offs_n.shape[1] < 32:  # a tile of a group's first keys, or its last
        index = word_of(n_start % 32 + offs_n)
    bits = tl.where(index < 2, tl.where(index == 0, w0, w1), tl.where(index == 2, w2, w3))
    byte = (bits >> (8 * byte_of(offs_m, offs_n)).to(tl.uint32)) & 255  # 0 is the lowest
    return byte >= tl.cast(threshold, tl.uint32)


@triton.jit
def group_words(stream, group_q, group_k):
    """The four words of each group."""
    x = fma(group_k, STEPS_K[0], fma(group_q, STEPS_Q[0], stream.a0))
    y = fma(group_k, STEPS_K[1], fma(group_q, STEPS_Q[1], stream.a1))
    z = fma(group_k, STEPS_K[2], fma(group_q, STEPS_Q[2], stream.a2))
    w = fma(group_k, STEPS_K[3], fma(group_q, STEPS_Q[3], stream.a3))
    for _ in tl.static_range(MIXES):
        x, y, z, w = mix(x, y, z, w)
    return x, y, z, w


@triton.jit
def mix(x, y, z, w):
    """Four words to four: bytes turned round, and pcg4d's multiplications."""
    x, y, z, w = reverse(x), reverse(y), reverse(z), reverse(w)
    x = fma(y, w, x)
    y = fma(z, x, y)
    z = fma(x, y, z)
    w = fma(y, z, w)
    return x, y, z, w


@triton.jit
def fma(x, y, z):
    """Low 32 bits of x y + z; the compiler multiplies no more than these."""
    return low(x.to(tl.int64) * y + z)


@triton.jit
def reverse(x):
    """The bytes of a word in the opposite order: one instruction."""
    return (x << 24) | ((x & 0xFF00) << 8) | ((x >> 8) & 0xFF00) | (x >> 24)


@triton.jit
def philox(c0, c1, c2, c3, k0, k1, ROUNDS: tl.constexpr):
    """Philox4x32: uint32 counter and key to four words; all broadcast."""
    for i in tl.static_range(ROUNDS):
        # 64-bit products in one instruction; an int64 wraps and loses no bit
        a = c0.to(tl.int64) * MULTIPLIER_0
        b = c2.to(tl.int64) * MULTIPLIER_1
        step_0 = low(k0.to(tl.int64) + i * KEY_STEP_0)
        step_1 = low(k1.to(tl.int64) + i * KEY_STEP_1)
        c0, c1, c2, c3 = high(b) ^ c1 ^ step_0, low(b), high(a) ^ c3 ^ step_1, low(a)
    return c0, c1, c2, c3


@triton.jit
def low(x):
    """The low 32 bits of an int64."""
    return x.to(tl.uint32)


@triton.jit
def high(x):
    """The high 32 bits."""
    return (x >> 32).to(tl.uint32)
