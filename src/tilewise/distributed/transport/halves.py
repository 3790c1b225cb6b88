"""Memory of each rank of a group that the other ranks read: a rank publishes there, the others
pull what they need, and none sends.

An arena has two halves. A call publishes into one of them, meets the others at one barrier, and
pulls; the next call does so in the other half, and its barrier proves that all have pulled what
the first one held. So there is one barrier a call.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from ...kernels.common.row_table import Table
from .copies import Piece, bytes_at, copy_one_by_one
from .memory import Memory

Tensor = torch.Tensor
LEAST = 1 << 16  # bytes of a half
HALVES = 2
MOST_VIEWS = 8192


class Arena:
    """On the CPU: a block of each rank in files, and a barrier on the host. All ranks must make the
    same calls; an arena grows on all of them at once.
    """

    counts_pieces = False  # whether a kernel can wait for one piece of what is copied
    part_sums: Any = None  # the kernel that adds what all ranks have published, where there is one

    def __init__(self, barrier: Any, memory: Memory) -> None:
        self.barrier, self.memory = barrier, memory
        self.host = getattr(barrier, "host", barrier)  # on which epochs are counted
        self.rank, self.ranks = barrier.rank, barrier.ranks
        self.half, self.room, self.epoch = 0, 0, -1
        self.blocks: list[Tensor] = []
        self.pulled = 0  # bytes that were read of other ranks, in all
        self.views: dict[Any, Tensor] = {}  # of the blocks; see `exchange.Published`

    def publish(self, nbytes: int, signature: str) -> Tensor:
        """Returns room for what this rank publishes next, uint8: the same size on all ranks."""
        if self.epoch != self.host.epoch:  # an error came to some ranks as the arena grew, or read
            self.epoch, self.room = self.host.epoch, 0
        if not self.room or nbytes > self.room:
            room = max(LEAST, nbytes, 2 * self.room)
            self.grow(HALVES * room, f"{signature}, for which the arena grows to {room} bytes")
            self.room = room
        # By barriers, which ranks count alike: a call that raised on one has published on others
        self.half = (self.barrier.number + 1) % HALVES
        return self.of(self.rank, nbytes)

    def meet(self, signature: str) -> None:
        """Waits until all ranks have published for the call of this signature."""
        self.barrier.wait(signature)

    def abandon(self, error: BaseException | None) -> None:
        """Ends the epoch after an error of this rank; None if the other ranks have learnt of it."""

    def of(self, rank: int, nbytes: int) -> Tensor:
        """Views what a rank has published, uint8: after `meet`, until the call after the next."""
        return self.blocks[rank].narrow(0, self.half * self.room, nbytes)

    def grow(self, nbytes: int, signature: str) -> None:
        """Allocates new memory on every rank, which is there on all of them when it returns."""
        self.views.clear()
        self.blocks = self.memory.allocate(self.barrier, nbytes, signature=signature)

    def keep(self, key: Any, view: Tensor) -> Tensor:
        """Keeps a view of the blocks until these grow."""
        if len(self.views) >= MOST_VIEWS:
            self.views.clear()
        self.views[key] = view
        return view

    def copy(self, table: Table, sources: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
        """Makes the copies of a table, all of this rank's memory."""
        copy_one_by_one(table, sources, targets=targets)

    def add_runs(
        self, parts: Tensor, places: Tensor, targets: Tensor | None, total: Tensor
    ) -> None:
        """Writes sums of rows of `parts`, at `places` (rows, runs), to rows of `total`."""
        exact = parts.new_zeros((len(places), *total.shape[1:]))
        for place in places.unbind(1):
            is_seen = place >= 0
            exact[is_seen] += parts[place[is_seen].long()]
        if targets is None:
            total.copy_(exact)
        else:
            total[targets.long()] = exact.to(total.dtype)

    def pull(
        self, lists: Sequence[Sequence[Piece]], targets: Sequence[Tensor], *, counted: int = 0
    ) -> list[Any]:
        """Begins to copy lists of pieces of what other ranks have published, one list after the
        other, while the caller's stream goes on. Every `counted` pieces are counted as one.

        Returns:
            A mark for each list, for `arrive`.
        """
        marks = []
        with self.copying():
            for pieces in lists:
                self.pulled += sum([x.nbytes for x in pieces])
                for number, piece in enumerate(pieces, 1):
                    self._copy_piece(piece, targets[piece.target])
                    if counted and number % counted == 0:
                        self.count_piece()
                marks.append(self.mark())
        return marks

    def _copy_piece(self, piece: Piece, target: Tensor) -> None:
        nbytes = piece.nbytes
        block = self.of(piece.rank, piece.start + nbytes)
        row = bytes_at(target, piece.offset, pitch=nbytes, rows=1, width=nbytes)
        row.copy_(block[None, piece.start :])

    def count_piece(self) -> None:
        """Counts the copies inside of `copying` so far as arrived, in an arena that can."""

    @contextlib.contextmanager
    def copying(self) -> Iterator[None]:
        """Makes the copies inside while the caller's stream goes on."""
        yield

    def mark(self) -> Any:
        """Marks the copies inside of `copying` so far, for `arrive`."""

    def arrive(self, mark: Any) -> None:
        """Lets the caller's stream wait for these copies."""

    def settle(self, pulled: Sequence[Tensor]) -> None:
        """Makes sure that what a failed call has pulled is not taken for a result."""
