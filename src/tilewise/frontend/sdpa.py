"""torch's `scaled_dot_product_attention` as a drop-in function: its arguments, its order of
dimensions and its argument names in errors.
"""

from __future__ import annotations

from typing import Any, Never

import torch

from ..errors import ArgumentError, Words
from ..keywords import refuses_others, unexpected
from ..mods.compilers import holds, share_batch
from ..mods.flat import NO_MODIFIERS, FlatMods
from ..mods.flatten import modifiers_by
from ..ops import context_parallel as shards
from ..ops.calls import find
from ..problem import Extras
from ..tile.dropout_numbers import check_dropout, draw_rng_of
from . import paths
from .broadcasting import Batched, batched, over_scores, with_positive_scale
from .call import call, launch
from .checks import check_tensor
from .compiled import fits_node, has_node
from .scalars import Numbers, check_flag

Tensor = torch.Tensor
WORDS = Words(
    q="query",
    k="key",
    v="value",
    bias="attn_mask",
    bias_is_also="bool or ",
    captured="attn_mask is",
    shape="(batch, nheads, seqlen, headdim)",
    is_heads_first=True,
    order="",
)


@refuses_others("tilewise.scaled_dot_product_attention")
@has_node
def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
    **unknown: Never,
) -> Tensor:
    """`torch.nn.functional.scaled_dot_product_attention`: (..., nheads, seqlen, headdim), causal
    top-left.

    Example:
        >>> import torch, tilewise
        >>> q = torch.randn(1, 4, 16, 32)
        >>> ours = tilewise.scaled_dot_product_attention(q, q, q, is_causal=True)
        >>> theirs = torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)
        >>> torch.allclose(ours, theirs, atol=1e-5)
        True

    Tensors are copied, with a PerformanceWarning, only if kernels cannot read them: the last
    dimension is not contiguous, one of several batch dimensions is broadcast, key and value heads
    differ, or scale is not positive (query is copied). `torch.use_deterministic_algorithms(True)`
    makes gradients bitwise reproducible.

    Args:
        query: (..., nheads, seqlen_q, headdim), 2 dimensions or more; fp16, bf16, fp32 (fp64 on the
            CPU). Dimensions before the last two broadcast.
        key: (..., nheads_k, seqlen_k, headdim).
        value: (..., nheads_k, seqlen_k, headdim_v).
        attn_mask: broadcasts over (..., nheads, seqlen_q, seqlen_k). Bools: True where a query
            attends to a key; floats, in the dtype of query or fp32, are added to the scores and
            differentiable; a `torch.nn.attention.bias.CausalBias` is a causal mask.
        dropout_p: probability of dropping a probability, rounded to a multiple of 1/256.
        is_causal: top-left causal mask; not with attn_mask.
        scale: softmax scale; 1 / sqrt(headdim) by default.
        enable_gqa: allows nheads // nheads_k query heads per key head.

    Returns:
        (..., nheads, seqlen_q, headdim_v). A row without keys is 0.

    Raises:
        ArgumentError: an argument is wrong, also attn_mask with is_causal, which torch's CPU
            kernels take in some cases.
        NotImplementedError: no backend supports the call; the message has each backend's reason.
    """
    if unknown:
        raise unexpected("tilewise.scaled_dot_product_attention", unknown)
    if torch.compiler.is_dynamo_compiling() and attn_mask is None and dropout_p == 0:
        if fits_node((query, key, value)) and not shards.contexts:
            options: Any = {"is_causal": is_causal, "scale": scale, "enable_gqa": enable_gqa}
            return paths.traced(
                "scaled_dot_product_attention", query=query, key=key, value=value, **options
            )
    return with_lse(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)[0]


def with_lse(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> tuple[Tensor, Tensor]:
    """`scaled_dot_product_attention` and the log-sum-exp of each row, (batch, nheads, seqlen_q) of
    the batch that dimensions before them make.
    """
    if shards.contexts and shards.is_sharded():
        _check_shards((query, key, value), attn_mask)
        x = batched(query, key, value, enable_gqa=check_flag("enable_gqa", enable_gqa), words=WORDS)
        return shards.innermost()(
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
    is_deterministic = torch.are_deterministic_algorithms_enabled()
    entry = None
    if attn_mask is None and type(dropout_p) in (int, float) and dropout_p == 0:
        plain = "sdpa", is_causal, scale, enable_gqa, is_deterministic
        entry, _ = find((query, key, value), plain=plain)
        if entry is not None and entry.call is not None:
            return launch(entry.call, (query, key, value), optional=(), layout="bhsd")
    inputs = query, key, value
    is_causal = check_flag("is_causal", is_causal)
    has_gqa = check_flag("enable_gqa", enable_gqa)
    x = batched(query, key, value=value, enable_gqa=has_gqa, words=WORDS)
    if attn_mask is not None and is_causal:
        raise ArgumentError(
            "attn_mask with is_causal: pass one of them, as torch does, and fold causality into "
            "the mask"
        )
    causal = "top_left" if is_causal else alignment(attn_mask, x.scores) or False
    if causal:
        attn_mask = None
    if type(dropout_p) in (int, float) and dropout_p == 1:  # nothing is kept
        dropout_p, x = 0.0, x._replace(value=x.value * 0)
    rng = draw_rng_of(x.query) if check_dropout(dropout_p) else None
    bias, modifiers = _masked_by(attn_mask, x)
    query, scale = with_positive_scale(x.query, scale, words=WORDS)
    if not all(a is b for a, b in zip(inputs, (query, x.key, x.value))):
        entry = None  # what is launched are others
    out, lse = call(
        query.transpose(1, 2),
        x.key.transpose(1, 2),
        v=x.value.transpose(1, 2),
        extras=Extras(bias=bias, dropout_rng=rng, captured=modifiers.captured),
        numbers=Numbers(scale, dropout_p=dropout_p, causal=causal),
        deterministic=is_deterministic,
        mods=modifiers.mods,
        words=WORDS,
        entry=entry,
    )
    out = out.transpose(1, 2)
    return (out if out.shape == x.out else out[..., : x.out[-1]].view(x.out)), lse


def _check_shards(inputs: tuple[Tensor, Tensor, Tensor], attn_mask: Tensor | None) -> None:
    """Refuses what attention on shards does not take."""
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


def alignment(attn_mask: Tensor | None, scores: tuple[int, ...]) -> str | None:
    """Which corner the diagonal of one of torch's CausalBias objects ends in; None for others."""
    if type(attn_mask) in (torch.Tensor, torch.nn.Parameter) or not isinstance(attn_mask, Tensor):
        return None
    from torch.nn.attention.bias import CausalBias, CausalVariant

    if not isinstance(attn_mask, CausalBias):
        return None
    if attn_mask.variant == CausalVariant.UPPER_LEFT:
        return "top_left"
    lengths = attn_mask.seq_len_q, attn_mask.seq_len_kv
    if lengths != tuple(scores[-2:]):
        raise ArgumentError(
            f"attn_mask is a lower-right CausalBias of (seqlen_q, seqlen_k) {lengths}: here they "
            f"are {tuple(scores[-2:])}, so make it with causal_lower_right{tuple(scores[-2:])}"
        )
    return "bottom_right"


def _masked_by(attn_mask: Tensor | None, x: Batched) -> tuple[Tensor | None, FlatMods]:
    """An attn_mask of torch's for a call of these shapes: numbers are a bias, bools a mask."""
    if attn_mask is None:
        return None, NO_MODIFIERS
    check_tensor("attn_mask", attn_mask)
    if attn_mask.dim() == 4:
        share_batch(x.query, attn_mask)
    sizes = x.scores[len(x.scores) - attn_mask.dim() :]
    if attn_mask.dim() > len(x.scores) or any(
        n != size and n != 1 for n, size in zip(attn_mask.shape, sizes)
    ):
        raise ArgumentError(
            f"attn_mask has shape {tuple(attn_mask.shape)}: it must broadcast over the scores, "
            f"(..., nheads, seqlen_q, seqlen_k), here {x.scores}"
        )
    mask = over_scores(attn_mask, x.out, name="attn_mask")
    if mask.dtype != torch.bool:
        return mask, NO_MODIFIERS
    is_compiled = torch.compiler.is_compiling()
    if any(holds(n == 0, False) for n in x.scores) if is_compiled else 0 in x.scores:
        return None, NO_MODIFIERS  # there is no pair to hide
    return None, modifiers_by(mask)
