"""The common path of all public functions: one check per signature, then one op or a launch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .. import dispatch
from ..errors import HEADS_FIRST, OURS, ArgumentError, Words, warn_slow
from ..mods.flat import captured_by_score
from ..ops import attention as ops
from ..ops.autocast import cast_bias, is_any_autocast_on
from ..ops.calls import Entry, entry_of, has_lazy, resolved
from ..problem import NO_EXTRAS, NO_MODS, Call, Extras, Mods, describe, extras_of
from ..switches import is_on
from .checks import check_device, check_extras, check_tensors, either
from .scalars import Numbers, check_causal, check_flag, check_numbers
from .values import check_scores, check_values

Tensor = torch.Tensor


def launch(
    call: Call,
    inputs: tuple[Any, Any, Any],
    *,
    optional: Sequence[Tensor | None],
    layout: str,
    words: Words = OURS,
) -> tuple[Tensor, Tensor]:
    """`out` and `lse` of a cached call, of q, k and v in `layout`; `optional` are the first
    Extras.
    """
    (q, k, v), extras, is_packed = inputs, NO_EXTRAS, call.problem.is_packed
    if is_packed:
        q, k, v = q.unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0)
    elif layout == "bhsd":
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    if call.has_extras:
        extras = extras_of(optional)
        if q.is_cpu:
            check_values(q, k, extras=extras, words=words)
    out, lse = ops.launch(call, q, k, v, extras)
    if is_packed:
        return out.squeeze(0), lse.squeeze(0)
    return out if layout == "bshd" else out.transpose(1, 2), lse


def check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    extras: Extras,
    numbers: Numbers,
    deterministic: bool,
    mods: Mods = NO_MODS,
    is_long: bool = False,
    words: Words = OURS,
) -> Call:
    """The call of tensors in (batch, seqlen, nheads, headdim) order, but for values of lengths."""
    check_tensors(q, k, v=v, words=words)
    check_extras(q, k, extras=extras, words=words)
    if extras.bias is not None:
        check_bias(q, k, bias=extras.bias, is_packed=extras.cu_seqlens_q is not None, words=words)
    if deterministic and mods.score:
        check_order(captured_by_score(mods, extras.captured))
    scalars = check_numbers(numbers, q, words=words)
    problem = describe(
        q,
        k,
        v,
        extras=extras,
        scalars=scalars,
        align=check_causal(numbers.causal),
        mods=mods,
        deterministic=deterministic,
        is_long=is_long,
        has_bias_grad=extras.bias is not None and extras.bias.requires_grad,
    )
    return Call(problem, scalars)


def check_bias(
    q: Tensor, k: Tensor, bias: Tensor, is_packed: bool = False, words: Words = OURS
) -> None:
    """A bias that broadcasts over the scores of sequences that are rows of a batch."""
    scores = q.shape[0], q.shape[2], q.shape[1], k.shape[1]
    if is_packed:
        raise ArgumentError(
            "bias does not support packed sequences: pass a score_mod that indexes the tensor by "
            "position"
        )
    if bias.dtype == torch.bool:
        indices = ("b", "h", "q_idx", "kv_idx")[max(0, 4 - bias.dim()) :]
        indices = ("0" if n == 1 else index for n, index in zip(bias.shape, indices))
        raise ArgumentError(
            f"{words.bias}.dtype is torch.bool: a bias is added to the scores, so pass the bools "
            f"as a mask, mask_mod=lambda b, h, q_idx, kv_idx: bias[{', '.join(indices)}]"
        )
    if bias.dim() != 4 or any(n not in (1, m) for n, m in zip(bias.shape, scores)):
        raise ArgumentError(
            f"{words.bias} has shape {tuple(bias.shape)}: it must have 4 dimensions, (batch, "
            f"nheads, seqlen_q, seqlen_k) = {scores}, each of this size or 1"
            f"{_expanded(bias, scores)}"
        )
    if bias.dtype not in (q.dtype, torch.float32):
        dtypes = either([str(x).removeprefix("torch.") for x in (q.dtype, torch.float32)])
        raise ArgumentError(
            f"{words.bias}.dtype is {bias.dtype}: it must be {words.bias_is_also}{dtypes}"
        )
    check_device(words.bias, bias, of=words.q, q=q)


def _expanded(bias: Tensor, scores: tuple[int, ...]) -> str:
    """How a bias of fewer dimensions gets 4."""
    missing = 4 - bias.dim()
    ways = {", ".join(["None"] * missing): (1,) * missing + bias.shape} if missing > 0 else {}
    if missing == 1:
        ways[":, None"] = (bias.shape[0], 1, *bias.shape[1:])
    fitting = [way for way, x in ways.items() if all(n in (1, m) for n, m in zip(x, scores))]
    return f": pass bias[{fitting[0]}]" if fitting else ""


def check_order(captured: tuple[Tensor, ...]) -> None:
    """Refuses captured tensors that require a gradient, which is summed in no fixed order."""
    for x in captured:
        if x.requires_grad and torch.is_grad_enabled() and x.device.type != "cpu":
            raise NotImplementedError(
                "deterministic=True, and a score function captured a tensor of shape "
                f"{tuple(x.shape)} that requires a gradient: that gradient is summed in no fixed "
                "order, so pass the tensor as bias, whose gradient is deterministic, or detach() "
                "it"
            )


def warn_of_order(q: Tensor, k: Tensor, v: Tensor, words: Words) -> None:
    """A warning, once, of shapes that heads and lengths the other way round would explain."""
    _, seqlen, nheads, _ = q.shape
    if q.shape == k.shape == v.shape and nheads > seqlen > 1:
        warn_slow(
            f"{words.q}, {words.k} and {words.v} are {nheads} heads of {seqlen} rows each; "
            f"{words.order} (a warning of TILEWISE_CHECK=1, once)",
            UserWarning,
        )


def call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    extras: Extras,
    numbers: Numbers,
    deterministic: bool,
    backend: str | None = None,
    mods: Mods = NO_MODS,
    is_long: bool = False,
    words: Words = OURS,
    entry: Entry | None = None,
) -> tuple[Tensor, Tensor]:
    """The common path of all public functions: autocast, one check per signature, launch. `words`
    are the function's argument names, and `entry` is the cache entry of its arguments. What is not
    in the signature here has been checked before the lookup.
    """
    deterministic = check_flag("deterministic", deterministic)
    dispatch.check_backend(backend)
    tensors = q, k, v, *extras.tensors
    needs_dispatcher = ops.needs_dispatcher(tensors)
    if needs_dispatcher or is_any_autocast_on():
        q, k, v = ops.autocast(q, k, v)
        extras = extras._replace(bias=cast_bias(extras.bias, q))
        tensors = q, k, v, *extras.tensors
    if not needs_dispatcher and has_lazy(tensors):
        q, k, v, *optional = tensors = resolved(tensors)
        extras = extras_of(optional)
    numbers = numbers._replace(window=numbers.sides(words.window))
    if entry is None and not needs_dispatcher and numbers.are_fixed:
        entry = entry_of(tensors, (numbers, deterministic, mods, is_long, backend))
    checked = None if entry is None else entry.call  # a compiler would watch the table
    if checked is None:
        checked = check(
            q,
            k,
            v=v,
            extras=extras,
            numbers=numbers,
            deterministic=deterministic,
            mods=mods,
            is_long=is_long,
            words=words,
        )
        checked.backend = backend
        checked.needs_grad = not needs_dispatcher and ops.needs_grad(tensors)
        if entry is not None:
            entry.call = checked
    if checked.has_extras:
        check_values(q, k, extras=extras, words=words)
    if not needs_dispatcher and is_on("TILEWISE_CHECK"):
        if words.order and words is not HEADS_FIRST and not checked.problem.is_packed:
            warn_of_order(q, k, v=v, words=words)
        if q.device.type != "cpu":
            check_scores(q, k, scalars=checked.scalars, words=words)
    return ops.attention(checked, q, k, v, extras, needs_dispatcher)
