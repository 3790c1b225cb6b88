"""How many bytes tilewise moves, by formula, tile by tile.

They lie between two counts: `once`, each tensor once a kernel, as if the L2 cache kept the rest,
and `tiled`, each tile reading what it visits, as if there were no cache. The hardware's counters
tell where between.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from .shapes import Shape

PASSES = {"fwd": ("fwd",), "bwd": ("bwd",), "fwd+bwd": ("fwd", "bwd")}


class Moved(NamedTuple):
    """Bytes of a pass of tilewise."""

    once: float
    tiled: float


class Sizes(NamedTuple):
    """Bytes of the tensors of a shape, over the whole batch."""

    q: float
    k: float
    v: float
    out: float
    stats: float  # one fp32 number a query


def sizes_of(shape: Shape) -> Sizes:
    """From the lengths of its sequences."""
    itemsize = getattr(torch, shape.dtype).itemsize
    queries = sum(shape.sequences)
    keys = queries if shape.lengths else shape.batch * shape.seqlen_k
    return Sizes(
        queries * shape.nheads * shape.headdim * itemsize,
        keys * shape.nheads_k * shape.headdim * itemsize,
        keys * shape.nheads_k * shape.headdim_v * itemsize,
        queries * shape.nheads * shape.headdim_v * itemsize,
        queries * shape.nheads * 4,
    )


def moved(
    shape: Shape,
    blocks: tuple[int, int],
    backend: str,
    backward_blocks: tuple[int, int] | None = None,
    pack: int = 1,
) -> Moved:
    """Bytes of tilewise with tiles of so many queries and keys, of every kernel of its passes. The
    backward has the same tile unless another is given; `pack` query heads share one forward.
    """
    passes = [
        _forward(shape, blocks, pack)
        if direction == "fwd"
        else _backward(shape, backward_blocks or blocks, backend)
        for direction in PASSES[shape.direction]
    ]
    return Moved(sum((x.once for x in passes), 0.0), sum((x.tiled for x in passes), 0.0))


def _forward(shape: Shape, blocks: tuple[int, int], pack: int) -> Moved:
    """Q, O and the LSE once; K and V once, or whenever a tile of queries visits them."""
    q, k, v, out, stats = sizes_of(shape)
    once = q + out + stats
    rows = _visited(shape, blocks) / pack * blocks[1]
    return Moved(once + k + v, once + rows * _key_bytes(shape))


def _backward(shape: Shape, blocks: tuple[int, int], backend: str) -> Moved:
    """delta, then tiles of keys, for which queries pass; dQ is added up in fp32 (hopper), or
    computed by tiles of queries, for which keys pass once more (portable, cpu).
    """
    q, k, v, out, stats = sizes_of(shape)
    visits = _visited(shape, blocks)
    of_queries = (q + out + 2 * stats) / sum(shape.sequences) / shape.nheads  # Q, dO, lse, delta
    delta = 2 * out + 2 * stats  # reads O, dO and lse, writes delta
    once = delta + 2 * (k + v)  # K and V in, dK and dV out
    passing = visits * blocks[0] * of_queries
    if backend == "hopper":
        wide = shape.headdim * 4  # of dQ in fp32
        dq = 4.0 * sum(shape.sequences) * shape.nheads * shape.headdim
        end = dq + dq + q  # cleared before; read, and written as dq, after
        added = visits * blocks[0] * 2 * wide
        return Moved(once + q + out + 2 * stats + 2 * dq + end, once + passing + added + end)
    again = q + out + 2 * stats + q  # for dQ: Q, dO, lse, delta in, dQ out
    keys = visits * blocks[1] * _key_bytes(shape)
    return Moved(once + q + out + 2 * stats + again + k + v, once + passing + again + keys)


def _key_bytes(shape: Shape) -> float:
    """Bytes of one row of K and of V in one head."""
    return (shape.headdim + shape.headdim_v) * getattr(torch, shape.dtype).itemsize


def _visited(shape: Shape, blocks: tuple[int, int]) -> float:
    """Tiles of scores that are computed, over all heads. A block mask's are estimated from the
    pairs that it keeps.
    """
    if shape.modifier and not shape.causal:
        return shape.nheads * shape.pairs / (blocks[0] * blocks[1])
    lengths = [(n, n) for n in shape.sequences] if shape.lengths else None
    if lengths is None:
        lengths = [(shape.seqlen_q, shape.seqlen_k)]
    total = sum(visited_tiles(m, n, blocks, shape.causal, shape.window) for m, n in lengths)
    return total * shape.nheads * (1 if shape.lengths else shape.batch)


def visited_tiles(
    seqlen_q: int,
    seqlen_k: int,
    blocks: tuple[int, int],
    is_causal: bool,
    window: int | None = None,
) -> int:
    """Tiles of scores of one head with a pair that the band keeps.

    >>> visited_tiles(512, 512, (128, 128), is_causal=False)
    16
    >>> visited_tiles(512, 512, (128, 128), is_causal=True)
    10
    """
    m, n = blocks
    first_row = torch.arange(0, seqlen_q, m)
    last_row = (first_row + m).clamp(max=seqlen_q) - 1
    diagonal = seqlen_k - seqlen_q
    last = torch.full_like(first_row, seqlen_k - 1)
    if is_causal:
        last = (last_row + diagonal).clamp(max=seqlen_k - 1)
    first = torch.zeros_like(first_row)
    if window is not None:
        first = (first_row + diagonal - window).clamp(min=0)
    count = torch.div(last, n, rounding_mode="floor") - torch.div(first, n, rounding_mode="floor")
    return int((count + 1)[last >= first].sum())
