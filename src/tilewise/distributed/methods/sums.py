"""Sums of the gradients of keys: each rank has a part of the gradient of every key that its queries
saw, in fp32; the owner of a key adds the parts of all ranks, in their order, and rounds once.

Parts of the keys that queries of several ranks see are exchanged, in slices, through the room that
K and V have had, which is used again and again: a slice has a share of such rows of every owner, so
that in each of them all ranks pull their share. While the parts of a slice are pulled, the next is
published.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..layouts.work import KeyRun
from ..transport.exchange import Published
from ..transport.halves import Arena
from .shard_call import ShardCall
from .sum_tables import MOST_BITS, Slice, most_rows, tables_of

Tensor = torch.Tensor


class Sums:
    """Adds the parts of a call, in `dtype`."""

    def __init__(
        self, arena: Arena, spec: ShardCall, *, signature: str, dtype: torch.dtype
    ) -> None:
        self.arena, self.spec, self.signature, self.dtype = arena, spec, signature, dtype
        self.parts: list[Tensor] = []
        self.totals: list[Tensor] = []
        self.number = 0  # of the slice that is published
        self.mark = None  # of the sums of the one before

    def begin(self, dk: Tensor, dv: Tensor, *, runs: tuple[KeyRun, ...] = ()) -> None:
        """Takes this rank's parts of the gradients of all keys, (batch, seqlen, nheads_k, headdim),
        or of the keys of each run, end to end. The sums of the first slice begin, and the second is
        published.
        """
        layout = self.spec.layout
        # Wide heads give 16 bits
        exact = torch.promote_types(self.dtype, torch.float32)
        # Of a batch of 1 no copy
        self.parts = [x.to(exact).transpose(0, 1).contiguous() for x in (dk, dv)]
        self.totals = [
            x.new_empty((layout.tokens, *x.shape[1:]), dtype=self.dtype) for x in self.parts
        ]
        # Of both, side by side in a row: a message of rows has both
        self.widths = [x.shape[1:].numel() for x in self.parts]
        self.no_rows = self.parts[0].new_empty((0, sum(self.widths)))
        room = max(self.arena.room, self.arena.slice_bytes)
        row_bytes = sum(self.widths) * exact.itemsize
        self.tables = tables_of(
            layout,
            self.spec.band,
            slice_rows=most_rows(room, row_bytes, ranks=layout.ranks),
            runs=runs or (KeyRun(0, 0, stop=layout.seqlen),),
            device=dk.device,
            nodes=self.arena.nodes,
        )
        self.signature += f", in {len(self.tables.slices)} slices"
        self._publish()
        self._add()

    def add_all(self) -> None:
        """Begins all sums that are left."""
        while self.number < len(self.tables.slices):
            self._add()

    def finish(self) -> tuple[Tensor, Tensor]:
        """Returns the gradients of this rank's keys and values."""
        self.add_all()
        tables = self.tables
        self.arena.add_runs(
            self.parts, tables.private_places, targets=tables.private, totals=self.totals
        )
        if tables.slices:
            self.arena.arrive(self.mark)
        self.parts = []
        dk, dv = (x.transpose(0, 1) for x in self.totals)
        return dk, dv

    def _publish(self) -> None:
        """Publishes this rank's parts of the next slice, if any."""
        tables = self.tables
        if self.number == len(tables.slices):
            return
        counts = [tables.slices[self.number].rows] * self.spec.layout.ranks
        self.published = Published(self.arena, [self.no_rows], counts=counts)
        self.arena.publish(self.published.nbytes, self.signature)
        halves = self.published.view(self.arena.rank, 0).split(self.widths, 1)
        self.arena.add_runs(self.parts, tables.places[self.number], targets=None, totals=halves)

    def _add(self) -> None:
        """Adds published parts once the sums before are made, and publishes the next."""
        arena, tables = self.arena, self.tables
        if self.number == len(tables.slices):
            return
        if self.number:  # after the barrier, what those sums have read may be written over
            arena.arrive(self.mark)
        arena.meet(self.signature)
        has_kernel = arena.part_sums is not None and arena.ranks <= MOST_BITS
        add = add_by_kernel if has_kernel else add_parts
        with arena.copying():
            if tables.traffic:
                self.published.fetch(tables.traffic[self.number])
            piece = tables.slices[self.number]
            add(self.published, piece, shared=tables.shared, totals=self.totals)
            self.mark = arena.mark()
        self.number += 1
        self._publish()


def add_parts(
    published: Published, piece: Slice, *, shared: Tensor, totals: Sequence[Tensor]
) -> None:
    """Adds the parts of a slice's rows in rank order, and writes the sums to rows of totals."""
    (dtype,), (shape,) = published.dtypes, published.shapes
    exact = shared.new_zeros((piece.stop - piece.first, *shape), dtype=dtype)
    for rank, runs in enumerate(piece.parts):
        for first, stop in runs:
            start, end = first + piece.place, stop + piece.place
            exact[first:stop] += published.pull(rank, 0, start=start, stop=end)
    rows = shared[piece.first : piece.stop, 1].long()
    for total, x in zip(totals, exact.split([x.shape[1:].numel() for x in totals], 1)):
        total[rows] = x.to(total.dtype).unflatten(1, total.shape[1:])


def add_by_kernel(
    published: Published, piece: Slice, *, shared: Tensor, totals: Sequence[Tensor]
) -> None:
    """Adds the parts of a slice in one launch, to the bit."""
    arena = published.arena
    if piece.stop == piece.first or not totals[0].numel():
        return
    # The offset is that of all ranks, as all publish as many rows
    (row_bytes,), mine = published.row_bytes, published.view(arena.rank, 0)
    offset = mine.data_ptr() - arena.blocks[arena.rank].data_ptr() + piece.place * row_bytes
    arena.part_sums.add(
        arena.blocks,
        offset,
        dtype=mine.dtype,
        of_rows=shared[piece.first : piece.stop],
        totals=totals,
    )
    remote = (runs for rank, runs in enumerate(piece.parts) if rank != arena.rank)
    arena.pulled += row_bytes * sum(stop - first for runs in remote for first, stop in runs)
