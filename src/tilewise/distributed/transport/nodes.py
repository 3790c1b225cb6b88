"""Nodes: groups of ranks that share memory, and what travels between those that do not.

Of each rank of another node one rank of this one keeps a mirror. What that rank publishes arrives
there once, and all ranks of the node read it in shared memory, as they read what is published here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from ..layouts.work import joined

Bytes = tuple[int, int]  # [start, stop) of a half


class Message(NamedTuple):
    """Bytes [start, stop) of a half of the arena, to a rank or from one."""

    peer: int
    start: int
    stop: int


class Traffic:
    """What a rank sends to other nodes, and what it receives of them, in one go: into its mirrors,
    or into the same bytes of its own half (`is_in_place`).
    """

    __slots__ = ("is_in_place", "peers", "received", "receives", "sends")

    def __init__(
        self, sends: Iterable[Message], receives: Iterable[Message], is_in_place: bool = False
    ) -> None:
        self.sends, self.receives, self.is_in_place = tuple(sends), tuple(receives), is_in_place
        self.peers = [x.peer for x in self.sends + self.receives]
        self.received = sum([x.stop - x.start for x in self.receives])  # bytes, or rows


class Nodes:
    """The nodes of a group, as one of its ranks sees them."""

    def __init__(self, members: tuple[tuple[int, ...], ...], rank: int) -> None:
        self.members, self.rank = members, rank
        self.homes = {x: node for node, ranks in enumerate(members) for x in ranks}
        self.number = self.homes[rank]
        self.mine = members[self.number]
        remote = [x for x in sorted(self.homes) if x not in self.mine]
        # By keeper, the ranks of other nodes whose mirrors it has, one after another
        self.kept = {x: [y for y in remote if self.keeper(y, self.number) == x] for x in self.mine}
        self.slots = max(map(len, self.kept.values()))
        self.has_pairs = any(len(x) > 1 for x in members)

    def keeper(self, owner: int, node: int) -> int:
        """Returns the rank of a node that keeps the mirror of a rank of another one.

        >>> nodes = Nodes(((0, 1), (2, 3), (4,)), rank=0)
        >>> [nodes.keeper(3, node) for node in (0, 2)]
        [1, 4]
        """
        place = self.members[self.homes[owner]].index(owner)
        return self.members[node][place % len(self.members[node])]

    def with_mirrors(self, blocks: Sequence[Any], nbytes: int) -> list[Any]:
        """Returns the block of every rank: of other nodes its mirror, which lies `nbytes` or more
        behind the beginning of its keeper's.
        """
        whole = list(blocks)
        for keeper, owners in self.kept.items():
            for slot, owner in enumerate(owners, 1):
                whole[owner] = blocks[keeper][slot * nbytes :]
        return whole

    def traffic(
        self,
        wanted: Callable[[int, Sequence[int]], Iterable[Bytes]],
        is_in_place: bool = False,
    ) -> Traffic:
        """Lists what crosses nodes, where `wanted` returns what readers want of an owner's half."""
        sends = [
            Message(self.keeper(self.rank, node), start, stop=stop)
            for node, readers in enumerate(self.members)
            if node != self.number
            for start, stop in joined(wanted(self.rank, readers))
        ]
        receives = [
            Message(owner, start, stop=stop)
            for owner in self.kept[self.rank]
            for start, stop in joined(wanted(owner, self.mine))
        ]
        return Traffic(sends, receives, is_in_place=is_in_place)
