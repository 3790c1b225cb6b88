"""Which method is the fastest for a call, by a model of its time: the work of the slowest rank, the
bytes that it pulls, and how much of the pulling nothing hides.

    t = FLOPs / rate + bytes / bandwidth + one barrier a step

of the bytes that nothing hides: all but those of the forward of stream, which begins when one of
GROUPS is there, and takes no less than all bytes do.

The rates are those of H200s (bf16, NVLink, November 2026: 650 TFLOP/s forward, 585 backward,
365 GB/s pulled by each GPU at once); a choice depends on their ratio alone. How well tiles fill a
GPU is not in it, but for the launches of the backward of stream, one for each of two runs.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

from ...frontend.scalars import Window
from ..layouts.layout import Layout
from ..layouts.pulls import shared_rows
from ..layouts.work import Band, band_of, keys_of

FORWARD, BACKWARD = 650e9, 585e9  # FLOPs a millisecond
BANDWIDTH = 365e6  # bytes a millisecond
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


class Plan(NamedTuple):
    """The methods by their time; as a string a table."""

    method: str
    costs: tuple[Cost, ...]

    def __str__(self) -> str:
        lines = ["method     TFLOP     MB pulled       ms"]
        for method, tflop, mbytes, ms, reason in self.costs:
            figures = f"{tflop:8.3f} {mbytes:13.1f} {ms:8.3f}"
            mark = "  <-" if method == self.method else ""
            lines.append(f"{method:7} " + (f"{figures}{mark}" if reason is None else reason))
        return "\n".join(lines)


@functools.lru_cache(maxsize=256)
def plan(
    layout: Layout,
    nheads: int,
    nheads_k: int,
    headdim: int,
    headdim_v: int | None = None,
    *,
    batch: int = 1,
    causal: bool = True,
    window: Window = None,
    itemsize: int = 2,
    learns: bool = True,
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

    Returns:
        A `Plan` with `method` and `costs`; `str` of it is the table.
    """
    headdim_v = headdim if headdim_v is None else headdim_v
    heads, stream = _costs(
        layout,
        band_of(window, causal),
        q_size=batch * nheads * headdim,
        out_size=batch * nheads * headdim_v,
        kv_size=batch * nheads_k * (headdim + headdim_v),
        itemsize=itemsize,
        learns=learns,
    )
    if nheads_k % layout.ranks:
        reason = f"{nheads_k} key heads cannot be dealt evenly over {layout.ranks} ranks"
        heads = heads._replace(reason=reason)
    best = min((x for x in (heads, stream) if x.reason is None), key=lambda x: x.ms)
    return Plan(best.method, (heads, stream))


def _costs(
    layout: Layout,
    band: Band,
    *,
    q_size: int,
    out_size: int,
    kv_size: int,
    itemsize: int,
    learns: bool,
) -> tuple[Cost, Cost]:
    """Estimates heads and stream. Sizes count the numbers per token."""
    work = layout.work(window=band)
    # Heads: all rows of a share of the heads
    products = (q_size + out_size) * sum(work) / layout.ranks
    remote = max(layout.seqlen - count for count in layout.counts)
    # q, k, v and out forward; dout and q, k, v again backward, and dq, dk, dv
    moved = (q_size + kv_size) * remote + out_size * (layout.seqlen - min(layout.counts))
    pulled = itemsize * moved / layout.ranks * (2 if learns else 1)
    ms = (2 * products / FORWARD + 5 * products * learns / BACKWARD) + pulled / BANDWIDTH
    ms += BARRIER * (4 if learns else 2)
    heads = _cost("heads", products, pulled=pulled, ms=ms, learns=learns)
    # Stream: the rows of the rank that has the most work
    products = (q_size + out_size) * max(work)
    keys = kv_size * max(_remote_keys(layout.at(rank), band) for rank in range(layout.ranks))
    partial = 4 * keys  # fp32
    keys *= itemsize
    pulling = keys / BANDWIDTH
    ms = max(2 * products / FORWARD, pulling) + pulling / GROUPS + BARRIER
    if not learns:
        return heads, _cost("stream", products, pulled=keys, ms=ms, learns=learns)
    # Parts in fp32 of the keys that others see, in slices of as many bytes as a rank's K and V
    # that they see
    shared = [sum(b - a for a, b in rows) for rows in shared_rows(layout, band)]
    slices = -(-4 * sum(shared) // max(1, itemsize * max(shared)))
    # Keys arrive beside the kernel that computes delta, which takes about as long
    ms += 5 * products / (SHORTER * BACKWARD) + partial / BANDWIDTH + BARRIER * (1 + slices)
    pulled = 2 * keys + partial
    return heads, _cost("stream", products, pulled=pulled, ms=ms, learns=learns)


def _remote_keys(layout: Layout, band: Band) -> int:
    """Counts the keys of other ranks that some query of this rank sees."""
    return sum(b - a for a, b in keys_of(layout.spans, band)) - layout.tokens


def _cost(method: str, products: float, *, pulled: float, ms: float, learns: bool) -> Cost:
    """Makes a cost of multiply-adds: 2 FLOPs each, and 5 in the backward."""
    tflop = (7 if learns else 2) * products / 1e12
    return Cost(method, tflop, mbytes=pulled / 1e6, ms=ms)
