"""The mask function: what transformers says of a mask, once a forward, as a `Visible`.

It never answers None. To transformers None means that a flag of the layer says it all, and a model
that adds its mask by itself takes it for no mask: nothing hides the future from it then.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from .chunks import chunk_of, chunk_starts, is_chunked, left_padding
from .opaque import ANOTHER
from .visible import Band, Predicate, Visible, band_of, packed_of, runs_of, simplest

Tensor = torch.Tensor
NOT_CHUNKED = (
    "the mask is not that of the model's chunks, as a compiled graph assumes: rows whose "
    "position_ids start anew are not served compiled with chunked attention"
)
OTHER_MASKS = (
    "this model's mask is neither causal nor a window nor chunks nor packed sequences (blocks of "
    "image tokens that see each other are none of these): " + ANOTHER
)


class Asked(NamedTuple):
    """A mask that is neither plainly causal nor plainly all keys."""

    predicate: Predicate
    batch: int
    lengths: tuple[int, int]  # of queries and keys
    offsets: tuple[int | Tensor, int]  # the positions of the first ones
    padding: Tensor | None  # bool (batch, positions)
    local_size: int | None
    device: torch.device | str
    is_causal: bool
    chunk: int | None

    def is_whole(self) -> bool:
        """Whether the queries are the keys, from the first position on, without padding."""
        is_first = all(isinstance(start, int) and start == 0 for start in self.offsets)
        return is_first and self.padding is None and self.lengths[0] == self.lengths[1]


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
    **kwargs,
) -> Visible:
    """Which keys the queries of this forward see; transformers calls it for each kind of layer."""
    if isinstance(attention_mask, Visible):  # made by `generate`, before the model's forward
        return attention_mask
    if "cache_position" in kwargs:  # how transformers before 5.4 says it
        positions = kwargs["cache_position"]
        q_length, q_offset, device = positions.shape[0], positions[0], positions.device
    if use_vmap:
        raise NotImplementedError(f"this model adds a mask of its own: {ANOTHER}")
    from transformers.masking_utils import bidirectional_mask_function, causal_mask_function

    lengths = (q_length, kv_length)
    # A step over a compiled static cache: its length stays on the device, or each step compiles.
    is_step = q_length == 1 and not allow_is_causal_skip
    if is_step and attention_mask is None and mask_function is causal_mask_function:
        used = _used(q_offset, q_length, kv_offset, batch_size, device)
        return Visible((None, 0), None, lengths, used=used)
    if mask_function is causal_mask_function:
        band: Band = (None, 0)
    elif mask_function is bidirectional_mask_function:
        band = (None, None)
    else:
        chunk = chunk_of(kwargs.get("config"), local_size)
        is_causal = "allow_is_bidirectional_skip" not in kwargs  # a bidirectional mask's alone
        offsets, size = (q_offset, kv_offset), (local_size, device, is_causal, chunk)
        found = _probed(Asked(mask_function, batch_size, lengths, offsets, attention_mask, *size))
        if isinstance(found, Visible):
            return found
        band = found
    q_start, end = int(q_offset), kv_offset + kv_length
    # Slots of a static cache that are not written yet come after the last query.
    stop = min(end, q_start + q_length) if band[1] == 0 else end
    runs = runs_of(attention_mask, kv_offset, stop)
    if runs is None and is_step and band[1] == 0:
        used = _used(q_offset, q_length, kv_offset, batch_size, device)
        return Visible(band, None, lengths, used=used)
    if runs is None and stop < end:
        runs = ((0, stop - kv_offset),) * batch_size
    return simplest(band, q_start - kv_offset, lengths, runs, device)


def _used(q_offset: int | Tensor, q_length: int, kv_offset: int, batch: int, device) -> Tensor:
    """int32 (batch,): the keys of a static cache that are written once these queries' are."""
    used = torch.as_tensor(q_offset + q_length - kv_offset, dtype=torch.int32, device=device)
    return used.expand(batch)


def _probed(asked: Asked) -> Visible | Band:
    """The mask that `asked.predicate` is, found by probing it."""
    is_whole, compiling = asked.is_whole(), torch.compiler.is_compiling()
    if asked.chunk is not None and (compiling or not is_whole):
        chunked = _chunked(asked)
        if chunked is not None:
            return chunked
    predicate, batch, (q_length, kv_length), *_ = asked
    rest = (asked.local_size, asked.device)
    if is_whole and compiling and batch == 1:
        return packed_of(predicate, batch, q_length, *rest, asked.is_causal)
    q_start, kv_offset = int(asked.offsets[0]), asked.offsets[1]
    stop = kv_offset + kv_length
    if asked.is_causal:
        stop = min(stop, q_start + q_length)
    queries, keys = range(q_start, q_start + q_length), range(kv_offset, stop)
    band = band_of(predicate, queries, keys, batch, *rest, is_causal=asked.is_causal)
    if band is not None:
        return band
    packed = None
    if is_whole:
        packed = packed_of(predicate, batch, q_length, *rest, chunk=asked.chunk)
    if packed is None:
        raise NotImplementedError(OTHER_MASKS)
    return packed


def _chunked(asked: Asked) -> Visible | None:
    """Chunks behind a cache or padding, and in a compiled graph; None if it is something else."""
    (q_start, q_length), (kv_offset, kv_length) = zip(asked.offsets, asked.lengths, strict=True)
    queries, keys = (q_start, q_length), (kv_offset, kv_length)
    padding = left_padding(asked.padding, asked.batch, asked.device)
    fits = is_chunked(asked.predicate, asked.chunk, padding, queries, keys)
    if torch.compiler.is_compiling():
        torch._assert_async(fits, NOT_CHUNKED)
    elif not fits:
        return None
    diagonal = runs = None
    if asked.padding is not None and q_length > 1:
        diagonal = int(q_start) - kv_offset
        runs = runs_of(asked.padding, kv_offset, kv_offset + diagonal + q_length)
    elif asked.padding is not None:  # refuses holes
        runs_of(asked.padding, kv_offset, kv_offset + kv_length)
    starts = chunk_starts(asked.chunk, padding, queries, keys)
    return Visible((None, 0), diagonal, asked.lengths, runs=runs, starts=starts, chunk=asked.chunk)
