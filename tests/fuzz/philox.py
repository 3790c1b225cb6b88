"""Which pairs dropout keeps, written from docs/design/dropout.md and from Philox's paper (Salmon et
al. 2011): nothing here comes from the library.
"""

from __future__ import annotations

import torch

Tensor = torch.Tensor
LOW = 0xFFFFFFFF


def kept(rng: Tensor, batch: int, heads: Tensor, queries: Tensor, keys: Tensor, p: float) -> Tensor:
    """bool (heads, queries, keys): which pairs of a sequence are kept."""
    seed, offset = rng.tolist()
    h = heads.view(-1, 1, 1)
    counter = (torch.full_like(h, batch), h, _word(h, offset), _word(h, offset >> 32))
    a0, a1, a2, a3 = philox(counter, (_word(h, seed), _word(h, seed >> 32)))
    i, j = queries.view(1, -1, 1), keys.view(1, 1, -1)
    key_group, query_group = (j // 32) * 4 + (j % 8) // 2, (i // 16) * 8 + i % 8
    words = torch.stack(
        torch.broadcast_tensors(*philox((key_group, query_group, a2, a3), (a0, a1)))
    )
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


def _product(x: Tensor, factor: int) -> tuple[Tensor, Tensor]:
    """The high and the low word of a product, by halves of x, so that nothing leaves an int64."""
    low = (x & 0xFFFF) * factor
    rest = (low >> 16) + (x >> 16) * factor
    return rest >> 16, ((rest & 0xFFFF) << 16) | (low & 0xFFFF)


def _word(like: Tensor, value: int) -> Tensor:
    return torch.full_like(like, value & LOW)
