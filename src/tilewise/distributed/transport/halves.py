"""Memory of each rank of a group that the other ranks read: a rank publishes there, the others
pull what they need, and none sends.

An arena has two halves. A call publishes into one of them, meets the others at one barrier, and
pulls; the next call does so in the other half, and its barrier proves that all have pulled what
the first one held. So there is one barrier a call.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from ...kernels.common.row_table import Table
from .copies import Piece, bytes_at, copy_one_by_one
from .links import Exchange, Links
from .memory import Memory
from .nodes import Traffic

Tensor = torch.Tensor
Tensors = Sequence[Tensor]
LEAST = 1 << 16  # bytes of a half
HALVES = 2
MOST_VIEWS = 8192


class Arena:
    """On the CPU: a block of each rank in files, and a barrier on the host. All ranks must make the
    same calls; an arena grows on all of them at once.
    """

    counts_pieces = False  # whether a kernel can wait for one piece of what is copied
    slice_bytes = LEAST  # of gradient parts that are exchanged at once, though K and V take less
    part_sums: Any = None  # the kernel that adds what all ranks have published, where there is one

    def __init__(self, barrier: Any, memory: Memory, *, links: Links | None = None) -> None:
        self.barrier, self.memory = barrier, memory
        self.links: Any = links
        self.host = getattr(barrier, "host", barrier)  # on which epochs are counted
        self.rank, self.ranks = barrier.rank, barrier.ranks
        self.nodes = None if links is None else links.nodes  # None where there is one
        self.parts = 1 + (0 if self.nodes is None else self.nodes.slots)  # of a half, with mirrors
        self.half, self.room, self.epoch = 0, 0, -1
        self.blocks: list[Tensor] = []
        self.pulled = 0  # bytes that were read of other ranks, in all
        self.received = 0  # bytes that came from other nodes, in all
        self.views: dict[Any, Any] = {}  # of the blocks; see `exchange.Published`

    def publish(self, nbytes: int, signature: str) -> Tensor:
        """Returns room for what this rank publishes next, uint8: the same size on all ranks."""
        if self.epoch != self.host.epoch:  # an error came to some ranks as the arena grew, or read
            self.epoch, self.room, self.half = self.host.epoch, 0, 0
        if not self.room or nbytes > self.room:
            room = max(LEAST, nbytes, 2 * self.room)
            self.grow(room, f"{signature}, for which the arena grows to {room} bytes")
            self.room = room
        # Ranks count alike, in one epoch: a call that raised on one has ended it on all
        self.half = (self.half + 1) % HALVES
        return self.of(self.rank, nbytes)

    def meet(self, signature: str) -> None:
        """Waits until all ranks have published for the call of this signature."""
        self.barrier.meet(signature)

    def abandon(self, error: BaseException | None) -> None:
        """Ends the epoch after an error of this rank; None if the other ranks have learnt of it."""
        if self.links is not None:
            self.links.settle()

    def of(self, rank: int, nbytes: int) -> Tensor:
        """Views what a rank has published, uint8: after `meet`, until the call after the next."""
        key = rank, self.half, nbytes
        memory = self.views.get(key)
        if memory is None:
            memory = self.keep(key, self.blocks[rank].narrow(0, self.begin_of_half(), nbytes))
        return memory

    def begin_of_half(self) -> int:
        """Returns where the half begins in each block, in bytes."""
        return self.half * self.parts * self.room

    def grow(self, room: int, signature: str) -> None:
        """Allocates new memory on every rank, which is there on all of them when it returns."""
        self.views.clear()
        self.blocks = self.allocate(room, signature)

    def allocate(self, room: int, signature: str) -> list[Tensor]:
        """Allocates a block of every rank: halves of so many bytes, each before the mirrors that
        the rank keeps.
        """
        nbytes = HALVES * self.parts * room
        blocks = self.memory.allocate(self.host, nbytes, signature=signature)
        return blocks if self.nodes is None else self.nodes.with_mirrors(blocks, room)

    def keep(self, key: Any, view: Any) -> Any:
        """Keeps a view of the blocks, or some in a record, until these grow."""
        if len(self.views) >= MOST_VIEWS:
            self.views.clear()
        self.views[key] = view
        return view

    def copy(self, table: Table, sources: Tensors, targets: Tensors, *, meets: str = "") -> None:
        """Makes the copies of a table, of this rank's memory, and meets ranks that call `meets`."""
        copy_one_by_one(table, sources, targets=targets)
        if meets:
            self.meet(meets)

    def add_runs(
        self, parts: Tensors, places: Tensor, targets: Tensor | None, totals: Tensors
    ) -> None:
        """Writes sums of rows of each tensor's parts, at `places` (rows, runs), to rows of its
        total.
        """
        for x, total in zip(parts, totals):
            rows = x.flatten(1)
            exact = rows.new_zeros((len(places), rows.shape[1]))
            for place in places.unbind(1):
                is_seen = place >= 0
                exact[is_seen] += rows[place[is_seen].long()]
            sums = exact.unflatten(1, total.shape[1:])
            if targets is None:
                total.copy_(sums)
            else:
                total[targets.long()] = sums.to(total.dtype)

    def begin(self, traffic: Traffic) -> Exchange:
        """Begins to exchange with other nodes, inside of `copying`."""
        calls = self.views.get((self.half, traffic))
        if calls is None:
            calls = self.keep((self.half, traffic), self.links.calls_of(traffic, self._bytes))
        self.received += traffic.received
        return self.links.begin(traffic, calls)

    def finish(self, exchange: Exchange) -> None:
        """Ends an exchange, of this rank and of its node, whose mirrors may then be read."""
        self.links.finish(exchange)
        if self.links.nodes.has_pairs:
            self.meet_node()

    def meet_node(self) -> None:
        """Waits for all ranks of the node; here for all there are."""
        self.barrier.meet(self.host.signature)

    def _bytes(self, rank: int, start: int, stop: int) -> Tensor:
        return self.of(rank, stop)[start:]

    def arrivals(
        self, lists: Sequence[Sequence[Piece]], traffic: Sequence[Traffic]
    ) -> Iterator[Sequence[Piece]]:
        """Yields lists of pieces once these are in the node: to each exchange belong as many of
        them, those without pieces of other nodes before they have come.
        """
        begun = [self.begin(x) for x in traffic]
        size, ended = len(lists) // len(traffic), 0
        for number, pieces in enumerate(lists):
            # The exchanges of lists before, and this one's own if it has pieces of other nodes
            needed = number // size + self._are_remote(pieces)
            while ended < needed:
                self.finish(begun[ended])
                ended += 1
            yield pieces
        for exchange in begun[ended:]:
            self.finish(exchange)

    def _are_remote(self, pieces: Sequence[Piece]) -> bool:
        mine = self.links.nodes.mine
        return any([x.rank not in mine for x in pieces])

    def pull(
        self,
        lists: Sequence[Sequence[Piece]],
        targets: Sequence[Tensor],
        *,
        traffic: Sequence[Traffic] = (),
        then: Callable[[], None] | None = None,
    ) -> list[Any]:
        """Begins to copy lists of pieces of what other ranks have published, one list after the
        other, while the caller's stream goes on. What comes from other nodes arrives by `traffic`,
        each for as many of the lists. Copies that `then` makes follow each list, before its mark.

        Returns:
            A mark for each list, for `arrive`.
        """
        marks = []
        with self.copying():
            for pieces in self.arrivals(lists, traffic) if traffic else lists:
                for piece in pieces:
                    self._copy_piece(piece, targets[piece.target])
                    if piece.arrived:
                        self.count(piece.arrived)
                if then is not None:
                    then()
                marks.append(self.mark())
        return marks

    def _copy_piece(self, piece: Piece, target: Tensor) -> None:
        of_rows: Any = dict(rows=piece.rows, width=piece.nbytes)
        end = piece.start + (piece.rows - 1) * piece.pitch + piece.nbytes
        source = bytes_at(self.of(piece.rank, end), piece.start, pitch=piece.pitch, **of_rows)
        bytes_at(target, piece.offset, pitch=piece.step, **of_rows).copy_(source)
        self.pulled += piece.rows * piece.nbytes

    def count(self, arrived: int) -> None:
        """Says how many pieces have arrived with the copies so far, in an arena that can."""

    def copying(self) -> contextlib.AbstractContextManager[None]:
        """Makes the copies inside while the caller's stream goes on."""
        return contextlib.nullcontext()

    def mark(self) -> Any:
        """Marks the copies inside of `copying` so far, for `arrive`."""

    def arrive(self, mark: Any) -> None:
        """Lets the caller's stream wait for these copies."""

    def settle(self, pulled: Sequence[Tensor]) -> None:
        """Makes sure that what a failed call has pulled is not taken for a result."""
