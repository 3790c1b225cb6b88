"""The gradients of keys: each rank has a part of those of all keys that its queries saw, in fp32;
the owner of a key adds the parts of all ranks, in their order, and rounds once.

Parts are as long as the sequence, four times as many bytes as the shards of K and V that the arena
has room for. So they are exchanged in slices, which use that room again and again: a slice has a
share of the rows of every owner, so that in each of them all ranks pull as much.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from .call_spec import CallSpec
from .exchange import ALIGN, Published
from .halves import LEAST, Arena
from .layout import Layout, Run
from .rows import Partial
from .work import keys_of

Tensor = torch.Tensor
Runs = tuple[tuple[int, int, int], ...]  # see `Partial`


class Slice(NamedTuple):
    """Rows [first, stop) of this rank, and where they begin among those of all owners."""

    first: int
    stop: int
    place: int
    rows: int  # of all owners


def summed(
    arena: Arena, spec: CallSpec, partial: Partial, signature: str, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """The gradients of this rank's keys and values, in `dtype`."""
    layout = spec.layout
    parts = [x.transpose(0, 1) for x in (partial.dk, partial.dv)]
    totals = [x.new_empty(layout.tokens, *x.shape[1:], dtype=dtype) for x in parts]
    row_bytes = [x[:1].numel() * x.itemsize for x in parts]
    each = most_rows(max(arena.room, LEAST), row_bytes, layout.ranks)
    slices = slices_of(layout, each)
    signature = f"{signature}, in {len(slices)} slices"
    device = parts[0].device
    positions = positions_of(layout, each, device)
    if partial.runs:
        positions = places_of(layout, each, partial.runs, device)
    for piece, index in zip(slices, positions):
        published = Published(arena, [x.unsqueeze(0) for x in parts], [piece.rows] * layout.ranks)
        arena.publish(published.nbytes, signature)
        for number, x in enumerate(parts):
            room = published.view(layout.rank, number)[0]
            if partial.runs:
                arena.add_runs(x, index, room)
            else:
                torch.index_select(x, 0, index, out=room)
        arena.meet(signature)
        add = add_parts if arena.part_sums is None else add_by_kernel
        for number, total in enumerate(totals):
            add(published, number, spec, piece, total)
    dk, dv = (x.transpose(0, 1) for x in totals)
    return dk, dv


def add_parts(
    published: Published, number: int, spec: CallSpec, piece: Slice, total: Tensor
) -> None:
    """The sums of a slice's rows, of the parts of all ranks in their order, into `total`, which is
    of all rows of this rank.
    """
    dtype, _, shape = published.kinds[number]
    exact = total.new_zeros(piece.stop - piece.first, *shape, dtype=dtype)
    for rank, first, stop in parts_in(spec, piece):
        rows = published.pull(rank, number, first + piece.place, stop + piece.place)
        exact[first:stop] += rows
    total[piece.first : piece.stop] = exact


def add_by_kernel(
    published: Published, number: int, spec: CallSpec, piece: Slice, total: Tensor
) -> None:
    """The same in one launch, to the bit."""
    arena = published.arena
    rows = total[piece.first : piece.stop]
    if not rows.numel():
        return
    dtype, _, shape = published.kinds[number]
    row_bytes = math.prod(shape) * dtype.itemsize
    ranks = ranks_of(spec.layout, *spec.sides, total.device)[piece.first : piece.stop]
    # Of all ranks the same, as all publish as many rows
    mine = published.view(arena.rank, number)[0, piece.place :]
    offset = mine.data_ptr() - arena.blocks[arena.rank].data_ptr()
    arena.part_sums.add(arena.blocks, offset, dtype, ranks, rows)
    others = (stop - first for r, first, stop in parts_in(spec, piece) if r != arena.rank)
    arena.pulled += row_bytes * sum(others)


def parts_in(spec: CallSpec, piece: Slice) -> Iterator[tuple[int, int, int]]:
    """(rank, first, stop) of the rows of a slice, counted from its first, that each rank has a part
    of.
    """
    for rank, ranges in enumerate(parts_of(spec.layout, *spec.sides)):
        for start, stop in ranges:
            a, b = max(start, piece.first), min(stop, piece.stop)
            if a < b:
                yield rank, a - piece.first, b - piece.first


def most_rows(room: int, row_bytes: Sequence[int], ranks: int) -> int:
    """How many rows of every owner a slice may have: of tensors that each begin at a multiple of
    ALIGN bytes.

    >>> most_rows(2 * 1024 * 256, [512, 512], 4)  # K and V of 1024 rows, in 16 bits: 2 N slices
    128
    """
    padding = sum(ALIGN for n in row_bytes if n % ALIGN)
    return max(1, (room - padding) // max(1, sum(row_bytes) * ranks))


@functools.lru_cache(maxsize=64)
def slices_of(layout: Layout, each: int) -> tuple[Slice, ...]:
    """Slices of at most `each` rows of every owner.

    >>> import tilewise.distributed as td
    >>> slices_of(td.contiguous(10, 2).at(1), 3)  # 5 rows of each
    (Slice(first=0, stop=3, place=3, rows=6), Slice(first=3, stop=5, place=2, rows=4))
    """
    found = []
    for first in range(0, max(layout.counts), each):
        sizes = [max(0, min(each, count - first)) for count in layout.counts]
        starts = [*itertools.accumulate(sizes, initial=0)]
        mine = sizes[layout.rank]
        at = min(first, layout.tokens)
        found.append(Slice(at, at + mine, starts[layout.rank], starts[-1]))
    return tuple(found)


@functools.lru_cache(maxsize=8)
def positions_of(layout: Layout, each: int, device: torch.device) -> tuple[Tensor, ...]:
    """The positions of each slice's rows, int32."""
    of_ranks = [layout.at(rank) for rank in range(layout.ranks)]
    places = [
        torch.cat([torch.arange(a, b, dtype=torch.int32) for a, b in (*x.runs[x.rank], (0, 0))])
        for x in of_ranks
    ]
    starts = range(0, max(layout.counts), each)
    return tuple(torch.cat([x[i : i + each] for x in places]).to(device) for i in starts)


@functools.lru_cache(maxsize=8)
def places_of(layout: Layout, each: int, runs: Runs, device: torch.device) -> tuple[Tensor, ...]:
    """The places of each slice's rows among the keys of each run, (rows, runs), int32; -1 where a
    run does not see a key.

    >>> import tilewise.distributed as td
    >>> runs = (0, 0, 1), (1, 0, 4)  # the first key for the first run, then all for the second
    >>> places_of(td.contiguous(4, 2), 4, runs, torch.device("cpu"))[0].tolist()
    [[0, 1], [-1, 2], [-1, 3], [-1, 4]]
    """
    indices = positions_of(layout, each, torch.device("cpu"))
    return tuple(places_in(runs, index).to(device) for index in indices)


def places_in(runs: Runs, positions: Tensor) -> Tensor:
    """Where each run has its part of the gradients of these keys, (rows, runs)."""
    found = [
        torch.where((positions >= first) & (positions < last), positions - first + at, -1)
        for at, first, last in runs
    ]
    return torch.stack(found, 1)


@functools.lru_cache(maxsize=256)
def parts_of(layout: Layout, left: int, right: int) -> tuple[tuple[Run, ...], ...]:
    """Of every rank the rows of this one that its queries see.

    >>> import tilewise.distributed as td
    >>> parts_of(td.zigzag(8, 2).at(1), -1, 0)  # rank 0 has the last queries, and so sees all
    (((0, 4),), ((0, 4),))
    """
    return tuple(
        tuple(_rows_of(layout, keys_of(layout.at(rank).spans, left, right)))
        for rank in range(layout.ranks)
    )


@functools.lru_cache(maxsize=8)
def ranks_of(layout: Layout, left: int, right: int, device: torch.device) -> Tensor:
    """`parts_of` as bits: of every row of this rank, int32, bit r for rank r."""
    found = torch.zeros(layout.tokens, dtype=torch.int32)
    for rank, ranges in enumerate(parts_of(layout, left, right)):
        bit = torch.tensor(1 << rank).to(torch.int32)  # of rank 31 the sign
        for start, stop in ranges:
            found[start:stop] |= bit
    return found.to(device)


def _rows_of(layout: Layout, keys: Sequence[Run]) -> list[Run]:
    """The rows of this rank at these positions, runs that continue each other as one."""
    found: list[Run] = []
    row = 0
    for start, stop in layout.runs[layout.rank]:
        for first, last in keys:
            a, b = max(start, first), min(stop, last)
            if a < b:
                run = row + a - start, row + b - start
                if found and found[-1][1] == run[0]:
                    run = found.pop()[0], run[1]
                found.append(run)
        row += stop - start
    return found
