"""The mask function: what transformers says of a mask, once a forward, as a `Visible`.

It never answers None. To transformers None means that a flag of the layer says it all, and a model
that adds its mask by itself takes it for no mask: nothing hides the future from it then.
"""

from __future__ import annotations

import dataclasses

import torch

from ...errors import warn_slow
from .asked import Asked
from .chunks import Keys, Span, chunk_of, chunk_starts, is_chunked, kept_keys, left_padding
from .stored import KEYS, PAIRS, beside, pairs
from .visible import (
    HOLES,
    NO_KEYS,
    Band,
    Predicate,
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
    "position_ids start anew are not served compiled with chunked attention"
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
    asked = Asked(
        *(mask_function, batch_size, (q_length, kv_length), (q_offset, kv_offset)),
        *(attention_mask, local_size, device),
        is_causal="allow_is_bidirectional_skip" not in kwargs,  # a bidirectional mask's alone
        chunk=chunk_of(kwargs.get("config"), local_size),
        use_vmap=use_vmap,
        # Over a compiled static cache: its length stays on the device, or each step compiles.
        is_step=q_length == 1 and not allow_is_causal_skip,
        cache_position=kwargs.get("cache_position"),
    )
    found = _found(asked)
    if found is None:
        warn_slow(PAIRS)
        return pairs(asked)
    return found if isinstance(found, Visible) else _padded(asked, found)


def _found(asked: Asked) -> Visible | Band | None:
    """What `asked.predicate` is; None if it is no band, no chunks and no packed sequences."""
    from transformers.masking_utils import bidirectional_mask_function, causal_mask_function

    if asked.use_vmap:  # it may take single numbers alone
        return None
    if asked.predicate is causal_mask_function:
        return None, 0
    if asked.predicate is bidirectional_mask_function:
        return None, None
    compiling = torch.compiler.is_compiling()
    chunk = asked.chunk
    if chunk is not None and (compiling or not asked.is_whole()):
        is_one = asked.offsets[1] == 0 and asked.lengths[1] <= chunk
        if compiling and asked.padding is not None and not is_one:
            return None
        if _fits_chunks(asked, chunk):
            return (None, 0) if is_one else _chunked(asked, chunk)
    if compiling and (asked.is_union() or asked.is_on_device()):
        return None
    return _probed(asked)


def _probed(asked: Asked) -> Visible | Band | None:
    """What `asked.predicate` is, found by asking it about some pairs."""
    is_whole = asked.is_whole()
    predicate, batch, (q_length, kv_length), *_ = asked
    rest = (asked.local_size, asked.device)
    if is_whole and torch.compiler.is_compiling() and batch == 1:
        return packed_of(predicate, batch, q_length, *rest, asked.is_causal)
    q_start, kv_offset = int(asked.offsets[0]), asked.offsets[1]
    stop = kv_offset + kv_length
    if asked.is_causal:
        stop = min(stop, q_start + q_length)
    queries, keys = range(q_start, q_start + q_length), range(kv_offset, stop)
    band = band_of(predicate, queries, keys, batch, *rest, is_causal=asked.is_causal)
    if band is not None or not is_whole:
        return band
    return packed_of(predicate, batch, q_length, *rest, chunk=asked.chunk)


def _padded(asked: Asked, band: Band) -> Visible:
    """A band, and the padding."""
    (q_length, kv_length), (q_offset, kv_offset) = asked.lengths, asked.offsets
    if band == NO_KEYS:
        none = torch.zeros(asked.batch, dtype=torch.int32, device=asked.device)
        return Visible((None, None), None, asked.lengths, used=none)
    is_step = asked.is_step and band[1] == 0
    if is_step and asked.padding is None:
        return Visible(band, None, asked.lengths, used=asked.used())
    if torch.compiler.is_compiling():
        if asked.padding is not None:
            return beside(asked, band, asked.padding)
        if asked.is_on_device():
            return pairs(asked)
    q_start, end = int(q_offset), kv_offset + kv_length
    # Slots of a static cache that are not written yet come after the last query.
    stop = min(end, q_start + q_length) if band[1] == 0 else end
    runs = runs_of(asked.padding, kv_offset, stop)
    if asked.padding is not None and runs == HOLES:
        warn_slow(KEYS)
        return beside(asked, band, asked.padding)
    if runs is None and is_step:
        return Visible(band, None, asked.lengths, used=asked.used())
    if runs is None and stop < end:
        runs = ((0, stop - kv_offset),) * asked.batch
    return simplest(band, q_start - kv_offset, asked.lengths, runs, asked.device)


def _spans(asked: Asked) -> tuple[Span, Keys]:
    """Where queries and keys begin, and how many there are."""
    (q_length, kv_length), (q_offset, kv_offset) = asked.lengths, asked.offsets
    return (q_offset, q_length), (kv_offset, kv_length)


def _fits_chunks(asked: Asked, chunk: int) -> bool:
    """Whether the predicate is that of the model's chunks; a compiled graph asserts it."""
    padding = left_padding(asked.padding, asked.batch, asked.device)
    fits = is_chunked(asked.predicate, chunk, padding, *_spans(asked))
    if torch.compiler.is_compiling():
        assert_later(fits, NOT_CHUNKED)
        return True
    return bool(fits)


def _chunked(asked: Asked, chunk: int) -> Visible:
    """Chunks behind a cache or padding, and in a compiled graph."""
    queries, keys = _spans(asked)
    padding = left_padding(asked.padding, asked.batch, asked.device)
    starts = chunk_starts(chunk, padding, queries, keys)
    chunked = Visible((None, 0), None, asked.lengths, starts=starts, chunk=chunk)
    if asked.padding is None:
        return chunked
    (kv_offset, kv_length), q_length = keys, asked.lengths[0]
    diagonal = kv_length - 1 if q_length == 1 else int(asked.offsets[0]) - kv_offset
    end = diagonal + q_length  # behind the last query's key
    runs = runs_of(asked.padding, kv_offset, kv_offset + end)
    if q_length == 1 and runs != HOLES:
        return chunked
    stops = [] if runs is None else [stop for _, stop in runs]
    is_late = any(stop < end for stop in stops)
    if runs == HOLES or (is_late and diagonal != 0):
        warn_slow(KEYS)
        return pairs(asked)
    if is_late:
        kept = kept_keys(starts[1], torch.tensor(stops, device=asked.device), kv_length)
        chunked = dataclasses.replace(chunked, kept=kept)
    return dataclasses.replace(chunked, diagonal=diagonal, runs=runs)
