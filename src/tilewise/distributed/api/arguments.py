"""From the arguments of a call on shards, as users or an operator pass them, to the call that
methods compute, and its signature: a text that all ranks compare.
"""

from __future__ import annotations

import functools
import zlib
from typing import Any

import torch

from ...dispatch import check_backend
from ...errors import ArgumentError
from ...frontend.call import check
from ...frontend.scalars import Numbers, check_flag
from ...mods.flat import FlatMods
from ...mods.serialize import serialize
from ...ops import attention as ops
from ...problem import Extras
from ...tile.dropout_numbers import draw_rng
from ..layouts.layout import Layout
from ..methods.grads import LEARNED
from ..methods.shard_call import ShardCall

Tensor = torch.Tensor


def sharded_call(
    layout: Layout,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    numbers: Numbers,
    extras: Extras,
    modifiers: FlatMods,
    deterministic: bool,
    backend: str | None,
    bitwise: bool,
    learns: bool = False,
) -> ShardCall:
    """Checks the call of this rank's q, k and v, (batch, tokens, heads, headdim)."""
    p, rng = numbers.dropout_p, extras.dropout_rng
    if p and rng is None:
        if layout.ranks > 1:
            raise ArgumentError(
                "dropout_p without dropout_rng: all ranks must drop the same elements, so pass the "
                "same int64 (seed, offset) on each"
            )
        rng = draw_rng(q.device)
    extras = extras._replace(dropout_rng=rng if p else None, captured=modifiers.captured)
    call = check(
        q,
        k,
        v=v,
        extras=extras,
        numbers=numbers,
        deterministic=check_flag("deterministic", deterministic),
        mods=modifiers.mods,
    )
    for name, x in (("q", q), ("k", k)):
        if x.shape[1] != layout.tokens:
            raise ArgumentError(
                f"{name} has shape {tuple(x.shape)}, {x.shape[1]} tokens: rank {layout.rank} has "
                f"{layout.tokens} tokens of {layout.seqlen} in this layout; deal them with "
                "layout.shard"
            )
    slopes = extras.alibi_slopes
    if layout.cu_seqlens is not None and slopes is not None and slopes.dim() == 2:
        raise NotImplementedError(
            "alibi_slopes of shape (batch, nheads) with documents: pass shape (nheads,)"
        )
    check_backend(backend)
    if layout.ranks > 1:
        refuse_captured_gradients(modifiers)
    checked = ShardCall(
        layout,
        scalars=call.scalars,
        extras=extras,
        align=call.problem.align,
        mods=modifiers.mods,
        deterministic=call.problem.deterministic,
        backend=backend,
        bitwise=check_flag("bitwise", bitwise),
        learns=learns or ops.needs_grad((q, k, v, getattr(extras, LEARNED))),
    )
    names = zip("qkv", (q, k, v))
    shapes = [f"{name} {(x.shape[0], layout.seqlen, *x.shape[2:])}" for name, x in names]
    shapes.append(str(q.dtype).removeprefix("torch."))
    return checked._replace(signature=_signature(checked, numbers, shapes=shapes))


def index_sizes(layout: Layout, q: Tensor) -> tuple[int, int, int, int]:
    """Returns batch, heads and lengths as masks and score functions count them; 0 for those of
    documents.
    """
    if layout.cu_seqlens is None:
        return q.shape[0], q.shape[2], layout.seqlen, layout.seqlen
    return q.shape[0] * (len(layout.cu_seqlens) - 1), q.shape[2], 0, 0


def refuse_captured_gradients(modifiers: FlatMods) -> None:
    """Refuses captured tensors that want gradients."""
    if any(x.requires_grad for x in modifiers.captured):
        raise NotImplementedError(
            "a score_mod that captured a tensor that requires a gradient: no method of "
            "tilewise.distributed computes it yet, so detach() the tensor"
        )


def _signature(call: ShardCall, numbers: Numbers, *, shapes: list[str]) -> str:
    """Writes the call as a text, without the tokens, of which each rank has its own number."""
    layout = call.layout
    options: dict[str, Any] = numbers._asdict()
    options |= dict(causal=None, window=None, dropout_p=numbers.dropout_p or None)
    for name, x in zip(Extras._fields, call.extras.optional):
        options[name] = x if x is None else f"{tuple(x.shape)} {values_of(x)}"
    options["mask_mod"] = _digest(serialize(call.mods.mask))
    options["score_mod"] = _digest(serialize(call.mods.score))
    options["bitwise"] = None if call.bitwise else False
    parts = [
        *shapes,
        f"{layout.kind} over {layout.ranks} ranks ({_layout_digest(layout)})",
        f"causal={numbers.causal}, window={tuple(call.band)}",
        "with a gradient" if call.learns else "without a gradient",
        *(f"{name}={value}" for name, value in options.items() if value is not None),
    ]
    return ", ".join(parts)


def values_of(x: Tensor) -> str:
    """Writes what a tensor holds, which all ranks must pass alike. What is on a GPU is not read:
    that would wait for it.
    """
    return f"of values {_digest(repr(x.tolist()))}" if x.device.type == "cpu" else "of the device"


@functools.lru_cache(maxsize=1024)
def _layout_digest(layout: Layout) -> str | None:
    return _digest(repr((layout.runs, layout.cu_seqlens)))


def _digest(text: str) -> str | None:
    """Shortens a text to a few letters, which are the same in every process; None if empty."""
    return f"{zlib.crc32(text.encode()):08x}" if text else None
