"""Which pairs dropout keeps, written from docs/design/dropout.md and from Philox's paper (Salmon et
al. 2011): nothing here comes from the library.
"""

from __future__ import annotations

import torch

Tensor = torch.Tensor
LOW = 0xFFFFFFFF
STEPS_K = (0x6A09E667, 0xBB67AE85, 0x3C6EF373, 0xA54FF53B)
STEPS_Q = (0x510E527F, 0x9B05688D, 0x1F83D9AB, 0x5BE0CD19)


def kept(rng: Tensor, batch: int, heads: Tensor, queries: Tensor, keys: Tensor, p: float) -> Tensor:
    """bool (heads, queries, keys): which pairs of a sequence are kept."""
    seed, offset = rng.tolist()
    h = heads.view(-1, 1, 1)
    counter = (torch.full_like(h, batch), h, _word(h, offset), _word(h, offset >> 32))
    a0, a1, a2, a3 = philox(counter, (_word(h, seed), _word(h, seed >> 32)))
    i, j = queries.view(1, -1, 1), keys.view(1, 1, -1)
    key_group, query_group = (j // 32) * 4 + (j % 8) // 2, (i // 16) * 8 + i % 8
    steps = zip((a0, a1, a2, a3), STEPS_K, STEPS_Q)
    words = [a + key_group * by_k + query_group * by_q & LOW for a, by_k, by_q in steps]
    words = torch.stack(mix(*mix(*words)))
    which = ((j // 8) % 4).expand(words.shape[1:])
    word = words.gather(0, which.unsqueeze(0)).squeeze(0)
    byte = (word >> (8 * (((i // 8) % 2) * 2 + j % 2))) & 0xFF
    return byte >= threshold(p)


def threshold(p: float) -> int:
    """Bytes below this are dropped."""
    return max(1, min(255, round(256 * p)))


def philox(counter: tuple, key: tuple, rounds: int = 7) -> tuple:
    """Philox4x32: four words of counter and two of key, int64 tensors below 2^32."""
    x0, x1, x2, x3 = counter
    k0, k1 = key
    for _ in range(rounds):
        high0, low0 = _product(x0, 0xD2511F53)
        high1, low1 = _product(x2, 0xCD9E8D57)
        x0, x1, x2, x3 = high1 ^ x1 ^ k0, low1, high0 ^ x3 ^ k1, low0
        k0, k1 = (k0 + 0x9E3779B9) & LOW, (k1 + 0xBB67AE85) & LOW
    return x0, x1, x2, x3


def mix(*words: Tensor) -> tuple[Tensor, ...]:
    """The bytes of four words turned round, and each multiplied into another."""
    x, y, z, w = (sum((x >> 8 * i & 0xFF) << 24 - 8 * i for i in range(4)) for x in words)
    x = x + _product(y, w)[1] & LOW
    y = y + _product(z, x)[1] & LOW
    z = z + _product(x, y)[1] & LOW
    w = w + _product(y, z)[1] & LOW
    return x, y, z, w


def _product(x: Tensor, factor: Tensor | int) -> tuple[Tensor, Tensor]:
    """The high and the low word of a product, by halves of x, so that nothing leaves an int64."""
    low = (x & 0xFFFF) * factor
    rest = (low >> 16) + (x >> 16) * factor
    return rest >> 16, ((rest & 0xFFFF) << 16) | (low & 0xFFFF)


def _word(like: Tensor, value: int) -> Tensor:
    return torch.full_like(like, value & LOW)
