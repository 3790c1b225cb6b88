"""Score function, bias, mask and dropout of one tile, by the indices of its rows and columns.

A tile is (heads, group * rows, keys), and seen by index (batch, nheads_k, group, rows, keys).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from ...mods.evaluation import evaluate
from ...mods.expressions import lookup
from ...tile import random_bytes
from .dense import Dense, QueryRange
from .tiles import Chunk, positions

Tensor = torch.Tensor


class TileIndices(NamedTuple):
    """The indices of a tile: positions that broadcast against its view by index."""

    b: Tensor  # (batch, 1, 1, 1, 1)
    h: Tensor  # (nheads_k, group, 1, 1)
    q_idx: Tensor  # (rows, 1)
    k_idx: Tensor  # (keys,)


def place_of(dense: Dense, x: Chunk, r: QueryRange, start: int, stop: int) -> TileIndices:
    """Keys [start, stop) of a block of queries."""
    batch = range(dense.q.shape[0])[x.batch]
    heads = range(dense.k.shape[1])[x.heads]
    b = positions(batch.start, batch.stop) + dense.more.first
    h = positions(heads.start * x.group, heads.stop * x.group)
    q_idx, k_idx = positions(r.start, r.stop), positions(start, stop)
    return TileIndices(b.view(-1, 1, 1, 1, 1), h.view(-1, x.group, 1, 1), q_idx.unsqueeze(1), k_idx)


def by_index(s: Tensor, place: TileIndices) -> Tensor:
    """A tile as (batch, nheads_k, group, rows, keys)."""
    sizes = place.b.shape[0], *place.h.shape[:2], place.q_idx.shape[0], place.k_idx.shape[0]
    return s.view(sizes)


def apply_score_mod(s: Tensor, dense: Dense, place: TileIndices) -> Tensor | None:
    """Applies the score function in place; its derivative, None where there is no function."""
    more = dense.more
    if not more.mods.score:
        return None
    s = by_index(s, place)
    at = place.b, place.h, place.q_idx, place.k_idx, more.of_score
    derivative = evaluate(lookup(more.mods.derivative), *at, score=s)
    derivative = derivative.to(s.dtype).expand_as(s).clone()
    s.copy_(evaluate(lookup(more.mods.score), *at, score=s))
    return derivative.flatten(0, 1).flatten(1, 2)


def apply_bias_and_mask(s: Tensor, dense: Dense, place: TileIndices) -> None:
    """Adds the bias, and masks."""
    more = dense.more
    s = by_index(s, place)
    if more.bias is not None:
        s.add_(of_bias(more.bias, place, dense))
    if more.mods.mask:
        at = place.b, place.h, place.q_idx, place.k_idx
        s.masked_fill_(~evaluate(lookup(more.mods.mask), *at, more.of_mask), -math.inf)


def of_bias(bias: Tensor, place: TileIndices, dense: Dense) -> Tensor:
    """The part of a bias, or of its gradient, that meets a tile, seen by index."""
    sides = place.b.flatten() - dense.more.first, place.h.flatten(), place.q_idx[:, 0], place.k_idx
    for dim, side in enumerate(sides):
        if bias.shape[dim] > 1:
            bias = bias.narrow(dim, int(side[0]), len(side))
    heads = place.h.shape[:2] if bias.shape[1] > 1 else (1, 1)
    return bias.unflatten(1, heads)


def add_dbias(dbias: Tensor, ds: Tensor, dense: Dense, place: TileIndices) -> None:
    """Adds the gradient of a tile's scores to that of the bias."""
    target = of_bias(dbias, place, dense)
    target.add_(by_index(ds, place).sum_to_size(target.shape))


def slopes_of(s: Tensor, dense: Dense, place: TileIndices) -> list[Tensor]:
    """The derivatives of the score function at each target of the call, to be asked for before
    `apply_score_mod`.
    """
    more, s = dense.more, by_index(s, place)
    at = place.b, place.h, place.q_idx, place.k_idx, more.of_score
    # Copies: a slope may be the score itself, which changes in place
    return [evaluate(target.slope, *at, score=s).clone() for target in more.targets]


def add_captured(ds: Tensor, slopes: list[Tensor], dense: Dense, place: TileIndices) -> None:
    """Adds to the gradients of captured tensors what the gradient of a tile's scores gives."""
    more, ds = dense.more, by_index(ds, place)
    at = place.b, place.h, place.q_idx, place.k_idx, more.of_score
    for target, slope in zip(more.targets, slopes):
        share = torch.where(ds == 0, 0, ds * slope)  # masked: a slope may be inf
        index = [evaluate(node, *at) for node in target.load.inputs]
        index = [x.clamp(0, n - 1) for x, n in zip(index, target.grad.shape)]
        shape = torch.broadcast_shapes(*(x.shape for x in index))
        shape = (1,) * (share.dim() - len(shape)) + tuple(shape)
        index = tuple(x.expand(shape) for x in index)
        share = share.sum_to_size(shape).to(target.grad.dtype)
        if index:
            target.grad.index_put_(index, share, accumulate=True)
        else:
            target.grad.add_(share.sum())


def dropout_mask(dense: Dense, place: TileIndices) -> tuple[Tensor, float] | None:
    """Which probabilities dropout keeps, shaped as a tile, and the factor of those."""
    more = dense.more
    if more.rng is None:
        return None
    threshold = random_bytes.threshold_of(more.dropout_p)
    b, h = place.b[..., 0, 0], place.h[..., 0, 0]
    start = int(place.q_idx[0]), int(place.k_idx[0])
    sizes = len(place.q_idx), len(place.k_idx)
    keep = random_bytes.keep_tile(more.rng, b, h, *start, *sizes, threshold)
    return keep.flatten(0, 1).flatten(1, 2), random_bytes.factor_of(threshold)


def drop(p: Tensor, dense: Dense, place: TileIndices) -> Tensor:
    """P with what is dropped 0 and the rest grown to make up for it."""
    found = dropout_mask(dense, place)
    return p if found is None else torch.where(found[0], p * found[1], 0)
