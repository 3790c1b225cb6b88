"""Host side: the programs of the forward and of the backward."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import triton

from ...problem import Extras, Grads, Problem, Scalars
from ..common import results
from ..common.arguments import bias_of, numbers_of, optionals_of, sizes_of, strided
from ..common.bwd_dbias import attn_bwd_dbias_kernel, sharing_of
from ..common.bwd_delta import bwd_delta_kernel
from ..common.bwd_rest import attn_bwd_rest_kernel
from ..common.program import Program, TorchStep
from ..common.workspace import Workspace
from .bwd_dkdv import attn_bwd_dkdv_kernel
from .bwd_dq import attn_bwd_dq_kernel
from .fwd import attn_fwd_kernel
from .plan import Plan

Tensor = torch.Tensor


def prepare(
    problem: Problem, scalars: Scalars, q: Tensor, k: Tensor
) -> Callable[..., tuple[Tensor, Tensor]]:
    """`forward_of` a problem."""
    return results.forward_of(functools.partial(forward_program, problem, scalars))


def prepare_backward(problem: Problem, scalars: Scalars) -> Callable[..., Grads]:
    """`backward_of` a problem."""
    return results.backward_of(functools.partial(backward_program, problem, scalars))


def forward_program(
    problem: Problem, scalars: Scalars, arch: str = "", *, q: Any, k: Any, v: Any, **tensors: Any
) -> Program:
    """The forward's one launch, of operands; on a GPU of `arch` if that is given."""
    extras = Extras(**tensors)
    out, lse = results.outputs_of(problem, q)
    plan = plan_forward(problem, scalars, extras, q=q, k=k, v=v, out=out, lse=lse, arch=arch)
    names = results.names_with(results.FORWARD, extras)
    return Program(names, [plan.configured()], Workspace(q.device), (out, lse))


def backward_program(problem: Problem, scalars: Scalars, arch: str = "", **tensors: Any) -> Program:
    """delta, what lse has lost, then dK and dV, then dQ, then the gradients of the bias and of the
    sinks.
    """
    saved, extras = results.records_of(tensors)
    names, work = results.names_with(results.BACKWARD, extras), Workspace(saved.q.device)
    grads = results.grads_of(problem, saved, extras)
    dlse = None if saved.dlse is None else saved.dlse.contiguous()
    # Such as the expanded gradient of a sum
    dout = saved.dout if saved.dout.stride(-1) == 1 else saved.dout.contiguous()
    saved = saved._replace(dout=dout, dlse=dlse)
    delta = plan_delta(problem, saved, extras, work, arch)
    plans, lost = [delta], None
    if problem.has_natural_scores:
        plans.append(plan_rest(problem, scalars, saved, extras, work, arch))
        lost = plans[-1].args["rest"]
    stats = saved.lse, delta.args["delta"], lost
    plans += plan_backward(problem, scalars, saved, stats, grads, extras, arch)
    steps: list[Any] = [plan.configured() for plan in plans]
    if grads.dsinks is not None:
        steps.append(TorchStep(results.sum_sinks, ("dsinks", "parts")))
    return Program(names, [results.BEFORE_KEYS, *steps, results.AFTER_KEYS], work, tuple(grads))


def plan_tiles(
    name: str,
    kernel: Any,
    *,
    problem: Problem,
    scalars: Scalars,
    extras: Extras,
    read: dict[str, Any],
    arch: str = "",
    **args: Any,
) -> Plan:
    """A kernel that computes scores, with a program for each block of queries: of tensors that are
    `read` in tiles, other arguments, and those that all such kernels have.
    """
    q, k, sizes = read["q"], read["k"], sizes_of(read["q"], read["k"], extras)
    shared: dict[str, Any] = dict(optionals=optionals_of(extras, problem.mods), sizes=sizes)
    shared |= dict(numbers=numbers_of(scalars, q.shape[1], k.shape[1]))
    return Plan(
        name,
        kernel,
        problem,
        block="BLOCK_M",
        rows=q.shape[1],
        copies=q.shape[0] * q.shape[2],
        packed=sizes.packed,
        operands=tuple(read.values()),
        args={name: strided(x) for name, x in read.items()} | args | shared,
        arch=arch,
    )


def plan_forward(
    problem: Problem,
    scalars: Scalars,
    extras: Extras,
    *,
    out: Any,
    lse: Any,
    arch: str = "",
    **read: Any,
) -> Plan:
    """Tiles of queries, of the q, k and v that are `read`."""
    common: dict[str, Any] = dict(problem=problem, scalars=scalars, extras=extras, arch=arch)
    return plan_tiles("fwd", attn_fwd_kernel, read=read, out=strided(out), lse=lse, **common)


def plan_delta(problem: Problem, saved: Any, extras: Extras, work: Any, arch: str = "") -> Plan:
    """delta, shaped as lse, and, of sinks, the parts of their gradient, both in the workspace."""
    out, lse = saved.out, saved.lse
    plan = Plan(
        "bwd_delta",
        bwd_delta_kernel,
        problem,
        block="BLOCK_M",
        rows=lse.shape[2],
        copies=lse.shape[0] * lse.shape[1],
        packed=0,  # a row's delta needs no sequence
        operands=(out,),
        args={},
        arch=arch,
    )
    delta, parts = work.add("delta", lse.shape, lse.dtype), None
    if extras.sinks is not None:
        blocks = triton.cdiv(plan.rows, plan.tile(plan.config()).BLOCK_M)
        parts = work.add("parts", (*lse.shape[:2], blocks), lse.dtype)
    args = dict(out=strided(out), dout=strided(saved.dout), lse=lse, dlse=saved.dlse, delta=delta)
    args |= dict(accumulated=None, dq_semaphore=None, sink_parts=parts)
    args |= dict(optionals=optionals_of(extras, problem.mods), sizes=sizes_of(out, out))
    return plan._replace(args=args)


def plan_rest(
    problem: Problem, scalars: Scalars, saved: Any, extras: Extras, work: Any, arch: str = ""
) -> Plan:
    """What the lse of large scores has lost, in the workspace; a bias or a score function may make
    such.
    """
    tiles, lse = dict(q=saved.q, k=saved.k, v=saved.v), saved.lse
    lost = work.add("rest", lse.shape, lse.dtype)
    common: dict[str, Any] = dict(problem=problem, scalars=scalars, extras=extras, arch=arch)
    return plan_tiles("bwd_rest", attn_bwd_rest_kernel, read=tiles, lse=lse, rest=lost, **common)


def plan_backward(
    problem: Problem,
    scalars: Scalars,
    saved: Any,
    stats: tuple,
    grads: Any,
    extras: Extras,
    arch: str = "",
) -> list[Plan]:
    """Tiles of keys for dK and dV, then tiles of queries for dQ, then the gradient of a bias, in
    tiles as dQ is computed in. `stats` are lse, delta and what lse has lost.
    """
    q, k, dbias = saved.q, saved.k, grads.dbias
    plan = functools.partial(
        plan_tiles,
        problem=problem,
        scalars=scalars,
        extras=extras,
        read=dict(q=q, k=k, v=saved.v, dout=saved.dout),
        arch=arch,
    )
    dq, dk, dv = map(strided, grads[:3])
    keys = plan("bwd_dkdv", attn_bwd_dkdv_kernel, dk=dk, dv=dv, stats=stats)
    keys = keys._replace(block="BLOCK_N", rows=k.shape[1], copies=k.shape[0] * k.shape[2])
    plans = [keys, plan("bwd_dq", attn_bwd_dq_kernel, dq=dq, stats=stats)]
    if dbias is not None and dbias.numel():
        target = bias_of(dbias)
        of_bias = plan("bwd_dbias", attn_bwd_dbias_kernel, dbias=target, stats=stats)
        of_bias = of_bias._replace(rows=0, copies=0, packed=0)
        tile = of_bias.tile(of_bias.config())
        sharing, tiles = sharing_of(dbias, q, k, tile=tile)
        args = of_bias.args | dict(sharing=sharing)
        plans.append(of_bias._replace(rows=tile.BLOCK_M, copies=tiles, args=args))
    return plans
