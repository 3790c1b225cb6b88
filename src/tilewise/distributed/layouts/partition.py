"""The ways to partition the tokens of a sequence over ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from ...errors import ArgumentError
from ...frontend.scalars import check_size
from .balance import balanced
from .group import checked, ranks_of
from .layout import Layout, check_starts, made
from .work import Run

Tensor = torch.Tensor


def contiguous(seqlen: int, group: Any = None) -> Layout:
    """One contiguous shard per rank, in rank order.

    Example:
        >>> contiguous(10, 4).counts
        (3, 3, 3, 1)

    Without a causal mask all ranks have the same work. With one, the last rank has almost twice the
    mean, unless `method="heads"` exchanges heads.

    Args:
        seqlen: tokens in the sequence.
        group: a process group, a DeviceMesh of ranks, or of nodes and their ranks, or a number of
            ranks; None is the default group.

    Raises:
        ArgumentError: an argument is wrong.
    """
    ranks = ranks_of(group)
    seqlen = check_size("seqlen", seqlen)
    size = -(-seqlen // ranks)
    runs = [[_chunk(rank, size, seqlen=seqlen)] for rank in range(ranks)]
    return _layout("contiguous", seqlen, runs=runs, group=group)


def zigzag(seqlen: int, group: Any = None) -> Layout:
    """Two chunks per rank, one from the front and one from the back: equal work when causal.

    Example:
        >>> zigzag(8, 2).runs
        (((0, 2), (6, 8)), ((2, 6),))

    Args:
        seqlen: tokens in the sequence.
        group: a process group, a DeviceMesh of ranks, or of nodes and their ranks, or a number of
            ranks; None is the default group.

    Raises:
        ArgumentError: an argument is wrong.
    """
    ranks = ranks_of(group)
    seqlen = check_size("seqlen", seqlen)
    size = -(-seqlen // (2 * ranks))
    chunks = [(rank, 2 * ranks - 1 - rank) for rank in range(ranks)]
    runs = [[_chunk(i, size, seqlen=seqlen) for i in pair] for pair in chunks]
    return _layout("zigzag", seqlen, runs=runs, group=group)


def striped(seqlen: int, group: Any = None, block: int = 128) -> Layout:
    """Blocks in round-robin order: rank r has blocks r, r + N, r + 2 N and so on.

    Example:
        >>> striped(7, 2, block=2).runs
        (((0, 2), (4, 6)), ((2, 4), (6, 7)))

    Args:
        seqlen: tokens in the sequence.
        group: a process group, a DeviceMesh of ranks, or of nodes and their ranks, or a number of
            ranks; None is the default group.
        block: tokens per block.

    Raises:
        ArgumentError: an argument is wrong.
    """
    ranks = ranks_of(group)
    seqlen = check_size("seqlen", seqlen)
    block = check_size("block", block, least=1)
    blocks = range(-(-seqlen // block))
    runs = [[_chunk(i, block, seqlen=seqlen) for i in blocks[rank::ranks]] for rank in range(ranks)]
    return _layout("striped", seqlen, runs=runs, group=group)


def documents(cu_seqlens: Sequence[int] | Tensor, group: Any = None, chunk: int = 512) -> Layout:
    """Packed documents in chunks: equal tokens per rank, and nearly equal work when causal.

    Example:
        >>> layout = documents([0, 9000, 9100, 32768], 4)
        >>> layout.counts
        (8192, 8192, 8192, 8192)
        >>> work = layout.work(causal=True)
        >>> max(work) < 1.01 * sum(work) / 4
        True

    Args:
        cu_seqlens: where documents begin, and the end.
        group: a process group, a DeviceMesh of ranks, or of nodes and their ranks, or a number of
            ranks; None is the default group.
        chunk: tokens per chunk. Shorter chunks balance work better, and give a rank more runs.

    Raises:
        ArgumentError: an argument is wrong.
    """
    starts = check_starts(cu_seqlens)
    chunk = check_size("chunk", chunk, least=1)
    runs = balanced(starts, ranks_of(group), chunk=chunk)
    return _layout("documents", starts[-1], runs=runs, group=group).packed(starts)


def from_positions(positions: Tensor | Sequence[Tensor], group: Any = None) -> Layout:
    """Any assignment of tokens to ranks.

    Example:
        >>> import torch
        >>> from_positions(torch.tensor([[0, 3], [2, 1]]), 2).runs
        (((0, 1), (3, 4)), ((2, 3), (1, 2)))

    Args:
        positions: each rank's positions, in its order; together they contain each position once.
        group: a process group, a DeviceMesh of ranks, or of nodes and their ranks, or a number of
            ranks; None is the default group.

    Raises:
        ArgumentError: an argument is wrong.
    """
    of_ranks = [[int(i) for i in part] for part in positions]
    ranks = ranks_of(group)
    if len(of_ranks) != ranks:
        raise ArgumentError(
            f"positions of {len(of_ranks)} ranks, and the group has {ranks}: pass one row "
            "or tensor for each"
        )
    seqlen = sum(map(len, of_ranks))
    if sorted(i for part in of_ranks for i in part) != list(range(seqlen)):
        raise ArgumentError(
            f"there are {seqlen} positions: each of 0 to {seqlen - 1} must be there once"
        )
    runs = [[(i, i + 1) for i in part] for part in of_ranks]
    return _layout("from_positions", seqlen, runs=runs, group=group)


def _chunk(index: int, size: int, *, seqlen: int) -> Run:
    """Returns one of equal chunks, of which the last are shorter or empty."""
    return min(index * size, seqlen), min((index + 1) * size, seqlen)


def _layout(kind: str, seqlen: int, *, runs: Sequence[Sequence[Run]], group: Any) -> Layout:
    group = checked(group)
    layout = Layout(kind, seqlen, runs=tuple(map(_joined, runs)))
    if type(group) is not int:
        layout = replace(layout, rank=dist.get_rank(group), group=group)
    return made(layout)


def _joined(runs: Sequence[Run]) -> tuple[Run, ...]:
    """Joins runs that continue each other, and leaves out the empty ones."""
    joined: list[Run] = []
    for start, stop in runs:
        if joined and joined[-1][1] == start and start < stop:
            joined[-1] = joined[-1][0], stop
        elif start < stop:
            joined.append((start, stop))
    return tuple(joined)
