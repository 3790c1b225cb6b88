"""Keys of a tile divided into parts, of which several programs compute one each: FlashDecoding's
split of the keys (https://crfm.stanford.edu/2023/10/12/flashdecoding.html) on the schedule of the
training forward, for chunks whose tiles are fewer than SMs.

A part leaves its state, unnormalised, in fp32. A second kernel folds those of a tile from left to
right and writes the rows, on all SMs: alone, the program that ends a tile's last part
took 5 to 15 us longer.

Parts are what is summed, and no schedule. Where a batch has tiles enough, a program computes all
parts of a tile, and folds each with those before: the same sums, of a state that stays in the L2
cache.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ....tile.schedule import query_tile_in_group
from ....tile.softmax import finish, load_sink
from ....tile.splits import SplitState, fold
from ...common.lengths import for_all_lengths
from ..compat import barrier
from ..decode.scales import sequence_scale
from ..layouts import column_of, row_of
from ..operands import row_factor
from ..pieces import in_pieces
from ..pipeline import advance, start
from .rows import head_of_row, query_of_row
from .varlen import Ragged, open_in_batch, receive_tile

FEWEST_BLOCKS = gl.constexpr(6)  # of a part, where there are several
FOLDED = gl.constexpr(1)  # a state, with that of the parts before
WRITTEN = gl.constexpr(2)  # as rows of the output; else it is left
FOLD_ROWS = gl.constexpr(8)  # of a program of the fold
AT_ONCE = gl.constexpr(4)  # states that it loads before it folds the first


class TileParts(NamedTuple):
    """The blocks of keys of a tile, its parts if a program has them all, and which comes now."""

    first: gl.tensor
    last: gl.tensor
    count: gl.tensor  # 0: the blocks are those of one part, whose state is left
    part: gl.tensor


@gluon.jit
def open_part(number, call, FEATURES: gl.constexpr, TILE: gl.constexpr):
    """The part of a number, or the tile that a program computes whole. Neighbours are different
    tiles, which mostly read the same keys. A sequence of few keys does not use all parts: one
    without blocks takes a block of no keys.
    """
    parts = call.optionals.parts
    count, whole = parts.count, parts.whole
    shared = gl.maximum((call.queue.tiles - whole) // count, 1)  # tiles
    is_whole = number < whole
    tile = gl.where(is_whole, number, whole + (number - whole) % shared)
    part = gl.where(is_whole, 0, (number - whole) // shared)
    work = open_in_batch(tile, call, FEATURES=FEATURES, TILE=TILE)
    blocks = work.last + 1 - work.first
    used = gl.minimum(gl.maximum(blocks // FEWEST_BLOCKS, 1), count)
    is_empty = part >= used
    first = work.first + gl.where(is_empty, 0, blocks * part // used)
    stop = work.first + gl.where(is_empty, 1, blocks * (part + 1) // used)
    of_program = call.queue.tiles - whole + gl.program_id(0)
    return Ragged(
        work.start,
        work.head,
        batch=work.batch,
        last=gl.where(is_whole, work.last, stop - 1),
        first=first,
        full_first=work.full_first,
        full_stop=gl.where(is_empty, 0, work.full_stop),
        seqlen_q=work.seqlen_q,
        seqlen_k=gl.where(is_empty, 0, work.seqlen_k),
        diagonal=work.diagonal,
        first_q=gl.where(is_whole, of_program, (tile - whole) * count + part),
        first_k=work.first_k,
        rows_q=gl.where(is_whole, used, 0),
    )


@gluon.jit
def parts_of(work):
    """The parts of a tile as the message has it."""
    return TileParts(work.first, work.last, count=work.rows_q, part=0)


@gluon.jit
def has_more(tile):
    """Whether another part of a tile follows."""
    return tile.part + 1 < tile.count


@gluon.jit
def part_of(work, tile):
    """A part of a tile; what becomes of its state is in `rows_q`."""
    count, blocks = gl.maximum(tile.count, 1), tile.last + 1 - tile.first
    folded = gl.where(tile.part > 0, FOLDED, 0)
    written = gl.where(tile.part + 1 == tile.count, WRITTEN, 0)
    return Ragged(
        work.start,
        work.head,
        batch=work.batch,
        last=tile.first + blocks * (tile.part + 1) // count - 1,
        first=tile.first + blocks * tile.part // count,
        full_first=work.full_first,
        full_stop=work.full_stop,
        seqlen_q=work.seqlen_q,
        seqlen_k=work.seqlen_k,
        diagonal=work.diagonal,
        first_q=work.first_q,
        first_k=work.first_k,
        rows_q=folded + written,
    )


@gluon.jit
def receive_first(messages, HAS_PARTS: gl.constexpr, FEATURES: gl.constexpr):
    """The first tile, or part of one, and what `receive_part` gives beside it."""
    work, parts = receive_tile(messages, start(), FEATURES=FEATURES), TileParts(0, 0, 0, 0)
    if HAS_PARTS:
        parts = parts_of(work)
        work = part_of(work, parts)
    return work, parts, advance(start(), 2)


@gluon.jit
def receive_part(messages, state, work, parts, HAS_PARTS: gl.constexpr, FEATURES: gl.constexpr):
    """The next part of a tile, or the next tile, the parts that it is one of, and the state of the
    messages.
    """
    if not HAS_PARTS:
        return receive_tile(messages, state, FEATURES=FEATURES), parts, advance(state, 2)
    else:
        if has_more(parts):
            parts = TileParts(parts.first, parts.last, parts.count, parts.part + 1)
        else:
            work = receive_tile(messages, state, FEATURES=FEATURES)
            state = advance(state, 2)
            parts = parts_of(work)
        return part_of(work, parts), parts, state


@gluon.jit
def state_so_far(acc_o, m_i, l_i, work, parts, WG: gl.constexpr, TILE: gl.constexpr):
    """The state of a warpgroup's rows after a part, and after those before if it is folded."""
    LAYOUT: gl.constexpr = acc_o.type.layout
    state = SplitState(acc_o, row_factor(m_i, LAYOUT), l_i=row_factor(l_i, LAYOUT))
    if work.rows_q % WRITTEN == FOLDED:
        barrier()  # m and l of a row were written by one thread
        rows = state_rows(work, WG, LAYOUT=LAYOUT, TILE=TILE)
        ptrs = state_ptrs(parts, rows, LAYOUT=LAYOUT, TILE=TILE)
        acc_o = gl.load(ptrs, eviction_policy="evict_last")
        before = SplitState(acc_o, gl.load(parts.m_i + rows), l_i=gl.load(parts.l_i + rows))
        state = fold(before, state)
    return state


@gluon.jit
def is_written(work):
    """Whether a part is the last of a tile that one program computes whole."""
    return work.rows_q >= WRITTEN


@gluon.jit
def leave_state(state, work, parts, WG: gl.constexpr, TILE: gl.constexpr):
    """Writes the state of a warpgroup's rows; O where there are keys."""
    LAYOUT: gl.constexpr = state.acc_o.type.layout
    rows = state_rows(work, WG, LAYOUT=LAYOUT, TILE=TILE)
    if work.seqlen_k > 0:
        ptrs = state_ptrs(parts, rows, LAYOUT=LAYOUT, TILE=TILE)
        gl.store(ptrs, state.acc_o, eviction_policy="evict_last")
    gl.store(parts.m_i + rows, state.m_i)
    gl.store(parts.l_i + rows, state.l_i)


@gluon.jit
def state_rows(work, WG: gl.constexpr, LAYOUT: gl.constexpr, TILE: gl.constexpr):
    """The rows of a warpgroup's state."""
    return (work.first_q * TILE.WARPGROUPS + WG) * 64 + gl.arange(0, 64, row_of(LAYOUT))


@for_all_lengths(("parts", "queue.tiles", "queue.heads", "sizes"))
@gluon.jit
def fold_parts_kernel(
    out, lse, parts, queue, sizes, optionals, scales, FEATURES: gl.constexpr, TILE: gl.constexpr
):
    """FOLD_ROWS rows of a tile, from the states of its parts."""
    M: gl.constexpr = FOLD_ROWS
    LAYOUT: gl.constexpr = in_pieces(TILE.BLOCK_DV, 4, warps=4)
    group = gl.program_id(0) // (64 // M)  # of a warpgroup's rows
    tile, warpgroup = group // TILE.WARPGROUPS, group % TILE.WARPGROUPS
    row = gl.program_id(0) % (64 // M) * M + warpgroup * 64 + gl.arange(0, M, row_of(LAYOUT))
    rows = tile * parts.count * (64 * TILE.WARPGROUPS) + row
    state = load_state(parts, rows, True, LAYOUT=LAYOUT, TILE=TILE)
    for part in range(1, parts.count, AT_ONCE):
        states = ()
        for i in gl.static_range(AT_ONCE):
            rows += 64 * TILE.WARPGROUPS
            exists = part + i < parts.count
            states = states + (load_state(parts, rows, exists, LAYOUT=LAYOUT, TILE=TILE),)
        for i in gl.static_range(AT_ONCE):
            acc_o, m_i, l_i = states[i]
            state = fold(state, SplitState(acc_o, m_i, l_i=l_i))
    tile += parts.whole
    m_block, head, batch = query_tile_in_group(tile, queue, sizes.seqlen_q, TILE.BLOCK_M)
    q_idx = query_of_row(m_block * TILE.BLOCK_M, row, TILE=TILE)
    heads = gl.to_tensor(head_of_row(head, row, FEATURES=FEATURES, TILE=TILE))
    exists = q_idx < sizes.seqlen_q
    if TILE.PACK > 1:
        exists = exists & (row % TILE.PACK < FEATURES.GROUP)
    sink = load_sink(optionals, heads, FEATURES)
    rescale, row_lse = finish(state.m_i, state.l_i, sink, FEATURES)
    batch = gl.to_tensor(batch).to(gl.int64)
    begins = batch * out.batch + q_idx.to(gl.int64) * out.row + heads.to(gl.int64) * out.head
    columns = gl.arange(0, TILE.BLOCK_DV, column_of(LAYOUT))
    inside = exists[:, None] & (columns < FEATURES.HEADDIM_V)[None, :]
    acc_o = state.acc_o * rescale[:, None]
    if TILE.CACHE != "":
        if scales.v is not None and scales.v_row is None:
            has_keys = exists & (state.m_i != float("-inf"))
            head_k = (heads + gl.zeros_like(row)) // FEATURES.GROUP  # one head may have all rows
            acc_o = acc_o * sequence_scale(scales, 1, batch, head_k, has_keys)[:, None]
    rounded = acc_o.to(out.ptr.dtype.element_ty)
    gl.store(out.ptr + begins[:, None] + columns[None, :], rounded, mask=inside)
    place = (batch * sizes.nheads + heads) * sizes.seqlen_q + q_idx
    gl.store(lse + place, row_lse, mask=exists)


@gluon.jit
def state_ptrs(parts, rows, LAYOUT: gl.constexpr, TILE: gl.constexpr):
    """Where rows of O lie: of 64 in the order of an accumulator's registers, so that what a warp
    writes at a time lies together.
    """
    columns = gl.arange(0, TILE.BLOCK_DV, column_of(LAYOUT))
    row = rows % 64
    place = row // 16 * 64 + row // 8 % 2 * 256 + row % 8 * 8
    begins = parts.acc_o + ((rows - row).to(gl.int64) * TILE.BLOCK_DV + place)[:, None]
    return begins + (columns // 8 * 512 + columns % 8)[None, :]


@gluon.jit
def load_state(parts, rows, exists, LAYOUT: gl.constexpr, TILE: gl.constexpr):
    """A state; that of no keys where it does not exist."""
    exists = exists & (rows >= 0)
    ptrs = state_ptrs(parts, rows, LAYOUT=LAYOUT, TILE=TILE)
    m_i = gl.load(parts.m_i + rows, mask=exists, other=float("-inf"))
    acc_o = gl.load(ptrs, mask=(m_i != float("-inf"))[:, None], other=0.0)
    return SplitState(acc_o, m_i, l_i=gl.load(parts.l_i + rows, mask=exists, other=0.0))
