"""The backend for CPU tensors: exact attention in plain torch, O(N) memory, every feature.

`flash` hands a plain problem to torch's own fused CPU kernel; `blockwise` computes all others tile
by tile. A batch with `seqused_k` is cut into its rows, so that padding is never read.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from ...mods.derivative import by_loads
from ...mods.flatten import take_apart
from ...problem import Extras, Grads, Problem, Saved, Scalars
from ..common.outputs import empty_grads, empty_out
from . import blockwise, flash, fp8, packed
from .dense import Target, make_dense

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
    is_causal = None if problem.is_packed else flash.whole_mask(problem, q, k, scalars)
    if is_causal is not None:
        return flash.whole(is_causal, scalars.scale)
    return functools.partial(forward, problem, scalars=scalars)


def supports_fp8(problem: Problem, device: torch.device, out_dtype: torch.dtype) -> str | None:
    """None, or why this backend does not serve the problem of e4m3 tensors."""
    return supports(problem._replace(dtype=out_dtype), device)


def prepare_fp8(problem: Problem, scalars: Scalars, out_dtype: torch.dtype) -> Callable:
    """The forward: (quantized, extras) -> (out, lse)."""
    return fp8.prepare(forward, problem, scalars, out_dtype)


def prepare_backward(problem: Problem, scalars: Scalars) -> Callable[..., Grads]:
    """The backward: (saved, extras) -> gradients."""
    return functools.partial(backward, problem, scalars=scalars)


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
        return packed.forward(forward, problem, q, k, v, extras, scalars)
    is_causal = flash.whole_mask(problem, q, k, scalars)
    if is_causal is not None:
        return flash.whole(is_causal, scalars.scale)(q, k, v, extras)
    out, lse = empty_out(problem, q)
    for row, used in _batch_rows(q, k, extras.seqused_k):
        inputs = q[row], k[row, :used], v[row, :used]
        at = first + (row.start or 0)
        dense = make_dense(problem, *inputs, _of_row(extras, row), scalars, at)
        out_row, lse_row = out[row].transpose(1, 2), lse[row]
        if flash.serves(dense):
            for target, result in zip((out_row, lse_row), flash.forward(dense)):
                target.copy_(result)
        else:
            blockwise.forward(dense, out_row, lse_row)
    return out, lse


def backward(
    problem: Problem,
    saved: Saved,
    extras: Extras,
    scalars: Scalars,
    first: int = 0,
    targets: tuple[Target, ...] = (),
) -> Grads:
    """Gradients of q, k, v and, where requested, sinks and bias; adds to those of the targets."""
    if problem.is_packed:
        of_one = functools.partial(backward, targets=targets)
        return packed.backward(of_one, problem, saved, extras, scalars)
    dout, dlse, q, k, v, out, lse = saved
    is_whole = dlse is None and not problem.has_fp32_key_grads  # which torch rounds there
    is_causal = flash.whole_mask(problem, q, k, scalars) if is_whole else None
    has_flash = dlse is None and not blockwise.is_large(lse)
    if has_flash and is_causal is not None:
        found = flash.backward_whole(saved, is_causal, scalars.scale)
        return Grads(*(_as_empty_like(x, grad) for x, grad in zip((q, k, v), found)), None)
    grads = empty_grads(problem, q, k, v, extras)
    dsinks = None if extras.sinks is None else lse.new_zeros(extras.sinks.shape)
    dbias = lse.new_zeros(extras.bias.shape) if problem.has_bias_grad else None
    for row, used in _batch_rows(q, k, extras.seqused_k):
        inputs = q[row], k[row, :used], v[row, :used]
        at = first + (row.start or 0)
        dense = make_dense(problem, *inputs, _of_row(extras, row), scalars, at, targets)
        grads.dk[row, used:].zero_(), grads.dv[row, used:].zero_()
        filled = grads.dq[row], grads.dk[row, :used], grads.dv[row, :used]
        parts = Grads(*(x.transpose(1, 2) for x in filled), dsinks, _rows_of(dbias, row))
        given = dout[row].transpose(1, 2), out[row].transpose(1, 2), lse[row]
        if has_flash and flash.serves(dense):
            flash.backward(dense, *given, parts)
        else:
            blockwise.backward(dense, *given, None if dlse is None else dlse[row], parts)
    for grad, found in ((grads.dsinks, dsinks), (grads.dbias, dbias)):
        if found is not None:
            grad.copy_(found)
    return grads


def captured_grads(
    problem: Problem, saved: Saved, extras: Extras, scalars: Scalars, wanted: list[int]
) -> list[Tensor]:
    """Gradients of those tensors that the score function captured, by their numbers."""
    exact = saved.lse.dtype
    if saved.q.dtype != exact:  # delta from a rounded O is not accurate enough
        dout, q, k, v = (x.to(exact) for x in (saved.dout, saved.q, saved.k, saved.v))
        problem = problem._replace(dtype=exact)
        out, lse = forward(problem, q, k, v, extras, scalars)
        saved = Saved(dout, saved.dlse, q, k, v, out, lse)
    tensors = take_apart(problem.mods, extras.captured).score
    grads = {i: torch.zeros_like(tensors[i], dtype=exact) for i in wanted}
    targets = tuple(
        Target(load, slope, grads[load.value[0]])
        for load, slope in by_loads(problem.mods.score)
        if load.value[0] in grads
    )
    backward(problem, saved, extras, scalars, targets=targets)
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


def _of_row(extras: Extras, row: slice) -> Extras:
    """The extras of some rows of the batch."""
    slopes = extras.alibi_slopes
    if slopes is not None and slopes.dim() == 2:
        slopes = slopes[row]
    return extras._replace(alibi_slopes=slopes, seqused_k=None, bias=_rows_of(extras.bias, row))


def _rows_of(bias: Tensor | None, row: slice) -> Tensor | None:
    """The part of a bias, or of its gradient, for some rows of the batch."""
    return bias if bias is None or bias.shape[0] == 1 else bias[row]
