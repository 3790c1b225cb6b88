"""How long a call would take on GPUs that are not here: tiles that SMs take in turn, the bytes that
its ranks pull and receive, and how much of both at a time.

    forward  = start + max(tiles, bytes) + what nothing hides
    backward = likewise; the parts of gradients follow their tiles

In one node that is a figure, between nodes a range: from all that can be hidden, to nothing at half
the network's bandwidth. Only two GPUs were measured as two nodes.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ...errors import ArgumentError
from ...frontend.scalars import Window
from ...problem import OPEN
from ..layouts.crossing import Moved, nodes_of
from ..layouts.layout import Layout
from ..layouts.work import Band, band_of, keys_of_span
from .plan import BANDWIDTH, GROUPS, NETWORK, check_sizes, moved_by_heads, moved_by_stream, plan

BLOCK, HALF = 128, 64  # queries of a tile and keys of a step; queries of a backward's step
SMS = 132
MOST_TILES = 20_000  # more fill all SMs


# FLOPs a millisecond in long tiles, 16-bit, from rows of one GPU at 32Ki tokens and the most there
# are, on the H200 256Ki
FORWARD = {"h100": 666e9, "h200": 681e9}
BACKWARD = {"h100": 588e9, "h200": 605e9}
START = 1.0  # a tile's start and end, in steps of a block: its loads, its output
# What the kernels before and after a backward's tiles move of each number in q: they read O and dO,
# write zeros to dQ in fp32, read it, and round it. By the data sheets' bytes a millisecond
BESIDE_TILES = 14
MEMORY = {"h100": 3.35e9, "h200": 4.8e9}
# Milliseconds of a forward and a backward beside tiles: publishing, barriers, copies that nothing
# hides. The H100's rows are of earlier code, whose forward had one barrier
STREAM_STARTS = {"h100": (0.02, 0.15), "h200": (0.06, 0.05)}
HEADS_STARTS = 0.2, 0.2
ONE_STARTS = 0.01, 0.04  # of one GPU's launches, by which times of 512 to 16Ki tokens are on a line
UNKNOWN = (
    "not known: nodes of several GPUs, bandwidth that nodes share, the slowest of many cards, "
    "barriers of many hosts; only two GPUs were measured as two nodes"
)


class Simulation:
    """What a call costs, as ranges from the least to the most; in one node both are equal."""

    def __init__(
        self, method: str, layout: Layout, nodes: int, *, moved: Moved, learns: bool
    ) -> None:
        self.method, self.seqlen, self.nodes = method, layout.seqlen, nodes
        # The most that a rank reads in its node, and receives from others
        self.pulled_mb, self.received_mb = (x / 1e6 for x in moved.totals(learns))
        self.ms = 0.0, 0.0
        self.alone = self.transfers = 0.0  # milliseconds of tiles, and of what moves

    def add(self, start: float, tiles: float, moved: Moved, groups: int) -> None:
        """Adds a forward or a backward, in milliseconds, in so many groups of heads."""
        received = moved.received + moved.parts_received
        inside = max(tiles, moved.pulled) + moved.pulled / groups
        across = max(tiles, moved.pulled, received) + (moved.pulled + received) / groups
        best, worst = self.ms
        best += start + moved.parts + across
        worst += start + moved.parts + inside + 2 * received
        self.ms = best, worst
        self.alone += start + tiles
        self.transfers += sum(moved)

    @property
    def tokens_per_second(self) -> tuple[float, ...]:
        """The tokens that all GPUs compute in a second."""
        return tuple(self.seqlen / x * 1e3 for x in reversed(self.ms))

    @property
    def hidden(self) -> tuple[float, ...]:
        """The share of transfers' time that tiles hide."""
        transfers = self.transfers or 1.0
        return tuple(1 - min(1, (x - self.alone) / transfers) for x in reversed(self.ms))

    def __str__(self) -> str:
        lines = [
            f"{self.method}, {self.nodes} node{'s' * (self.nodes > 1)}: {_range(self.ms)} ms, "
            f"{_range([x / 1e6 for x in self.tokens_per_second])} million tokens/s",
            f"MB per GPU: {self.pulled_mb:.1f} pulled inside its node, {self.received_mb:.1f} "
            f"received from others; {_range(self.hidden)} of their time hidden",
        ]
        return "\n".join([*lines, UNKNOWN] if self.nodes > 1 else lines)


def simulate(
    layout: Layout,
    nheads: int,
    nheads_k: int,
    headdim: int,
    *,
    nodes: int = 1,
    gpus: int | None = None,
    method: str | None = None,
    window: Window = None,
    learns: bool = True,
    card: str = "h100",
    nvlink: float = BANDWIDTH / 1e6,
    network: float = NETWORK / 1e6,
) -> Simulation:
    """A causal call's time, tokens per second and bytes on GPUs that need not be there, by a model.

    Example:
        >>> import tilewise.distributed as td
        >>> layout = td.zigzag(1 << 20, 16)
        >>> figures = td.simulate(layout, nheads=32, nheads_k=8, headdim=128, nodes=2, gpus=8)
        >>> figures.method, round(figures.received_mb)
        ('stream', 4563)

    Args:
        layout: which rank has which tokens; 16-bit, one sequence.
        nheads: query heads.
        nheads_k: key heads.
        headdim: that of q, k and v.
        nodes: how many nodes there are, with as many GPUs each.
        gpus: GPUs per node; by default the layout's ranks, divided.
        method: "stream" or "heads"; by default the plan's.
        window: (left, right), as in `tilewise.attention`.
        learns: whether to include a backward.
        card: "h100" or "h200".
        nvlink: GB/s that a GPU pulls in its node.
        network: GB/s that a GPU receives from other nodes.

    Returns:
        A `Simulation`. With several nodes, times are ranges; `str` of it says what is not known.

    Raises:
        ArgumentError: an argument is wrong.
        NotImplementedError: the method does not support the call.
    """
    check_sizes(nheads, nheads_k, headdim=headdim, nodes=nodes)
    for name, speed in (("nvlink", nvlink), ("network", network)):
        if not isinstance(speed, (int, float)) or not speed > 0:
            raise ArgumentError(f"{name}={speed!r}: it must be a positive number of GB/s")
    if gpus is not None and gpus * nodes != layout.ranks:
        raise ArgumentError(
            f"gpus={gpus} and nodes={nodes}: their product must be the number of ranks in the "
            f"layout, {layout.ranks}"
        )
    if card not in FORWARD:
        raise ArgumentError(f"card={card!r}: it must be {' or '.join(map(repr, FORWARD))}")
    nodes_of(layout, nodes)
    group = nheads // nheads_k
    band, size, kv_size = band_of(window, True), nheads * headdim, 2 * nheads_k * headdim
    if method is None and nodes == 1 and nheads_k % layout.ranks == 0:
        method = plan(layout, nheads, nheads_k, headdim, window=window, learns=learns).method
    if method not in ("stream", "heads", None):
        raise ArgumentError(f"method={method!r}: it must be 'stream', 'heads' or None")
    method = method or "stream"
    if method == "heads" and nheads_k % layout.ranks:
        raise NotImplementedError(
            f"method='heads': {nheads_k} key heads cannot be dealt evenly over {layout.ranks} "
            "ranks; method='stream' supports this"
        )
    if method == "heads":
        of_rank = replace(layout, runs=(((0, layout.seqlen),),), rank=0, group=None)
        sizes: Any = dict(q_size=size, kv_size=kv_size, out_size=size, itemsize=2)
        moved = moved_by_heads(layout, nodes, **sizes)
        nheads, groups, starts = nheads // layout.ranks, 2, HEADS_STARTS
    else:
        work = layout.work(window=band)
        of_rank = layout.at(work.index(max(work)))
        sizes = dict(kv_size=kv_size, itemsize=2, learns=learns)
        moved = moved_by_stream(layout, band, nodes, **sizes)
        groups, starts = GROUPS, STREAM_STARTS[card] if layout.ranks > 1 else ONE_STARTS
    figures = Simulation(method, layout, nodes, moved=moved, learns=learns)
    moved = Moved(
        moved.pulled / nvlink / 1e6,
        moved.parts / nvlink / 1e6,
        received=moved.received / network / 1e6,
        parts_received=moved.parts_received / network / 1e6,
    )
    step = 2 * BLOCK * BLOCK * 2 * headdim * SMS  # FLOPs of all SMs
    tiles = _forward_steps(of_rank, band, nheads) * step / FORWARD[card]
    figures.add(starts[0], tiles, moved._replace(parts=0, parts_received=0), groups)
    if learns:
        tiles = _backward_steps(of_rank, band, nheads, group=group) * 2.5 * step / BACKWARD[card]
        beside = BESIDE_TILES * of_rank.tokens * nheads * headdim / MEMORY[card]
        figures.add(starts[1] + beside, tiles, moved, groups)
    return figures


def _forward_steps(layout: Layout, band: Band, nheads: int) -> float:
    """Counts the steps, of a block of keys each, that pass until the last SM is done with a rank's
    tiles, which are blocks of queries. Free SMs take the longest tile that is left.
    """
    tiles = []
    for span in layout.spans:
        for first in range(span.start, span.stop, BLOCK):
            stop = min(span.last, min(first + BLOCK, span.stop) + band.right)
            begin = span.first if band.left == OPEN else max(span.first, first - band.left)
            begin -= (begin - span.first) % BLOCK
            tiles.append(-(-(stop - begin) // BLOCK) + START)
    return _until_done([x for x in sorted(tiles, reverse=True) for _ in range(nheads)])


def _backward_steps(layout: Layout, band: Band, nheads: int, group: int) -> float:
    """Counts them for a backward, whose tiles are blocks of the keys that a run of rows sees, each
    with all query heads of its key head. They come in the kernel's order: run by run, head by head.
    """
    tiles = []
    for span in layout.spans:
        begin, stop = keys_of_span(span, band)
        of_head = []
        for first in range(begin - (begin - span.first) % BLOCK, stop, BLOCK):
            start = max(0, first - band.right - span.start) // HALF
            end = span.stop if band.left == OPEN else min(span.stop, first + BLOCK + band.left)
            of_head.append(group * max(0, -(-(end - span.start) // HALF) - start) / 2 + START)
        tiles += of_head * (nheads // group)
    return _until_done(tiles)


def _until_done(tiles: Sequence[float]) -> float:
    """Returns when the last tile ends, where each goes to the first SM that is free."""
    if len(tiles) > MOST_TILES:
        return sum(tiles) / SMS
    busy = [0.0] * SMS
    for steps in tiles:
        heapq.heapreplace(busy, busy[0] + steps)
    return max(busy)


def _range(ends: Sequence[float]) -> str:
    low, high = ends
    return f"{low:.4g}" if low == high else f"{low:.4g} to {high:.4g}"
