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
        """Room for what this rank publishes next, uint8; `signature` is that of the call, and ranks
        that make the same one ask for as many bytes.
        """
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
        """After an error of this rank or of another, which the host has said; None if before."""

    def of(self, rank: int, nbytes: int) -> Tensor:
        """What a rank has published, uint8; after `meet`, and until the call after the next."""
        return self.blocks[rank].narrow(0, self.half * self.room, nbytes)

    def grow(self, nbytes: int, signature: str) -> None:
        """New memory on every rank, which is there on all of them when it returns."""
        self.views.clear()
        self.blocks = self.memory.allocate(self.barrier, nbytes, signature)

    def keep(self, key: Any, view: Tensor) -> Tensor:
        """Keeps a view of the blocks until these grow."""
        if len(self.views) >= MOST_VIEWS:
            self.views.clear()
        self.views[key] = view
        return view

    def copy(self, table: Table, sources: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
        """The copies of a table, all of this rank's memory."""
        copy_one_by_one(table, sources, targets)

    def add_runs(
        self, parts: Tensor, places: Tensor, targets: Tensor | None, total: Tensor
    ) -> None:
        """The sums of the rows of `parts` at `places`, (rows, runs), none below 0, into the rows
        of `total` that `targets` names, or into all.
        """
        exact = parts.new_zeros(len(places), *total.shape[1:])
        for place in places.unbind(1):
            is_seen = place >= 0
            exact[is_seen] += parts[place[is_seen].long()]
        if targets is None:
            total.copy_(exact)
        else:
            total[targets.long()] = exact.to(total.dtype)

    def pull(self, pieces: Sequence[Piece], targets: Sequence[Tensor], counted: int = 0) -> Any:
        """Begins to copy pieces of what other ranks have published, beside what the caller's stream
        does next; the mark of their arrival. Every `counted` of them are counted as one.
        """
        return self.pull_all((pieces,), targets, counted)[0]

    def pull_all(
        self, lists: Sequence[Sequence[Piece]], targets: Sequence[Tensor], counted: int = 0
    ) -> list[Any]:
        """Does as `pull` for several lists, one after the other; the mark of each."""
        marks = []
        with self.copying():
            for pieces in lists:
                self.pulled += sum([x.nbytes for x in pieces])
                self.begin(pieces, targets, counted)
                marks.append(self.mark())
        return marks

    def begin(self, pieces: Sequence[Piece], targets: Sequence[Tensor], counted: int) -> None:
        """Inside of `copying`: begins these copies."""
        for number, (rank, start, target, at, nbytes) in enumerate(pieces, 1):
            block = self.of(rank, start + nbytes)
            bytes_at(targets[target], at, nbytes, 1, nbytes).copy_(block[None, start:])
            if counted and number % counted == 0:
                self.count_piece()

    def count_piece(self) -> None:
        """Inside of `copying`, of an arena that counts pieces."""

    @contextlib.contextmanager
    def copying(self) -> Iterator[None]:
        """Copies inside are made beside what the caller's stream does next."""
        yield

    def mark(self) -> Any:
        """Inside of `copying`: the copies that were begun so far, for `arrive`."""

    def arrive(self, mark: Any) -> None:
        """What the caller's stream does next follows these copies."""

    def settle(self, *pulled: Tensor) -> None:
        """Once all copies have arrived: makes sure that tensors which were pulled of a call that
        failed are not taken for results.
        """
