"""Which method is the fastest for a call, by a model of its time: the work of the slowest rank, the
bytes that it pulls, and how much of the pulling nothing hides.

    t = FLOPs / rate + bytes / bandwidth + one barrier a step

of the bytes that nothing hides: all but those of the forward of stream, which begins when one of
GROUPS is there, and takes no less than all bytes do. There are two bandwidths: of what a rank pulls
in its node, and of what it receives from others.

The rates are those of H200s (bf16, NVLink, November 2026: 650 TFLOP/s forward, 585 backward,
365 GB/s pulled by each GPU at once); a choice depends on their ratio alone. How well tiles fill a
GPU is not in it, but for the launches of the backward of stream, one for each of two runs.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

from ...errors import ArgumentError
from ...frontend.scalars import Window, check_size
from ..layouts.crossing import Moved, crossing, nodes_of
from ..layouts.layout import Layout
from ..layouts.pulls import shared_rows
from ..layouts.work import Band, band_of, keys_of

FORWARD, BACKWARD = 650e9, 585e9  # FLOPs a millisecond
BANDWIDTH = 365e6  # bytes a millisecond, inside a node
NETWORK = 45e6  # between nodes: what a GPU's link of 400 Gbit/s may give, not measured
BARRIER = 0.01  # milliseconds
GROUPS = 4  # pieces that are pulled one after another: nothing hides the first one
SHORTER = 0.99  # of the backward's rate: fits stream on two H100s, 8Ki to 64Ki tokens each


class Cost(NamedTuple):
    """The estimated cost of one method, forward and backward, on its slowest rank."""

    method: str
    tflop: float
    mbytes: float
    ms: float
    reason: str | None = None  # why it does not support the call
    received: float = 0  # MB from other nodes, by the rank that receives the most


class Plan(NamedTuple):
    """The methods by their time; as a string a table."""

    method: str
    costs: tuple[Cost, ...]
    nodes: int = 1

    def __str__(self) -> str:
        has_nodes = self.nodes > 1
        lines = ["method     TFLOP     MB pulled" + "   MB received" * has_nodes + "       ms"]
        for method, tflop, mbytes, ms, reason, received in self.costs:
            across = f"{received:13.1f} " if has_nodes else ""
            figures = f"{tflop:8.3f} {mbytes:13.1f} {across}{ms:8.3f}"
            mark = "  <-" if method == self.method else ""
            lines.append(f"{method:7} " + (f"{figures}{mark}" if reason is None else reason))
        if has_nodes:
            speeds = f"{BANDWIDTH / 1e6:g} GB/s inside a node, {NETWORK / 1e6:g} GB/s between nodes"
            lines.append(f"{self.nodes} nodes; each GPU has {speeds}")
        return "\n".join(lines)


def check_sizes(nheads: Any, nheads_k: Any, **sizes: Any) -> None:
    """Refuses what is no number of heads, or of another size."""
    for name, value in dict(nheads=nheads, nheads_k=nheads_k, **sizes).items():
        check_size(name, value, least=1)
    if nheads % nheads_k:
        raise ArgumentError(f"nheads={nheads}: it must be a multiple of nheads_k={nheads_k}")


def plan(
    layout: Layout,
    nheads: int,
    nheads_k: int,
    headdim: int,
    headdim_v: int | None = None,
    *,
    batch: int = 1,
    causal: bool | str = True,
    window: Window = None,
    itemsize: int = 2,
    learns: bool = True,
    nodes: int = 1,
) -> Plan:
    """Each method's estimated cost, from a model for H200s, and the method that is chosen.

    Example:
        >>> import tilewise.distributed as td
        >>> print(td.plan(td.zigzag(65536, 4), nheads=32, nheads_k=8, headdim=128))
        method     TFLOP     MB pulled       ms
        heads     30.787         503.3   52.542  <-
        stream    30.787         805.3   52.834

    Args:
        layout: which rank has which tokens.
        nheads: query heads.
        nheads_k: key heads.
        headdim: that of q and k.
        headdim_v: that of v, if different.
        batch: sequences.
        causal: whether the mask is causal.
        window: (left, right), as in `tilewise.attention`.
        itemsize: bytes per element.
        learns: whether to include a backward.
        nodes: how many nodes the ranks are, as many in each.

    Returns:
        A `Plan` with `method` and `costs`; `str` of it is the table.

    Raises:
        ArgumentError: a size is no int of at least 1, or nheads no multiple of nheads_k.
    """
    headdim_v = headdim if headdim_v is None else headdim_v
    check_sizes(nheads, nheads_k, headdim=headdim, headdim_v=headdim_v, batch=batch, nodes=nodes)
    heads, stream = _costs(
        layout,
        band_of(window, causal),
        q_size=batch * nheads * headdim,
        out_size=batch * nheads * headdim_v,
        kv_size=batch * nheads_k * (headdim + headdim_v),
        itemsize=itemsize,
        learns=learns,
        nodes=nodes,
    )
    if nheads_k % layout.ranks:
        reason = f"{nheads_k} key heads cannot be dealt evenly over {layout.ranks} ranks"
        heads = heads._replace(reason=reason)
    best = min((x for x in (heads, stream) if x.reason is None), key=lambda x: x.ms)
    best = best if nodes == 1 else stream  # as a call chooses: heads would hide less
    return Plan(best.method, (heads, stream), nodes)


def moved_by_heads(
    layout: Layout, nodes: int, *, q_size: int, kv_size: int, out_size: int, itemsize: int
) -> Moved:
    """Counts q, k, v and out forward; dout and q, k, v again backward, and dq, dk, dv."""
    remote = max(layout.seqlen - count for count in layout.counts)
    moved = (q_size + kv_size) * remote + out_size * (layout.seqlen - min(layout.counts))
    inside = [sum(layout.counts[rank] for rank in node) for node in nodes_of(layout, nodes)]
    across = (q_size + kv_size) * (layout.seqlen - min(inside))
    across += out_size * max(inside) * (nodes - 1)
    pulled, received = (itemsize * x / layout.ranks for x in (moved, across))
    return Moved(pulled, received=received)


def moved_by_stream(
    layout: Layout, band: Band, nodes: int, *, kv_size: int, itemsize: int, learns: bool
) -> Moved:
    """Counts keys and values, and parts of their gradients. Of those that cross nodes, it counts
    what the rank receives that receives the most bytes.
    """
    keys = kv_size * max(_remote_keys(layout.at(rank), band) for rank in range(layout.ranks))
    received = [
        Moved(
            itemsize * keys,
            4 * keys,
            itemsize * kv_size * x.received,
            4 * kv_size * x.parts_received,
        )
        for x in crossing(layout, band, nodes)
    ]
    return max(received, key=lambda x: x.totals(learns)[1])


@functools.lru_cache(maxsize=256)
def _costs(
    layout: Layout,
    band: Band,
    *,
    q_size: int,
    out_size: int,
    kv_size: int,
    itemsize: int,
    learns: bool,
    nodes: int,
) -> tuple[Cost, Cost]:
    """Estimates heads and stream. Sizes count the numbers per token."""
    work = layout.work(window=band)
    # Heads: all rows of a share of the heads
    products = (q_size + out_size) * sum(work) / layout.ranks
    sizes: Any = dict(q_size=q_size, kv_size=kv_size, out_size=out_size, itemsize=itemsize)
    pulled, received = moved_by_heads(layout, nodes, **sizes).totals(learns)
    ms = (2 * products / FORWARD + 5 * products * learns / BACKWARD) + pulled / BANDWIDTH
    ms += BARRIER * (4 if learns else 2) + received / NETWORK
    heads = _cost("heads", products, moved=(pulled, received), ms=ms, learns=learns)
    # Stream: the rows of the rank that has the most work
    products = (q_size + out_size) * max(work)
    sizes = dict(kv_size=kv_size, itemsize=itemsize, learns=learns)
    moved = moved_by_stream(layout, band, nodes, **sizes)
    pulling, receiving = moved.pulled / BANDWIDTH, moved.received / NETWORK
    ms = max(2 * products / FORWARD, pulling, receiving) + (pulling + receiving) / GROUPS + BARRIER
    if learns:
        # Parts in fp32 of the keys that others see, in slices of as many bytes as a rank's K and V
        # that they see
        shared = [sum(b - a for a, b in rows) for rows in shared_rows(layout, band)]
        slices = -(-4 * sum(shared) // max(1, itemsize * max(shared)))
        # Keys arrive beside the kernel that computes delta, which takes about as long
        ms += 5 * products / (SHORTER * BACKWARD) + BARRIER * (1 + slices)
        ms += moved.parts / BANDWIDTH + moved.parts_received / NETWORK
    return heads, _cost("stream", products, moved=moved.totals(learns), ms=ms, learns=learns)


def _remote_keys(layout: Layout, band: Band) -> int:
    """Counts the keys of other ranks that some query of this rank sees."""
    return sum(b - a for a, b in keys_of(layout.spans, band)) - layout.tokens


def _cost(
    method: str, products: float, *, moved: tuple[float, float], ms: float, learns: bool
) -> Cost:
    """Makes a cost of multiply-adds: 2 FLOPs each, and 5 in the backward."""
    tflop = (7 if learns else 2) * products / 1e12
    pulled, received = (x / 1e6 for x in moved)
    return Cost(method, tflop, mbytes=pulled, ms=ms, received=received)
