"""Layers inside of `tilewise.distributed.context_parallel`: transformers makes masks of a shard's
own places, so the call is made of what the layer and its mask say of the whole sequence, which is
causal or full and perhaps a window, and what is more than that is refused.

A shard's position ids jump where its runs of tokens do. transformers takes that for packed
sequences, which is right for none of them: the layout says which documents there are.
"""

from __future__ import annotations

import torch

from ...errors import ArgumentError
from ...ops.context_parallel import innermost
from .attend import LayerFeatures, attend
from .positions import version_of
from .visible import Band, Visible, assert_later

Tensor = torch.Tensor
DOCUMENTS = "documents belong in the layout: layout.packed(cu_seqlens), or td.documents(cu_seqlens)"
INSIDE = "inside tilewise.distributed.context_parallel"
PADDED = (
    f"an attention_mask with padding, or of pairs, {INSIDE}: its columns are the keys of a shard; "
    "leave padding out of the sequence, or make it a document of its own"
)
PACKED = (
    f"cu_seq_lens_q, cu_seq_lens_k and position_ids of packed sequences {INSIDE}: {DOCUMENTS}, and "
    "its positions are the position_ids"
)
PLACES = (
    f"position_ids {INSIDE} must be layout.positions, which say where a shard's tokens are in the "
    "whole sequence: model(ids, position_ids=layout.positions[None])"
)
BESIDE = ("max_length_q", "max_length_k", "seq_idx", "cu_seq_lens_q", "cu_seq_lens_k")


def attend_shards(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Visible | Tensor | None,
    band: Band,
    features: LayerFeatures,
    position_ids: Tensor | None,
) -> Tensor:
    """The call of a layer, (batch, tokens, heads, headdim). `band` is that of the layer's flags."""
    context = innermost()
    with context.reporting(q):
        if features.bias is not None or (isinstance(mask, Tensor) and mask.dim() != 2):
            raise NotImplementedError(PADDED)
        if isinstance(mask, Visible):
            band = _band_of(mask, band)
            _check_runs(mask, context.layout.positions)
        elif mask is not None:
            _assert(mask.all(), NotImplementedError(PADDED))
        if band.left is not None and not band.is_causal:
            raise NotImplementedError(f"a window on both sides {INSIDE} is not supported")
        _check_positions(mask, position_ids, positions=context.layout.positions)
        return attend(q, k, v=v, band=band, features=features)


def _band_of(visible: Visible, of_layer: Band) -> Band:
    """The band of the whole sequence, of which a shard may be too short to show the window."""
    stored = visible.mask, visible.runs, visible.used, visible.seqused_k
    if any(x is not None for x in stored):
        raise NotImplementedError(PADDED)
    if visible.chunk is not None or visible.has_chunks:
        raise NotImplementedError(f"chunked attention {INSIDE} is not supported")
    left, right = visible.band
    if visible.local_size is not None:
        left = visible.local_size - 1
    if of_layer.left not in (None, left):
        raise NotImplementedError(
            f"sliding_window={of_layer.left + 1} in a layer whose mask has none {INSIDE}"
        )
    return Band(left, right)


def _check_runs(visible: Visible, positions: Tensor) -> None:
    """Packed sequences that transformers finds are the runs of the shard."""
    if visible.begins is None:
        if visible.starts is not None:
            raise NotImplementedError(PACKED)
        return
    expected = torch.ones_like(positions, dtype=torch.bool)
    expected[1:] = positions.diff() != 1
    _assert((visible.begins.cpu() == expected).all(), NotImplementedError(PACKED))


def _check_positions(
    mask: Visible | Tensor | None, position_ids: Tensor | None, positions: Tensor
) -> None:
    """Where they reach the layer; their values are read once for all layers of a forward."""
    if position_ids is None or position_ids.dim() != 2:
        return
    answers = mask.position_ids if isinstance(mask, Visible) else []
    if torch.compiler.is_compiling():  # no value can be read, and none is kept
        answers = []
    if any(ids is position_ids and version == version_of(ids) for ids, version, _ in answers):
        return
    if position_ids.shape[1] != positions.shape[0]:
        raise ArgumentError(PLACES)
    same = (position_ids == positions.to(position_ids.device)).all()
    _assert(same, ArgumentError(PLACES))
    if not torch.compiler.is_compiling():
        answers.append((position_ids, version_of(position_ids), None))


def _assert(condition: Tensor, error: Exception) -> None:
    if torch.compiler.is_compiling():
        assert_later(condition, str(error))
    elif not condition:
        raise error
