"""Drop-in functions' calls inside of `tilewise.distributed.context_parallel`, in the words of
`tilewise.attention`.
"""

from __future__ import annotations

import torch

from ..errors import ArgumentError, Words
from ..ops.context_parallel import of_shards
from .broadcasting import batched
from .scalars import Window, check_flag

Tensor = torch.Tensor


def flash_attn(
    inputs: tuple[Tensor, Tensor, Tensor],
    learned: tuple[Tensor | None, Tensor | None],
    numbers: tuple[float, float | None, float],
    causal: bool,
    window: Window,
    deterministic: bool,
    attention_chunk: int,
) -> tuple[Tensor, Tensor]:
    """`out` and `lse` of `flash_attn_func` on shards."""
    if attention_chunk:
        raise NotImplementedError(
            "attention_chunk inside tilewise.distributed.context_parallel: pass "
            "mask_mod=tilewise.mods.chunked(size) to tilewise.attention"
        )
    q, k, v = inputs
    alibi_slopes, sinks = learned
    dropout_p, scale, softcap = numbers
    return of_shards(
        q=q,
        k=k,
        v=v,
        causal=check_flag("causal", causal),
        scale=scale,
        window=window,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        sinks=sinks,
        dropout_p=dropout_p,
        deterministic=deterministic,
        return_lse=True,
    )


def sdpa(
    inputs: tuple[Tensor, Tensor, Tensor],
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    words: Words,
) -> tuple[Tensor, Tensor]:
    """`out` and `lse` of torch's `scaled_dot_product_attention` on shards."""
    if attn_mask is not None:
        raise NotImplementedError(
            "attn_mask inside tilewise.distributed.context_parallel, where q holds the rows of a "
            "shard: pass is_causal, or mask_mod to tilewise.attention; documents belong in the "
            "layout"
        )
    if any(x.dim() != 4 for x in inputs):
        shapes = ", ".join(str(tuple(x.shape)) for x in inputs)
        raise ArgumentError(
            f"query, key and value have shapes {shapes}: inside "
            "tilewise.distributed.context_parallel they must be (batch, nheads, tokens, headdim)"
        )
    x = batched(*inputs, check_flag("enable_gqa", enable_gqa), words)
    return of_shards(
        q=x.query,
        k=x.key,
        v=x.value,
        causal="top_left" if check_flag("is_causal", is_causal) else False,
        scale=scale,
        dropout_p=dropout_p,
        deterministic=torch.are_deterministic_algorithms_enabled(),
        layout="bhsd",
        return_lse=True,
    )
