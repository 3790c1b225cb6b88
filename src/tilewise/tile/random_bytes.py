"""Which (query, key) pairs dropout keeps: a function of where a pair is, and of nothing else.

A random byte belongs to each (seed, offset, batch, head, query, key). Philox4x32 (Salmon et al.
2011, "Parallel random numbers: as easy as 1, 2, 3") makes four words of all but the pair, once a
head, and a cheaper function makes four of these and of where the pair is, once in 16 pairs:

    a0..a3 = philox((batch, head, offset low, offset high), (seed low, seed high))
    w0..w3 = mix(mix(x0..x3))    where x_i = a_i + key_group STEPS_K_i + query_group STEPS_Q_i

and the byte of a pair is byte `byte_of` of word `word_of`. A pair is kept where its byte is at
least `threshold`, so probabilities have steps of 1/256; what is kept is multiplied by `factor_of`.

The four small functions below hold operators that torch and Triton share, so that `triton.jit`
can compile them (see `tile.dropout`). Indices are positions, not negative.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

Tensor = torch.Tensor

ROUNDS = 7  # of Philox: the fewest that pass BigCrush, says the paper
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_STEPS = (0x9E3779B9, 0xBB67AE85)

MIXES = 2
# Fractions of the square roots of 2, 3, 5 and 7, and of 11, 13, 17 and 19, made odd
STEPS_K = (0x6A09E667, 0xBB67AE85, 0x3C6EF373, 0xA54FF53B)
STEPS_Q = (0x510E527F, 0x9B05688D, 0x1F83D9AB, 0x5BE0CD19)
_WORD = 0xFFFFFFFF


def query_group(q_idx):
    """Queries 8 apart share a group: a thread has both, in wgmma's accumulator layout."""
    return q_idx // 16 * 8 + q_idx % 8


def key_group(k_idx):
    """Keys 2t and 2t + 1 of four neighbouring eights share a group: a thread has all of them."""
    return k_idx // 32 * 4 + k_idx % 8 // 2


def word_of(k_idx):
    """The number of a group's word, of four: the eight keys that the key is in."""
    return k_idx // 8 % 4


def byte_of(q_idx, k_idx):
    """The number of the byte in that word, 0 the least significant."""
    return q_idx // 8 % 2 * 2 + k_idx % 2


# Queries and keys in a block, which no group crosses
_QUERY_BLOCK, _KEY_BLOCK = 16, 32


class Stream(NamedTuple):
    """The random numbers of one head of one sequence: where its groups' words start."""

    a0: Tensor
    a1: Tensor
    a2: Tensor
    a3: Tensor


def keep(
    rng: Tensor,
    batch: Tensor | int,
    head: Tensor | int,
    q_idx: Tensor,
    k_idx: Tensor,
    threshold: int,
) -> Tensor:
    """Whether each pair is kept: bool, of the shape to which the four indices broadcast.

    >>> rng = torch.tensor([3, 0])
    >>> keep(rng, 0, 0, torch.arange(2)[:, None], torch.arange(4)[None, :], 128)
    tensor([[ True,  True,  True, False],
            [False,  True, False, False]])

    rng is the int64 pair of `dropout_numbers.draw_rng`; indices are integers or integer tensors on
    its device. Each pair costs a group's words: `keep_tile` is for rectangles.
    """
    q_idx, k_idx = q_idx.long(), k_idx.long()
    stream = stream_of(rng, batch, head=head)
    drawn = group_words(stream, query_group(q_idx), key_group(k_idx))
    index = word_of(k_idx)
    low = torch.where(index == 0, drawn[0], drawn[1])
    high = torch.where(index == 2, drawn[2], drawn[3])
    bits = torch.where(index < 2, low, high)
    return ((bits >> 8 * byte_of(q_idx, k_idx)) & 255) >= threshold


def keep_tile(
    rng: Tensor,
    batch: Tensor | int,
    head: Tensor | int,
    q_start: int,
    k_start: int,
    rows: int,
    columns: int,
    threshold: int,
) -> Tensor:
    """`keep` of queries q_start, q_start + 1, ... and keys k_start, ...: (..., rows, columns), with
    the dimensions to which batch and head broadcast in front.

    >>> keep_tile(torch.tensor([3, 0]), 0, torch.arange(8), 0, 0, 100, 50, 26).shape
    torch.Size([8, 100, 50])

    One group serves 16 pairs. Starts may be anywhere; multiples of 16 and 32 waste nothing.
    """
    batch, head = (x[..., None, None] if isinstance(x, Tensor) else x for x in (batch, head))
    group_q = _groups(q_start, rows, _QUERY_BLOCK, query_group, device=rng.device)[:, None]
    group_k = _groups(k_start, columns, _KEY_BLOCK, key_group, device=rng.device)
    stream = stream_of(rng, batch, head=head)
    drawn = torch.stack(group_words(stream, group_q, group_k=group_k), -1)
    is_kept = drawn.to(torch.int32).view(torch.uint8) >= threshold  # the lowest byte first
    is_kept = is_kept.unflatten(-1, (4, 2, 2)).view(torch.int16).squeeze(-1)
    # q // 16, q % 8, k // 32, k % 8 // 2, k // 8 % 4, q // 8 % 2, and both k % 2 in one int16
    is_kept = is_kept.unflatten(-3, (-1, 4)).unflatten(-5, (-1, 8))
    is_kept = is_kept.movedim((-1, -2), (-5, -2))
    is_kept = is_kept.flatten(-6, -4).flatten(-3).view(torch.bool)
    is_kept = is_kept.narrow(-2, q_start % _QUERY_BLOCK, rows)
    return is_kept.narrow(-1, k_start % _KEY_BLOCK, columns)


def stream_of(rng: Tensor, batch: Tensor | int, head: Tensor | int) -> Stream:
    """The random numbers of a head."""
    seed, offset = rng.unbind()
    batch, head = (x.long() & _WORD if isinstance(x, Tensor) else x for x in (batch, head))
    return Stream._make(philox((batch, head, *_halves(offset)), _halves(seed)))


def group_words(stream: Stream, group_q: Tensor, group_k: Tensor) -> tuple[Tensor, ...]:
    """The four words of each group."""
    # A mask that changes nothing: Inductor (torch 2.13) multiplies an `arange` in 32 bits
    group_q, group_k = group_q & _WORD, group_k & _WORD
    steps = zip(stream, STEPS_Q, STEPS_K)
    state = (_fma(group_k, step_k, _fma(group_q, step_q, a)) for a, step_q, step_k in steps)
    for _ in range(MIXES):
        state = mix(*state)
    return tuple(state)


def mix(x: Tensor, y: Tensor, z: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    """Four words to four, each 32 bits in an int64, one to one: a round of multiplications of pcg4d
    (Jarzynski and Olano 2020, "Hash functions for GPU rendering"), on words whose bytes are turned
    round. Products carry bits up alone, so the upper ones, which depend on most, come down before.
    """
    x, y, z, w = map(_reversed, (x, y, z, w))
    x = _fma(y, w, x)
    y = _fma(z, x, y)
    z = _fma(x, y, z)
    w = _fma(y, z, w)
    return x, y, z, w


def philox(counter: tuple, key: tuple, rounds: int = ROUNDS) -> tuple:
    """Philox4x32: four words of counter and two of key to four words, each 32 bits in an int64.

    >>> [f"{word:08x}" for word in philox((0, 0, 0, 0), (0, 0), rounds=10)]
    ['6627e8d5', 'e169c58d', 'bc57ac4c', '9b00dbd8']

    No product leaves an int64: C++ compilers, Inductor's among them, need not wrap one that does.
    """
    c0, c1, c2, c3 = counter
    for i in range(rounds):
        low_a, high_a = _product(c0, MULTIPLIERS[0])
        low_b, high_b = _product(c2, MULTIPLIERS[1])
        k0, k1 = ((k + i * step) & _WORD for k, step in zip(key, KEY_STEPS))
        c0, c1, c2, c3 = high_b ^ c1 ^ k0, low_b, high_a ^ c3 ^ k1, low_a
    return c0, c1, c2, c3


def _halves(x: Tensor | int) -> tuple:
    """Low and high 32 bits."""
    return x & _WORD, (x >> 32) & _WORD


def _product(x: Tensor | int, multiplier: int) -> tuple:
    """Low and high 32 bits of a product of 32-bit words, by way of x (multiplier - 2^32)."""
    low, high = _halves(x * (multiplier - 2**32))
    return low, (high + x) & _WORD


def _fma(x: Tensor, y: Tensor | int, z: Tensor) -> Tensor:
    """Low 32 bits of x y + z, of 32-bit words. As a signed number y leaves room for the sum."""
    return (x * ((y ^ 2**31) - 2**31) + z) & _WORD


def _reversed(x: Tensor) -> Tensor:
    """A 32-bit word, its bytes in the opposite order."""
    x = (x >> 16) | (x << 16)
    return ((x >> 8) & 0x00FF00FF) | ((x & 0x00FF00FF) << 8)


def _groups(start: int, length: int, block: int, group_of, device: torch.device) -> Tensor:
    """The groups of the blocks that hold [start, start + length)."""
    first, stop = start // block * block, -(-(start + length) // block) * block
    return torch.arange(group_of(first), group_of(stop), device=device)
