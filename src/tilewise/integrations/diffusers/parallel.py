"""diffusers' context parallelism: its rings and its Ulysses call our forward and our backward.

Each rank holds a part of the sequence. Ulysses exchanges it for the whole sequence of some heads; a
ring passes keys and values on, and joins what each gives by lse. diffusers does both, in templates
that take two functions.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch

from ...frontend.call import check
from ...frontend.scalars import Numbers
from ...mods.flat import NO_MODIFIERS
from ...mods.flatten import modifiers_by
from ...ops import attention as ops
from ...problem import Extras, Saved
from .call import attend

Tensor = torch.Tensor


def attend_shards(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    return_lse: bool,
    config,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of a rank's queries to all ranks' keys."""
    dispatch = importlib.import_module("diffusers.models.attention_dispatch")
    run = dispatch._templated_context_parallel_attention
    has_mask = mask is not None
    is_ring = config.context_parallel_config.ring_degree > 1
    unsupported = {
        "attn_mask that differs by query or head": has_mask and not _is_of_keys(mask),
        "attn_mask with a ring, which passes keys on without it (Ulysses takes it),": has_mask
        and is_ring,
        "attn_mask with a gradient": has_mask and mask.requires_grad,
        "dropout_p": dropout_p > 0,
        "return_lse with gradients": return_lse and ops.needs_grad((query, key, value)),
        "is_causal": is_causal,
        "enable_gqa": enable_gqa and query.shape[2] != key.shape[2],
    }
    for argument, is_used in unsupported.items():
        if is_used:
            raise NotImplementedError(
                f"{argument} is not supported under context parallelism: leave it out, or load the "
                "model without `parallel_config` and `enable_parallelism`"
            )
    parallel_options = dict(forward_op=forward_op, backward_op=backward_op, _parallel_config=config)
    return run(query, key, value, mask, 0.0, False, scale, False, return_lse, **parallel_options)


def forward_op(
    ctx,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    _save_ctx: bool = True,
    _parallel_config=None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention to the keys at hand; a ring then joins such results."""
    query, key, value = ops.autocast(query, key, value)  # what is saved is what is computed with
    flags: dict[str, Any] = dict(dropout_p=dropout_p, is_causal=is_causal)
    flags.update(scale=scale, enable_gqa=enable_gqa)
    out, lse = attend(query, key, value=value, mask=attn_mask, **flags)
    if _save_ctx:
        ctx.save_for_backward(query, key, value, out, lse, attn_mask)
        ctx.scale = scale
    return (out, lse) if return_lse else out


def backward_op(
    ctx,
    grad_out: Tensor,
    *args,
    query: Tensor | None = None,
    key: Tensor | None = None,
    value: Tensor | None = None,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    **kwargs,
) -> tuple[Tensor, ...]:
    """Gradients of query, key and value; a ring passes the keys at hand, and out and lse of all."""
    ring_degree = ctx._parallel_config.context_parallel_config.ring_degree
    if ring_degree > 1 and lse is None:
        raise NotImplementedError(
            "gradients in a ring: this diffusers passes no lse of all keys; install 0.40 or newer"
        )
    *saved, mask = ctx.saved_tensors
    inputs = zip(saved, (query, key, value, out, lse))
    q, k, v, out, lse = (old if new is None else new for old, new in inputs)
    bias, modifiers = mask, NO_MODIFIERS
    if mask is not None and mask.dtype == torch.bool:
        bias, modifiers = None, modifiers_by(mask)
    extras = Extras(bias=bias, captured=modifiers.captured)
    call = check(
        q,
        k,
        v=v,
        extras=extras,
        numbers=Numbers(ctx.scale),
        deterministic=torch.are_deterministic_algorithms_enabled(),
        mods=modifiers.mods,
    )
    call = ops.known_call(call, (q, k, v, *extras.tensors))
    dout, out = (x.to(q.dtype).contiguous() for x in (grad_out, out))
    lse = lse.transpose(1, 2).contiguous()
    saved_inputs = Saved(dout, None, q=q, k=k, v=v, out=out, lse=lse)
    return ops.gradients(call, saved_inputs, extras=extras)


def _is_of_keys(mask: Tensor) -> bool:
    """Whether it is (batch or 1, 1, 1, seqlen_k)."""
    return mask.dim() == 4 and mask.shape[1:3] == (1, 1)
