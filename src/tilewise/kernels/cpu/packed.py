"""Varlen on the CPU: each packed sequence is a call of its own."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ...problem import INPUTS, Extras, Grads, Problem, Saved, Scalars
from ..common.outputs import empty_grads, empty_out
from .dense import copy_sums, sums_of

Tensor = torch.Tensor


def forward(
    attend: Callable, problem: Problem, q: Tensor, k: Tensor, v: Tensor, extras: Extras, scalars
) -> tuple[Tensor, Tensor]:
    """`out` and `lse` of packed sequences, by `attend` of one."""
    out, lse = empty_out(q, problem.headdim_v)
    out.zero_(), lse.fill_(-torch.inf)  # rows that are not used
    alone = as_one(problem)
    for i, (queries, keys, of_one) in enumerate(sequences(extras)):
        parts = attend(alone, q[:, queries], k[:, keys], v[:, keys], of_one, scalars, i)
        out[:, queries].copy_(parts[0]), lse[:, :, queries].copy_(parts[1])
    return out, lse


def backward(
    differentiate: Callable, problem: Problem, saved: Saved, extras: Extras, scalars: Scalars
) -> Grads:
    """Gradients of packed sequences, by `differentiate` of one."""
    dout, dlse, q, k, v, out, lse = saved
    grads = empty_grads(problem, q, k=k, v=v, extras=extras)
    for grad in grads:
        if grad is not None:
            grad.zero_()
    sums = sums_of(grads, lse)
    alone = as_one(problem)
    for i, (queries, keys, of_one) in enumerate(sequences(extras)):
        dlse_one = None if dlse is None else dlse[:, :, queries]
        saved_one = Saved(
            dout=dout[:, queries],
            dlse=dlse_one,
            q=q[:, queries],
            k=k[:, keys],
            v=v[:, keys],
            out=out[:, queries],
            lse=lse[:, :, queries],
        )
        parts = differentiate(alone, saved_one, of_one, scalars, i)
        for whole, part, rows in zip(grads, parts, (queries, keys, keys)):
            whole[:, rows].copy_(part)
        for total, part in zip(sums[INPUTS:], parts[INPUTS:]):
            if total is not None:
                total += part
    return copy_sums(grads, sums)


def as_one(problem: Problem) -> Problem:
    """The problem of one sequence."""
    return problem._replace(is_packed=False, has_seqused_q=False, has_seqused_k=False)


def sequences(extras: Extras) -> Iterator[tuple[slice, slice, Extras]]:
    """The used rows of each sequence in q and in k, and its extras."""
    rows_q = _used_rows(extras.cu_seqlens_q, extras.seqused_q)
    rows_k = _used_rows(extras.cu_seqlens_k, extras.seqused_k)
    slopes = extras.alibi_slopes
    lengths: Any = dict.fromkeys(("seqused_k", "seqused_q", "cu_seqlens_q", "cu_seqlens_k"))
    alone = extras._replace(**lengths)
    for i, (queries, keys) in enumerate(zip(rows_q, rows_k)):
        slopes_one = slopes if slopes is None or slopes.dim() == 1 else slopes[i : i + 1]
        yield queries, keys, alone._replace(alibi_slopes=slopes_one)


def _used_rows(cu_seqlens: Tensor, used: Tensor | None) -> Iterator[slice]:
    starts = cu_seqlens.tolist()
    for i, (start, stop) in enumerate(itertools.pairwise(starts)):
        yield slice(start, stop if used is None else start + int(used[i]))
