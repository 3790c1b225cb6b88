"""Host side of a bias of every pair in the backward, and of its gradient where that is dS.

A tile computes the dS of each pair once. So where each pair has a bias of its own, dS is written as
the gradient. Where batches or heads share the bias, all of dS goes to memory in the inputs' dtype,
and is summed from there: two passes over memory, where computing dS again takes two matmuls and all
the exponentials.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from ....problem import NO_MODS, Grads, Problem
from ..bias_memory import has_tiles

Tensor = torch.Tensor
WRITTEN, SUMMED = "written", "summed"
MAX_DS_BYTES = 2 << 30  # bytes of dS that are stored to be summed; beyond, it is recomputed


def way_of(
    problem: Problem, bias: Tensor | None, dbias: Tensor | None, q: Tensor, k: Tensor
) -> str:
    """How the gradient of a bias is computed: WRITTEN or SUMMED. Empty where it is not requested,
    or has a kernel of its own.
    """
    is_ds = not (problem.has_derivative or problem.has_dropout)
    is_narrow = max(problem.headdim, problem.headdim_v) <= 128
    if dbias is None or not (is_ds and is_narrow and has_tiles(bias, q)):
        return ""
    if dbias.shape[:2] == (q.shape[0], q.shape[2]) and has_tiles(dbias, q):
        return WRITTEN
    size = math.prod(sums_of(q, k)) * q.itemsize
    return SUMMED if size <= MAX_DS_BYTES else ""


def sums_of(q: Tensor, k: Tensor) -> tuple[int, int, int, int]:
    """The shape of dS in memory, with rows that TMA can write."""
    batch, seqlen_q, nheads, _ = q.shape
    return batch, nheads, seqlen_q, -(-k.shape[1] // 8) * 8


def target_of(plan: Any, grads: Grads, ds: Any) -> Any:
    """Where the kernel writes dS: the gradient itself, or memory for the sum."""
    if not plan.tile.BIAS_GRAD:
        return None
    if ds is None:
        return grads.dbias
    return ds.as_strided((*ds.shape[:3], grads.dbias.shape[3]), ds.stride())


def has_unseen(problem: Problem) -> bool:
    """Whether there may be pairs that no tile visits."""
    is_cut = problem.has_left or problem.has_right or problem.mods.block != NO_MODS.block
    return is_cut or problem.has_seqused_k or problem.has_seqused_q


def clear(target: Tensor) -> None:
    """Zeros where dS is written."""
    target.zero_()


def sum_scores(dbias: Tensor, ds: Tensor) -> None:
    """The gradient, where it is a sum of what was written."""
    ds = ds[..., : dbias.shape[3]]
    shared = [i for i in range(4) if dbias.shape[i] != ds.shape[i]]
    if shared:
        torch.sum(ds, shared, keepdim=True, out=dbias)
    else:
        dbias.copy_(ds)
