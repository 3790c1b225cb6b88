"""Where a call lies under the roofline: the bytes that it must move, and what a device can do.

Bytes are the least there are: each tensor that goes in is read once, each that comes out is written
once. A kernel moves more; a call whose least bytes already take longer than its FLOPs is bound by
memory whatever the kernel does.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from tilewise.explain.modifiers import BIASES
from tilewise.explain.shapes import Shape

LSE_BYTES = 4  # one fp32 a query and head


class Peak(NamedTuple):
    """What the maker's data sheet states: dense 16-bit matmuls, and memory."""

    tflops: float
    tb_per_s: float

    @property
    def ridge(self) -> float:
        """FLOPs a byte from which matmuls, and no longer memory, are the limit."""
        return self.tflops / self.tb_per_s

    def roof(self, intensity: float) -> float:
        """The most TFLOP/s at so many FLOPs a byte."""
        return min(self.tflops, intensity * self.tb_per_s)


# Data sheets of the makers; without sparsity. Longest matching name first.
PEAKS = {
    "NVIDIA H200": Peak(989.4, 4.8),
    "NVIDIA H100 80GB HBM3": Peak(989.4, 3.35),
    "NVIDIA A100-SXM4-80GB": Peak(311.9, 2.039),
    "NVIDIA A100-SXM4-40GB": Peak(311.9, 1.555),
}
HALVES = ("float16", "bfloat16")


def peak_of(device: str) -> Peak | None:
    """The peaks of a device by its name, None for one that is not listed."""
    names = [name for name in PEAKS if device.startswith(name)]
    return PEAKS[max(names, key=len)] if names else None


def bytes_of(shape: Shape) -> float:
    """The least bytes of a call: forward q, k, v, out and LSE; backward also dout, and dq, dk, dv.

    A bias is read as often as the passes need it, and its gradient written once.
    """
    item = getattr(torch, shape.dtype).itemsize
    queries = sum(shape.sequences)
    keys = queries if shape.lengths else shape.batch * shape.seqlen_k
    q, out = (queries * shape.nheads * width for width in (shape.headdim, shape.headdim_v))
    kv = keys * shape.nheads_k * (shape.headdim + shape.headdim_v)
    lse = queries * shape.nheads * LSE_BYTES
    bias = shape.nheads * shape.seqlen_q * shape.seqlen_k if shape.modifier in BIASES else 0
    gradient = bias if shape.modifier == "learned-bias" else 0
    forward = item * (q + kv + out + bias) + lse
    backward = item * (2 * q + 2 * kv + 2 * out + bias + gradient) + lse
    return {"fwd": forward, "bwd": backward, "fwd+bwd": forward + backward}[shape.direction]


def intensity_of(shape: Shape) -> float:
    """FLOPs a byte, of the least bytes."""
    return shape.flops / bytes_of(shape)
