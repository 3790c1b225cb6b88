"""Host side of quantising: `quantize` and `transposed_values` of `kernels/cpu/quantize.py`, by
kernels.
"""

from __future__ import annotations

from typing import Any

import torch

from ...tile.rotary import Rotary
from ..common.quantized import FP8, Lengths, Quantized, Scales, empty_values
from ..common.relaunch import Launches, addresses_of, distinct_views
from .decode_launch import run
from .quantize_launches import plans_of, sides_of, transposing
from .quantize_memory import Given, Room, addresses_in, make, memory_in, room_of, tensors_of

Tensor = torch.Tensor


def quantize(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    steps: Any,
    scales: Given,
    of: Lengths,
    rotary: Rotary | None = None,
) -> Quantized:
    """Quantises 4-dimensional tensors; `steps` has rotate, smooth_k and smooth_v, and `scales` are
    the caller's, (batch, nheads_k).
    """
    return prepare_quantize(steps)(q, k, v, scales, of, rotary)


def transposed_values(v: Tensor, seqused_k: Tensor | None, cu_seqlens_k: Tensor | None) -> Tensor:
    """V^T, (batch, nheads_k, headdim_v, columns), of e4m3 (batch, seqlen_k, nheads_k, headdim_v):
    0 where no key is in use.
    """
    return prepare_transposed()(v, seqused_k, cu_seqlens_k)


class Quantizing(Launches):
    """`quantize` of one signature."""

    def __init__(self, steps: Any) -> None:
        super().__init__()
        self.steps = steps
        self.room: Room | None = None

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, scales: Given, of: Lengths, rotary: Rotary | None
    ) -> Quantized:
        starts = of.cu_seqlens_q, of.cu_seqlens_k, of.cu_seqlens_k
        room = self.room
        if room is None:
            sides = sides_of(q, k, self.steps)
            room = self.room = room_of((q, k, v), sides, starts, scales)
        made = make(room, (q, k, v), starts)
        tables = (None, None) if rotary is None else rotary[:2]
        read = q, k, v, *scales, *of, *tables
        if not self.again_at(addresses_of(read) + addresses_in(room, made)):
            sides, memory = sides_of(q, k, self.steps), memory_in(room, made)
            written = [x for one in memory for x in tensors_of(one)]
            views = distinct_views(read)
            inputs, given, lengths = views[:3], views[3:6], Lengths(*views[6:10])
            turns = None if rotary is None else rotary._replace(cos=views[10], sin=views[11])
            plans = plans_of(inputs, sides, given, lengths, turns, memory)
            self.record([run(plan, q.device) for plan in plans], (*views, *written), q)
        q8, k8, v_t = (x if x.dtype == FP8 else x.view(FP8) for x in made.outs)
        found = Scales(*(x if one is None else one for x, one in zip(made.scales, scales)))
        drift = made.words[0] if room.drifts and made.words is not None else None
        return Quantized(q8, k8, v_t, found, *made.means[1:], drift)


class Transposing(Launches):
    """`transposed_values` of one signature."""

    def __call__(self, v: Tensor, seqused_k: Tensor | None, cu_seqlens_k: Tensor | None) -> Tensor:
        v_t = empty_values(v, cu_seqlens_k)
        if not self.again((v, seqused_k, cu_seqlens_k, v_t)):
            views = distinct_views((v.view(torch.uint8), seqused_k, cu_seqlens_k))
            launched = [run(plan, v.device) for plan in transposing(*views, v_t)]
            self.record(launched, (*views, v_t), v)
        return v_t.view(FP8)


prepare_quantize, prepare_transposed = Quantizing, Transposing
