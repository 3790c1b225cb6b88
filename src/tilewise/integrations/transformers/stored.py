"""Masks that are stored as bools, where no band, no runs and no sequences say them.

Keys hidden among others are a bool a key in addition to the band; other masks are transformers'
own, a bool a pair. Attention reads either as a captured mask. In a compiled graph, where no value
can be read, padding is stored, too.
"""

from __future__ import annotations

from typing import Any

import torch

from ...errors import warn_slow
from .opaque import ANOTHER
from .visible import ALL_KEYS, HOLES, Band, Lengths, MaskRequest, Visible, runs_of, simplest

Tensor = torch.Tensor
KEYS = (
    "attention_mask hides keys among the real ones of a row, so attention reads it for each key: "
    "if that is too slow, pad on the left to generate"
)
PAIRS = (
    "this model's mask is neither causal nor a window nor chunks nor packed sequences (blocks of "
    "image tokens that see each other are none of these), so it is stored, and attention reads it "
    "for every query and key"
)
GIVEN = (
    "an attention_mask of four dimensions is read for every query and key: pass the 2D padding "
    "mask where that says the same"
)


def beside(request: MaskRequest, band: Band, padding: Tensor) -> Visible:
    """A band, and which keys are padding: (batch, 1, 1, keys). Reads no value."""
    kv_length, kv_offset = request.kv_length, request.kv_offset
    mask = _real_keys(padding, kv_offset, length=kv_length)
    if request.is_step and band.is_causal:
        return Visible(band, None, lengths=request.lengths, used=request.used(), mask=mask)
    if request.is_on_device() and torch.compiler.is_compiling():
        return pairs(request)
    diagonal = int(request.q_offset) - kv_offset
    end = diagonal + request.q_length  # behind the last query's key
    if band.is_open or end == kv_length or (band.is_causal and end < kv_length):
        return Visible(band, diagonal, lengths=request.lengths, mask=mask)
    return pairs(request)


def padded(padding: Tensor, band: Band, q: Tensor, k: Tensor) -> Visible:
    """A band, and the 2D padding that a model passes to its layers."""
    lengths = Lengths(q.shape[1], k.shape[1])
    diagonal = lengths.keys - lengths.queries
    compiling = torch.compiler.is_compiling()
    runs = HOLES if compiling else runs_of(padding, 0, stop=k.shape[1])
    if runs == HOLES:
        warn_slow(KEYS)
        return Visible(band, diagonal, lengths, mask=_real_keys(padding, 0, length=k.shape[1]))
    return simplest(band, diagonal, lengths=lengths, runs=runs, device=q.device)


def _real_keys(padding: Tensor, start: int, length: int) -> Tensor:
    real = padding[:, start : start + length].bool()
    real = torch.nn.functional.pad(real, (0, length - real.shape[1]))
    return real[:, None, None]


def pairs(request: MaskRequest) -> Visible:
    """transformers' own mask, (batch, 1, queries, keys)."""
    from transformers.masking_utils import sdpa_mask

    queries: dict[str, Any] = dict(q_length=request.q_length, q_offset=request.q_offset)
    if request.cache_position is not None:
        queries = dict(cache_position=request.cache_position)
    mask = sdpa_mask(
        batch_size=request.batch,
        kv_length=request.kv_length,
        kv_offset=request.kv_offset,
        mask_function=request.predicate,
        attention_mask=request.padding,
        allow_is_causal_skip=False,
        allow_is_bidirectional_skip=False,
        use_vmap=request.use_vmap,
        device=request.device,
        **queries,
    )
    diagonal = request.q_offset - request.kv_offset
    return Visible(ALL_KEYS, diagonal, lengths=request.lengths, mask=mask)


def given(mask: Tensor, q: Tensor, k: Tensor) -> Visible | None:
    """A mask of four dimensions that the user passes: it says all, so that no flag of the layer
    counts. None for one of numbers, which are added to the scores.
    """
    lengths = Lengths(q.shape[1], k.shape[1])
    sizes = (q.shape[0], q.shape[2], *lengths)
    if mask.dim() != 4 or any(n not in (1, size) for n, size in zip(mask.shape, sizes)):
        raise NotImplementedError(
            f"attention_mask of shape {tuple(mask.shape)}: 2D padding masks are supported, and "
            f"masks that broadcast over (batch, nheads, queries, keys), here {sizes}; {ANOTHER}"
        )
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise NotImplementedError(
            f"attention_mask of {mask.dtype} and shape {tuple(mask.shape)}: pass bools, or numbers "
            "to be added to the scores"
        )
    warn_slow(GIVEN)
    return Visible(ALL_KEYS, None, lengths, mask=mask) if mask.dtype == torch.bool else None
