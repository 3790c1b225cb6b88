"""`tilewise.distributed.attention`: one call on each rank, on its rows of q, k and v."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch

from ...errors import ArgumentError, a_type
from ...features import FEATURES, refuse
from ...frontend.checks import check_rank, check_tensor
from ...frontend.scalars import Numbers, Window, check_flag
from ...frontend.scalars import check_layout as check_order
from ...keywords import refuses_others, unexpected
from ...mods.flatten import modifiers_of
from ...ops import attention as ops
from ...ops.autocast import is_any_autocast_on
from ...ops.calls import resolved
from ...ops.context_parallel import unsharded
from ...problem import Extras
from ...tile.dropout_numbers import check_dropout
from ..layouts.layout import Layout
from ..transport.arena import reporting
from . import dtensor, known_calls, operator
from .arguments import index_sizes, sharded_call
from .choice import arena_for, attend, choose

Tensor = torch.Tensor

# Arguments of `tilewise.attention` that no method serves
NOT_SERVED = {name for name, feature in FEATURES.items() if feature.sharded}


@refuses_others("tilewise.distributed.attention")
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    layout: Layout,
    causal: bool | str = False,
    scale: float | None = None,
    window: Window = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    mask_mod: Callable[..., Any] | None = None,
    score_mod: Callable[..., Any] | None = None,
    dropout_p: float = 0,
    dropout_rng: Tensor | None = None,
    order: str = "bshd",
    deterministic: bool = False,
    return_lse: bool = False,
    backend: str | None = None,
    method: str | None = None,
    bitwise: bool = True,
    **others: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """`tilewise.attention` for a sequence that is sharded across the ranks of a process group.

    Example:
        >>> import torch, tilewise.distributed as td
        >>> layout = td.zigzag(64, 1)  # one rank; in a program, the process group
        >>> q, k, v = torch.randn(3, 2, 64, 4, 32).unbind(0)
        >>> td.attention(*map(layout.shard, (q, k, v)), layout=layout, causal=True).shape
        torch.Size([2, 64, 4, 32])

    All ranks make the call at the same time, each with its own rows. The other arguments are those
    of `tilewise.attention`. They refer to the whole sequence: positions in masks and dropout,
    ALiBi's distances, windows. All ranks must pass equal `alibi_slopes`, `sinks`, `dropout_rng` and
    captured tensors.

    Args:
        q: (batch, tokens, nheads, headdim), this rank's tokens in `layout`; with documents also
            (tokens, nheads, headdim).
        k: shaped as q, with nheads_k.
        v: as k, with its own headdim_v.
        layout: which rank has which tokens.
        sinks: (nheads,). As for any weight, this rank's gradient is a partial sum over ranks.
        order: "bshd", or "bhsd" for (batch, nheads, tokens, headdim).
        method: "stream" pulls keys and values to the queries. "heads" exchanges rows for heads, if
            the number of ranks divides nheads_k. None chooses between them, as `plan` does. "ring"
            attends to one rank's keys after another and merges; it needs `bitwise=False`.
        bitwise: `out` and `lse` are bitwise equal to one process's. On a CPU, each rank's "stream"
            forward then does one process's work; False computes only this rank's rows.

    The gradients of k and v are fp32 sums in rank order. With "heads" and `deterministic=True`, all
    gradients are bitwise equal to one process's.

    Returns:
        This rank's rows of `out`, and with `return_lse` of `lse`.

    Raises:
        ArgumentError: an argument is wrong.
        NotImplementedError: the method does not support the call; the message names one that does.
        RankMismatch: the ranks do not make the same call.
        RankLost: a rank does not make the call within the group's timeout.
    """
    with reporting(layout, (q, k, v)):
        entry = None
        has_functions = not (mask_mod is score_mod is dropout_rng is None)
        # Ranks compare what these hold, at each call
        holds_values = any([torch.is_tensor(x) and x.is_cpu for x in (alibi_slopes, sinks)])
        is_known = not (has_functions or holds_values)
        if is_known and _is_plain(dropout_p, return_lse, others=others):
            settings = causal, scale, softcap, deterministic, backend, method, bitwise, order
            tensors, settings = (q, k, v, alibi_slopes, sinks), (*settings, dropout_p)
            entry = known_calls.entry_of_call(layout, tensors, settings=settings, window=window)
        if entry is not None and entry.call is not None:
            arena = arena_for(layout, q.device)
            spec = known_calls.known_call(entry, layout, arena=arena)
            if spec is not None and spec.prepared is not None:
                is_packed, chosen = q.dim() == 3, spec.prepared.method
                q, k, v = _ordered(q, k, v=v, order=order, is_packed=is_packed)
                if not (alibi_slopes is None and sinks is None):
                    spec = spec._replace(extras=Extras(alibi_slopes, sinks))
                with unsharded():
                    out, lse = attend(
                        arena, spec, q=q, k=k, v=v, method=chosen, return_lse=return_lse
                    )
                return _restored(out, lse if return_lse else None, order=order, is_packed=is_packed)
        layout = check_layout(layout)
        for name, x in (("q", q), ("k", k), ("v", v)):
            check_tensor(name, x)
        places = None
        if dtensor.are_dtensors(q, k, v):
            places = dtensor.places_of(layout, q, k=k, v=v, order=order)
            dtensor.check_indices(places, mask_mod, score_mod=score_mod, dropout_p=dropout_p)
            inputs: Any = q, k, v
            q, k, v = (x.to_local() for x in inputs)
            alibi_slopes = dtensor.of_heads(places, alibi_slopes, is_learned=False)
            sinks = dtensor.of_heads(places, sinks, is_learned=True)
        is_packed = q.dim() == 3 and layout.cu_seqlens is not None
        is_traced = operator.is_traced(q, k, v)
        if not is_traced:  # in an operator, torch resolves them
            q, k, v = resolved((q, k, v))
            alibi_slopes, sinks, dropout_rng = resolved((alibi_slopes, sinks, dropout_rng))
        with contextlib.nullcontext() if is_traced else unsharded():
            _refuse(others)
            q, k, v = _ordered(q, k, v=v, order=order, is_packed=is_packed)
            check_rank(q, k, v=v)
            p = check_dropout(dropout_p)
            numbers = Numbers(
                scale=scale, softcap=softcap, dropout_p=p, causal=causal, window=window
            )
            sizes = (q.shape[0], q.shape[2], 0, 0) if is_traced else index_sizes(layout, q)
            arguments: Any = dict(
                numbers=numbers,
                extras=Extras(alibi_slopes, sinks, dropout_rng=dropout_rng),
                modifiers=modifiers_of(mask_mod, score_mod, None, sizes),
                deterministic=deterministic,
                backend=backend,
                bitwise=bitwise,
            )
            if is_traced:
                out, lse = operator.attention(layout, q, k=k, v=v, method=method, **arguments)
            else:
                arena = arena_for(layout, q.device)
                return_lse = check_flag("return_lse", return_lse)
                spec = sharded_call(layout, q, k=k, v=v, **arguments)
                chosen = choose(arena, spec, q, k=k, v=v, method=method)
                spec = known_calls.keep(entry, spec, arena=arena, method=chosen)
                out, lse = attend(arena, spec, q=q, k=k, v=v, method=chosen, return_lse=return_lse)
        lse = lse if return_lse else None
        return _restored(out, lse, order=order, is_packed=is_packed, places=places)


def _is_plain(dropout_p: Any, return_lse: Any, others: dict[str, Any]) -> bool:
    """Tells whether the types of a call's other arguments show that it may be cached."""
    if torch.compiler.is_compiling() or type(return_lse) is not bool:
        return False
    if type(dropout_p) not in (int, float) or dropout_p:
        return False
    return all([x is None and name in NOT_SERVED for name, x in others.items()])


def _restored(
    out: Tensor, lse: Tensor | None, order: str, *, is_packed: bool, places: Any = None
) -> Tensor | tuple[Tensor, Tensor]:
    """Returns results in the order of the inputs, without `lse` where it is None."""
    if is_packed:
        out, lse = out.squeeze(0), lse if lse is None else lse.squeeze(0)
    elif order == "bhsd":
        out = out.transpose(1, 2)
    if places is not None:
        out, lse = dtensor.joined(places, out, lse=lse)
    return out if lse is None else (out, lse)


def _ordered(
    q: Tensor, k: Tensor, v: Tensor, *, order: str, is_packed: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns q, k and v as (batch, tokens, heads, headdim), in the dtype of autocast."""
    check_order(order, "order")
    if is_packed:
        q, k, v = (x.unsqueeze(0) for x in (q, k, v))
    elif order == "bhsd":
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return ops.autocast(q, k, v) if is_any_autocast_on() else (q, k, v)


def check_layout(layout: Any) -> Layout:
    """Checks that a layout is one, and has the processes of its ranks."""
    if not isinstance(layout, Layout):
        raise ArgumentError(
            f"layout is {a_type(layout)}: it must be a tilewise.distributed.Layout, as "
            "td.zigzag(seqlen, group) makes it; the order of dimensions is order= here"
        )
    if layout.ranks > 1 and layout.group is None:
        raise ArgumentError(
            f"this layout was made for {layout.ranks} ranks without a process group: make it with "
            "one"
        )
    return layout


def _refuse(others: dict[str, Any]) -> None:
    for name in others:
        if name not in NOT_SERVED:
            raise unexpected("tilewise.distributed.attention", [name])
    refuse("sharded", **others)
