"""The mask function: what transformers says of a mask, once a forward, as a `Visible`.

It never answers None. To transformers None means that a flag of the layer says it all, and a model
that adds its mask by itself takes it for no mask: nothing hides the future from it then.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from ...errors import warn_slow
from .chunks import Span, chunk_of, chunk_starts, is_chunked, kept_keys, left_padding
from .stored import KEYS, PAIRS, beside, pairs
from .visible import (
    ALL_KEYS,
    CAUSAL,
    HOLES,
    NO_KEYS,
    Band,
    MaskRequest,
    Predicate,
    Run,
    Visible,
    assert_later,
    band_of,
    packed_of,
    runs_of,
    simplest,
)

Tensor = torch.Tensor
NOT_CHUNKED = (
    "the mask is not that of the model's chunks, as a compiled graph assumes: rows whose "
    "position_ids restart are not supported compiled with chunked attention"
)


def visible_keys(
    batch_size: int,
    q_length: int = 0,
    kv_length: int = 0,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Predicate | None = None,
    attention_mask: Tensor | Visible | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    **kwargs,
) -> Visible:
    """Which keys the queries of this forward see; transformers calls it for each kind of layer."""
    if isinstance(attention_mask, Visible):  # made by `generate`, before the model's forward
        return attention_mask
    if mask_function is None:
        raise TypeError("mask_function is missing, which says what a query sees")
    if "cache_position" in kwargs:  # how transformers before 5.4 says it
        positions = kwargs["cache_position"]
        q_length, q_offset, device = positions.shape[0], positions[0], positions.device
    request = MaskRequest(
        mask_function,
        batch_size,
        q_length=q_length,
        kv_length=kv_length,
        q_offset=q_offset,
        kv_offset=kv_offset,
        padding=attention_mask,
        local_size=local_size,
        device=device,
        is_causal="allow_is_bidirectional_skip" not in kwargs,  # a bidirectional mask's alone
        chunk=chunk_of(kwargs.get("config"), local_size),
        use_vmap=use_vmap,
        # Over a compiled static cache: its length stays on the device, or each step compiles.
        is_step=q_length == 1 and not allow_is_causal_skip,
        cache_position=kwargs.get("cache_position"),
    )
    has_chunks = request.chunk is not None
    window = None if has_chunks else local_size
    return dataclasses.replace(_visible(request), local_size=window, has_chunks=has_chunks)


def _visible(request: MaskRequest) -> Visible:
    visible = _found(request)
    if visible is None:
        warn_slow(PAIRS)
        return pairs(request)
    return visible if isinstance(visible, Visible) else _padded(request, visible)


def _found(request: MaskRequest) -> Visible | Band | None:
    """What `request.predicate` is; None if it is no band, no chunks and no packed sequences."""
    from transformers.masking_utils import bidirectional_mask_function, causal_mask_function

    if request.use_vmap:  # it may take single numbers alone
        return None
    if request.predicate is causal_mask_function:
        return CAUSAL
    if request.predicate is bidirectional_mask_function:
        return ALL_KEYS
    compiling = torch.compiler.is_compiling()
    chunk = request.chunk
    if chunk is not None and (compiling or not request.is_whole()):
        is_one = request.kv_offset == 0 and request.kv_length <= chunk
        if compiling and request.padding is not None and not is_one:
            return None
        if _fits_chunks(request, chunk):
            return CAUSAL if is_one else _chunked(request, chunk)
    if compiling and (request.is_union() or request.is_on_device()):
        return None
    return _probed(request)


def _probed(request: MaskRequest) -> Visible | Band | None:
    """What `request.predicate` is, found by evaluating it for some pairs."""
    is_whole = request.is_whole()
    predicate, batch, q_length = request.predicate, request.batch, request.q_length
    size, device = request.local_size, request.device
    if is_whole and torch.compiler.is_compiling() and batch == 1:
        causal = request.is_causal
        return packed_of(predicate, batch, q_length, size, device=device, is_causal=causal)
    q_start, k_start = int(request.q_offset), request.kv_offset
    stop = k_start + request.kv_length
    if request.is_causal:
        stop = min(stop, q_start + q_length)
    queries, keys = range(q_start, q_start + q_length), range(k_start, stop)
    band = band_of(predicate, queries, keys, batch, size, device, is_causal=request.is_causal)
    if band is not None or not is_whole:
        return band
    return packed_of(predicate, batch, q_length, size, device=device, chunk=request.chunk)


def _padded(request: MaskRequest, band: Band) -> Visible:
    """A band, and the padding."""
    if band == NO_KEYS:
        none = torch.zeros(request.batch, dtype=torch.int32, device=request.device)
        return Visible(ALL_KEYS, None, lengths=request.lengths, used=none)
    is_step = request.is_step and band.is_causal
    if is_step and request.padding is None:
        return Visible(band, None, lengths=request.lengths, used=request.used())
    if torch.compiler.is_compiling():
        if request.padding is not None:
            return beside(request, band, padding=request.padding)
        if request.is_on_device():
            return pairs(request)
    q_start, k_start = int(request.q_offset), request.kv_offset
    end = k_start + request.kv_length
    # Slots of a static cache that are not written yet come after the last query.
    stop = min(end, q_start + request.q_length) if band.is_causal else end
    runs = runs_of(request.padding, k_start, stop=stop)
    if request.padding is not None and runs == HOLES:
        warn_slow(KEYS)
        return beside(request, band, padding=request.padding)
    if runs is None and is_step:
        return Visible(band, None, lengths=request.lengths, used=request.used())
    if runs is None and stop < end:
        runs = (Run(0, stop - k_start),) * request.batch
    return simplest(band, q_start - k_start, request.lengths, runs=runs, device=request.device)


def _chunk_rows(request: MaskRequest) -> dict[str, Any]:
    """What chunks are counted by: padding, queries and keys."""
    return dict(
        padding=left_padding(request.padding, request.batch, device=request.device),
        queries=Span(request.q_offset, request.q_length),
        keys=Span(request.kv_offset, request.kv_length),
    )


def _fits_chunks(request: MaskRequest, chunk: int) -> bool:
    """Whether the predicate is that of the model's chunks; a compiled graph asserts it."""
    fits = is_chunked(request.predicate, chunk, **_chunk_rows(request))
    if torch.compiler.is_compiling():
        assert_later(fits, NOT_CHUNKED)
        return True
    return bool(fits)


def _chunked(request: MaskRequest, chunk: int) -> Visible:
    """Chunks behind a cache or padding, and in a compiled graph."""
    starts = chunk_starts(chunk, **_chunk_rows(request))
    chunked = Visible(CAUSAL, None, lengths=request.lengths, starts=starts, chunk=chunk)
    if request.padding is None:
        return chunked
    q_length, kv_length, k_start = request.q_length, request.kv_length, request.kv_offset
    diagonal = kv_length - 1 if q_length == 1 else int(request.q_offset) - k_start
    end = diagonal + q_length  # behind the last query's key
    runs = runs_of(request.padding, k_start, stop=k_start + end)
    if q_length == 1 and runs != HOLES:
        return chunked
    stops = [] if runs is None else [run.stop for run in runs]
    is_late = any(stop < end for stop in stops)
    if runs == HOLES or (is_late and diagonal != 0):
        warn_slow(KEYS)
        return pairs(request)
    if is_late:
        seqused_k = kept_keys(starts.keys, torch.tensor(stops, device=request.device), kv_length)
        chunked = dataclasses.replace(chunked, seqused_k=seqused_k)
    return dataclasses.replace(chunked, diagonal=diagonal, runs=runs)
