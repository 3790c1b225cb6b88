"""The backend for CPU tensors: exact attention in plain torch, O(N) memory, every feature.

`flash` hands a plain problem to torch's own fused CPU kernel; `blockwise` computes all others tile
by tile. A batch with `seqused_k` is cut into its rows, so that padding is never read, and packed
sequences are calls of their own.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ...mods.derivative import by_loads
from ...mods.flat import captured_by_score
from ...problem import INPUTS, Between, Extras, Grads, Problem, Saved, Scalars
from ..common.outputs import around, empty_grads, empty_out, padding_grads, padding_out
from ..common.quantized import Quantized
from . import blockwise, flash
from .dense import Target, copy_sums, make_dense, rows_of, sums_of
from .quantize import dequantize, lengths_of

Tensor = torch.Tensor
NAME = "cpu"
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def supports(problem: Problem, device: torch.device) -> str | None:
    """None, or why this backend does not serve the problem."""
    if device.type != "cpu":
        return f"computes on the CPU, and the tensors are on {device}"
    if problem.dtype not in DTYPES:
        return f"does not compute in {problem.dtype}"
    return None


def prepare(problem: Problem, scalars: Scalars, q: Tensor, k: Tensor) -> Callable:
    """The forward for tensors of these shapes: (q, k, v, extras) -> (out, lse)."""
    is_causal = None if problem.is_packed else flash.whole_mask(problem, q, k=k, scalars=scalars)
    if is_causal is not None:
        return flash.whole(is_causal, scalars.scale)
    return functools.partial(forward, problem, scalars=scalars)


def supports_fp8(problem: Problem, device: torch.device, out_dtype: torch.dtype) -> str | None:
    """None, or why this backend does not serve the problem of e4m3 tensors."""
    return supports(problem._replace(dtype=out_dtype), device)


def prepare_fp8(problem: Problem, scalars: Scalars, out_dtype: torch.dtype) -> Callable:
    """The forward: (quantized, extras) -> (out, lse). It dequantises and computes in fp32; q and k
    stay rotated, which leaves their products as they are.
    """
    exact = problem._replace(dtype=torch.float32)

    def forward_fp8(quantized: Quantized, extras: Extras) -> tuple[Tensor, Tensor]:
        q, k, v = dequantize(quantized, lengths_of(extras))
        out, lse = forward(exact, q, k=k, v=v, extras=extras, scalars=scalars)
        return out.to(out_dtype), lse

    return forward_fp8


def prepare_backward(problem: Problem, scalars: Scalars) -> Callable[..., Grads]:
    """The backward: (saved, extras, between=None) -> gradients."""

    def gradients(saved: Saved, extras: Extras, between: Between | None = None) -> Grads:
        return around(between, lambda: backward(problem, saved, extras, scalars))

    return gradients


def forward(
    problem: Problem,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    extras: Extras,
    scalars: Scalars,
    first: int = 0,
) -> tuple[Tensor, Tensor]:
    """`out` and `lse`; `first` is the number of the first row of the batch."""
    if problem.is_packed:
        return _forward_packed(problem, q, k=k, v=v, extras=extras, scalars=scalars)
    is_causal = flash.whole_mask(problem, q, k=k, scalars=scalars)
    if is_causal is not None:
        return flash.whole(is_causal, scalars.scale)(q, k, v, extras)
    out, lse = empty_out(q, problem.headdim_v)
    for row, used in _batch_rows(q, k, seqused_k=extras.seqused_k):
        dense = make_dense(
            problem, q, k=k, v=v, extras=extras, scalars=scalars, row=row, used=used, first=first
        )
        out_row, lse_row = out[row].transpose(1, 2), lse[row]
        if flash.serves(dense):
            for target, result in zip((out_row, lse_row), flash.forward(dense)):
                target.copy_(result)
        else:
            blockwise.forward(dense, out_row, lse=lse_row)
    return out, lse


def backward(
    problem: Problem,
    saved: Saved,
    extras: Extras,
    scalars: Scalars,
    first: int = 0,
    targets: tuple[Target, ...] = (),
) -> Grads:
    """Gradients of q, k, v and, where requested, optional tensors; adds to those of the targets."""
    if problem.is_packed:
        return _backward_packed(problem, saved, extras=extras, scalars=scalars, targets=targets)
    dout, dlse, q, k, v, out, lse = saved
    is_whole = dlse is None and not problem.has_fp32_key_grads  # which torch rounds there
    is_causal = flash.whole_mask(problem, q, k=k, scalars=scalars) if is_whole else None
    has_flash = dlse is None and not blockwise.is_large(lse)
    if has_flash and is_causal is not None:
        parts = flash.backward_whole(saved, is_causal, scale=scalars.scale)
        dq, dk, dv = (_as_empty_like(x, grad) for x, grad in zip((q, k, v), parts))
        return Grads(dq, dk, dv=dv)
    grads = empty_grads(problem, q, k=k, v=v, extras=extras)
    sums = sums_of(grads, lse)
    for row, used in _batch_rows(q, k, seqused_k=extras.seqused_k):
        dense = make_dense(problem, q, k, v, extras, scalars, row, used, first, targets)
        grads.dk[row, used:].zero_(), grads.dv[row, used:].zero_()
        of_rows = sums._replace(
            dq=grads.dq[row].transpose(1, 2),
            dk=grads.dk[row, :used].transpose(1, 2),
            dv=grads.dv[row, :used].transpose(1, 2),
            dbias=rows_of(sums.dbias, row),
        )
        dout_rows, out_rows = dout[row].transpose(1, 2), out[row].transpose(1, 2)
        if has_flash and flash.serves(dense):
            flash.backward(dense, dout_rows, out=out_rows, lse=lse[row], grads=of_rows)
        else:
            dlse_rows = None if dlse is None else dlse[row]
            blockwise.backward(dense, dout_rows, out_rows, lse[row], dlse=dlse_rows, grads=of_rows)
    return copy_sums(grads, sums)


def _forward_packed(
    problem: Problem, q: Tensor, k: Tensor, v: Tensor, extras: Extras, scalars: Scalars
) -> tuple[Tensor, Tensor]:
    """`out` and `lse` of packed sequences, each of which is a call of its own."""
    out, lse = padding_out(problem, q)  # so that rows that are not used have theirs
    alone = _as_one(problem)
    for i, (queries, keys, of_one) in enumerate(_sequences(extras)):
        parts = forward(alone, q[:, queries], k[:, keys], v[:, keys], of_one, scalars, first=i)
        out[:, queries].copy_(parts[0]), lse[:, :, queries].copy_(parts[1])
    return out, lse


def _backward_packed(
    problem: Problem, saved: Saved, extras: Extras, scalars: Scalars, targets: tuple[Target, ...]
) -> Grads:
    """Gradients of packed sequences, each of which is a call of its own."""
    dout, dlse, q, k, v, out, lse = saved
    grads = padding_grads(problem, saved, extras)
    sums = sums_of(grads, lse)
    alone = _as_one(problem)
    for i, (queries, keys, of_one) in enumerate(_sequences(extras)):
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
        parts = backward(alone, saved_one, of_one, scalars, first=i, targets=targets)
        for whole, part, rows in zip(grads, parts, (queries, keys, keys)):
            whole[:, rows].copy_(part)
        for total, part in zip(sums[INPUTS:], parts[INPUTS:]):
            if total is not None:
                total += part
    return copy_sums(grads, sums)


def captured_grads(
    problem: Problem, saved: Saved, extras: Extras, scalars: Scalars, wanted: list[int]
) -> list[Tensor]:
    """Gradients of those tensors that the score function captured, by their numbers."""
    exact = saved.lse.dtype
    if saved.q.dtype != exact:  # delta from a rounded O is not accurate enough
        dout, q, k, v = (x.to(exact) for x in (saved.dout, saved.q, saved.k, saved.v))
        problem = problem._replace(dtype=exact)
        out, lse = forward(problem, q, k=k, v=v, extras=extras, scalars=scalars)
        saved = Saved(dout, saved.dlse, q=q, k=k, v=v, out=out, lse=lse)
    tensors = captured_by_score(problem.mods, extras.captured)
    grads = {i: torch.zeros_like(tensors[i], dtype=exact) for i in wanted}
    targets = tuple(
        Target(load, slope, grad=grads[load.value[0]])
        for load, slope in by_loads(problem.mods.score)
        if load.value[0] in grads
    )
    backward(problem, saved, extras=extras, scalars=scalars, targets=targets)
    return [grads[i].to(tensors[i].dtype) for i in wanted]


def _as_empty_like(x: Tensor, grad: Tensor) -> Tensor:
    """A gradient with the dtype and strides of `empty_grads`, copied only where they differ."""
    if grad.dtype == x.dtype and grad.stride() == x.stride():
        return grad
    return torch.empty_like(x).copy_(grad)


def _batch_rows(q: Tensor, k: Tensor, seqused_k: Tensor | None) -> list[tuple[slice, int]]:
    """Rows of the batch with as many keys: all of them, or with `seqused_k` one by one."""
    if seqused_k is None:
        return [(slice(None), k.shape[1])]
    return [(slice(row, row + 1), used) for row, used in enumerate(seqused_k.tolist())]


def _as_one(problem: Problem) -> Problem:
    """The problem of one sequence."""
    return problem._replace(is_packed=False, has_seqused_q=False, has_seqused_k=False)


def _sequences(extras: Extras) -> Iterator[tuple[slice, slice, Extras]]:
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
