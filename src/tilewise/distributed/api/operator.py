"""The call as torch.compile sees it: two operators, forward and backward. A layout crosses as a
tensor of numbers, so that one graph serves all layouts and lengths, and masks and score functions
as texts. What the call checks and chooses it does as it runs, on real tensors.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from ...features import OPERATORS, SHARDED_TYPES, schema_of
from ...frontend.qkv import check_rank, check_tensors
from ...frontend.scalars import band, check_causal, check_flag
from ...mods.expressions import lookup
from ...mods.flat import count_tensors
from ...mods.flatten import modifiers_of
from ...mods.masks import Mask
from ...mods.scores import ScoreMod
from ...mods.serialize import MASK, SCORE_FUNCTION, deserialize, serialize
from ...ops import attention as ops
from ...ops.calls import PLAIN_TENSORS
from ...ops.context_parallel import unsharded
from ...ops.schema import LIBRARY, SAVED, no_double_backward, record_of
from ...problem import Extras, Saved
from ...tile.dropout_numbers import check_dropout, draw_rng
from ..layouts.layout import Layout, layout_of
from ..methods.call_spec import CallSpec, check, check_captured
from ..transport.arena import Arena, reporting
from .choice import arena_for, attend, backward, choose

Tensor = torch.Tensor
INPUTS = 3  # q, k, v
LAYOUT = 2 * INPUTS + 1  # the place of the layout, after the optional tensors


# Of the operators, after q, k and v: those of a call as scalars, masks and score functions as texts
NAMES = OPERATORS["context_parallel"]
CALL = schema_of(NAMES, **SHARDED_TYPES)
QKV = "Tensor q, Tensor k, Tensor v"
# Inductor leaves such operators out of the CUDA graphs that it captures (`refuse_capture`)
TAGS = (torch.Tag.cudagraph_unsafe,)
LIBRARY.define(f"context_parallel_forward({QKV}, {CALL}) -> (Tensor, Tensor)", tags=TAGS)
GRADS = "(Tensor, Tensor, Tensor, Tensor)"
LIBRARY.define(f"context_parallel_backward({SAVED}, {CALL}) -> {GRADS}", tags=TAGS)


def is_traced(*inputs: Tensor) -> bool:
    """Tells whether a compiler sees the call, or tensors that have no numbers."""
    return torch.compiler.is_compiling() or any(type(x) not in PLAIN_TENSORS for x in inputs)


def attention(
    spec: CallSpec, q: Tensor, k: Tensor, v: Tensor, *, method: str | None
) -> tuple[Tensor, Tensor]:
    """Calls the operator: `out` and `lse` of a rank's rows, (batch, tokens, heads, headdim)."""
    extras = spec.extras
    modifiers = modifiers_of(spec.mask_mod, spec.score_mod, None, (q.shape[0], q.shape[2], 0, 0))
    check_captured(modifiers)
    dropout_p, rng = check_dropout(spec.dropout_p), extras.dropout_rng
    if dropout_p and rng is None and spec.layout.ranks == 1:
        rng = draw_rng(q.device)
    left, right = band(spec.window, False)
    values = spec._asdict() | extras._asdict()
    values |= dict(
        dropout_rng=rng,
        captured=list(modifiers.captured) or None,
        layout=spec.layout.table,
        causal="" if spec.causal is False else check_causal(spec.causal),
        left=left,
        right=right,
        dropout_p=float(dropout_p),
        mask_mod=serialize(modifiers.mods.mask),
        score_mod=serialize(modifiers.mods.score),
        deterministic=check_flag("deterministic", spec.deterministic),
        method=method,
        bitwise=check_flag("bitwise", spec.bitwise),
        needs_grad=ops.needs_grad(q, k, v, extras.sinks),
    )
    return torch.ops.tilewise.context_parallel_forward(q, k, v, *[values[x] for x in NAMES])


def _spec_of(layout: Layout, call: tuple) -> tuple[CallSpec, str | None]:
    """Reads the call, and the name of a method, from an operator's arguments after q, k and v."""
    values: dict[str, Any] = dict(zip(NAMES, call))
    captured = tuple(values.pop("captured") or ())
    mask = score = None
    if values["mask_mod"]:
        name = deserialize(values["mask_mod"], MASK)
        mask = Mask(lookup(name), captured[: count_tensors(name)])
        captured = captured[count_tensors(name) :]
    if values["score_mod"]:
        score = ScoreMod(lookup(deserialize(values["score_mod"], SCORE_FUNCTION)), captured)
    extras, window = record_of(Extras, values), (values["left"], values["right"])
    values |= dict(layout=layout, causal=values["causal"] or False, window=window, extras=extras)
    values |= dict(mask_mod=mask, score_mod=score, learns=values["needs_grad"])
    return record_of(CallSpec, values), values["method"]


@contextlib.contextmanager
def _running(q: Tensor, call: tuple) -> Iterator[tuple[Arena | None, CallSpec, str | None]]:
    layout = layout_of(call[LAYOUT - INPUTS])
    with reporting(layout), unsharded(), torch.no_grad():
        yield arena_for(layout, q.device), *_spec_of(layout, call)


def _forward(q, k, v, *call):
    with _running(q, call) as (arena, spec, wanted):
        spec = check(spec, q, k, v)
        method = choose(spec, q, k, v, method=wanted)
        results = attend(arena, spec, q, k, v, method=method, return_lse=True)
    return tuple(x.contiguous() for x in results if x is not None)


def _backward(dout, dlse, q, k, v, out, lse, *call):
    with _running(q, call) as (arena, spec, wanted):
        spec = check(spec, q, k, v)
        method = choose(spec, q, k, v, method=wanted)
        saved = Saved(dout, dlse, q=q, k=k, v=v, out=out, lse=lse)
        grads = backward(arena, spec, saved, method=method)
    dsinks = q.new_empty(0) if grads.dsinks is None else grads.dsinks
    return *(x.contiguous() for x in grads[:INPUTS]), dsinks


def _forward_fake(q, k, v, *call):
    check_rank(q, k, v=v)
    check_tensors(q, k, v=v)
    exact = torch.promote_types(q.dtype, torch.float32)
    lse = q.new_empty(q.shape[0], q.shape[2], q.shape[1], dtype=exact)
    return q.new_empty(*q.shape[:3], v.shape[3]), lse


def _backward_fake(dout, dlse, q, k, v, out, lse, alibi_slopes, sinks, *call):
    dsinks = q.new_empty(0) if sinks is None else torch.empty_like(sinks)
    return *(x.new_empty(x.shape) for x in (q, k, v)), dsinks


def _setup_context(ctx, inputs, output):
    tensors, ctx.options = inputs[: LAYOUT - 1], inputs[LAYOUT + 1 :]
    captured, table = inputs[LAYOUT - 1 : LAYOUT + 1]
    ctx.save_for_backward(*output, *tensors, table, *(captured or ()))
    ctx.set_materialize_grads(False)


def _autograd(ctx, dout, dlse):
    absent = (None,) * (LAYOUT + 1 + len(ctx.options))
    if dout is None and dlse is None:
        return absent
    out, lse, q, k, v, alibi_slopes, sinks, dropout_rng, table, *captured = ctx.saved_tensors
    dout = torch.zeros_like(out) if dout is None else dout
    call = alibi_slopes, sinks, dropout_rng, captured or None, table, *ctx.options
    saved = dout, dlse, q, k, v, out, lse
    dq, dk, dv, dsinks = torch.ops.tilewise.context_parallel_backward(*saved, *call)
    dsinks = None if sinks is None else dsinks
    return dq, dk, dv, None, dsinks, *absent[INPUTS + 2 :]


LIBRARY.impl("context_parallel_forward", _forward, "CompositeExplicitAutograd")
LIBRARY.impl("context_parallel_backward", _backward, "CompositeExplicitAutograd")
torch.library.register_fake("tilewise::context_parallel_forward", _forward_fake, lib=LIBRARY)
torch.library.register_fake("tilewise::context_parallel_backward", _backward_fake, lib=LIBRARY)
torch.library.register_autograd(
    "tilewise::context_parallel_forward", _autograd, setup_context=_setup_context, lib=LIBRARY
)
torch.library.register_autograd(
    "tilewise::context_parallel_backward", no_double_backward, lib=LIBRARY
)
