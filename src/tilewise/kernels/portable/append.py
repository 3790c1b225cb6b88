"""New keys and values into a cache: a program for each new key, all of its heads.

It finds its sequence, rotates the key by its position, and writes both rows where the table or its
slot says; a key without a slot is not written. Other programs of the same launch write what the
attention after it reads: rotated queries, lengths, and where padded sequences lie.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ...tile.fp8 import quantize
from ...tile.types import Strided
from ..common.lengths import for_all_lengths
from .rotary import turned

SEQUENCES_PER_GROUP = tl.constexpr(128)  # sequences, or slots, per group
ROWS_PER_PROGRAM = tl.constexpr(1024)  # of a table of padded sequences


# Integers that say nothing of how addresses are aligned
LENGTHS = "new.batch", "new.seqlen", "new.positions", "total"
LENGTHS += "cache.table_stride", "cache.pages", "cache.num_pages"
LENGTHS += "prologue.total_q", "prologue.seqlen_q"


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
    before: Any = None  # int32 (batch,), instead of seqused_k: the keys before the new ones
    rotary_seqlens: Any = None  # int32 (batch,): rotary positions count from these


class Prologue(NamedTuple):
    """What is written for the attention that follows, contiguous, and what it is made of."""

    q: Strided | None = None  # or None: it is not rotated
    rotated: Strided | None = None
    cu_seqlens_q: Any = None  # int32 (batch + 1,), or None
    total_q: int = 0
    seqlen_q: int = 0
    used: Any = None  # int32 (batch,), written
    leftpad: Any = None  # int32 (batch,)
    rows: Any = None  # int32 (batch,), the row of the cache of each padded sequence
    table: Any = None  # int32 (batch, seqlen_k), written: pages of one row of padded sequences


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
    PREPARES: bool = False  # whether there is a prologue
    NHEADS_Q: int = 0
    BLOCK_Q: int = 0  # query heads of a program
    AT_FIRST: bool = False  # all queries of a sequence are at its first position


@for_all_lengths(LENGTHS)
@triton.jit
def cache_append_kernel(new, cache, prologue, total, WIDTHS: tl.constexpr):
    program = tl.program_id(0)
    if program < total:
        append_key(program, new, cache, total, WIDTHS)
    if WIDTHS.PREPARES:
        if program >= total:  # of a grid that has more
            prepare(program - total, new, cache, prologue, WIDTHS)


@triton.jit
def append_key(token, new, cache, total, WIDTHS: tl.constexpr):
    """A key and its value."""
    sequence, position, angle = find_position(token, new)
    if new.slots is None:
        slot = slot_of(sequence, position, cache)
    else:
        slot = tl.load(new.slots + token)
        if has_later(token, slot, new.slots, total):
            slot = slot * 0 - 1
    num_rows = tl.cast(cache.num_pages, tl.int64) * cache.page_size
    if (slot >= 0) & (slot < num_rows):
        page, row = slot // cache.page_size, slot % cache.page_size
        batch, new_row = token // new.seqlen, token % new.seqlen
        heads = tl.arange(0, WIDTHS.BLOCK_H)[:, None]
        k_dims = tl.arange(0, WIDTHS.BLOCK_D)[None, :]
        v_dims = tl.arange(0, WIDTHS.BLOCK_DV)[None, :]
        k_in = (heads < WIDTHS.NHEADS) & (k_dims < WIDTHS.D)
        v_in = (heads < WIDTHS.NHEADS) & (v_dims < WIDTHS.DV)
        k_row, v_row = row_of(new.k, batch, new_row, heads), row_of(new.v, batch, new_row, heads)
        k = tl.load(k_row + k_dims, mask=k_in, other=0.0)
        if new.cos is not None:
            rotated = turned(k, k_row, 0, k_in, angle, new, WIDTHS.HALF, WIDTHS.INTERLEAVED)
            k = rotated.to(k.dtype)
        if WIDTHS.LIMIT > 0:
            k = in_bytes(
                k, sequence, page, row, heads,
                cache.k_scale, cache.k_scale_batch, cache.k_scale_row, cache.k_scale_head,
                new.batch, WIDTHS,
            )  # fmt: skip
        tl.store(row_of(cache.k, page, row, heads) + k_dims, k, mask=k_in)
        v = tl.load(v_row + v_dims, mask=v_in, other=0.0)
        if WIDTHS.LIMIT > 0:
            v = in_bytes(
                v, sequence, page, row, heads,
                cache.v_scale, cache.v_scale_batch, cache.v_scale_row, cache.v_scale_head,
                new.batch, WIDTHS,
            )  # fmt: skip
        tl.store(row_of(cache.v, page, row, heads) + v_dims, v, mask=v_in)


@triton.jit
def prepare(program, new, cache, prologue, WIDTHS: tl.constexpr):
    """Lengths first, then a table of padded sequences, then queries."""
    lengths = tl.cdiv(new.batch, SEQUENCES_PER_GROUP)
    if program < lengths:
        count_keys(program, new, prologue)
    else:
        program -= lengths
        if prologue.table is not None:
            rows = new.batch * tl.cdiv(cache.page_size, ROWS_PER_PROGRAM)
            if program < rows:
                place_rows(program, cache.page_size, prologue)
            program -= rows
        if prologue.q is not None:
            if program >= 0:
                rotate_query(program, new, prologue, WIDTHS)


@triton.jit
def count_keys(group, new, prologue):
    """Lengths with the new keys, without padding."""
    sequence = group * SEQUENCES_PER_GROUP + tl.arange(0, SEQUENCES_PER_GROUP)
    inside = sequence < new.batch
    used = tl.load(new.before + sequence, mask=inside, other=0)
    if new.cu_seqlens is None:
        used += new.seqlen
    else:
        used += tl.load(new.cu_seqlens + 1 + sequence, mask=inside, other=0)
        used -= tl.load(new.cu_seqlens + sequence, mask=inside, other=0)
    if prologue.leftpad is not None:
        used -= tl.load(prologue.leftpad + sequence, mask=inside, other=0)
    tl.store(prologue.used + sequence, used, mask=inside)


@triton.jit
def place_rows(program, seqlen_k, prologue):
    """Where keys of a padded sequence lie, as pages of one row."""
    blocks = tl.cdiv(seqlen_k, ROWS_PER_PROGRAM)
    sequence = program // blocks
    key = program % blocks * ROWS_PER_PROGRAM + tl.arange(0, ROWS_PER_PROGRAM)
    row = sequence
    if prologue.rows is not None:
        row = tl.load(prologue.rows + sequence)
    first = row * seqlen_k + tl.load(prologue.leftpad + sequence)
    place = prologue.table + tl.cast(sequence, tl.int64) * seqlen_k + key
    tl.store(place, first + key, mask=key < seqlen_k)


@triton.jit
def rotate_query(program, new, prologue, WIDTHS: tl.constexpr):
    """Some heads of a query."""
    BLOCKS: tl.constexpr = (WIDTHS.NHEADS_Q + WIDTHS.BLOCK_Q - 1) // WIDTHS.BLOCK_Q
    token = program // BLOCKS
    starts, seqlen = prologue.cu_seqlens_q, prologue.seqlen_q
    sequence, row = find_row(token, starts, new.batch, seqlen)
    sequence = tl.minimum(sequence, new.batch - 1)  # rows of none are read by none
    if new.rotary_seqlens is None:
        angle = tl.load(new.before + sequence)
    else:
        angle = tl.load(new.rotary_seqlens + sequence)
    if not WIDTHS.AT_FIRST:
        angle += row
    heads = program % BLOCKS * WIDTHS.BLOCK_Q + tl.arange(0, WIDTHS.BLOCK_Q)[:, None]
    dims = tl.arange(0, WIDTHS.BLOCK_D)[None, :]
    inside = (heads < WIDTHS.NHEADS_Q) & (dims < WIDTHS.D)
    q_row = row_of(prologue.q, token // seqlen, token % seqlen, heads)
    q = tl.load(q_row + dims, mask=inside, other=0.0)
    rotated = turned(q, q_row, 0, inside, angle, new, WIDTHS.HALF, WIDTHS.INTERLEAVED)
    place = row_of(prologue.rotated, token // seqlen, token % seqlen, heads) + dims
    tl.store(place, rotated.to(q.dtype), mask=inside)


@triton.jit
def in_bytes(
    x, sequence, page, row, heads, ptr, batch_stride, row_stride, head_stride, batch,
    WIDTHS: tl.constexpr,
):  # fmt: skip
    """A row of each head in 8 bits; its scales are read, or computed and written."""
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
def find_row(token, cu_seqlens, batch, seqlen):
    """The sequence of a row, `batch` for a packed one of none, and which of its rows it is."""
    if cu_seqlens is None:
        return token // seqlen, token % seqlen
    else:
        sequence = token * 0
        for first in range(0, batch, SEQUENCES_PER_GROUP):
            number = first + tl.arange(0, SEQUENCES_PER_GROUP)
            ends = tl.load(cu_seqlens + 1 + number, mask=number < batch, other=2**31 - 1)
            sequence += tl.sum((ends <= token).to(tl.int32), 0)
        return sequence, token - tl.load(cu_seqlens + sequence)


@triton.jit
def find_position(token, new):
    """The sequence of a key, its position there, -1 if it belongs to none, and its position in the
    rotary tables.
    """
    if new.seqused_k is None and new.before is None:
        return token * 0, token * 0 - 1, token * 0
    else:
        sequence, row = find_row(token, new.cu_seqlens, new.batch, new.seqlen)
        is_in = sequence < new.batch
        if new.before is not None:
            first = tl.load(new.before + sequence, mask=is_in, other=0)
        elif new.cu_seqlens is None:
            first = tl.load(new.seqused_k + sequence) - new.seqlen
        else:
            end = tl.load(new.cu_seqlens + 1 + sequence, mask=is_in, other=0)
            start = tl.load(new.cu_seqlens + sequence)
            first = tl.load(new.seqused_k + sequence, mask=is_in, other=0) - end + start
        position = tl.where(is_in, first + row, -1)
        angle = position
        if new.rotary_seqlens is not None:
            angle = tl.load(new.rotary_seqlens + sequence, mask=is_in, other=0) + row
        return sequence, position, angle


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
