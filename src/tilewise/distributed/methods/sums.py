"""The gradients of keys: each rank has a part of those of all keys that its queries saw, in fp32;
the owner of a key adds the parts of all ranks, in their order, and rounds once.

Parts of the keys that queries of several ranks see are exchanged, in slices, through the room that
K and V have had, which is used again and again: a slice has a share of such rows of every owner, so
that in each of them all ranks pull their share. While the parts of a slice are pulled, the next is
published.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from ..layouts.layout import Layout, Run
from ..layouts.pulls import rows_of, shared_rows, without
from ..layouts.work import keys_of
from ..transport.exchange import ALIGN, Published
from ..transport.halves import LEAST, Arena
from .call_spec import CallSpec

Tensor = torch.Tensor
Runs = tuple[tuple[int, int, int], ...]  # where those of a run begin, and which keys they are


class Slice(NamedTuple):
    """Rows [first, stop) of those of this rank that are shared, and where they begin among the rows
    of all owners.
    """

    first: int
    stop: int
    place: int
    rows: int  # of all owners
    parts: tuple[tuple[int, int, int], ...]  # (rank, a, b): rows from `first` on that it sees


class Tables(NamedTuple):
    """What a call of known parts adds, and where. Of a row the places are those of the runs' parts,
    -1 where a run does not see its key.
    """

    slices: tuple[Slice, ...]
    places: tuple[Tensor, ...]  # of the rows of each slice, of all owners, (rows, runs)
    shared: Tensor  # of each row that others see the ranks that do, bit r for rank r, and the row
    private: Tensor  # rows that no other rank sees
    private_places: Tensor


class Sums:
    """The sums of the parts of a call, in `dtype`."""

    def __init__(self, arena: Arena, spec: CallSpec, signature: str, dtype: torch.dtype) -> None:
        self.arena, self.spec, self.signature, self.dtype = arena, spec, signature, dtype
        self.parts: list[Tensor] = []
        self.totals: list[Tensor] = []
        self.number = 0  # of the slice that is published
        self.mark = None  # of the sums of the one before

    def begin(self, dk: Tensor, dv: Tensor, runs: Runs = ()) -> None:
        """Takes this rank's parts of the gradients of all keys, (batch, seqlen, nheads_k, headdim),
        or of the keys of each run, end to end. The sums of the first slice begin, and the second is
        published.
        """
        layout = self.spec.layout
        exact = torch.promote_types(self.dtype, torch.float32)  # what wide heads do not give yet
        # Of a batch of 1 no copy
        self.parts = [x.to(exact).transpose(0, 1).contiguous() for x in (dk, dv)]
        self.totals = [
            x.new_empty(layout.tokens, *x.shape[1:], dtype=self.dtype) for x in self.parts
        ]
        row_bytes = [x[:1].numel() * x.itemsize for x in self.parts]
        each = most_rows(max(self.arena.room, LEAST), row_bytes, layout.ranks)
        runs = runs or ((0, 0, layout.seqlen),)
        self.tables = tables_of(layout, *self.spec.sides, each, runs, dk.device)
        self.signature += f", in {len(self.tables.slices)} slices"
        self._publish()
        self._add()

    def finish(self) -> tuple[Tensor, Tensor]:
        """The gradients of this rank's keys and values."""
        of = self.tables
        while self.number < len(of.slices):
            self._add()
        for part, total in zip(self.parts, self.totals):
            self.arena.add_runs(part, of.private_places, of.private, total)
        if of.slices:
            self.arena.arrive(self.mark)
        self.parts = []
        dk, dv = (x.transpose(0, 1) for x in self.totals)
        return dk, dv

    def _publish(self) -> None:
        """Publishes this rank's parts of a slice, if there is one more."""
        of = self.tables
        if self.number == len(of.slices):
            return
        rows = [of.slices[self.number].rows] * self.spec.layout.ranks
        self.published = Published(self.arena, [x.unsqueeze(0) for x in self.parts], rows)
        self.arena.publish(self.published.nbytes, self.signature)
        for i, x in enumerate(self.parts):
            room = self.published.view(self.arena.rank, i)[0]
            self.arena.add_runs(x, of.places[self.number], None, room)

    def _add(self) -> None:
        """Adds the parts of the slice that is published, and publishes the next beside. The barrier
        follows the sums of the one before: it says that what they read may be written over.
        """
        arena, of = self.arena, self.tables
        if self.number == len(of.slices):
            return
        if self.number:
            arena.arrive(self.mark)
        arena.meet(self.signature)
        add = add_parts if arena.part_sums is None else add_by_kernel
        with arena.copying():
            for i, total in enumerate(self.totals):
                add(self.published, i, of, of.slices[self.number], total)
            self.mark = arena.mark()
        self.number += 1
        self._publish()


def add_parts(published: Published, number: int, of: Tables, piece: Slice, total: Tensor) -> None:
    """The sums of a slice's rows, of the parts of all ranks in their order, into `total`, which is
    of all rows of this rank.
    """
    dtype, _, shape = published.kinds[number]
    exact = total.new_zeros(piece.stop - piece.first, *shape, dtype=dtype)
    for rank, first, stop in piece.parts:
        rows = published.pull(rank, number, first + piece.place, stop + piece.place)
        exact[first:stop] += rows
    total[of.shared[piece.first : piece.stop, 1].long()] = exact.to(total.dtype)


def add_by_kernel(
    published: Published, number: int, of: Tables, piece: Slice, total: Tensor
) -> None:
    """Adds the parts of a slice in one launch, to the bit."""
    arena = published.arena
    count = piece.stop - piece.first
    if not count or not total.numel():
        return
    dtype, _, shape = published.kinds[number]
    # Of all ranks the same, as all publish as many rows
    mine = published.view(arena.rank, number)[0, piece.place :]
    offset = mine.data_ptr() - arena.blocks[arena.rank].data_ptr()
    shared = of.shared[piece.first : piece.stop]
    arena.part_sums.add(arena.blocks, offset, dtype, shared, total)
    others = (stop - first for rank, first, stop in piece.parts if rank != arena.rank)
    arena.pulled += math.prod(shape) * dtype.itemsize * sum(others)


def most_rows(room: int, row_bytes: Sequence[int], ranks: int) -> int:
    """How many rows of every owner a slice may have: of tensors that each begin at a multiple of
    ALIGN bytes.

    >>> most_rows(2 * 1024 * 256, [512, 512], 4)  # K and V of 1024 rows, in 16 bits
    128
    """
    padding = sum(ALIGN for n in row_bytes if n % ALIGN)
    return max(1, (room - padding) // max(1, sum(row_bytes) * ranks))


@functools.lru_cache(maxsize=256)
def slices_of(counts: tuple[int, ...], rank: int, each: int) -> tuple[tuple[int, ...], ...]:
    """(first, stop, place, rows) of slices of `each` rows an owner or fewer, in the mean, of owners
    that have so many: in each slice the same share of all of them.

    >>> slices_of((5, 10), 1, 4)  # 3 and 5 rows, then 2 and 5
    ((0, 5, 3, 8), (5, 10, 2, 7))
    """
    found, firsts = [], [0] * len(counts)
    for shares in _shares(counts, -(-sum(counts) // (each * len(counts)))):
        place, first = sum(shares[:rank]), firsts[rank]
        found.append((first, first + shares[rank], place, sum(shares)))
        firsts = [a + n for a, n in zip(firsts, shares)]
    return tuple(found)


def _shares(counts: tuple[int, ...], number: int) -> Iterator[list[int]]:
    """How many rows of each owner are in each of so many slices, none of which has more than one
    row more than another.
    """
    left = list(counts)
    for slices in range(number, 0, -1):
        shares = [n // slices for n in left]
        more = -(-sum(left) // slices) - sum(shares)
        by_remainder = sorted(range(len(left)), key=lambda r: -(left[r] % slices))
        for r in by_remainder[:more]:
            shares[r] += 1
        left = [n - share for n, share in zip(left, shares)]
        yield shares


@functools.lru_cache(maxsize=8)
def tables_of(
    layout: Layout, left: int, right: int, each: int, runs: Runs, device: torch.device
) -> Tables:
    """Tables of a layout under a band, whose parts lie in `runs`."""
    shared = shared_rows(layout, left, right)
    positions = [_positions(layout.at(rank), rows) for rank, rows in enumerate(shared)]
    counts = tuple(map(len, positions))
    of_ranks = [slices_of(counts, rank, each) for rank in range(layout.ranks)]
    mine = shared[layout.rank]
    rows = _indices(mine)
    bits = _bits_of(layout, left, right)[rows.long()]
    at_positions = places_of(runs, layout.seqlen)
    slices, places = [], []
    for first, stop, place, count in of_ranks[layout.rank]:
        parts = _runs_of_bits(bits[first:stop], layout.ranks)
        slices.append(Slice(first, stop, place, count, parts))
    for pieces in zip(*of_ranks):
        of_owners = [x[a:b] for x, (a, b, *_) in zip(positions, pieces)]
        places.append(at_positions[torch.cat(of_owners)].to(device))
    private = _indices(without([(0, layout.tokens)], mine))
    alone = at_positions[_positions(layout, [(0, layout.tokens)])[private.long()]]
    others = torch.stack([bits, rows], 1), private, alone
    return Tables(tuple(slices), tuple(places), *(x.to(device) for x in others))


def places_of(runs: Runs, seqlen: int) -> Tensor:
    """Where the runs that see a key have their parts of its gradient, (seqlen, most runs that see
    a key), int32: in the order of the runs, then -1.

    >>> places_of(((0, 0, 1), (1, 0, 4), (5, 2, 4)), 4).tolist()
    [[0, 1], [2, -1], [3, 5], [4, 6]]
    """
    found = torch.full((seqlen, _depth(runs)), -1, dtype=torch.int32)
    depth = torch.zeros(seqlen, 1, dtype=torch.int64)
    for at, first, last in runs:
        place = torch.arange(at, at + last - first, dtype=torch.int32)[:, None]
        found[first:last].scatter_(1, depth[first:last], place)
        depth[first:last] += 1
    return found


def _depth(runs: Runs) -> int:
    """How many runs at most see a key."""
    ends = sorted([(first, 1) for _, first, _ in runs] + [(last, -1) for *_, last in runs])
    return max(1, *itertools.accumulate(step for _, step in ends))


def _positions(layout: Layout, rows: Sequence[Run]) -> Tensor:
    """The positions of some of a rank's rows."""
    all_rows = [torch.arange(a, b) for a, b in (*layout.runs[layout.rank], (0, 0))]
    return torch.cat(all_rows)[_indices(rows).long()]


def _indices(rows: Sequence[Run]) -> Tensor:
    return torch.cat([torch.arange(a, b, dtype=torch.int32) for a, b in (*rows, (0, 0))])


def _bits_of(layout: Layout, left: int, right: int) -> Tensor:
    """The ranks that see the key of every row of this rank, int32: bit r for rank r."""
    found = torch.zeros(layout.tokens, dtype=torch.int32)
    for rank in range(layout.ranks):
        bit = torch.tensor(1 << rank).to(torch.int32)  # of rank 31 the sign
        for start, stop in rows_of(layout, keys_of(layout.at(rank).spans, left, right)):
            found[start:stop] |= bit
    return found


def _runs_of_bits(bits: Tensor, ranks: int) -> tuple[tuple[int, int, int], ...]:
    """(rank, first, stop) of the rows that have a rank's bit, in the order of the ranks.

    >>> _runs_of_bits(torch.tensor([1, 3, 2]), 2)
    ((0, 0, 2), (1, 1, 3))
    """
    found = []
    for rank in range(ranks):
        has_bit = torch.nn.functional.pad((bits >> rank) & 1, (1, 1))
        edges = has_bit.diff().nonzero().flatten().tolist()
        found += [(rank, a, b) for a, b in zip(edges[::2], edges[1::2])]
    return tuple(found)
