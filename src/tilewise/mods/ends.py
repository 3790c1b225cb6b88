"""Masks whose rows and columns are intervals, as their ends: a query sees the keys from one number
to another, and a key is seen by such queries.

Documents, windows, prefixes and what & makes of them are of this kind. A kernel then reads two
numbers a row instead of evaluating a function for each pair. FlashMask (arXiv 2410.01359) keeps
such ends, of columns alone.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from .masks import Mask
from .trace import MASK, trace

Tensor = torch.Tensor
MAX_END_ROWS = 1 << 22  # of queries and keys of all heads: 64 MB of ends


class Ends(NamedTuple):
    """int32 (batch, nheads, seqlen): 0 and 0 for a row that sees nothing."""

    first_key: Tensor
    stop_key: Tensor
    first_query: Tensor
    stop_query: Tensor

    def mask(self) -> Mask:
        """The mask that the ends describe, traced."""
        return _mask_of(self)


class Side:
    """What has been seen so far of each row of one side, in blocks."""

    def __init__(self, rows: tuple[int, ...], seqlen: int, device: torch.device) -> None:
        self.seqlen = seqlen  # of the other side
        self.count, self.stop = (
            torch.zeros(rows, dtype=torch.int32, device=device) for _ in range(2)
        )
        self.first = torch.full(rows, seqlen, dtype=torch.int32, device=device)

    def add_full(self, at: tuple[slice, ...], full: Tensor, starts: Tensor, size: int) -> None:
        """Blocks `full` (..., rows, others), of which all pairs are seen; the other side's begin at
        `starts`.
        """
        stops = (starts + size).clamp_(max=self.seqlen)
        count = torch.where(full, stops - starts, 0).sum(-1)
        first = torch.where(full, starts, self.seqlen).amin(-1)
        stop = torch.where(full, stops, 0).amax(-1)
        self.count[at] += count[..., None].int()
        self.first[at] = torch.minimum(self.first[at], first[..., None].int())
        self.stop[at] = torch.maximum(self.stop[at], stop[..., None].int())

    def add_pairs(self, rows: Tensor, starts: Tensor, is_seen: Tensor) -> None:
        """Pairs (blocks, BLOCK, BLOCK of the other side) of the blocks numbered `rows`, with the
        other side's from `starts` on.
        """
        place = torch.arange(is_seen.shape[2], device=is_seen.device)
        first = torch.where(is_seen, place, is_seen.shape[2]).amin(2) + starts[:, None]
        stop = torch.where(is_seen, place + 1, 0).amax(2) + starts[:, None]
        count = is_seen.sum(2)
        first = torch.where(count > 0, first, self.seqlen).int()
        stop = torch.where(count > 0, stop, 0).int()
        of_rows = rows[:, None].expand(count.shape)
        for totals, values, reduction in (
            (self.count, count.int(), "sum"),
            (self.first, first, "amin"),
            (self.stop, stop, "amax"),
        ):
            totals.view(-1, totals.shape[-1]).scatter_reduce_(0, of_rows, values, reduction)

    def ends(self, seqlen: int) -> tuple[Tensor, Tensor, Tensor]:
        """First and stop of each of `seqlen` rows, and whether that says all of every row."""
        count, first, stop = (
            x.flatten(2)[:, :, :seqlen] for x in (self.count, self.first, self.stop)
        )
        is_empty = count == 0
        says_all = (is_empty | (count == stop - first)).all()
        first, stop = (x.masked_fill(is_empty, 0).contiguous() for x in (first, stop))
        return first, stop, says_all


class EndRows:
    """The rows and columns of a mask, as its blocks are looked at."""

    def __init__(self, shape: tuple[int, ...], grid: tuple[int, ...], block, device) -> None:
        batch, nheads, m_blocks, n_blocks = grid
        self.shape, self.block, self.grid = shape, block, grid
        self.queries = Side((batch, nheads, m_blocks, block[0]), shape[3], device=device)
        self.keys = Side((batch, nheads, n_blocks, block[1]), shape[2], device=device)

    def add_full(self, slab: tuple[range, ...], full: Tensor) -> None:
        """Blocks (batch, nheads, m_blocks, n_blocks) of a slab that are known to be full."""
        batches, heads, m_blocks = (slice(r.start, r.stop) for r in slab)
        block_m, block_n = self.block
        m_starts = torch.arange(m_blocks.start, m_blocks.stop, device=full.device) * block_m
        n_starts = torch.arange(full.shape[3], device=full.device) * block_n
        self.queries.add_full((batches, heads, m_blocks), full, n_starts, block_n)
        self.keys.add_full((batches, heads), full.transpose(2, 3), m_starts, block_m)

    def add_pairs(self, slab: tuple[range, ...], tiles: Tensor, is_seen: Tensor) -> None:
        """Pairs of tiles, each (b, h, m, n) within the slab."""
        b, h, m, n = tiles.unbind(1)
        b, h, m = b + slab[0].start, h + slab[1].start, m + slab[2].start
        block_m, block_n = self.block
        q = m[:, None] * block_m + torch.arange(block_m, device=tiles.device)
        k = n[:, None] * block_n + torch.arange(block_n, device=tiles.device)
        is_seen = is_seen & (q < self.shape[2])[:, :, None] & (k < self.shape[3])[:, None, :]
        head = b * self.grid[1] + h
        self.queries.add_pairs(head * self.grid[2] + m, n * block_n, is_seen)
        self.keys.add_pairs(head * self.grid[3] + n, m * block_m, is_seen.transpose(1, 2))

    def ends(self) -> Ends | None:
        """The ends, or None for another kind of mask; it waits for the device."""
        first_key, stop_key, by_queries = self.queries.ends(self.shape[2])
        first_query, stop_query, by_keys = self.keys.ends(self.shape[3])
        is_said = bool(by_queries & by_keys)
        return Ends(first_key, stop_key, first_query, stop_query=stop_query) if is_said else None


def _mask_of(ends: Ends) -> Mask:
    first_key, stop_key, first_query, stop_query = ends
    batch, nheads, _ = first_key.shape

    def within(b, h, q_idx, kv_idx):
        b, h = b if batch > 1 else 0, h if nheads > 1 else 0
        is_key = (kv_idx >= first_key[b, h, q_idx]) & (kv_idx < stop_key[b, h, q_idx])
        is_query = (q_idx >= first_query[b, h, kv_idx]) & (q_idx < stop_query[b, h, kv_idx])
        return is_key & is_query

    expr, tensors = trace(within, MASK)
    return Mask(expr, tensors)


@functools.cache
def _names() -> frozenset[str]:
    shapes = ((1 + b, 1 + h, 1) for b in (False, True) for h in (False, True))
    columns = (torch.zeros(shape, dtype=torch.int32, device="cpu") for shape in shapes)
    return frozenset(Ends(x, x.clone(), x.clone(), x.clone()).mask().key for x in columns)


def says_ends(name: str) -> bool:
    """Whether a mask's tree is that of `Ends.mask`."""
    return name in _names()
