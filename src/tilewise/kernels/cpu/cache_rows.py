"""Where the keys and values of a sequence lie, as rows of one matrix.

A cache in the dtype of the sums is read in place if its strides are multiples of a row: then it is
a matrix (rows, width) over the same memory, contiguous or in pages. Any other, of 16 or 8 bits or
with rows further apart, is copied first, some keys of all heads at a time, in the order in which it
lies.
"""

from __future__ import annotations

import math
import threading
from typing import NamedTuple

import torch

Tensor = torch.Tensor
COPIED = 1 << 19  # elements at a time, or those of a span: 2 MiB, of which each thread reads a part
KEPT_BYTES = 8 << 20  # of memory that outlives a call, each of two, in each thread
FEW_PAGES = 2  # are copied one by one, and so are pages of so many elements
LARGE_PAGE = 1 << 16
INT32_MAX = 2**31 - 1


_of_thread = threading.local()


class Memory:
    """Memory of what is copied. It outlives the call, if it is not too much: a MiB of fresh pages
    took 0.5 ms, a twentieth of a decode step over 8Ki keys (AMD EPYC, 2026-11-23).
    """

    def __init__(self):
        self.of_call: dict[str, Tensor] = {}

    def take(self, name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
        """What the last call with this name has got, or longer."""
        numel = math.prod(shape)
        is_kept = numel * dtype.itemsize <= KEPT_BYTES
        buffers = _of_thread.__dict__ if is_kept else self.of_call
        buffer = buffers.get(name)
        if buffer is None or buffer.dtype != dtype or buffer.numel() < numel:
            with torch.inference_mode(False):  # else no later call outside of it could write there
                buffer = buffers[name] = torch.empty(numel, dtype=dtype, device="cpu")
        return buffer[:numel].view(shape)


class Rows(NamedTuple):
    """Some keys or values of a sequence."""

    matrix: Tensor  # (any number, width)
    ids: Tensor  # (n, nheads_k): the row of each


class CacheRows:
    """The keys, or the values, of sequence `row` from `first` to `last`."""

    def __init__(self, x: Tensor, table: Tensor | None, row: int, ends: tuple[int, int], dtype):
        self.x, self.row, self.dtype = x, row, dtype
        self.first, self.last = ends
        self.pages = None if table is None else table[row]
        is_in_place = x.dtype == dtype and _is_in_units(x)
        self.whole = self._in_place() if is_in_place and self.first < self.last else None
        self.heads_are_beside = is_in_place and x.stride(2) < x.stride(1)
        # Keys that are loaded at a time
        self.most = self.last if is_in_place else COPIED // math.prod(x.shape[2:])

    def load(self, first: int, last: int, memory: Memory) -> Rows:
        """Keys [first, last). They stay until others are loaded, keys or values."""
        if self.whole is not None:
            matrix, ids = self.whole
            return Rows(matrix, ids[first - self.first : last - self.first])
        return self._copied(first, last, memory=memory)

    def _in_place(self) -> Rows:
        x, width = self.x, self.x.shape[3]
        of_page, of_key, of_head = (
            x.stride(dim) // width if x.shape[dim] > 1 else 0 for dim in range(3)
        )
        start, stop = self.first, self.last
        if self.pages is None:
            ids = self.row * of_page + torch.arange(start, stop, device="cpu") * of_key
        else:
            pages, skipped = self._pages(start, stop)
            within = torch.arange(x.shape[1], device="cpu") * of_key
            ids = (pages.long().unsqueeze(1) * of_page + within).flatten()
            ids = ids[skipped : skipped + stop - start]
        ids = ids.unsqueeze(1) + torch.arange(x.shape[2], device="cpu") * of_head
        strides = of_page, of_key, of_head
        count = sum((n - 1) * stride for n, stride in zip(x.shape, strides)) + 1
        matrix = x.as_strided((count, width), (width, 1))
        return Rows(matrix, ids.int() if count <= INT32_MAX else ids)

    def _pages(self, first: int, last: int) -> tuple[Tensor, int]:
        """The pages of keys [first, last), and the keys of the first one that are before them."""
        page_size = self.x.shape[1]
        start, stop = first // page_size, (last - 1) // page_size + 1
        return self.pages[start:stop].clamp(0, self.x.shape[0] - 1), first - start * page_size

    def _copied(self, first: int, last: int, memory: Memory) -> Rows:
        n, nheads_k, width = last - first, *self.x.shape[2:]
        matrix = memory.take("rows", self.dtype, (n * nheads_k, width))
        ids = torch.arange(n * nheads_k, dtype=torch.int32, device="cpu")
        if self.x.stride(2) > self.x.stride(1):  # one head behind the other
            self._copy(matrix.view(nheads_k, n, width).transpose(0, 1), first, last, memory)
            return Rows(matrix, ids.view(nheads_k, n).T)
        self._copy(matrix.view(n, nheads_k, width), first, last=last, memory=memory)
        return Rows(matrix, ids.view(n, nheads_k))

    def _copy(self, target: Tensor, first: int, last: int, memory: Memory) -> None:
        if self.pages is None:
            target.copy_(self.x[self.row, first:last])
            return
        pages, skipped = self._pages(first, last)
        if len(pages) > FEW_PAGES and self.x[0].numel() < LARGE_PAGE:
            shape = len(pages), *self.x.shape[1:]
            buffer = memory.take("pages", self.x.dtype, shape)
            rows = torch.index_select(self.x, 0, pages, out=buffer).flatten(0, 1)
            target.copy_(rows[skipped : skipped + last - first])
            return
        page_size, start = self.x.shape[1], first - skipped
        for number in pages.tolist():
            a, b = max(first, start), min(last, start + page_size)
            target[a - first : b - first] = self.x[number, a - start : b - start]
            start += page_size


def _is_in_units(x: Tensor) -> bool:
    """Whether all rows lie a multiple of a row apart."""
    return all(n <= 1 or stride % x.shape[3] == 0 for n, stride in zip(x.shape[:3], x.stride()))
