"""The call of one process on the whole sequence: what every method's result is held to, what one
rank computes by itself, and what a rank computes on its heads.
"""

from __future__ import annotations

import itertools

import torch

from ..frontend.attention import attention
from .asked import Asked

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
