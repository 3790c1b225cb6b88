"""Host side of the FP8 forward: which problems it serves, and its launches.

GPUs without a product of e4m3 get its bits: the kernel makes bfloat16 of them, tile by tile, and P
stays bfloat16.
"""

from __future__ import annotations

import torch
import triton

from ...problem import Extras, Problem, Scalars
from ...tile.types import Strided
from ...tuning.select import architecture, is_overridden
from ..common.arguments import numbers_of, optionals_of, sizes_of, strided
from ..common.quantized import Quantized
from ..common.relaunch import Launches, distinct_extras, distinct_views
from .fp8_fwd import OfHead, Quantization, fp8_fwd_kernel
from .launch import Plan, _scratch, run

Tensor = torch.Tensor


def has_product(arch: str) -> bool:
    """Whether a GPU multiplies e4m3. gfx942 has a format of its own, of another bias."""
    if arch.startswith("sm"):
        return int(arch[2:]) >= 89
    return not arch.startswith("gfx") or arch in ("gfx950", "gfx1200", "gfx1201")


def prepare_fp8(problem: Problem, scalars: Scalars, out_dtype: torch.dtype) -> ForwardFp8:
    """The forward of all calls of one signature."""
    return ForwardFp8(problem, scalars, out_dtype)


class ForwardFp8(Launches):
    """Forwards of one signature."""

    def __init__(self, problem: Problem, scalars: Scalars, out_dtype: torch.dtype) -> None:
        super().__init__()
        self.problem = problem
        self.scalars = scalars
        self.out_dtype = out_dtype

    def __call__(self, quantized: Quantized, extras: Extras) -> tuple[Tensor, Tensor]:
        q = quantized.q
        batch, seqlen_q, nheads, _ = q.shape
        shape = batch, seqlen_q, nheads, self.problem.headdim_v
        out = q.new_empty(shape, dtype=self.out_dtype)
        lse = q.new_empty(batch, nheads, seqlen_q, dtype=torch.float32)
        read = *quantized[:3], *quantized.scales, quantized.v_mean
        row = *read, out, lse, *extras.tensors
        if self.relaunches is not None and not is_overridden():
            triton.set_allocator(_scratch)
            if self.again(row):
                return out, lse
        read, extras = distinct_views((*read, out, lse)), distinct_extras(extras)
        if not has_product(architecture(q.device)):
            read[:3] = [x.view(torch.uint8) for x in read[:3]]
        launched = run(plan_fp8(self.problem, *read, extras, self.scalars))
        if not is_overridden():
            self.record([launched], (*read, *extras.tensors), q)
        return out, lse


def plan_fp8(
    problem, q, k, v_t, q_scale, k_scale, v_scale, v_mean, out, lse, extras: Extras, scalars
) -> Plan:
    """Tiles of queries; q, k and v_t in e4m3, or its bits."""
    sizes, numbers = sizes_of(q, k, extras), numbers_of(scalars, q, k)
    batch, head, row, _ = v_t.stride()
    of_v_t = Strided(v_t, batch, row, head)
    mean = None if v_mean is None else of_head(v_mean)
    quantization = Quantization(*map(of_head, (q_scale, k_scale, v_scale)), mean)
    args = strided(q), strided(k), of_v_t, strided(out), lse, quantization
    args = *args, optionals_of(extras, problem.mods), sizes, numbers
    of_rows = q.shape[1], q.shape[0] * q.shape[2], sizes.packed
    return Plan("fp8_fwd", fp8_fwd_kernel, problem, "BLOCK_M", *of_rows, (q, k), args)


def of_head(x: Tensor) -> OfHead:
    """Numbers of (sequence, head) as the kernel takes them."""
    return OfHead(x, *x.stride()[:2])
