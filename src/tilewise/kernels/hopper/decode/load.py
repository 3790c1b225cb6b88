"""The load warp: it finds work, says what it is, and keeps the rings of keys and values full, where
TMA copies these (else copy.py).

Decoding reads each key once, so its speed is that of the memory: of bytes in flight (Little's law:
4.4 TB/s and 1 us of latency are 34 KB an SM, more under load). The warp runs ahead of the matmuls,
into the next part, until both rings are full.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from ....tile.split_schedule import (
    Hint,
    decoding_programs,
    find_alternating,
    find_sequence,
    share_of,
    streams_of,
)
from ....tile.types import Table
from ..compat import tma_load
from ..pipeline import advance, start, wait_empty
from ..tile_messages import send
from ..work import LANE_LAYOUT, fetch_next_tile
from .entries import first_entries, look_up_rows, next_entries, page_of, pages_of, rows_of
from .numbers import end_numbers, first_number, next_number, rates_of
from .rows import clear_unused
from .scales import copy_row_scales, have_scales, k_rows, v_rows
from .work import blocks_of, keys_of, no_more, open_part, open_slice, tile_counter

KEYS_OF_LANES = gl.constexpr(gl.BlockedLayout([1], [32], [1], [0]))


class Sources(NamedTuple):
    """What is copied: descriptors of (pages, nheads_k, page_size, headdim), or `Strided`."""

    k: Any
    v: Any
    table: Table


@gluon.jit
def load_partition(sources, rings, counters, call, FEATURES: gl.constexpr, TILE: gl.constexpr):
    ROWS: gl.constexpr = TILE.ROWS * TILE.WARPGROUPS
    DV: gl.constexpr = TILE.BLOCK_DV
    if fetches_descriptors(TILE.BY_TMA, TILE.WARPGROUPS):
        fetch_descriptors(sources, rings, TILE=TILE)
    lane = gl.arange(0, 32, LANE_LAYOUT)
    TOKENS: gl.constexpr = ROWS // FEATURES.GROUP
    sms = gl.cdiv(gl.num_programs(0), TILE.PROGRAMS)
    if FEATURES.CHUNK > 0:
        RATES: gl.constexpr = rates_of(TILE.CACHE, TILE.PROGRAMS)
        sms = decoding_programs(lane, sms, call, FEATURES, TOKENS=TOKENS, RATES=RATES)
    share = share_of(lane, sms, call, FEATURES, TOKENS=TOKENS, PER_SM=TILE.PROGRAMS)
    messages_state, state = start(), start()
    number = first_number(sms, counters, FEATURES=FEATURES, TILE=TILE)
    if TILE.WARPGROUPS == 1:
        streams = Hint(0, 0, rows=0, pieces=0)
    else:
        streams = streams_of(lane, share, call=call, FEATURES=FEATURES, ROWS=ROWS, BLOCK_DV=DV)
    part, streams = find_part(number, streams, lane, share, call, FEATURES, TILE)
    if TILE.WARPGROUPS == 1:
        mbarrier.wait(rings.ready.index(0), 0)
    # Where others copy, this warp could hold two parts more than it has work for, while programs
    # that end early have none: it fetches a number when the part before has begun
    FETCHES_LATE: gl.constexpr = not TILE.BY_TMA and TILE.WARPGROUPS == 1
    while part.is_work:
        fetched = 0
        if not FETCHES_LATE:
            fetched = fetch_next_tile(counters, True)
        work = open_part(part, share, call=call, FEATURES=FEATURES, TILE=TILE)
        send(rings.messages, messages_state, fields=work)
        messages_state = advance(messages_state, 2)
        if TILE.BY_TMA:
            state = load_part(work, sources, rings, state, call, FEATURES, TILE)
        if FETCHES_LATE:
            wait_empty(rings.messages, advance(messages_state, 2))  # all have received this part
            fetched = fetch_next_tile(counters, True)
        number = next_number(fetched, sms, FEATURES=FEATURES, TILE=TILE)
        part, streams = find_part(number, streams, lane, share, call, FEATURES, TILE)
    parts = part.stop
    # Numbers past the parts are slices of folds. All parts were handed out before them, to programs
    # that run: a slice waits for nothing that has not begun.
    OWN: gl.constexpr = TILE.ROWS  # each warpgroup's are folded by themselves
    hint = Hint(0, parts, rows=0, pieces=0)
    EQUALLY: gl.constexpr = TILE.WARPGROUPS > 1
    if not TILE.STATES:
        part = find_sequence(number, hint, lane, share, call, True, EQUALLY, FEATURES, OWN, DV)
        while part.is_work:
            work = open_slice(part, share, call=call, FEATURES=FEATURES, ROWS=OWN, BLOCK_DV=DV)
            await_parts(work, counters, call=call, FEATURES=FEATURES)
            # Not before: programs that are done early would have two, and others none
            fetched = fetch_next_tile(counters, True)
            send(rings.messages, messages_state, fields=work)
            messages_state = advance(messages_state, 2)
            number = next_number(fetched, sms, FEATURES=FEATURES, TILE=TILE)
            hint = part.hint
            part = find_sequence(number, hint, lane, share, call, True, EQUALLY, FEATURES, OWN, DV)
    end_numbers(number, part.stop, sms, counters=counters, FEATURES=FEATURES, TILE=TILE)
    send(rings.messages, messages_state, fields=no_more())


@gluon.constexpr_function
def fetches_descriptors(by_tma, warpgroups):
    """Whether the descriptors are fetched ahead. Of two warpgroups' calls, which take long, the
    load warp has no registers for it.
    """
    return by_tma and warpgroups == 1


@gluon.jit
def fetch_descriptors(sources, rings, TILE: gl.constexpr):
    """Copies a box of keys and one of values that lie outside of the cache: zeros, which no memory
    is read for. So the descriptors, a trip to memory, are there when the lengths are.
    """
    k, v = sources.k, sources.v
    PAGE: gl.constexpr = k.block_type.shape[2]
    BYTES: gl.constexpr = k.block_type.nbytes + v.block_type.nbytes
    ready = rings.ready.index(0)
    mbarrier.expect(ready, BYTES)
    tma_load(k, [0, 0, -PAGE, 0], ready, rings.k.buffers.index(0).slice(0, PAGE, 2))
    tma_load(v, [0, 0, -PAGE, 0], ready, rings.v.buffers.index(0).slice(0, PAGE, 2))


@gluon.jit
def find_part(number, streams, lane, share, call, FEATURES: gl.constexpr, TILE: gl.constexpr):
    """The sequence of a part, and where to look for the next."""
    ROWS: gl.constexpr = TILE.ROWS * TILE.WARPGROUPS
    DV: gl.constexpr = TILE.BLOCK_DV
    if TILE.WARPGROUPS == 1:
        part = find_sequence(number, streams, lane, share, call, False, False, FEATURES, ROWS, DV)
        return part, part.hint
    else:
        return find_alternating(number, streams, lane, share, call, FEATURES, ROWS, DV)


@gluon.jit
def await_parts(work, counters, call, FEATURES: gl.constexpr):
    """Until all parts of a tile have written their states, which later loads then see."""
    counter = tile_counter(work, counters, call=call, FEATURES=FEATURES)
    done = gl.atomic_add(counter, 0, sem="acquire")
    while done < work.parts:
        done = gl.atomic_add(counter, 0, sem="acquire")


@gluon.jit
def load_part(work, sources, rings, state, call, FEATURES: gl.constexpr, TILE: gl.constexpr):
    """The keys and values of a part, block by block. Entries of the page table are loaded a block
    ahead, once for both, so that no copy waits for them.
    """
    N: gl.constexpr = TILE.BLOCK_N
    ROWS: gl.constexpr = TILE.ROWS * TILE.WARPGROUPS
    BOX: gl.constexpr = sources.k.block_type.shape[2]
    table = sources.table
    keys = keys_of(work, call, FEATURES=FEATURES, ROWS=ROWS)
    first, stop = blocks_of(work, call, FEATURES=FEATURES, ROWS=ROWS, N=N)
    ahead = first_entries(first * N, work, keys=keys, table=table, FEATURES=FEATURES, BOX=BOX, N=N)
    # Scales of rows are copied by 4 bytes, each lane's where its own keys lie
    HAVE_SCALES: gl.constexpr = have_scales(call.scales.k_row, call.scales.v_row)
    page_size = BOX if BOX < N else table.page_size
    key = first * N + gl.arange(0, N, KEYS_OF_LANES)
    rows_ahead = 0, 0
    if HAVE_SCALES:
        rows_ahead = look_up_rows(key, page_size, work=work, keys=keys, table=table)
    for block in range(first, stop):
        n = block * N
        rows = 0
        if HAVE_SCALES:
            rows = rows_of(rows_ahead, key, keys=keys, table=table)
            key += N
            rows_ahead = look_up_rows(key, page_size, work=work, keys=keys, table=table)
        pages, row = pages_of(ahead, keys, table, FEATURES=FEATURES, BOX=BOX, N=N), ahead.row
        ahead = next_entries(ahead, n + N, work, keys, table, FEATURES=FEATURES, BOX=BOX, N=N)
        load_block(sources.k, rings.k, state=state, work=work, pages=pages, row=row, TILE=TILE)
        if call.scales.k_row is not None:
            load_scales(k_rows(call.scales), rings.k, rings.k_scales, state, work, rows)
        if TILE.WARPGROUPS == 1:
            load_block(sources.v, rings.v, state=state, work=work, pages=pages, row=row, TILE=TILE)
        else:
            load_values(sources.v, rings.v, state, work, pages, row, n, keys, TILE)
        if call.scales.v_row is not None:
            load_scales(v_rows(call.scales), rings.v, rings.v_scales, state, work, rows)
        state = advance(state, TILE.STAGES)
    return state


@gluon.jit
def load_scales(scales, ring, smem, state, work, rows):
    """The scales of a block's rows; each lane arrives when its own have landed."""
    copy_row_scales(scales, smem.index(state.stage), work.head_k, rows=rows)
    async_copy.mbarrier_arrive(ring.full.index(state.stage), increment_count=False)


@gluon.jit
def load_block(desc, ring, state, work, pages, row, TILE: gl.constexpr):
    """A block of keys or values, as one copy or, of short pages, one for each. The bytes of a block
    are always as many: for a page past the last key some other one is copied.
    """
    wait_empty(ring, state)
    full = ring.full.index(state.stage)
    copy_pages(desc, full, ring.buffers.index(state.stage), work, pages, row, TILE)


@gluon.jit
def load_values(desc, ring, state, work, pages, row, n, keys, TILE: gl.constexpr):
    """A block of values whose rows that are not in use are zeros: they may hold NaN, and 0 times
    NaN is NaN. One warpgroup clears them itself; of two that read a block, neither could write it.
    """
    N: gl.constexpr = TILE.BLOCK_N
    has_unused = (n < keys.first) | (n + N > keys.last)
    wait_empty(ring, state)
    buffer = ring.buffers.index(state.stage)
    full = ring.full.index(state.stage)
    # Behind the stages' is a barrier for blocks that are full only when they have been cleared
    landed = ring.full.index(TILE.STAGES)
    barrier = ring.full.index(gl.where(has_unused, TILE.STAGES, state.stage))
    copy_pages(desc, barrier, buffer=buffer, work=work, pages=pages, row=row, TILE=TILE)
    if has_unused:
        mbarrier.wait(landed, 0)
        clear_unused(buffer.reshape((N, TILE.BLOCK_DV)), n, keys=keys, ROWS=8, WARPS=1, TILE=TILE)
        mbarrier.arrive(landed, count=1)  # so that the next phase is again the first
        mbarrier.arrive(full, count=1)


@gluon.jit
def copy_pages(desc, full, buffer, work, pages, row, TILE: gl.constexpr):
    """Starts the copies of a block, which complete `full`: from a row of one page on, or of pages
    that are all in it.
    """
    shape: gl.constexpr = desc.block_type.shape
    BYTES: gl.constexpr = desc.block_type.nbytes
    BOX: gl.constexpr = shape[2]
    N: gl.constexpr = TILE.BLOCK_N
    PAGES: gl.constexpr = N // BOX
    mbarrier.expect(full, BYTES * PAGES)
    for i in gl.static_range(PAGES):
        coordinates = [page_of(pages, i, BOX=BOX, N=N), work.head_k, row, 0]
        tma_load(desc, coordinates, full, buffer.slice(i * BOX, BOX, 2))
