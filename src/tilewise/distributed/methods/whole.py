"""The call of one process on the whole sequence: what every method's result is held to, what one
rank computes by itself, and what a rank computes on its heads.
"""

from __future__ import annotations

import functools
import itertools

import torch

from ...frontend.attention import attention
from ...frontend.scalars import is_long
from ...problem import Extras, Grads, Saved
from .call_spec import CallSpec
from .rows import gradients_of

Tensor = torch.Tensor


def attend(
    spec: CallSpec, q: Tensor, k: Tensor, v: Tensor, heads: slice = slice(None)
) -> tuple[Tensor, Tensor]:
    """`out` and `lse` of q, k and v of all tokens in their order, (batch, seqlen, heads, headdim),
    of which these are some heads.
    """
    slopes, sinks = spec.alibi_slopes, spec.sinks
    batch, seqlen = q.shape[:2]
    starts = packing(spec, q)
    if starts is not None:
        q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    out, lse = attention(
        *(q, k, v),
        causal=spec.causal,
        scale=spec.scale,
        window=spec.window,
        softcap=spec.softcap,
        alibi_slopes=None if slopes is None else slopes[..., heads],
        sinks=None if sinks is None else sinks[heads],
        cu_seqlens_q=starts,
        cu_seqlens_k=starts,
        max_seqlen_q=longest(spec),
        max_seqlen_k=longest(spec),
        mask_mod=spec.mask_mod,
        score_mod=spec.score_mod,
        dropout_p=spec.dropout_p,
        dropout_rng=spec.dropout_rng,
        deterministic=spec.deterministic,
        return_lse=True,
        backend=spec.backend,
    )
    if starts is None:
        return out, lse
    lse = lse.unflatten(1, (batch, seqlen)).transpose(0, 1)
    return out.unflatten(0, (batch, seqlen)), lse


def backward(
    spec: CallSpec, saved: Saved, heads: slice = slice(None), rounds: bool = False
) -> Grads:
    """The gradients of `attend`; those of keys in fp32 as parts of sums, or rounded as theirs."""
    dout, dlse, q, k, v, out, lse = saved
    batch, seqlen = q.shape[:2]
    starts, slopes = packing(spec, q), spec.alibi_slopes
    if starts is not None:
        dout, q, k, v, out = (x.flatten(0, 1)[None] for x in (dout, q, k, v, out))
        lse = lse.transpose(0, 1).flatten(1, 2)[None]
        dlse = None if dlse is None else dlse.transpose(0, 1).flatten(1, 2)[None]
    extras = Extras(
        None if slopes is None else slopes[..., heads],
        None if spec.sinks is None else spec.sinks[heads],
        *(None, None, starts, starts),
        dropout_rng=spec.dropout_rng,
        captured=spec.modifiers.captured,
    )
    align = spec.causal if isinstance(spec.causal, str) else "bottom_right"
    saved = Saved(dout, dlse, q, k, v, out, lse)
    has_long = starts is not None and is_long(longest(spec))
    found = gradients_of(spec, saved, align, *spec.sides, extras, has_long, rounds)
    dq, dk, dv = (x.reshape(batch, seqlen, *x.shape[2:]) for x in found[:3])
    return Grads(dq, dk, dv, found.dsinks)


def packing(spec: CallSpec, q: Tensor) -> Tensor | None:
    """Where the documents begin, those of all rows of the batch end to end, int32."""
    starts, seqlen = spec.layout.cu_seqlens, spec.layout.seqlen
    if starts is None:
        return None
    return _packed_on(starts, seqlen, q.shape[0], q.device)


@functools.lru_cache(maxsize=256)
def _packed_on(starts: tuple[int, ...], seqlen: int, batch: int, device: torch.device) -> Tensor:
    """Kept, as a copy to a GPU makes the host wait for it."""
    found = [row * seqlen + start for row in range(batch) for start in starts[:-1]]
    found.append(batch * seqlen)
    with torch.inference_mode(False):  # some of those that use it may want gradients
        return torch.tensor(found, dtype=torch.int32, device=device)


def longest(spec: CallSpec) -> int | None:
    """The tokens of the longest document."""
    starts = spec.layout.cu_seqlens
    if starts is None:
        return None
    return max((b - a for a, b in itertools.pairwise(starts)), default=0)


def alone(spec: CallSpec, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """The call where there is one rank, which has all tokens in its own order."""
    layout = spec.layout
    if layout.runs[0] == ((0, layout.seqlen),):
        return attend(spec, q, k, v)
    q, k, v = (layout.unshard([x]) for x in (q, k, v))
    out, lse = attend(spec, q, k, v)
    return layout.shard(out), layout.shard(lse, 2)


def alone_backward(spec: CallSpec, saved: Saved) -> Grads:
    """The gradients of `alone`."""
    layout, (dout, dlse, q, k, v, out, lse) = spec.layout, saved
    dout, q, k, v, out = (layout.unshard([x]) for x in (dout, q, k, v, out))
    dlse = None if dlse is None else layout.unshard([dlse], 2)
    lse = layout.unshard([lse], 2)
    grads = backward(spec, Saved(dout, dlse, q, k, v, out, lse))
    dq, dk, dv = (layout.shard(x) for x in grads[:3])
    return Grads(dq, dk, dv, grads.dsinks)
