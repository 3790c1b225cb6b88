"""tilewise under transformers: `attn_implementation="tilewise"` after one `register()`.

Two functions are registered under one name. The mask function runs once per forward and says what
each query may see as a `Visible`; the attention function runs in each layer and obeys it. Without
the first, transformers builds no mask for a custom name, and padding is ignored in silence.
Sequences packed in one row (a batch of 1) are served as packed ones: see `packed`. Whatever cannot
be served exactly is refused with a reason.
"""

from __future__ import annotations

import torch

from ..api import attention
from ..errors import ArgumentError, warn_slow
from .packed import starts_of
from .visible import Band, Visible, band_of, packed_of, runs_of, simplest

Tensor = torch.Tensor
ANOTHER = "load the model with attn_implementation='sdpa' or 'eager'"
PACKING = (
    "packed sequences are served in a batch of one row, told by cu_seq_lens_q and cu_seq_lens_k or "
    "by position_ids that start anew in it: pad the batch instead, or " + ANOTHER
)

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
    "position_ids",  # a packed row shows in the mask
    "return_dict",
    "use_cache",
}
REASONS = {
    "cache": "paged caches are not served: generate with `generate`, not `generate_batch`",
    "head_mask": "head masks are not served: " + ANOTHER,
    "max_length_k": PACKING,
    "max_length_q": PACKING,
    "output_attentions": "attention weights are never stored: " + ANOTHER,
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


def visible_keys(
    batch_size: int,
    q_length: int = 0,
    kv_length: int = 0,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function=None,
    attention_mask: Tensor | Visible | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    config=None,
    **kwargs,
) -> Visible | None:
    """The mask function: None where the model's own causal flag says it all."""
    if isinstance(attention_mask, Visible):  # made by `generate`, before the model's forward
        return attention_mask
    if "cache_position" in kwargs:  # how transformers before 5.4 says it
        positions = kwargs["cache_position"]
        q_length, q_offset, device = positions.shape[0], positions[0], positions.device
    if use_vmap:
        raise NotImplementedError(f"this model adds a mask of its own: {ANOTHER}")
    from transformers.masking_utils import bidirectional_mask_function, causal_mask_function

    # A step over a compiled static cache: its length stays on the device, or each step compiles.
    is_step = q_length == 1 and not allow_is_causal_skip
    used = torch.as_tensor(q_offset + q_length - kv_offset, dtype=torch.int32, device=device)
    if is_step and attention_mask is None and mask_function is causal_mask_function:
        return Visible((None, 0), None, used=used.expand(batch_size))
    q_start, end = int(q_offset), kv_offset + kv_length
    # Slots of a static cache that are not written yet come after the last query.
    stop = min(end, q_start + q_length)
    if mask_function is causal_mask_function:
        band: Band = (None, 0)
    elif mask_function is bidirectional_mask_function:
        band, stop = (None, None), end
    else:
        queries, keys = range(q_start, q_start + q_length), range(kv_offset, stop)
        is_whole = batch_size == 1 and attention_mask is None and end == q_length
        is_whole = is_whole and queries == keys == range(q_length)
        if is_whole and torch.compiler.is_compiling():
            return packed_of(mask_function, q_length, local_size, device)
        found = band_of(mask_function, queries, keys, batch_size, local_size, device)
        if found is None and is_whole:
            packed = packed_of(mask_function, q_length, local_size, device)
            if packed is not None:
                return packed
        if found is None:
            raise NotImplementedError(f"image blocks are not served; {PACKING}")
        band, stop = found, stop if found[1] == 0 else end
    runs = runs_of(attention_mask, kv_offset, stop)
    if runs is None and is_step and band[1] == 0:
        return Visible(band, None, used=used.expand(batch_size))
    if runs is None and stop < end:
        runs = ((0, stop - kv_offset),) * batch_size
    is_usual = band == (None, 0) or (band == (None, None) and getattr(config, "is_causal", True))
    if runs is None and is_usual:
        return None
    return simplest(band, q_start - kv_offset, runs, device)


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
    starts = starts_of(attention_mask, kwargs, query)
    _refuse(kwargs)
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    features = dict(scale=scaling, softcap=softcap, sinks=s_aux, deterministic=bool(deterministic))
    features["dropout_p"] = dropout
    if starts is not None:
        band = _band(module, is_causal, sliding_window)
        if isinstance(attention_mask, Visible):
            _agree(attention_mask, sliding_window)
            band = attention_mask.band
        return _attend_packed(q, k, v, starts, band, features), None
    if isinstance(attention_mask, Tensor):  # 2D: a model that hands its padding down
        runs = runs_of(attention_mask, 0, k.shape[1])
        if runs is not None:
            band = _band(module, is_causal, sliding_window)
            visible = simplest(band, k.shape[1] - q.shape[1], runs, q.device)
            return _attend_visible(q, k, v, visible, features), None
    elif attention_mask is not None:
        _agree(attention_mask, sliding_window)
        return _attend_visible(q, k, v, attention_mask, features), None
    return _attend(q, k, v, _band(module, is_causal, sliding_window), features), None


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


def _agree(visible: Visible, sliding_window: int | None) -> None:
    """The mask decides; a layer that asks for a narrower window than its mask is refused."""
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
        return _attend(q, k, v, visible.band, {**features, "seqused_k": visible.used}, align)
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
    """The sequences of a batch of one row."""
    packed = dict(zip(("cu_seqlens_q", "cu_seqlens_k"), starts))
    return _attend(q[0], k[0], v[0], band, {**features, **packed}).unsqueeze(0)


def _attend_run(q, k, v, visible: Visible, run: tuple[int, int], features: dict) -> Tensor:
    """Keys start..stop alone. Queries past the last of them are padding too, and give 0."""
    start, stop = run
    seqlen = q.shape[1]
    if visible.band != (None, None):  # so that the last query stands at the last key
        seqlen = max(min(seqlen, stop - visible.diagonal), 0)
    out = _attend(q[:, :seqlen], k[:, start:stop], v[:, start:stop], visible.band, features)
    return torch.nn.functional.pad(out, (0, 0, 0, 0, 0, q.shape[1] - seqlen))
