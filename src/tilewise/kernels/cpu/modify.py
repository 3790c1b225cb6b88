"""Score function, bias, mask and dropout of one tile, by the indices of its rows and columns.

A tile is (heads, group * rows, keys), and seen by index (batch, nheads_k, group, rows, keys).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from ...mods.evaluation import evaluate, within
from ...mods.expressions import Node, lookup
from ...tile import dropout_numbers, random_bytes
from .dense import Dense, Modifiers, QueryRange
from .tiles import Chunk, positions

Tensor = torch.Tensor


class TileIndices(NamedTuple):
    """The indices of a tile, which broadcast against its view by index, and what reads them."""

    b: Tensor  # (batch, 1, 1, 1, 1)
    h: Tensor  # (nheads_k, group, 1, 1)
    q_idx: Tensor  # (rows, 1)
    k_idx: Tensor  # (keys,)
    modifiers: Modifiers

    def view(self, s: Tensor) -> Tensor:
        """A tile as (batch, nheads_k, group, rows, keys)."""
        rows, keys = self.q_idx.shape[0], self.k_idx.shape[0]
        return s.view((self.b.shape[0], *self.h.shape[:2], rows, keys))

    def evaluate(self, expr: Node, tensors: tuple[Tensor, ...], score: Tensor | None = None):
        """The value of a tree for each element of the tile."""
        b, h, q_idx, k_idx, _ = self
        return evaluate(expr, b, h=h, q_idx=q_idx, k_idx=k_idx, tensors=tensors, score=score)


def indices_of(dense: Dense, chunk: Chunk, block: QueryRange, keys: slice) -> TileIndices:
    """The indices of a block of queries and a block of keys."""
    batch = range(dense.q.shape[0])[chunk.batch]
    heads = range(dense.k.shape[1])[chunk.heads]
    b = positions(batch.start, batch.stop) + dense.modifiers.first
    b = b.view(-1, 1, 1, 1, 1)
    h = positions(heads.start * chunk.group, heads.stop * chunk.group).view(-1, chunk.group, 1, 1)
    q_idx, k_idx = positions(block.start, block.stop).unsqueeze(1), positions(keys.start, keys.stop)
    return TileIndices(b, h, q_idx=q_idx, k_idx=k_idx, modifiers=dense.modifiers)


def derivative_of(s: Tensor, tile: TileIndices) -> list[Tensor]:
    """The derivative of the score function at scores, if there is a function."""
    mods, s = tile.modifiers.mods, tile.view(s)
    if not mods.score:
        return []
    derivative = tile.evaluate(lookup(mods.derivative), tile.modifiers.of_score, score=s)
    return [derivative.to(s.dtype).expand_as(s).clone().flatten(0, 1).flatten(1, 2)]


def apply(s: Tensor, tile: TileIndices) -> None:
    """Applies the score function, adds the bias, and masks, in place."""
    modifiers, s = tile.modifiers, tile.view(s)
    mods = modifiers.mods
    if mods.score:
        s.copy_(tile.evaluate(lookup(mods.score), modifiers.of_score, score=s))
    if modifiers.extras.bias is not None:
        s.add_(of_bias(modifiers.extras.bias, tile))
    if mods.mask:
        s.masked_fill_(~tile.evaluate(lookup(mods.mask), modifiers.of_mask), -math.inf)


def of_bias(bias: Tensor, tile: TileIndices) -> Tensor:
    """The part of a bias, or of its gradient, that meets a tile, seen by index."""
    rows = tile.b.flatten() - tile.modifiers.first
    for dim, indices in enumerate((rows, tile.h.flatten(), tile.q_idx[:, 0], tile.k_idx)):
        if bias.shape[dim] > 1:
            bias = bias.narrow(dim, int(indices[0]), len(indices))
    heads = tile.h.shape[:2] if bias.shape[1] > 1 else (1, 1)
    return bias.unflatten(1, heads)


def slopes_of(s: Tensor, tile: TileIndices) -> list[Tensor]:
    """Derivatives of the score function by what it reads at each target, before `apply`."""
    modifiers, s = tile.modifiers, tile.view(s)
    slopes = (tile.evaluate(x.slope, modifiers.of_score, score=s) for x in modifiers.targets)
    # Copies: one may be the score itself, which changes in place
    return [slope.clone() for slope in slopes]


def add_captured(ds: Tensor, slopes: list[Tensor], tile: TileIndices) -> None:
    """Adds to the gradients of captured tensors what the gradient of a tile's scores gives."""
    modifiers, ds = tile.modifiers, tile.view(ds)
    for target, slope in zip(modifiers.targets, slopes):
        share = torch.where(ds == 0, 0, ds * slope)  # masked: a slope may be inf
        index = [tile.evaluate(node, modifiers.of_score) for node in target.load.inputs]
        index = within(target.grad, target.load, index)
        shape = torch.broadcast_shapes(*(x.shape for x in index))
        shape = (1,) * (share.dim() - len(shape)) + tuple(shape)
        index = tuple(x.expand(shape) for x in index)
        share = share.sum_to_size(shape).to(target.grad.dtype)
        if index:
            target.grad.index_put_(index, share, accumulate=True)
        else:
            target.grad.add_(share.sum())


def drop(p: Tensor, tile: TileIndices) -> Tensor:
    """P with what is dropped 0 and the rest grown to make up for it."""
    if tile.modifiers.extras.dropout_rng is None:
        return p
    threshold = dropout_numbers.threshold_of(tile.modifiers.scalars.dropout_p)
    keep = random_bytes.keep_tile(
        tile.modifiers.extras.dropout_rng,
        batch=tile.b[..., 0, 0],
        head=tile.h[..., 0, 0],
        q_start=int(tile.q_idx[0]),
        k_start=int(tile.k_idx[0]),
        rows=len(tile.q_idx),
        columns=len(tile.k_idx),
        threshold=threshold,
    )
    keep = keep.flatten(0, 1).flatten(1, 2)
    return torch.where(keep, p * dropout_numbers.factor_of(threshold), 0)
