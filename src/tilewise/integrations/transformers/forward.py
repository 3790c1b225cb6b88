"""The attention function, which transformers calls in each layer: its arguments become a call of
tilewise, or a refusal with a reason.
"""

from __future__ import annotations

import torch

from ...ops.context_parallel import is_sharded
from .attend import LayerFeatures, attend, attend_packed, attend_visible
from .opaque import ANOTHER
from .packed import apart, starts_of
from .positions import PACKING
from .shards import BESIDE, PACKED, attend_shards
from .stored import given, padded
from .visible import ALL_KEYS, Band, Lengths, Visible

Tensor = torch.Tensor

# Keyword arguments that models hand down and that say nothing about attention.
HARMLESS = {
    "cache_position",
    "encoder_hidden_states",
    "layer_idx",
    "logits_to_keep",
    "num_items_in_batch",
    "output_hidden_states",
    "output_router_logits",
    "past_key_values",
    "position_embeddings",
    "position_ids",  # read for packed sequences
    "return_dict",
    "shift_labels",
    "use_cache",
}
BESIDE_MASK = "with a mask of four dimensions, which decides alone: leave one of them out"
REASONS = {
    "cache": (
        "`generate_batch` computes with flash attention's functions, for which this model has no "
        "place: generate with `generate`"
    ),
    "cu_seq_lens_k": BESIDE_MASK,
    "cu_seq_lens_q": BESIDE_MASK,
    "head_mask": "head masks are not supported: " + ANOTHER,
    "max_length_k": PACKING,
    "max_length_q": PACKING,
    "output_attentions": (
        "attention weights are never stored (with 'sdpa' neither): load the model with "
        "attn_implementation='eager'"
    ),
    "seq_idx": PACKING,
}


def attention_forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | Visible | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    **kwargs,
) -> tuple[Tensor, None]:
    """The attention function: (batch, nheads, seqlen, headdim) in, (batch, seqlen, ...) out."""
    q, k, v = (_rows(x).transpose(1, 2) for x in (query, key, value))
    features, starts = LayerFeatures.taken(kwargs, scale=scaling, dropout_p=dropout), None
    if is_sharded():
        band = _band(module, is_causal, sliding_window=sliding_window)
        refuse(kwargs, dict.fromkeys(BESIDE, PACKED))
        given_ids = kwargs.get("position_ids")
        return attend_shards(q, k, v, attention_mask, band, features, given_ids), None
    visible: Visible | None = None
    band = ALL_KEYS
    if isinstance(attention_mask, Tensor) and attention_mask.dim() != 2:
        visible = given(attention_mask, q, k=k)
        if visible is None:
            bias = attention_mask if features.bias is None else features.bias + attention_mask
            features = features._replace(bias=bias)
    else:
        if isinstance(attention_mask, Visible):
            _agree(attention_mask, q, k=k, sliding_window=sliding_window)
            visible, band = attention_mask, attention_mask.band
        else:
            band = _band(module, is_causal, sliding_window=sliding_window)
            if attention_mask is not None:  # of a model that hands its padding down
                visible = padded(attention_mask, band, q=q, k=k)
        starts = starts_of(visible, kwargs, q=q, k=k)
    refuse(kwargs)
    features = features._replace(bias=_of_scores(features.bias, q))
    if starts is not None and features.bias is not None:
        visible, starts = apart(starts, band, q=q, k=k), None
    if starts is not None:
        seqused_k = visible.seqused_k if visible is not None and starts is visible.starts else None
        return attend_packed(q, k, v, starts, band=band, features=features, kept=seqused_k), None
    if visible is not None:
        return attend_visible(q, k, v=v, visible=visible, features=features), None
    return attend(q, k, v=v, band=band, features=features), None


def _rows(x: Tensor) -> Tensor:
    """A tensor with its last dimension contiguous, which a convolution does not leave."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _of_scores(bias: Tensor | None, q: Tensor) -> Tensor | None:
    """What is added to scores, in a dtype that attention takes."""
    return bias if bias is None or bias.dtype in (q.dtype, torch.float32) else bias.float()


def refuse(kwargs: dict, reasons: dict[str, str] | None = None) -> None:
    """Refuses unknown arguments; `reasons` come before those of REASONS."""
    for name, value in kwargs.items():
        if value is None or value is False or name in HARMLESS:
            continue
        all_reasons = REASONS if reasons is None else REASONS | reasons
        reason = all_reasons.get(name, f"it is unknown here, so it is not ignored; {ANOTHER}")
        raise NotImplementedError(f"{name}: {reason}")


def _band(module: torch.nn.Module, is_causal: bool | None, sliding_window: int | None) -> Band:
    """The model's own flags: a sliding window of W counts the query's own key."""
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    left = None if sliding_window is None else sliding_window - 1
    return Band(left, 0 if is_causal else left)


def _agree(visible: Visible, q: Tensor, k: Tensor, sliding_window: int | None) -> None:
    """The mask decides; a layer with other keys, or a narrower window, than its mask is refused."""
    lengths, of_mask = Lengths(q.shape[1], k.shape[1]), visible.lengths
    if lengths != of_mask:
        raise NotImplementedError(
            f"a layer attends from {lengths.queries} queries to {lengths.keys} keys, and its mask "
            f"is made for {of_mask.queries} and {of_mask.keys}: {ANOTHER}"
        )
    left, right = visible.band
    if sliding_window is None or left in (None, sliding_window - 1):
        return
    if right == 0 or left != sliding_window:  # on both sides it counts the keys of one
        raise NotImplementedError(
            f"sliding_window={sliding_window} in a layer whose mask has a window of "
            f"{left + 1}: {ANOTHER}"
        )
