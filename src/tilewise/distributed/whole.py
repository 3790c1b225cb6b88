"""The call of one process on the whole sequence: what every method's result is held to, what one
rank computes by itself, and what a rank computes on its heads.
"""

from __future__ import annotations

import itertools

import torch

from ..frontend.attention import attention, is_long
from ..problem import Extras, Grads, Saved
from .asked import Asked
from .rows import gradients_of

Tensor = torch.Tensor


def attend(
    asked: Asked, q: Tensor, k: Tensor, v: Tensor, heads: slice = slice(None)
) -> tuple[Tensor, Tensor]:
    """`out` and `lse` of q, k and v of all tokens in their order, (batch, seqlen, heads, headdim),
    of which these are some heads.
    """
    slopes, sinks = asked.alibi_slopes, asked.sinks
    batch, seqlen = q.shape[:2]
    starts = packing(asked, q)
    if starts is not None:
        q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    out, lse = attention(
        *(q, k, v),
        causal=asked.causal,
        scale=asked.scale,
        window=asked.window,
        softcap=asked.softcap,
        alibi_slopes=None if slopes is None else slopes[..., heads],
        sinks=None if sinks is None else sinks[heads],
        cu_seqlens_q=starts,
        cu_seqlens_k=starts,
        max_seqlen_q=longest(asked),
        max_seqlen_k=longest(asked),
        mask_mod=asked.mask_mod,
        score_mod=asked.score_mod,
        dropout_p=asked.dropout_p,
        dropout_rng=asked.dropout_rng,
        deterministic=asked.deterministic,
        return_lse=True,
        backend=asked.backend,
    )
    if starts is None:
        return out, lse
    lse = lse.unflatten(1, (batch, seqlen)).transpose(0, 1)
    return out.unflatten(0, (batch, seqlen)), lse


def backward(asked: Asked, saved: Saved, heads: slice = slice(None)) -> Grads:
    """The gradients of `attend`."""
    dout, dlse, q, k, v, out, lse = saved
    batch, seqlen = q.shape[:2]
    starts, slopes = packing(asked, q), asked.alibi_slopes
    if starts is not None:
        dout, q, k, v, out = (x.flatten(0, 1)[None] for x in (dout, q, k, v, out))
        lse = lse.transpose(0, 1).flatten(1, 2)[None]
        dlse = None if dlse is None else dlse.transpose(0, 1).flatten(1, 2)[None]
    extras = Extras(
        None if slopes is None else slopes[..., heads],
        None if asked.sinks is None else asked.sinks[heads],
        *(None, None, starts, starts),
        dropout_rng=asked.dropout_rng,
        captured=asked.modifiers.captured,
    )
    align = asked.causal if isinstance(asked.causal, str) else "bottom_right"
    saved = Saved(dout, dlse, q, k, v, out, lse)
    has_long = starts is not None and is_long(longest(asked))
    found = gradients_of(asked, saved, align, *asked.sides, extras, has_long)
    dq, dk, dv = (x.reshape(batch, seqlen, *x.shape[2:]) for x in found[:3])
    return Grads(dq, dk, dv, found.dsinks)


def packing(asked: Asked, q: Tensor) -> Tensor | None:
    """Where the documents begin, those of all rows of the batch end to end, int32."""
    starts, seqlen = asked.layout.cu_seqlens, asked.layout.seqlen
    if starts is None:
        return None
    found = [row * seqlen + start for row in range(q.shape[0]) for start in starts[:-1]]
    found.append(q.shape[0] * seqlen)
    return torch.tensor(found, dtype=torch.int32, device=q.device)


def longest(asked: Asked) -> int | None:
    """The tokens of the longest document."""
    starts = asked.layout.cu_seqlens
    if starts is None:
        return None
    return max((b - a for a, b in itertools.pairwise(starts)), default=0)


def alone(asked: Asked, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """The call where there is one rank, which has all tokens in its own order."""
    layout = asked.layout
    if layout.runs[0] == ((0, layout.seqlen),):
        return attend(asked, q, k, v)
    q, k, v = (layout.unshard([x]) for x in (q, k, v))
    out, lse = attend(asked, q, k, v)
    return layout.shard(out), layout.shard(lse, 2)


def alone_backward(asked: Asked, saved: Saved) -> Grads:
    """The gradients of `alone`."""
    layout, (dout, dlse, q, k, v, out, lse) = asked.layout, saved
    dout, q, k, v, out = (layout.unshard([x]) for x in (dout, q, k, v, out))
    dlse = None if dlse is None else layout.unshard([dlse], 2)
    lse = layout.unshard([lse], 2)
    grads = backward(asked, Saved(dout, dlse, q, k, v, out, lse))
    dq, dk, dv = (layout.shard(x) for x in grads[:3])
    return Grads(dq, dk, dv, grads.dsinks)
