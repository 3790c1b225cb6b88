"""The operators of attention, forward and backward, as `torch.ops.tilewise` has them."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

from ..kernels.common.outputs import empty_grads, empty_out
from ..mods.flat import check_captured, indices_used
from ..problem import INPUTS, NO_EXTRAS, OPTIONAL, Call, Extras, Problem, Saved, describe, extras_of
from . import attention as ops
from . import schema
from . import vmap as batching
from .autograd_key import straight
from .context_parallel import refuse_shards
from .schema import SAVED_TENSORS

Tensor = torch.Tensor
FLAGS = "align", "deterministic", "has_bias_grad", "is_long"  # of a Problem
AFTER = schema.CALL_NAMES[len(Extras._fields) :]  # the tensors; a block is a list, as torch has it
MASK, SCORE, BLOCK = (AFTER.index(name) for name in ("mask_mod", "score_mod", "mask_block"))


def parts_of(args: tuple, before: int) -> tuple[tuple, Extras, schema.Options]:
    """An operator's arguments: the tensors before the extras, the extras, and the rest."""
    tensors, options = schema.flat(args, before)
    return tensors[:before], extras_of(tensors[before:]), schema.options_from(options)


def problem_from(inputs: Sequence[Tensor], extras: Extras, options: schema.Options) -> Problem:
    """The problem that an operator's arguments ask for; `inputs` are q, k and v."""
    q, k, v = inputs
    schema.check_devices(("q", "k", "v", *Extras._fields[:OPTIONAL]), (*inputs, *extras.tensors))
    mods = options.mods
    check_captured(mods, q, k=k, extras=extras)
    flags: Any = {x: getattr(options, x) for x in FLAGS}
    return describe(q, k, v, extras=extras, scalars=options.scalars, mods=mods, **flags)


def _call_of(inputs: tuple, extras: Extras, options: schema.Options) -> Call:
    """The call of an operator's arguments; `inputs` are q, k and v."""
    return Call(problem_from(inputs, extras, options=options), options.scalars, options.backend)


def _known(args: tuple, before: int) -> tuple[Call, tuple, Extras]:
    """The call of an operator's arguments, cached by signature, for compiled graphs, which do not
    pass through `frontend.call.call`; the tensors before the extras, and these.
    """
    row, options = schema.flat(args, before)

    def make() -> Call:
        inputs, extras = row[:before], extras_of(row[before:])
        if before == INPUTS:
            return _call_of(inputs, extras, schema.options_from(options))
        schema.check_devices(Saved._fields, inputs)
        return _call_of(inputs[2 : 2 + INPUTS], extras, schema.options_from(options))

    if options[MASK] or options[SCORE]:  # their trees, which a bounded table may have dropped
        _ = schema.options_from(options).mods
    flags: Any = *options[:BLOCK], *options[BLOCK], *options[BLOCK + 1 :]
    call = ops.known(row, flags, make)
    has_more = call.has_extras or len(row) > before + OPTIONAL
    return call, row[:before], extras_of(row[before:]) if has_more else NO_EXTRAS


def _forward_kernel(args: tuple):
    call, (q, k, v), extras = _known(args, INPUTS)
    refuse_shards()
    return ops.run_forward(call, q, k=k, v=v, extras=extras)


def _backward_kernel(args: tuple):
    call, tensors, extras = _known(args, SAVED_TENSORS)
    saved = Saved._make(tensors)
    return ops.filled(ops.run_backward(call, saved, extras=extras), saved.q)


def _forward_fake(args: tuple):
    inputs, extras, options = parts_of(args, INPUTS)
    return empty_out(inputs[0], problem_from(inputs, extras, options=options).headdim_v)


def _backward_fake(args: tuple):
    tensors, extras, options = parts_of(args, SAVED_TENSORS)
    schema.check_devices(Saved._fields, tensors)
    inputs = q, k, v = tensors[2 : 2 + INPUTS]
    return ops.filled(empty_grads(problem_from(inputs, extras, options), q, k, v, extras=extras), q)


# autograd and vmap


def _setup_context(ctx, inputs, output):
    tensors, extras, options = parts_of(inputs, INPUTS)
    saved = *tensors, *extras.tensors
    ops.save(ctx, _call_of(tensors, extras, options), tensors=saved, output=output)


def _op_backward(ctx, dout, dlse):
    out, lse, q, k, v, *tensors = ctx.saved_tensors
    captured = INPUTS + OPTIONAL
    needs = ctx.needs_input_grad[captured]  # of a list a list, of None False
    is_list = isinstance(needs, (list, tuple))
    after = (None,) * len(AFTER)
    if dout is None and dlse is None:
        return *(None,) * captured, None, *after
    dout = torch.zeros_like(out) if dout is None else dout
    saved, extras = Saved(dout, dlse, q=q, k=k, v=v, out=out, lse=lse), extras_of(tensors)
    grads = ops.differentiated(ctx.call, saved, extras)
    grads = ops.of_inputs(
        ctx.call, grads, saved=saved, extras=extras, needs=needs if is_list else ()
    )
    return *grads[:captured], list(grads[captured:]) if is_list else None, *after


def loop_function(function: Any) -> None:
    """Has a Function of a call and tensors mapped one by one."""
    rule = batching.looped(lambda args: schema.apply(function, args[0], args[1:]))
    function.vmap = staticmethod(rule)


def _attention_vmap(info, in_dims, call, *tensors):
    attend = functools.partial(schema.apply, ops.Attention, call)
    counts_rows = "b" in indices_used(call.problem.mods)
    return batching.forward(attend, counts_rows, info.batch_size, in_dims[1:], tensors)


ops.Attention.vmap = staticmethod(_attention_vmap)
loop_function(ops.AttentionBackward)


def _forward_vmap(info, in_dims, *args):
    tensors, options = schema.flat(args, INPUTS)

    def attend(tensors: tuple) -> tuple[Tensor, Tensor]:
        extras = extras_of(tensors[INPUTS:])
        arguments = (*tensors[:INPUTS], *extras.arguments, *options)
        return torch.ops.tilewise.flash_attn_forward(**dict(zip(schema.FORWARD, arguments)))

    counts_rows = "b" in indices_used(schema.options_from(options).mods)
    dims = schema.flat(in_dims, INPUTS)[0]
    return batching.forward(attend, counts_rows, info.batch_size, dims, tensors)


schema.operator(
    "flash_attn_forward",
    f"(Tensor q, Tensor k, Tensor v, {schema.CALL}) -> (Tensor, Tensor)",
    kernel=_forward_kernel,
    fake=_forward_fake,
    backward=_op_backward,
    setup_context=_setup_context,
    vmap=_forward_vmap,
)
schema.operator(
    "flash_attn_backward",
    f"({schema.SAVED}, {schema.CALL}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    kernel=_backward_kernel,
    fake=_backward_fake,
    backward=schema.no_double_backward,
    is_looped=True,
)
straight("flash_attn_forward", INPUTS, _forward_kernel, _op_backward, setup_context=_setup_context)
straight("flash_attn_backward", SAVED_TENSORS, _backward_kernel, schema.no_double_backward)
