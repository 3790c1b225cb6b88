"""Host side: the program of the gradients of captured tensors."""

from __future__ import annotations

from typing import Any

import torch

from ...mods.codegen import captured_of, function_of, place_function_of
from ...mods.derivative import by_loads
from ...mods.expressions import Node, intern, nodes_of
from ...mods.flat import captured_by_score
from ...problem import Extras, Problem, Saved, Scalars
from ..common.operand import Operand, operands_of
from ..common.program import Program, TorchStep
from ..common.results import BACKWARD, names_with, records_of
from ..common.workspace import Workspace
from .bwd_captured import CapturedLoad, attn_bwd_captured_kernel
from .launch import plan_rest, plan_tiles
from .plan import Plan

Tensor = torch.Tensor


def captured_grads(
    problem: Problem, saved: Saved, extras: Extras, scalars: Scalars, wanted: list[int]
) -> list[Tensor]:
    """Gradients of those tensors that the score function captured, by their numbers."""
    tensors = *saved, *extras.tensors
    operands = operands_of(BACKWARD, tensors)
    sums = captured_program(problem, scalars, wanted, **operands)(tensors)
    captured = captured_by_score(problem.mods, extras.captured)
    return [x.to(captured[i].dtype) for i, x in zip(wanted, sums)]


def captured_program(
    problem: Problem, scalars: Scalars, wanted: list[int], **tensors: Any
) -> Program:
    """Sums in the dtype of lse: what lse has lost, then a launch for each place where the score
    function reads a tensor that is wanted.
    """
    saved, extras = records_of(tensors)
    names, work = names_with(BACKWARD, extras), Workspace(saved.q.device)
    dout, lse = saved.dout, saved.lse
    of_rest = plan_rest(problem, scalars, saved, extras, work)
    scaled = work.add("scaled", dout.shape, dout.dtype)
    masked = work.add("masked_dlse", lse.shape, lse.dtype)
    steps: list[Any] = [
        of_rest.configured(),
        TorchStep(scale_dout, ("scaled", "dout", "rest")),
        TorchStep(mask_dlse, ("masked_dlse", "lse", "dlse")),
    ]
    captured = captured_by_score(problem.mods, extras.captured)
    sums = {i: sum_of(f"sum[{i}]", captured[i], lse.dtype) for i in wanted}
    saved = saved._replace(dout=scaled)
    stats = lse, masked, of_rest.args["rest"]
    plans = plan_captured(problem, scalars, saved, stats, sums, extras)
    return Program(names, [*steps, *(x.configured() for x in plans)], work, list(sums.values()))


def sum_of(name: str, x: Any, dtype: torch.dtype) -> Operand:
    """Zeros, to which the gradient of x is added."""
    like = torch.empty_like(x.new("meta"), dtype=dtype)
    return Operand(name, like.shape, dtype, x.device, strides=like.stride(), is_cleared=True)


def scale_dout(scaled: Tensor, dout: Tensor, rest: Tensor) -> None:
    """dO times 2^-rest."""
    torch.mul(dout, torch.exp2(-rest).transpose(1, 2).unsqueeze(-1), out=scaled)


def mask_dlse(masked: Tensor, lse: Tensor, dlse: Tensor | None) -> None:
    """The gradient of lse, and 0 of a row that saw no key."""
    masked.copy_(torch.where(lse.isneginf(), 0, lse.new_zeros(1) if dlse is None else dlse))


def plan_captured(
    problem: Problem,
    scalars: Scalars,
    saved: Any,
    stats: tuple,
    grads: dict[int, Any],
    extras: Extras,
) -> list[Plan]:
    """A launch for each place where the score function reads a tensor whose gradient is among
    `grads`: tiles of queries. `stats` are lse, its gradient and what lse has lost.
    """
    tiles, plans = dict(q=saved.q, k=saved.k, v=saved.v, dout=saved.dout), []
    common: dict[str, Any] = dict(problem=problem, scalars=scalars, extras=extras)
    common |= dict(read=tiles, stats=stats)
    for load, slope in by_loads(problem.mods.score):
        if (slot := load.value[0]) in grads:
            of_load = load_of(load, slope, grads[slot].numel() >= 1 << 31)
            (target,) = captured_of((grads[slot],))
            plan = plan_tiles("bwd_captured", attn_bwd_captured_kernel, target=target, **common)
            plans.append(plan._replace(args=plan.args | dict(LOAD=of_load)))
    return plans


def load_of(load: Node, slope: Node, is_wide: bool) -> CapturedLoad:
    """A load, and the score function's slope there, as kernels take it."""
    indices_used = {node.op for node in nodes_of(load)}
    return CapturedLoad(
        SLOPE=function_of(intern(slope)),
        PLACE=place_function_of(intern(load)),
        BY_QUERY="q_idx" in indices_used,
        BY_KEY="k_idx" in indices_used,
        WIDE=is_wide,
    )
