"""The tile scheduler of a packed batch in plain Python: which SM computes which tile, and when.

`tiles` numbers the tiles as `tilewise.tile.varlen` does on a GPU, and is what that is tested
against. `simulate` hands them out, in a fixed order or to the first free SM; `python -m benchmarks
schedule` draws the result.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from typing import NamedTuple


class Tile(NamedTuple):
    """A tile's number and its work tile."""

    tile: int
    batch: int
    head: int
    m_block: int
    split_idx: int


class Run(NamedTuple):
    """A processor (SM) computes a tile from `start` to `stop`."""

    processor: int
    start: int
    stop: int
    tile: int


def tiles(
    lengths: Sequence[int],
    nheads: int,
    block: int,
    num_splits: int = 1,
    longest_first: bool = False,
) -> Iterator[Tile]:
    """The tiles of a packed batch in the order of their numbers: batch, head, block, split.

    Example:
        >>> [(tile.tile, tile.batch, tile.m_block) for tile in tiles([160, 300], 1, 128)]
        [(0, 0, 0), (1, 0, 1), (2, 1, 0), (3, 1, 1), (4, 1, 2)]

    Lengths 160 and 300 have 2 and 3 blocks of 128. With more heads, tile = m_block + head *
    blocks(batch) + nheads * (blocks before the sequence); block 2 of head 1 of sequence 1 is tile 2
    + 1 * 3 + 2 * 2:

        >>> list(tiles([160, 300], 2, 128))[9]
        Tile(tile=9, batch=1, head=1, m_block=2, split_idx=0)
        >>> [tile.m_block for tile in tiles([160, 300], 1, 128, longest_first=True)]
        [1, 0, 2, 1, 0]

    Args:
        lengths: queries of each sequence.
        nheads: heads.
        block: queries of a tile.
        num_splits: splits of each tile's keys.
        longest_first: gives the blocks of a head from the last to the first.
    """
    tile = 0
    for batch, length in enumerate(lengths):
        blocks = range(-(-length // block))
        for head in range(nheads):
            for m_block in reversed(blocks) if longest_first else blocks:
                for split_idx in range(num_splits):
                    yield Tile(tile, batch, head=head, m_block=m_block, split_idx=split_idx)
                    tile += 1


def key_blocks(length: int, m_block: int, block: int, causal: bool) -> int:
    """The cost of a tile: how many blocks of keys it visits in the self-attention of its sequence.

    Example:
        >>> [key_blocks(300, m_block, 128, causal=True) for m_block in range(3)]
        [1, 2, 3]
        >>> [key_blocks(300, m_block, 128, causal=False) for m_block in range(3)]
        [3, 3, 3]

    Args:
        length: tokens of the sequence.
        m_block: the tile's block of queries.
        block: tokens of a block.
        causal: whether the mask is causal.
    """
    return m_block + 1 if causal else -(-length // block)


def simulate(costs: Sequence[int], processors: int, dynamic: bool) -> list[Run]:
    """When each tile runs and on which processor (SM), by tile number.

    Example:
        >>> simulate([4, 1, 1, 1], 2, dynamic=False)[2]
        Run(processor=0, start=4, stop=5, tile=2)
        >>> simulate([4, 1, 1, 1], 2, dynamic=True)[2]
        Run(processor=1, start=1, stop=2, tile=2)

    Args:
        costs: the time of each tile.
        processors: how many SMs.
        dynamic: the next tile goes to the first free processor, as a counter in memory assigns it;
            else tile i runs on processor i % processors, after that one's tiles before it.
    """
    free = [(0, processor) for processor in range(processors)]
    runs = []
    for tile, cost in enumerate(costs):
        start, processor = free[0] if dynamic else free[tile % processors]
        runs.append(Run(processor, start, stop=start + cost, tile=tile))
        if dynamic:
            heapq.heapreplace(free, (start + cost, processor))
        else:
            free[processor] = (start + cost, processor)
    return runs


def makespan(runs: Sequence[Run]) -> int:
    """When the last tile is done.

    Example:
        >>> makespan(simulate([4, 1, 1, 1], 2, dynamic=False))
        5
    """
    return max((run.stop for run in runs), default=0)


def busy(runs: Sequence[Run], processors: int) -> float:
    """The share of the makespan in which processors compute, over all of them.

    Example:
        >>> busy(simulate([4, 1, 1, 1], 2, dynamic=False), 2)
        0.7
    """
    work = sum(run.stop - run.start for run in runs)
    return work / (processors * makespan(runs)) if work else 1.0
