"""Sums of the gradients of keys: each rank has a part of the gradient of every key that its queries
saw, in fp32; the owner of a key adds the parts of all ranks, in their order, and rounds once.

Parts of the keys that queries of several ranks see are exchanged, in slices, through the room that
K and V have had, which is used again and again: a slice has a share of such rows of every owner, so
that in each of them all ranks pull their share. While the parts of a slice are pulled, the next is
published.
"""

from __future__ import annotations

import torch

from ..layouts.work import KeyRun
from ..transport.exchange import Published
from ..transport.halves import LEAST, Arena
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
        row_bytes = [x[:1].numel() * x.itemsize for x in self.parts]
        self.tables = tables_of(
            layout,
            self.spec.band,
            slice_rows=most_rows(max(self.arena.room, LEAST), row_bytes, ranks=layout.ranks),
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
        for part, total in zip(self.parts, self.totals):
            self.arena.add_runs(part, tables.private_places, targets=tables.private, total=total)
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
        self.published = Published(self.arena, self.parts, counts=counts)
        self.arena.publish(self.published.nbytes, self.signature)
        for i, x in enumerate(self.parts):
            half = self.published.view(self.arena.rank, i)
            self.arena.add_runs(x, tables.places[self.number], targets=None, total=half)

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
            for i, total in enumerate(self.totals):
                piece = tables.slices[self.number]
                add(self.published, i, piece=piece, shared=tables.shared, total=total)
            self.mark = arena.mark()
        self.number += 1
        self._publish()


def add_parts(
    published: Published, number: int, piece: Slice, *, shared: Tensor, total: Tensor
) -> None:
    """Adds the parts of a slice's rows in rank order, and writes the sums to rows of `total`."""
    dtype, shape = published.dtypes[number], published.shapes[number]
    exact = total.new_zeros((piece.stop - piece.first, *shape), dtype=dtype)
    for rank, runs in enumerate(piece.parts):
        for first, stop in runs:
            start, end = first + piece.place, stop + piece.place
            exact[first:stop] += published.pull(rank, number, start=start, stop=end)
    total[shared[piece.first : piece.stop, 1].long()] = exact.to(total.dtype)


def add_by_kernel(
    published: Published, number: int, piece: Slice, *, shared: Tensor, total: Tensor
) -> None:
    """Adds the parts of a slice in one launch, to the bit."""
    arena = published.arena
    count = piece.stop - piece.first
    if not count or not total.numel():
        return
    # The offset is that of all ranks, as all publish as many rows
    mine = published.view(arena.rank, number)[piece.place :]
    offset = mine.data_ptr() - arena.blocks[arena.rank].data_ptr()
    arena.part_sums.add(
        arena.blocks,
        offset,
        dtype=published.dtypes[number],
        of_rows=shared[piece.first : piece.stop],
        total=total,
    )
    remote = (runs for rank, runs in enumerate(piece.parts) if rank != arena.rank)
    remote_rows = sum(stop - first for runs in remote for first, stop in runs)
    arena.pulled += published.row_bytes[number] * remote_rows
