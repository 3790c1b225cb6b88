"""Sums of the gradients of keys of one group of heads after another: a rank writes its parts into
the memory of the ranks that own the keys, by DMA, while the next group is computed, and these add
what has come to their own, in the order of ranks, and round once.

The bits are those of `sums`, which publishes parts in slices and lets kernels read them. Here no
part is copied before it goes, and no SM waits for another GPU. But each key of another rank must
have one part, and a half of the arena room for those of a group of heads.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence

import torch

from ..layouts.layout import Layout
from ..layouts.pulls import place_among, pulls_in_turn, rows_seen, shared_rows
from ..layouts.work import Band, KeyRun, Run, keys_of_span
from ..transport.copies import Piece
from ..transport.exchange import starts_of
from ..transport.halves import Arena
from .shard_call import ShardCall
from .sum_tables import places_of

Tensor = torch.Tensor
LEAST_ROWS = 1 << 14  # of the query heads of a small group
MOST_SHARING = 0  # query heads of a key head: 1, once bits and times were seen on GPUs


class PushedSums:
    """Adds the parts of a group of heads, into dK and dV of all heads, `totals`. `before` are the
    sums of the group before.
    """

    def __init__(
        self,
        arena: Arena,
        spec: ShardCall,
        *,
        signature: str,
        totals: Sequence[Tensor],
        heads: range,
        before: PushedSums | None,
    ) -> None:
        self.arena, self.spec, self.signature = arena, spec, f"{signature}, pushed by groups"
        self.totals = [x[:, heads.start : heads.stop] for x in totals]
        self.before = before
        self.parts: list[Tensor] = []

    def begin(self, dk: Tensor, dv: Tensor, *, runs: tuple[KeyRun, ...] = ()) -> None:
        """Takes this rank's parts of one sequence, as `Sums.begin` does, and sends them on; then
        the sums of the group before are made, whose parts came meanwhile.
        """
        layout, band = self.spec.layout, self.spec.band
        exact = torch.promote_types(self.totals[0].dtype, torch.float32)
        self.parts = [x[0].to(exact).contiguous() for x in (dk, dv)]
        runs = runs or (KeyRun(0, 0, stop=layout.seqlen),)
        row_bytes = tuple(x[:1].numel() * x.itemsize for x in self.parts)
        self.places = places_on(layout, band, runs=runs, device=dk.device)
        if self.before is not None:
            self.before._meet()  # all have read what lies where these parts go
        room = room_for(layout, band, row_bytes=row_bytes)
        self.received = self._views(self.arena.publish(room, self.signature), row_bytes)
        pieces = pieces_of(layout, band, runs=runs, row_bytes=row_bytes)
        self.mark = self.arena.push(pieces, self.parts)
        if self.before is not None:
            self.before._add()
        self.before = None

    def add_all(self) -> None:
        """Begins nothing: parts are in flight."""

    def finish(self) -> tuple[Tensor, Tensor]:
        """Returns the gradients of this rank's keys and values, once the sums are made."""
        if self.parts:
            self._meet()
            self._add()
        dk, dv = (x[None] for x in self.totals)
        return dk, dv

    def _meet(self) -> None:
        """Waits for the parts of all ranks."""
        self.arena.arrive(self.mark)
        self.arena.meet(self.signature)

    def _add(self) -> None:
        """Makes the sums."""
        layout, rank = self.spec.layout, self.spec.layout.rank
        for part, received, total in zip(self.parts, self.received, self.totals):
            self.arena.add_runs(
                part,
                self.places,
                targets=None,
                total=total,
                received=received,
                before=rank,
                after=layout.ranks - 1 - rank,
            )
            self.arena.pulled += received.numel() * received.itemsize
        self.parts = []

    def _views(self, half: Tensor, row_bytes: tuple[int, ...]) -> list[Tensor]:
        """Views the parts of other ranks in this one's half, (rows, ...)."""
        rows = received_rows(self.spec.layout, self.spec.band, self.spec.layout.rank)[-1]
        views = []
        for x, start in zip(self.parts, starts_of(row_bytes, rows)):
            nbytes = rows * x[:1].numel() * x.itemsize
            views.append(half[start : start + nbytes].view(x.dtype).view((rows, *x.shape[1:])))
        return views


def pushed_groups(
    spec: ShardCall, q: Tensor, k: Tensor, v: Tensor, *, parts_in: torch.dtype
) -> tuple[range, ...]:
    """Returns the groups of key heads of a backward whose parts are pushed; none where they are
    not, as in calls where many query heads share keys: what they exchange is short beside what they
    compute, and not worth more launches.
    """
    (batch, _, nheads, _), nheads_k, itemsize = q.shape, k.shape[2], parts_in.itemsize
    if batch != 1 or nheads > MOST_SHARING * nheads_k or spec.uses_head_index:
        return ()
    widths, width = (k.shape[3], v.shape[3]), (k.shape[3] + v.shape[3]) * k.itemsize
    row_bytes = tuple(n * itemsize for n in widths)
    return _groups(spec.layout, spec.band, nheads_k, row_bytes=row_bytes, key_bytes=width)


@functools.lru_cache(maxsize=256)
def _groups(
    layout: Layout, band: Band, nheads_k: int, *, row_bytes: tuple[int, ...], key_bytes: int
) -> tuple[range, ...]:
    """Returns four groups, of which the first and the last are small: nothing hides the keys of the
    one and the parts of the other. Bytes are those of a row and a head.
    """
    small = -(-nheads_k // 8)
    sizes = small, (nheads_k + 1) // 2 - small, nheads_k // 2 - small, small
    if small * (layout.seqlen // layout.ranks) < LEAST_ROWS or min(sizes) < 1:
        return ()
    if not serves(layout, band):
        return ()
    room = room_for(layout, band, row_bytes=tuple(max(sizes) * n for n in row_bytes))
    published = max(sum(stop - start for start, stop in x) for x in shared_rows(layout, band))
    if room > published * nheads_k * key_bytes:  # else the arena has it: that of the keys
        return ()
    ends = itertools.accumulate(sizes, initial=0)
    return tuple(range(start, stop) for start, stop in itertools.pairwise(ends))


@functools.lru_cache(maxsize=256)
def serves(layout: Layout, band: Band) -> bool:
    """Tells whether no rank has two runs of queries that see the same key of another rank."""
    for rank in range(layout.ranks):
        of_rank = layout.at(rank)
        keys = [keys_of_span(span, band) for span in of_rank.spans]
        for (a, b), (c, d) in itertools.combinations(keys, 2):
            shared = (max(a, c), min(b, d))
            if any(pull.rank != rank for pull in pulls_in_turn(of_rank, [shared])):
                return False
    return True


@functools.lru_cache(maxsize=256)
def room_for(layout: Layout, band: Band, *, row_bytes: tuple[int, ...]) -> int:
    """Returns the bytes of a half that has all parts that come to a rank, the most of any."""
    counts = (received_rows(layout, band, owner)[-1] for owner in range(layout.ranks))
    return max(starts_of(row_bytes, rows)[-1] for rows in counts)


@functools.lru_cache(maxsize=256)
def received_rows(layout: Layout, band: Band, owner: int) -> tuple[int, ...]:
    """Returns where the parts of each rank begin among those that come to an owner, and the end.

    >>> import tilewise.distributed as td
    >>> [received_rows(td.zigzag(8, 2), Band(right=0), rank) for rank in (0, 1)]
    [(0, 0, 2), (0, 4, 4)]
    """
    counts = [
        sum(stop - start for start, stop in seen_rows(layout, band, owner, rank))
        for rank in range(layout.ranks)
    ]
    return tuple(itertools.accumulate(counts, initial=0))


def seen_rows(layout: Layout, band: Band, owner: int, rank: int) -> list[Run]:
    """Returns the rows of an owner whose keys another rank sees; none of its own."""
    return [] if rank == owner else rows_seen(layout, owner, [rank], band=band)


@functools.lru_cache(maxsize=64)
def pieces_of(
    layout: Layout, band: Band, *, runs: tuple[KeyRun, ...], row_bytes: tuple[int, ...]
) -> tuple[Piece, ...]:
    """Lists what this rank writes: bytes of its parts, which lie in `runs`, for the halves of the
    owners of their keys, those of the rank before it first.
    """
    pieces = []
    for step in range(1, layout.ranks):
        owner = (layout.rank - step) % layout.ranks
        *starts, end = received_rows(layout, band, owner)
        first, buffers = starts[layout.rank], starts_of(row_bytes, end)
        for target, source in parts_for(layout, band, owner, runs=runs):
            rows = target.stop - target.start
            for tensor, (buffer, nbytes) in enumerate(zip(buffers, row_bytes)):
                start, offset = buffer + (first + target.start) * nbytes, source * nbytes
                pieces.append(Piece(owner, start, tensor, offset=offset, nbytes=rows * nbytes))
    return tuple(pieces)


def parts_for(
    layout: Layout, band: Band, owner: int, *, runs: Sequence[KeyRun]
) -> Iterator[tuple[slice, int]]:
    """Yields the parts of an owner's keys, which one run sees: their rows among all of its rows
    that this rank sees, and where they begin among this rank's parts.
    """
    rows_here = seen_rows(layout, band, owner, layout.rank)
    visible: list[Run] = [keys_of_span(span, band) for span in layout.spans]
    if len(runs) != len(visible):  # one place for each key, whichever run has seen it
        visible = [(0, layout.seqlen)] * len(runs)
    for row, start, stop in layout.at(owner).placed:
        of_runs = zip(runs, visible)
        for (first, last), (run, (begin, end)) in itertools.product(rows_here, of_runs):
            a = max(start + max(first - row, 0), run.start, begin)
            b = min(stop, start + last - row, run.stop, end)
            if a < b:
                place = place_among(rows_here, row + a - start)
                yield slice(place, place + b - a), run.row + a - run.start


@functools.lru_cache(maxsize=8)
def places_on(
    layout: Layout, band: Band, *, runs: tuple[KeyRun, ...], device: torch.device
) -> Tensor:
    """Returns where the parts of each of this rank's rows lie, (rows, columns), int32, -1 for none:
    for each rank before this one among what has come, for each run among its own parts, for each
    rank behind.
    """
    me = layout.rank
    starts = received_rows(layout, band, me)
    of_runs = places_of(runs, layout.seqlen)[_positions(layout)]
    columns = torch.full((layout.tokens, layout.ranks), -1, dtype=torch.int32)
    for rank in range(layout.ranks):
        first = starts[rank]
        for start, stop in seen_rows(layout, band, me, rank):
            columns[start:stop, rank] = torch.arange(first, first + stop - start)
            first += stop - start
    return torch.cat([columns[:, :me], of_runs, columns[:, me + 1 :]], 1).contiguous().to(device)


def _positions(layout: Layout) -> Tensor:
    runs = [torch.arange(x.start, x.stop) for x in layout.placed]
    return torch.cat(runs) if runs else torch.arange(0)
