"""The operator of calls with FP8 products, how a call reaches it, and the straight-through
backward: plain eager calls go straight to the backend, as in `attention`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._C._functorch import peek_interpreter_stack

from .. import dispatch
from ..features import OPERATORS, schema_of
from ..kernels.common.alignment import check_elements
from ..kernels.common.outputs import empty_out, fill_padding, has_no_sequence
from ..kernels.common.quantized import Quantized, Scales
from ..kernels.cpu.hadamard import rotate_back
from ..kernels.cpu.quantize import dequantize, lengths_of, of_each, of_heads, rows_of, turned
from ..problem import INPUTS, Call, Extras, Problem, Saved, Scalars, describe, extras_of
from ..tile.rotary import Rotary
from . import attention as ops
from .attention import known, needs_dispatcher
from .calls import resolved
from .context_parallel import refuse_shards
from .late import register_late
from .quantize import quantizer_for
from .schema import Once, apply, check_devices, operator, record_of, refusing

Tensor = torch.Tensor
Forward = Callable[[Quantized, Extras], tuple[Tensor, Tensor]]


NAMES = OPERATORS["flash_attn_fp8_forward"]
OPERANDS = NAMES[:8]  # of a `Quantized`; v is V^T, or as the caller has it
TENSORS = NAMES[: NAMES.index("is_transposed")]


def attention(call: Call, x: Quantized, extras: Extras, wants_lse: bool) -> tuple[Tensor, Tensor]:
    """`out` and `lse` of a checked call of 4-dimensional tensors; `v_t` may be v. `lse` is that of
    k with its mean where it is wanted or differentiated.
    """
    source = x.source
    if call.needs_grad and source is not None:
        if needs_dispatcher((*source[:3], *extras.tensors)) or peek_interpreter_stack() is not None:
            raise NotImplementedError(
                'backward="bf16" under a compiler, torch.func, a dispatch mode or with a tensor '
                "subclass is not supported: call it eagerly"
            )
        tensors = *source[:INPUTS], *extras.optional
        return apply(_StraightThrough, call, (x, extras, *tensors))
    return _attend(call, x, extras, wants_lse)


def _attend(call: Call, x: Quantized, extras: Extras, wants_lse: bool) -> tuple[Tensor, Tensor]:
    operands = x.q, x.k, x.v_t, *x.scales, x.v_mean, x.v_drift
    if needs_dispatcher((*operands, *extras.tensors)) or peek_interpreter_stack() is not None:
        register_late()
        out, lse = torch.ops.tilewise.flash_attn_fp8_forward(**_arguments(call, operands, extras))
    else:
        out, lse = _run(call, operands, extras)
    if wants_lse and x.k_mean is not None:
        lse = raised(lse, x, mean=x.k_mean, scale=call.scalars.scale, extras=extras)
    return out, lse


def raised(lse: Tensor, x: Quantized, mean: Tensor, scale: float, extras: Extras) -> Tensor:
    """lse of scores with the mean of k: that raises those of a row by scale * q . k_mean."""
    rows = rows_of(x.q, extras.cu_seqlens_q, None)
    group = x.q.shape[2] // x.k.shape[2]
    q = x.q.float() * of_heads(x.scales.q, rows, group)
    shift = (q * of_each(mean, rows).repeat_interleave(group, 2)).sum(-1).transpose(1, 2)
    return torch.where(lse == -torch.inf, lse, lse + scale * shift)  # unused rows may be NaN


def _run(call: Call, operands: Sequence[Any], extras: Extras) -> tuple[Tensor, Tensor]:
    refuse_shards()
    if operands[0].is_meta:
        return empty_out(operands[0], call.problem.headdim_v, call.out_dtype)
    forward = call.forward
    if forward is None:  # a call of lazily negated tensors is known by nothing, and so always new
        operands, extras = resolved(operands), extras_of(resolved(extras.tensors))
        check_elements((*zip(OPERANDS, operands), *zip(Extras._fields, extras.optional)))
        forward = call.forward = forward_of(call, operands[0], operands[2], extras)
    # Kernels count scales and means by sequence and head; those of a cut `Quantized` lie apart.
    # x.contiguous() takes three times as long where x is contiguous
    numbers: Any = [x if x is None or x.is_contiguous() else x.contiguous() for x in operands[3:7]]
    q, k, v, *_, v_drift = operands
    x = Quantized(q, k, v, Scales._make(numbers[:3]), v_mean=numbers[3], v_drift=v_drift)
    return forward(x, extras)


def forward_of(call: Call, q: Tensor, v: Tensor, extras: Extras) -> Forward:
    """The forward of calls of one signature, whose v is V^T or not."""
    problem = call.problem
    chosen = dispatch.choose_fp8(problem, v.device, call.out_dtype, call.backend)
    if has_no_sequence(extras):
        return functools.partial(padding_out, call)
    prepare = functools.partial(chosen.prepare_fp8, problem, call.scalars, call.out_dtype)
    if call.is_transposed:
        return prepare()
    if hasattr(chosen, "takes_values") and chosen.takes_values(problem, q, v, call.out_dtype):
        return prepare(transposes=True)
    return _transposing(prepare(), quantizer_for(v).prepare_transposed())


def padding_out(call: Call, given: Quantized, extras: Extras) -> tuple[Tensor, Tensor]:
    """The forward of rows of no sequence alone."""
    out, lse = empty_out(given.q, call.problem.headdim_v, call.out_dtype)
    fill_padding(out, lse)
    return out, lse


def _transposing(forward: Forward, transpose: Callable[..., Tensor]) -> Forward:
    """A forward behind a pass that writes V^T."""

    def run(quantized: Quantized, extras: Extras) -> tuple[Tensor, Tensor]:
        v_t = transpose(quantized.v_t, extras.seqused_k, extras.cu_seqlens_k)
        return forward(quantized._replace(v_t=v_t), extras)

    return run


# the operator


def _arguments(call: Call, operands: Sequence[Any], extras: Extras) -> dict[str, Any]:
    values = {**dict(zip(OPERANDS, operands)), **extras._asdict(), **call.scalars._asdict()}
    values |= dict(align=call.problem.align, is_long=call.problem.is_long, backend=call.backend)
    values |= dict(out_dtype=call.out_dtype, is_transposed=call.is_transposed)
    return {name: values[name] for name in NAMES}


def problem_of(
    q: Tensor,
    k: Tensor,
    headdim_v: int,
    extras: Extras,
    scalars: Scalars,
    align: str,
    is_long: bool,
) -> Problem:
    """The Problem of checked inputs in (batch, seqlen, nheads, headdim) order."""
    problem = describe(q, k, k, extras, scalars, align, False, is_long=is_long)
    return problem._replace(headdim_v=headdim_v)


def _call_of(args: tuple) -> Call:
    """The call of an operator's arguments."""
    values = dict(zip(NAMES, args))
    check_devices(TENSORS, args[: len(TENSORS)])
    (q, k, v), extras, scalars = args[:3], record_of(Extras, values), record_of(Scalars, values)
    headdim_v = v.shape[2 if values["is_transposed"] else 3]
    align, is_long = values["align"], values["is_long"]
    problem = problem_of(q, k, headdim_v, extras, scalars, align, is_long)
    call = Call(problem, scalars, values["backend"])
    call.out_dtype, call.is_transposed = values["out_dtype"], values["is_transposed"]
    return call


def _kernel(args: tuple):
    """The operator's results, by a call that is cached by signature, for compiled graphs, which do
    not pass through `frontend.fp8.attend`.
    """
    tensors, flags = args[: len(TENSORS)], args[len(TENSORS) :]
    call = known(tensors, ("fp8", flags), lambda: _call_of(args))
    count = len(OPERANDS)
    return _run(call, tensors[:count], extras_of(tensors[count:]))


def _fake(args: tuple):
    call = _call_of(args)
    return empty_out(args[0], call.problem.headdim_v, call.out_dtype)


operator(
    "flash_attn_fp8_forward",
    f"({schema_of(NAMES)}) -> (Tensor, Tensor)",
    kernel=_kernel,
    fake=_fake,
    backward=refusing(
        "attention of 8-bit tensors has no gradient: pass a Quantized of tensors that require one, "
        'and backward="bf16", to tilewise.attention'
    ),
    is_looped=True,
)


# the backward


class _StraightThrough(torch.autograd.Function):
    """Rounding has the derivative of doing nothing: the gradients of the dequantised tensors, in
    bf16, are those of what was quantised.
    """

    @staticmethod
    def forward(ctx: Any, call: Call, x: Quantized, extras: Extras, *tensors: Any):
        out, lse = _attend(call, x, extras, True)
        eight_bits = *x[:3], *x.scales, x.k_mean, x.v_mean
        is_rotated, rotary = (False, None) if x.source is None else x.source[3:]
        tables = (None, None, True) if rotary is None else rotary
        saved = *eight_bits, *tables[:2], *extras.tensors
        ops.save(ctx, call, tensors=saved, output=(out, lse))
        ctx.is_rotated, ctx.is_interleaved = is_rotated, tables[2]
        ctx.dtypes = [None if t is None else t.dtype for t in tensors]
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None):  # pyright: ignore[reportIncompatibleMethodOverride]
        if dout is dlse is None:
            return (None,) * (3 + len(ctx.dtypes))
        tensors = dout, dlse, *ctx.saved_tensors
        differentiate = functools.partial(_differentiated, ctx.call, ctx.is_rotated)
        differentiate = functools.partial(differentiate, ctx.is_interleaved)
        if torch.is_grad_enabled():  # create_graph: the gradients are to be differentiated
            grads = apply(_Gradients, differentiate, tensors)
        else:
            grads = differentiate(tensors)
        pairs = zip(grads, ctx.dtypes)
        return *(None,) * 3, *(None if x is None else x.to(dtype) for x, dtype in pairs)


class _Gradients(Once):
    """The gradients, which have no derivative and say so."""

    @staticmethod
    def forward(differentiate: Callable[..., tuple[Tensor, ...]], *tensors: Tensor | None):
        return differentiate(tensors)


def _differentiated(
    call: Call, is_rotated: bool, is_interleaved: bool, tensors: tuple[Any, ...]
) -> tuple[Tensor | None, ...]:
    """The gradients of q, k and v, and of the optional tensors; `tensors` are those of the results
    and what was saved. `is_rotated` and `is_interleaved` say how the source was quantised.
    """
    dout, dlse, out, lse, q, k, v_t, *optional = tensors
    scales, (cos, sin), extras = Scales._make(optional[:3]), optional[5:7], extras_of(optional[7:])
    x = Quantized(q, k, v_t=v_t, scales=scales, k_mean=optional[3], v_mean=optional[4])
    dout = torch.zeros_like(out) if dout is None else dout
    q, k, v = (t.bfloat16() for t in meant(x, is_rotated, extras=extras))
    problem = call.problem._replace(dtype=torch.bfloat16)
    saved_in_bf16 = Saved(dout.bfloat16(), dlse, q=q, k=k, v=v, out=out.bfloat16(), lse=lse)
    grads = ops.run_backward(Call(problem, call.scalars, call.backend), saved_in_bf16, extras)
    dq, dk, dv = grads.dq, grads.dk, grads.dv
    if cos is not None:  # the transpose of a turn is the turn back
        back, lengths = Rotary(cos, -sin, interleaved=is_interleaved), lengths_of(extras)
        of_q = rows_of(q, lengths.cu_seqlens_q, lengths.seqused_q)
        of_k = rows_of(k, lengths.cu_seqlens_k, lengths.seqused_k)
        dq, dk = turned(dq, back, of_q, of_k), turned(dk, back, of_k)
    return dq, dk, dv, *ops.of_optional(call, grads, extras)


def meant(x: Quantized, is_rotated: bool, extras: Extras) -> tuple[Tensor, Tensor, Tensor]:
    """What q, k and v of 8 bits stand for, in fp32: rotated back, with their means; q and k are
    still turned by rotary tables.
    """
    lengths = lengths_of(extras)
    q, k, v = dequantize(x, lengths)
    if x.k_mean is not None:
        k = k + of_each(x.k_mean, rows_of(k, lengths.cu_seqlens_k, None))
    return (rotate_back(q), rotate_back(k), v) if is_rotated else (q, k, v)


register_late()  # once all operators are there
