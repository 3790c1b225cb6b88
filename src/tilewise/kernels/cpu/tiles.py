"""Tiles of one dense attention: which heads go together, their memory, and the scores of one tile.

Query heads that share a key head are more rows of the same tile, (heads, group * rows, keys), so
that keys are never repeated. Everything is computed in fp32 (fp64 for fp64).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch

from ...problem import Extras
from ...tile import predicates
from .dense import Dense, QueryRange, of_heads

Tensor = torch.Tensor
BLOCK_M = 128
BLOCK_N = 1024
TILE = 1 << 20


class Chunk(NamedTuple):
    """Heads that are computed together: slices of batch and key heads, and their keys."""

    batch: slice
    heads: slice
    group: int
    k: Tensor  # (heads, seqlen_k, headdim)
    v: Tensor
    extras: Extras  # those of heads, (heads, group, 1, 1)

    def by_group(self, x: Tensor) -> Tensor:
        """The chunk of (batch, nheads, ...), as a view (batch, nheads_k, group, ...)."""
        return x.unflatten(1, (x.shape[1] // self.group, self.group))[self.batch, self.heads]


def block_m(dense: Dense) -> int:
    """Queries in a block: fewer where a group of heads brings more rows."""
    group = dense.q.shape[1] // dense.k.shape[1]
    return max(16, BLOCK_M // group)


def chunks(dense: Dense, dtype: torch.dtype) -> Iterator[Chunk]:
    """All heads, cut so that a tile has about TILE elements."""
    batch, nheads, seqlen_q, _ = dense.q.shape
    nheads_k, seqlen_k = dense.k.shape[1:3]
    group = nheads // nheads_k
    tile = max(1, group * min(block_m(dense), seqlen_q) * min(BLOCK_N, seqlen_k))
    heads = min(nheads_k, max(1, TILE // tile))
    batches = max(1, TILE // (tile * nheads_k)) if heads == nheads_k else 1
    for b in range(0, batch, batches):
        for h in range(0, nheads_k, heads):
            yield _chunk(dense, slice(b, b + batches), heads=slice(h, h + heads), dtype=dtype)


def _chunk(dense: Dense, batch: slice, heads: slice, dtype: torch.dtype) -> Chunk:
    k, v = (x[batch, heads].to(dtype).flatten(0, 1) for x in (dense.k, dense.v))
    nheads_k, group = dense.k.shape[1], dense.q.shape[1] // dense.k.shape[1]

    def of_chunk(x: Tensor) -> Tensor:
        by_group = x.to(dtype).expand(dense.q.shape[0], -1).unflatten(1, (nheads_k, group))
        return by_group[batch, heads].flatten(0, 1)[..., None, None]

    extras = of_heads(dense.extras, of_chunk)
    return Chunk(batch, heads, group=group, k=k, v=v, extras=extras)


def load(x: Tensor, block: QueryRange, dtype: torch.dtype) -> Tensor:
    """A block of rows of `by_group`, (heads, group * rows, headdim)."""
    return x[:, :, :, block.start : block.stop].to(dtype).flatten(2, 3).flatten(0, 1)


def store(x: Tensor, block: QueryRange, tile: Tensor) -> None:
    """The inverse of `load`."""
    target = x[:, :, :, block.start : block.stop]
    target.copy_(tile.view(target.shape))


class Workspace:
    """Memory of tiles, kept from one tile to the next: fresh pages cost more than a softmax."""

    def __init__(self):
        self.memory = {}

    def matmul(self, name: str, x: Tensor, y: Tensor) -> Tensor:
        """x @ y in the memory called `name`."""
        shape = (x.shape[0], x.shape[1], y.shape[2])
        numel = math.prod(shape)
        if name not in self.memory or self.memory[name].numel() < numel:
            self.memory[name] = x.new_empty(numel)
        return torch.bmm(x, y, out=self.memory[name][:numel].view(shape))


def positions(start: int, stop: int) -> Tensor:
    """Positions of queries or keys, whatever torch's default device is."""
    return torch.arange(start, stop, device="cpu")


def key_blocks(block: QueryRange) -> list[slice]:
    """Blocks of the keys that a block of queries sees."""
    starts = range(block.first, block.last, BLOCK_N)
    return [slice(start, min(start + BLOCK_N, block.last)) for start in starts]


def bias_and_mask(s: Tensor, dense: Dense, chunk: Chunk, block: QueryRange, keys: slice) -> None:
    """Adds ALiBi to the scores of a block of keys, and hides those outside of the band."""
    start, stop = keys.start, keys.stop
    s = s.view(s.shape[0], chunk.group, block.stop - block.start, stop - start)
    slopes = chunk.extras.alibi_slopes
    if slopes is not None:
        q_idx, k_idx = positions(block.start, block.stop), positions(start, stop)
        distance = (q_idx.unsqueeze(1) + dense.diagonal - k_idx).abs()
        s.addcmul_(slopes, distance.to(s.dtype), value=-1)
    # The partial blocks: some query does not see keys before full_first or from full_last on.
    for a, b in ((start, min(stop, block.full_first)), (max(start, block.full_last), stop)):
        if a < b:
            s[..., a - start : b - start].masked_fill_(_hidden(dense, block, a, b), -math.inf)


def _hidden(dense: Dense, block: QueryRange, start: int, stop: int) -> Tensor:
    q_idx, k_idx = positions(block.start, block.stop).unsqueeze(1), positions(start, stop)
    hidden = torch.zeros(block.stop - block.start, stop - start, dtype=torch.bool, device="cpu")
    left, right, diagonal = dense.scalars.left, dense.scalars.right, dense.diagonal
    if left >= 0:
        hidden |= ~predicates.within_left(q_idx, k_idx, diagonal=diagonal, left=left)
    if right >= 0:
        hidden |= ~predicates.within_right(q_idx, k_idx, diagonal=diagonal, right=right)
    return hidden
