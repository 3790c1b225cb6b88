"""torch's own flash attention operators, computed by tilewise: what its registry replaces.

    _scaled_dot_product_flash_attention    (batch, nheads, seqlen, headdim), and its backward
    _flash_attention_forward               (batch, seqlen, nheads, headdim), or packed sequences as
                                           (total, nheads, headdim); and its backward

torch's autograd stands above them, so nothing here is differentiated. What tilewise does not serve
goes to the kernel that was there before, and is said once; where there was none, as on the CPU, the
refusal is raised.

Dropout is refused here: its mask means nothing to torch's kernel, which would have the backward of
our forward where tilewise is no longer active by then.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ..errors import ArgumentError, Words, warn_slow
from ..frontend.attention import attention
from ..frontend.call import check
from ..frontend.scalars import Numbers
from ..frontend.values import check_longest, check_values
from ..ops import attention as ops
from ..problem import INPUTS, LONG_SEQLEN, OPEN, Call, Extras, Saved

Tensor = torch.Tensor
WORDS = Words("query", "key", v="value", shape="(batch, seqlen, nheads, headdim)")
DENSE, PACKED = "_scaled_dot_product_flash_attention", "_flash_attention_forward"
OF_DENSE, OF_PACKED = f"{DENSE}_backward", "_flash_attention_backward"
INTO = f"{PACKED}_no_dropout_inplace"  # since torch 2.12


class FlashArguments(NamedTuple):
    """What `_flash_attention_forward` is given, in torch's order and names."""

    query: Tensor
    key: Tensor
    value: Tensor
    cum_seq_q: Tensor | None
    cum_seq_k: Tensor | None
    max_q: int
    max_k: int
    dropout_p: float
    is_causal: bool
    return_debug_mask: bool = False
    scale: float | None = None
    window_size_left: int | None = None
    window_size_right: int | None = None
    seqused_k: Tensor | None = None
    alibi_slopes: Tensor | None = None
    block_table: Tensor | None = None
    num_splits: int | None = None  # a hint: it chooses among equal results


def attend(arguments: FlashArguments) -> tuple[Tensor, Tensor]:
    """out and lse."""
    _refuse(arguments)
    if arguments.block_table is not None:
        return _attend_pages(arguments)
    q, k, v = _in_batch(arguments.cum_seq_q is not None, arguments[:INPUTS])
    call, extras = _checked(arguments, q, k=k, v=v)
    out, lse = ops.run_forward(call, q, k=k, v=v, extras=extras)
    if arguments.cum_seq_q is not None:
        return out.squeeze(0), lse.squeeze(0)
    return out, lse


def _attend_pages(arguments: FlashArguments) -> tuple[Tensor, Tensor]:
    """Attends over pages: `seqused_k` says how many keys each sequence has."""
    q, k, v = _in_batch(False, arguments[:INPUTS])
    window = arguments.window_size_left, arguments.window_size_right
    with torch.no_grad():
        results: Any = attention(
            q,
            k,
            v,
            page_table=arguments.block_table,
            seqused_k=arguments.seqused_k,
            cu_seqlens_q=arguments.cum_seq_q,
            max_seqlen_q=arguments.max_q if type(arguments.max_q) is int else None,
            alibi_slopes=arguments.alibi_slopes,
            causal=arguments.is_causal,
            scale=arguments.scale,
            window=window,
            return_lse=True,
        )
    return results


def differentiate(saved: Saved, arguments: FlashArguments) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of query, key and value."""
    _refuse(arguments)
    is_packed = arguments.cum_seq_q is not None
    tensors = saved.dout, saved.q, saved.k, saved.v, saved.out
    dout, q, k, v, out = _in_batch(is_packed, tensors)
    call, extras = _checked(arguments, q, k=k, v=v)
    lse = saved.lse.contiguous()
    lse = lse.unsqueeze(0) if is_packed else lse
    grads = ops.run_backward(call, Saved(dout, None, q, k=k, v=v, out=out, lse=lse), extras=extras)
    dq, dk, dv = grads[:INPUTS]
    if is_packed:
        return dq.squeeze(0), dk.squeeze(0), dv.squeeze(0)
    return dq, dk, dv


def _refuse(arguments: FlashArguments) -> None:
    """What no kernel of ours computes."""
    if arguments.block_table is not None and arguments.seqused_k is None:
        raise NotImplementedError(
            "block_table without seqused_k: pass seqused_k, the number of keys per sequence"
        )
    if arguments.return_debug_mask:
        raise NotImplementedError("return_debug_mask: a dropout mask is not stored")
    if arguments.dropout_p:
        raise NotImplementedError(
            "dropout_p: tilewise supports dropout in F.scaled_dot_product_attention, not below it"
        )
    if torch.is_grad_enabled() and any(x.requires_grad for x in arguments[:INPUTS]):
        for name in ("alibi_slopes", "seqused_k", "block_table"):  # torch's backward lacks them
            if getattr(arguments, name) is not None:
                raise NotImplementedError(f"{name} with a gradient: torch has no backward for it")


def _in_batch(is_packed: bool, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Packed tensors as a batch of 1; a last dimension that is not contiguous is copied."""
    rows = (x if x.stride(-1) == 1 else x.contiguous() for x in tensors)
    return tuple(x.unsqueeze(0) for x in rows) if is_packed else tuple(rows)


def _checked(arguments: FlashArguments, q: Tensor, k: Tensor, v: Tensor) -> tuple[Call, Extras]:
    """torch's call as one of ours: causal is bottom-right, and closes a window to the right."""
    extras = Extras(
        arguments.alibi_slopes,
        seqused_k=arguments.seqused_k,
        cu_seqlens_q=arguments.cum_seq_q,
        cu_seqlens_k=arguments.cum_seq_k,
    )
    left, right = (
        OPEN if size is None or size < 0 else size
        for size in (arguments.window_size_left, arguments.window_size_right)
    )
    with torch.no_grad():
        call = check(
            q,
            k,
            v=v,
            extras=extras,
            numbers=Numbers(arguments.scale, causal=arguments.is_causal, window=(left, right)),
            deterministic=torch.are_deterministic_algorithms_enabled(),
            is_long=arguments.cum_seq_q is not None and arguments.max_q > LONG_SEQLEN,
            words=WORDS,
        )
    check_values(q, k, extras=extras, words=WORDS)
    starts, used = (extras.cu_seqlens_q, extras.cu_seqlens_k), (None, arguments.seqused_k)
    check_longest({"max_q": arguments.max_q, "max_k": arguments.max_k}, starts, used)
    return ops.known_call(call, (q, k, v, *extras.tensors)), extras


# the operators, as torch calls them


def _dense(
    query, key, value, dropout_p=0.0, is_causal=False, return_debug_mask=False, *, scale=None
):
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    max_q, max_k = query.shape[2], key.shape[2]
    arguments = FlashArguments(
        q, k, v, None, None, max_q, max_k, dropout_p, is_causal, return_debug_mask, scale
    )
    out, lse = attend(arguments)
    return _as_like(query, out.transpose(1, 2)), lse, None, None, max_q, max_k, *_unused(query)


def _dense_backward(*args, scale=None):
    *tensors, lse, _, _, max_q, max_k, dropout_p, is_causal, _, _ = args
    dout, q, k, v, out = (x.transpose(1, 2) for x in tensors)
    saved = Saved(dout, None, q=q, k=k, v=v, out=out, lse=lse)
    arguments = FlashArguments(q, k, v, None, None, max_q, max_k, dropout_p, is_causal, scale=scale)
    grads = differentiate(saved, arguments)
    return tuple(_as_like(x, grad.transpose(1, 2)) for x, grad in zip(tensors[1:4], grads))


def _packed(*args, **options):
    arguments = _arguments(args, options)
    out, lse = attend(arguments)
    return _as_like(arguments.query, out), lse, *_unused(arguments.query)


def _packed_backward(*args, scale=None, window_size_left=None, window_size_right=None):
    dout, *inputs, out, lse, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, _, _ = args
    q, k, v = inputs
    arguments = FlashArguments(
        q, k, v, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, scale=scale
    )
    arguments = arguments._replace(
        window_size_left=window_size_left, window_size_right=window_size_right
    )
    grads = differentiate(Saved(dout, None, q=q, k=k, v=v, out=out, lse=lse), arguments)
    return tuple(_as_like(x, grad) for x, grad in zip(inputs, grads))


def _packed_into(out, *args, **options):
    result, lse = attend(_arguments(args, options))
    out.copy_(result)
    return lse


def _arguments(args: tuple, options: dict) -> FlashArguments:
    """What a torch newer than this file adds is refused, where it is set."""
    newer = [name for name in options if name not in FlashArguments._fields]
    if any(options[name] is not None for name in newer):
        raise NotImplementedError(f"{', '.join(newer)}: unknown to tilewise")
    return FlashArguments(*args, **{name: x for name, x in options.items() if name not in newer})


def _unused(query: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The last results of torch's forward: random state, an unused one, and a dropout mask."""
    state, unread = (query.new_empty(shape, dtype=torch.uint64) for shape in ((2,), ()))
    return state, unread, query.new_empty(0)


def _as_like(x: Tensor, result: Tensor) -> Tensor:
    """A result with the strides of `empty_like(x)`, as torch's graphs assert them."""
    like = torch.empty_like(x)
    return result if result.stride() == like.stride() else like.copy_(result)


KERNELS: dict[str, Callable] = {
    DENSE: _dense,
    OF_DENSE: _dense_backward,
    PACKED: _packed,
    OF_PACKED: _packed_backward,
    INTO: _packed_into,
}


def install(library: torch.library.Library, key: str) -> None:
    """Our kernels of these operators at a dispatch key, each with what was there before."""
    for name, kernel in KERNELS.items():
        if hasattr(torch.ops.aten, name):
            library.impl(name, _or_before(name, kernel, before(name, key)), key, with_keyset=True)


def before(name: str, key: str) -> Any:
    """The kernel that an operator has at a key, or None."""
    name = f"aten::{name}"
    if not torch._C._dispatch_has_kernel_for_dispatch_key(name, key):
        return None
    return torch.library.get_kernel(name, key)


def _or_before(name: str, kernel: Callable, earlier: Any) -> Callable:
    """A kernel of ours, and the earlier one for what it refuses."""

    def call(keyset, *args, **options):
        try:
            return kernel(*args, **options)
        except (ArgumentError, NotImplementedError) as error:
            if earlier is None:
                raise
            result = earlier.call_boxed(keyset, *args, **options)
            warn_slow(f"torch's own kernel computes aten::{name}: {error}")
            return result

    return call
