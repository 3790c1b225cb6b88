"""Where a call lies under the roofline: the bytes that it must move, and what a device can do.

Bytes are the least there are: each tensor that goes in is read once, each that comes out is written
once. A kernel moves more; a call whose least bytes already take longer than its FLOPs is bound by
memory whatever the kernel does.
"""

from __future__ import annotations

import torch

from tilewise.explain.modifiers import BIASES
from tilewise.explain.shapes import Shape
from tilewise.explain.traffic import sizes_of

HALVES = ("float16", "bfloat16")


def bytes_of(shape: Shape) -> float:
    """The least bytes of a call: forward q, k, v, out and LSE; backward also dout, and dq, dk, dv.

    A bias is read as often as the passes need it, and its gradient written once.
    """
    sizes = sizes_of(shape)
    item = getattr(torch, shape.dtype).itemsize
    pairs = shape.nheads * shape.seqlen_q * shape.seqlen_k
    bias = item * pairs if shape.modifier in BIASES else 0
    gradient = item * pairs if shape.modifier == "learned-bias" else 0
    rows = sizes.q + sizes.k + sizes.v + sizes.out
    forward, backward = rows + bias + sizes.stats, 2 * rows + bias + gradient + sizes.stats
    return {"fwd": forward, "bwd": backward, "fwd+bwd": forward + backward}[shape.direction]
