"""tilewise under transformers: `attn_implementation="tilewise"` after one `register()`.

Two functions are registered under one name. The mask function runs once per forward and says what
each query may see as a `Visible`; the attention function runs in each layer and obeys it. Without
the first, transformers builds no mask for a custom name, and padding is ignored in silence.
Sequences packed in one row are served as packed ones: see `packed`. Whatever cannot be served
exactly is refused with a reason; `check(model)` says beforehand which layers will reach tilewise.
"""

from __future__ import annotations

import torch

from ..api import attention
from ..errors import ArgumentError, warn_slow
from .check import Checked, check_model
from .masks import visible_keys
from .opaque import ANOTHER
from .packed import starts_of
from .positions import PACKING
from .visible import Band, Visible, runs_of, simplest

Tensor = torch.Tensor

# Keyword arguments that models hand down and that say nothing about attention.
HARMLESS = {
    "cache_position",
    "encoder_hidden_states",
    "layer_idx",
    "num_items_in_batch",
    "output_hidden_states",
    "output_router_logits",
    "past_key_values",
    "position_embeddings",
    "position_ids",  # read for packed sequences
    "return_dict",
    "use_cache",
}
REASONS = {
    "cache": "paged caches are not served: generate with `generate`, not `generate_batch`",
    "head_mask": "head masks are not served: " + ANOTHER,
    "max_length_k": PACKING,
    "max_length_q": PACKING,
    "output_attentions": (
        "attention weights are never stored (with 'sdpa' neither): load the model with "
        "attn_implementation='eager'"
    ),
    "position_bias": "additive position biases are not served yet: " + ANOTHER,
    "seq_idx": PACKING,
}


def register(name: str = "tilewise") -> None:
    """Makes `attn_implementation=name` known to transformers; calling it again changes nothing.

    >>> from tilewise.integrations import transformers             # doctest: +SKIP
    >>> transformers.register()                                    # doctest: +SKIP
    >>> AutoModel.from_pretrained(path, attn_implementation="tilewise")  # doctest: +SKIP
    """
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    if "flash" in name or "/" in name or "|" in name:
        raise ArgumentError(
            f"name={name!r}: transformers looks on its hub for names with 'flash' or '/' in them"
        )
    AttentionInterface.register(name, attention_forward)
    AttentionMaskInterface.register(name, visible_keys)


def is_registered(name: str = "tilewise") -> bool:
    """Whether `register` was called in this process."""
    from transformers import AttentionInterface

    return AttentionInterface().get(name) is attention_forward


def check(model: torch.nn.Module) -> Checked:
    """Lists a model's attention modules, and for each whether it will reach tilewise.

    >>> print(transformers.check(model))                           # doctest: +SKIP
    16 LlamaAttention: tilewise (it calls the attention that its config names)

    Each of `check(model).layers` has a name, a kind (its class), the attention that will run and
    the reason: "tilewise"; "refused", where the model adds masks that only tilewise's attention
    reads; "own", where the layer ignores the name; "unknown"; or the name that the model was
    loaded with. It is told from code, without a run: a call may still be refused for its arguments.
    """
    return check_model(model, is_registered)


def attention_forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | Visible | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    deterministic: bool | None = None,
    **kwargs,
) -> tuple[Tensor, None]:
    """The attention function: (batch, nheads, seqlen, headdim) in, (batch, seqlen, ...) out."""
    _refuse_scores(attention_mask)
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    visible = attention_mask
    if isinstance(attention_mask, Visible):
        _agree(attention_mask, q, k, sliding_window)
    else:
        band = _band(module, is_causal, sliding_window)
        visible = None
        if attention_mask is not None:  # 2D: a model that hands its padding down
            runs = runs_of(attention_mask, 0, k.shape[1])
            lengths = (q.shape[1], k.shape[1])
            visible = simplest(band, lengths[1] - lengths[0], lengths, runs, q.device)
    starts = starts_of(visible, kwargs, q, k)
    _refuse(kwargs)
    features = dict(scale=scaling, softcap=softcap, sinks=s_aux, deterministic=bool(deterministic))
    features["dropout_p"] = dropout
    if visible is not None:
        band = visible.band
    if starts is not None:
        return _attend_packed(q, k, v, starts, band, features), None
    if visible is not None:
        return _attend_visible(q, k, v, visible, features), None
    return _attend(q, k, v, band, features), None


def _refuse_scores(mask: Tensor | Visible | None) -> None:
    if isinstance(mask, Tensor) and mask.dim() != 2:
        raise NotImplementedError(
            f"attention_mask of shape {tuple(mask.shape)}: a mask of scores is not served yet; "
            f"pass the 2D padding mask, or {ANOTHER}"
        )


def _refuse(kwargs: dict) -> None:
    """What is handed down and not understood."""
    for name, value in kwargs.items():
        if value is None or value is False or name in HARMLESS:
            continue
        reason = REASONS.get(name, f"it is unknown here, so it is not ignored; {ANOTHER}")
        raise NotImplementedError(f"{name}: {reason}")


def _band(module: torch.nn.Module, is_causal: bool | None, sliding_window: int | None) -> Band:
    """The model's own flags: a sliding window of W counts the query's own key."""
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    left = None if sliding_window is None else sliding_window - 1
    return left, 0 if is_causal else left


def _agree(visible: Visible, q: Tensor, k: Tensor, sliding_window: int | None) -> None:
    """The mask decides; a layer with other keys, or a narrower window, than its mask is refused."""
    lengths = (q.shape[1], k.shape[1])
    if lengths != visible.lengths:
        raise NotImplementedError(
            f"a layer attends from {lengths[0]} queries to {lengths[1]} keys, and its mask is made "
            f"for {visible.lengths[0]} and {visible.lengths[1]}: {ANOTHER}"
        )
    if sliding_window is not None and visible.band[0] not in (None, sliding_window - 1):
        raise NotImplementedError(
            f"sliding_window={sliding_window} in a layer whose mask has a window of "
            f"{visible.band[0] + 1}: {ANOTHER}"
        )


def _attend(q: Tensor, k: Tensor, v: Tensor, band: Band, features: dict, align="bottom_right"):
    causal = align if band[1] == 0 else False
    return attention(q, k, v, causal=causal, window=band, **features)


def _attend_visible(q: Tensor, k: Tensor, v: Tensor, visible: Visible, features: dict) -> Tensor:
    """One call, or one a row where the rows' first keys differ."""
    if visible.used is not None:
        align = "bottom_right" if visible.diagonal is None else "top_left"
        return _attend(
            q, k, v, visible.band, {**features, "seqused_k": visible.used.to(q.device)}, align
        )
    if visible.runs is None:
        return _attend(q, k, v, visible.band, features)
    if len(set(visible.runs)) == 1:
        return _attend_run(q, k, v, visible, visible.runs[0], features)
    warn_slow(
        "rows of this batch begin at different keys, so attention is called once a row: pad on "
        "the right, or pack the rows into one, where that is too slow"
    )
    rows = [slice(row, row + 1) for row in range(q.shape[0])]
    parts = zip(rows, visible.runs, strict=True)
    return torch.cat([_attend_run(q[r], k[r], v[r], visible, run, features) for r, run in parts])


def _attend_packed(q, k, v, starts: tuple[Tensor, Tensor], band: Band, features: dict) -> Tensor:
    """The sequences of all rows, side by side."""
    packed = {f"cu_seqlens_{side}": x.to(q.device) for side, x in zip("qk", starts)}
    rows = [x.flatten(0, 1) for x in (q, k, v)]
    return _attend(*rows, band, {**features, **packed}).unflatten(0, q.shape[:2])


def _attend_run(q, k, v, visible: Visible, run: tuple[int, int], features: dict) -> Tensor:
    """Keys start..stop alone. Queries past the last of them are padding too, and give 0."""
    start, stop = run
    seqlen = q.shape[1]
    if visible.band != (None, None):  # so that the last query stands at the last key
        seqlen = max(min(seqlen, stop - visible.diagonal), 0)
    out = _attend(q[:, :seqlen], k[:, start:stop], v[:, start:stop], visible.band, features)
    return torch.nn.functional.pad(out, (0, 0, 0, 0, 0, q.shape[1] - seqlen))
