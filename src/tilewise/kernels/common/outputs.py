"""Allocates results: shapes and strides in one place, because a traced graph asserts them.

`out` is dense in (batch, seqlen, nheads, headdim) order, whatever the layout of the call: so the
projection that follows reads it without a copy, as after torch's own attention. `lse` is contiguous
(batch, nheads, seqlen_q), fp32 (fp64 for fp64 inputs). A gradient has the strides of its input, as
far as `torch.empty_like` keeps them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from ...problem import Between, Extras, Grads, Problem, Saved

if TYPE_CHECKING:
    from .quantized import Lengths


def empty_out(
    q: torch.Tensor, headdim_v: int, dtype: torch.dtype | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """`out` (batch, seqlen_q, nheads, headdim_v), in the dtype of q or in `dtype`, and `lse`."""
    return q.new_empty((*q.shape[:-1], headdim_v), dtype=dtype or q.dtype), empty_lse(q)


def empty_lse(q: torch.Tensor) -> torch.Tensor:
    """`lse` alone, (batch, nheads, seqlen_q), packed (nheads, total_q)."""
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    return q.new_empty((*q.shape[:-3], q.shape[-2], q.shape[-3]), dtype=dtype)


def empty_grads(
    problem: Problem, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, extras: Extras
) -> Grads:
    """One gradient per input, of its strides and dtype; in fp32 of k and v where that is asked."""
    dtype = torch.float32 if problem.has_fp32_key_grads else k.dtype
    dsinks = None if extras.sinks is None else torch.empty_like(extras.sinks)
    dbias = torch.empty_like(extras.bias) if problem.has_bias_grad else None
    dk, dv = torch.empty_like(k, dtype=dtype), torch.empty_like(v, dtype=dtype)
    return Grads(torch.empty_like(q), dk, dv, dsinks=dsinks, dbias=dbias)


def has_no_sequence(extras: Extras | Lengths) -> bool:
    """Whether tensors are packed of no sequences: all of their rows are padding, and kernels, which
    find rows by their sequence, would find none.
    """
    starts = extras.cu_seqlens_q
    return starts is not None and starts.shape[0] == 1


def fill_padding(out: torch.Tensor | None, lse: torch.Tensor) -> None:
    """Results of rows that belong to no sequence; no `out` where that is to stay as it is."""
    if out is not None:
        out.zero_()
    lse.fill_(-math.inf)


def padding_out(problem: Problem, q: torch.Tensor, *_: object) -> tuple[torch.Tensor, torch.Tensor]:
    """The forward of such rows alone."""
    out, lse = empty_out(q, problem.headdim_v)
    fill_padding(out, lse)
    return out, lse


def padding_grads(
    problem: Problem, saved: Saved, extras: Extras, between: Between | None = None
) -> Grads:
    """Their backward."""
    grads = empty_grads(problem, saved.q, saved.k, saved.v, extras)
    for grad in grads:
        if grad is not None:
            grad.zero_()
    return around(between, lambda: grads)


def around(between: Between | None, gradients: Callable[[], Grads]) -> Grads:
    """The gradients of a backward without kernels, before and after which a caller launches."""
    if between is None:
        return gradients()
    between.before_keys()
    grads = gradients()
    between.after_keys(grads)
    return grads
