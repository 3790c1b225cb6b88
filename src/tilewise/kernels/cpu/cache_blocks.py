"""Blocks of keys and values of a cache, copied to buffers of one shape and pitch for a problem,
whatever the layout of the cache.

A buffer holds one head behind the other. So torch's threads copy the heads that they multiply, and
find them in the cache of their own core (K of 8 heads, headdim 128, 8Ki keys in fp32, copied and
multiplied by two threads: 1.6 ms, 2.3 with rows of all heads, 0.6 without the copy; Intel Xeon with
2 MiB of L2 a core, 2026-11-23).
"""

from __future__ import annotations

import math
import threading
from typing import NamedTuple

import torch

from ..common.cached import Cached

Tensor = torch.Tensor
SPAN = 512  # keys of one softmax, unless a piece has fewer
BLOCK_N, LEAST_N = 512, 32  # keys of a product
BLOCK_ELEMENTS = 1 << 18  # of a block, where that allows so many keys: half an L2 cache, in fp32
KEPT_BYTES = 4 << 20  # of memory that outlives a call, each of two, in each thread
ALIGN = 16  # elements: 64 bytes in fp32
FEW_PAGES = 2  # are copied one by one


class BlockBuffers(NamedTuple):
    """A block's, and what products read of it."""

    rows: Tensor  # (n, nheads_k, ...)
    factor: Tensor  # of keys (nheads_k, headdim, n), of values (nheads_k, n, headdim_v)


class Workspace:
    """Memory of blocks, kept from one to the next: fresh pages cost more than a softmax."""

    def __init__(self, dtype: torch.dtype):
        self.dtype = dtype  # of blocks
        self.blocks: dict[tuple[str, int], BlockBuffers] = {}

    def scales(self, name: str, x: Tensor, n: int) -> BlockBuffers:
        """The memory of the scales of a block's rows, (n, nheads_k); its factor is that of scores,
        (nheads_k, 1, n).
        """
        key = name, -2
        if key not in self.blocks:
            rows = x.new_empty(n, x.shape[2], dtype=self.dtype)
            self.blocks[key] = BlockBuffers(rows, rows.T.unsqueeze(1))
        return self.blocks[key]

    def block(self, name: str, place: int, x: Tensor, n: int) -> BlockBuffers:
        """The memory of a slot; slot -1 serves keys and values alternately."""
        key = name, place
        if key not in self.blocks:
            # Rows a power of two apart would share a set of the CPU's cache
            nheads_k, width = x.shape[2:]
            pitch = -(-width // ALIGN) * ALIGN + ALIGN
            numel = nheads_k * n * pitch
            flat = _kept("block", self.dtype, numel) if place < 0 else None
            flat = x.new_empty(numel, dtype=self.dtype) if flat is None else flat
            by_head = flat.view(nheads_k, n, pitch)[:, :, :width]
            factor = by_head.mT if name == "k" else by_head
            self.blocks[key] = BlockBuffers(by_head.transpose(0, 1), factor)
        return self.blocks[key]


_of_thread = threading.local()


def _kept(name: str, dtype: torch.dtype, numel: int) -> Tensor | None:
    """Memory that outlives the call, if that is not too much: a MiB of fresh pages took 0.5 ms, a
    twentieth of a decode step over 8Ki keys (AMD EPYC, 2026-11-23).
    """
    if numel * dtype.itemsize > KEPT_BYTES:
        return None
    found = getattr(_of_thread, name, None)
    if found is None or found.dtype != dtype or found.numel() < numel:
        with torch.inference_mode(False):  # else no later call outside of it could write there
            found = torch.empty(numel, dtype=dtype, device="cpu")
        setattr(_of_thread, name, found)
    return found[:numel]


def _staged(x: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Memory of this shape in the dtype of x."""
    numel = math.prod(shape)
    kept = _kept("stage", x.dtype, numel)
    return (x.new_empty(numel) if kept is None else kept).view(shape)


def blocks_of(cached: Cached) -> tuple[int, int]:
    """The keys of a block, and the blocks of a span: the same for all lengths of a problem."""
    width = cached.k.shape[2] * max(cached.k.shape[3], cached.v.shape[3])
    fitting = 1 << max(0, (BLOCK_ELEMENTS // width).bit_length() - 1)
    n = min(BLOCK_N, max(LEAST_N, fitting), cached.split_size)
    return n, -(-min(SPAN, cached.split_size) // n)


def load(
    target: Tensor, x: Tensor, place: tuple[int, Tensor | None], first: int, last: int
) -> None:
    """Keys or values [first, last) to (last - first, nheads_k, ...). `place` is the row of the
    batch, and that of the page table if there is one.
    """
    row, table = place
    if table is None:
        target.copy_(x[row, first:last])
        return
    page_size = x.shape[1]
    start, stop = first // page_size, (last - 1) // page_size + 1
    pages = table[start:stop].clamp(0, x.shape[0] - 1)
    if stop - start > FEW_PAGES and first % page_size == 0 and x.dtype == target.dtype:
        whole = (last - first) // page_size
        into = target[: whole * page_size].unflatten(0, (whole, page_size))
        # In the order of the buffer, heads first: a third of the time that a buffer between takes
        torch.index_select(x.movedim(2, 0), 1, pages[:whole], out=into.movedim(2, 0))
        first += whole * page_size
        if first == last:
            return
        target, pages, start = target[whole * page_size :], pages[whole:], start + whole
    elif stop - start > FEW_PAGES:
        found = _staged(x, (stop - start, *x.shape[1:]))
        rows = torch.index_select(x, 0, pages, out=found).flatten(0, 1)
        target.copy_(rows[first - start * page_size : last - start * page_size])
        return
    for page, number in enumerate(pages.tolist(), start):
        a, b = max(first, page * page_size), min(last, (page + 1) * page_size)
        target[a - first : b - first] = x[number, a - page * page_size : b - page * page_size]
