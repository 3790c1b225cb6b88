"""New keys and values into a cache: a program for each new key, all of its heads.

It finds its sequence, rotates the key by its position, and writes both rows where the table or its
slot says; a key without a slot is not written.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ...tile.fp8 import quantize
from ...tile.types import Strided
from .rotary import turned

SEQUENCES_PER_GROUP = tl.constexpr(128)  # sequences, or slots, per group


class NewKeys(NamedTuple):
    """Keys and values to be appended, and where."""

    k: Strided  # (batch, seqlen, nheads_k, headdim), packed a batch of one
    v: Strided
    seqused_k: Any  # int32 (batch,), or None
    cu_seqlens: Any  # int32 (batch + 1,), or None
    slots: Any  # int64, one for each key, or None
    batch: int
    seqlen: int
    cos: Any  # (positions, rotary_dim / 2), or None
    sin: Any
    positions: int


class Widths(NamedTuple):
    """Heads and dims, and those padded to powers of two."""

    NHEADS: int
    D: int
    DV: int
    BLOCK_H: int
    BLOCK_D: int
    BLOCK_DV: int
    HALF: int  # of the dims that are turned
    INTERLEAVED: bool
    LIMIT: float = 0.0  # the largest number of a cache of 8 bits, 448 or 127; else 0


@triton.jit
def cache_append_kernel(new, cache, total, WIDTHS: tl.constexpr):
    token = tl.program_id(0)
    sequence, position = find_position(token, new)
    if new.slots is None:
        slot = slot_of(sequence, position, cache)
    else:
        slot = tl.load(new.slots + token)
        if has_later(token, slot, new.slots, total):
            slot = slot * 0 - 1
    num_rows = tl.cast(cache.num_pages, tl.int64) * cache.page_size
    if (slot < 0) | (slot >= num_rows):
        return
    page, row = slot // cache.page_size, slot % cache.page_size
    batch_row = token // new.seqlen, token % new.seqlen
    heads = tl.arange(0, WIDTHS.BLOCK_H)[:, None]
    k_dims, v_dims = tl.arange(0, WIDTHS.BLOCK_D)[None, :], tl.arange(0, WIDTHS.BLOCK_DV)[None, :]
    k_in = (heads < WIDTHS.NHEADS) & (k_dims < WIDTHS.D)
    v_in = (heads < WIDTHS.NHEADS) & (v_dims < WIDTHS.DV)
    k_row, v_row = row_of(new.k, *batch_row, heads), row_of(new.v, *batch_row, heads)
    k = tl.load(k_row + k_dims, mask=k_in, other=0.0)
    if new.cos is not None:
        found = turned(k, k_row, 0, k_in, position, new, WIDTHS.HALF, WIDTHS.INTERLEAVED)
        k = found.to(k.dtype)
    if WIDTHS.LIMIT > 0:
        at = sequence, page, row, heads
        k = in_bytes(
            *(k, at, cache.k_scale, cache.k_scale_batch, cache.k_scale_row, cache.k_scale_head),
            *(new.batch, WIDTHS),
        )
    tl.store(row_of(cache.k, page, row, heads) + k_dims, k, mask=k_in)
    v = tl.load(v_row + v_dims, mask=v_in, other=0.0)
    if WIDTHS.LIMIT > 0:
        at = sequence, page, row, heads
        v = in_bytes(
            *(v, at, cache.v_scale, cache.v_scale_batch, cache.v_scale_row, cache.v_scale_head),
            *(new.batch, WIDTHS),
        )
    tl.store(row_of(cache.v, page, row, heads) + v_dims, v, mask=v_in)


@triton.jit
def in_bytes(x, at, ptr, batch_stride, row_stride, head_stride, batch, WIDTHS: tl.constexpr):
    """A row of each head in 8 bits; its scales are read, or computed and written."""
    sequence, page, row, heads = at
    IS_INT: tl.constexpr = WIDTHS.LIMIT == 127.0
    x = x.to(tl.float32)
    if ptr is None:
        return quantize(x, 1.0, IS_INT)
    elif row_stride is None:
        place = tl.minimum(sequence, batch - 1).to(tl.int64) * batch_stride + heads * head_stride
        scale = tl.load(ptr + place, mask=heads < WIDTHS.NHEADS, other=1.0)
        return quantize(x, scale, IS_INT)
    else:
        has_nan = tl.max((x != x).to(tl.int32), 1)[:, None] > 0
        scale = tl.div_rn(tl.max(tl.abs(x), 1)[:, None], WIDTHS.LIMIT)
        # The smallest normal number: a row of zeros has it, too
        scale = tl.where(has_nan, float("nan"), tl.maximum(scale, 1.1754943508222875e-38))
        place = page.to(tl.int64) * batch_stride + row.to(tl.int64) * row_stride
        tl.store(ptr + place + heads * head_stride, scale, mask=heads < WIDTHS.NHEADS)
        return quantize(x, scale, IS_INT)


@triton.jit
def row_of(x, batch, row, heads):
    """Addresses of the first element of each head."""
    first = tl.cast(batch, tl.int64) * x.batch + tl.cast(row, tl.int64) * x.row
    return x.ptr + first + heads.to(tl.int64) * x.head


@triton.jit
def find_position(token, new):
    """The sequence of a key and its position there, -1 if it belongs to none."""
    if new.seqused_k is None:
        return token * 0, token * 0 - 1
    elif new.cu_seqlens is None:
        sequence = token // new.seqlen
        return sequence, tl.load(new.seqused_k + sequence) - new.seqlen + token % new.seqlen
    else:
        sequence = token * 0
        for first in range(0, new.batch, SEQUENCES_PER_GROUP):
            number = first + tl.arange(0, SEQUENCES_PER_GROUP)
            ends = tl.load(new.cu_seqlens + 1 + number, mask=number < new.batch, other=2**31 - 1)
            sequence += tl.sum((ends <= token).to(tl.int32), 0)
        is_in = sequence < new.batch
        used = tl.load(new.seqused_k + sequence, mask=is_in, other=0)
        end = tl.load(new.cu_seqlens + 1 + sequence, mask=is_in, other=0)
        return sequence, tl.where(is_in, used - end + token, -1)


@triton.jit
def slot_of(sequence, position, cache):
    """Where a position of a sequence lies, -1 for nowhere."""
    has_place = (position >= 0) & (position < cache.pages * cache.page_size)
    if cache.page_table is None:
        page = tl.cast(sequence, tl.int64)
    else:
        entry = tl.cast(sequence, tl.int64) * cache.table_stride + position // cache.page_size
        page = tl.load(cache.page_table + entry, mask=has_place, other=-1).to(tl.int64)
    has_place = has_place & (page >= 0) & (page < cache.num_pages)
    return tl.where(has_place, page * cache.page_size + position % cache.page_size, -1)


@triton.jit
def has_later(token, slot, slots, total):
    """Whether a later key has the same slot."""
    count = token * 0
    for first in range(token + 1, total, SEQUENCES_PER_GROUP):
        number = first + tl.arange(0, SEQUENCES_PER_GROUP)
        other = tl.load(slots + number, mask=number < total, other=-1)
        count += tl.sum(((other == slot) & (number < total)).to(tl.int32), 0)
    return count > 0
