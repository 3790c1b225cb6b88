"""Host side of the FP8 forward: which problems it serves, and its launches.

GPUs without a product of e4m3 get its bits: the kernel makes bfloat16 of them, tile by tile, and P
stays bfloat16.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from ...problem import Extras, Problem, Scalars
from ...tile.types import Strided
from ...tuning.select import architecture
from ..common.arguments import strided
from ..common.program import Program
from ..common.results import FP8_FORWARD, fp8_forward_of, names_with, outputs_of
from ..common.workspace import Workspace
from .fp8_fwd import OfHead, Quantization, fp8_fwd_kernel
from .launch import plan_tiles
from .plan import Plan

Tensor = torch.Tensor


def has_product(arch: str) -> bool:
    """Whether a GPU multiplies e4m3. gfx942 has a format of its own, of another bias."""
    if arch.startswith("sm"):
        return int(arch[2:]) >= 89
    return not arch.startswith("gfx") or arch in ("gfx950", "gfx1200", "gfx1201")


def prepare_fp8(problem: Problem, scalars: Scalars, out_dtype: torch.dtype) -> Callable[..., tuple]:
    """The forward of all calls of one signature."""
    return fp8_forward_of(functools.partial(fp8_program, problem, scalars, out_dtype))


def fp8_program(
    problem: Problem, scalars: Scalars, out_dtype: torch.dtype, arch: str = "", **tensors: Any
) -> Program:
    """The one launch, of operands; on a GPU of `arch` if that is given."""
    extras = Extras(**{name: tensors[name] for name in Extras._fields})
    q = tensors["q"]
    out, lse = outputs_of(problem, q, out_dtype)
    if not has_product(arch or architecture(q.device)):
        tensors |= {name: tensors[name].view(torch.uint8) for name in ("q", "k", "v_t")}
    plan = plan_fp8(problem, scalars, tensors | dict(out=out, lse=lse), extras, arch)
    names = names_with(FP8_FORWARD, extras)
    return Program(names, [plan.configured()], Workspace(q.device), (out, lse))


def plan_fp8(
    problem: Problem, scalars: Scalars, operands: dict[str, Any], extras: Extras, arch: str = ""
) -> Plan:
    """Tiles of queries; q, k and v_t in e4m3, or its bits."""
    q, k, v_t, v_mean = (operands[name] for name in ("q", "k", "v_t", "v_mean"))
    batch, head, row, _ = v_t.stride()
    quantization = Quantization(
        q=of_head(operands["q_scale"]),
        k=of_head(operands["k_scale"]),
        v=of_head(operands["v_scale"]),
        v_mean=None if v_mean is None else of_head(v_mean),
    )
    return plan_tiles(
        "fp8_fwd",
        fp8_fwd_kernel,
        problem=problem,
        scalars=scalars,
        extras=extras,
        read=dict(q=q, k=k),
        arch=arch,
        v_t=Strided(v_t, batch, row, head),
        out=strided(operands["out"]),
        lse=operands["lse"],
        quantization=quantization,
    )


def of_head(x: Tensor) -> OfHead:
    """Numbers of (sequence, head) as the kernel takes them."""
    return OfHead(x, x.stride(0), x.stride(1))
