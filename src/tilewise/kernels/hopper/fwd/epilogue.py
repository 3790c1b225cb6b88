"""The epilogue of a tile: O = acc / l and the lse are stored while the next tile begins.

O goes through shared memory, from which TMA writes it in the background: whole rows,
and none past the sequence's end.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from ....tile.softmax import finish, load_sink
from ..compat import tma_store
from ..layouts import row_of
from ..pieces import TMA_UNIT
from ..pipeline import make_barrier
from ..rescale import rounded_off
from ..tma import store_ragged
from ..work import key_head
from .convert import scale_in
from .parts import is_written, leave_state, state_so_far
from .rows import head_of_row, query_of_row
from .varlen import place_in, rows_in

OUT_COLUMNS = gl.constexpr(128)  # of O that pass through shared memory at a time, at most


@gluon.constexpr_function
def out_columns(block_d, block_dv):
    """Columns of O that pass through shared memory at a time: with 128 keys of 192 columns, and 128
    of V, there is room for 64.
    """
    return 64 if block_d == 192 and block_dv <= 128 else min(block_dv, OUT_COLUMNS.value)


class Output(NamedTuple):
    """The outputs, and the staging buffer of O in shared memory: (WARPGROUPS, 64, BLOCK_DV)."""

    target: tma.tensor_descriptor  # a `Strided` tensor, where threads store O
    smem: gl.shared_memory_descriptor
    lse: gl.tensor
    full: gl.shared_memory_descriptor  # barriers of these buffers, where threads store O
    empty: gl.shared_memory_descriptor


@gluon.jit
def make_handovers(WARPGROUPS: gl.constexpr, FEATURES: gl.constexpr):
    """Barriers of a buffer of O for each warpgroup, where threads store it from there."""
    if FEATURES.HEADDIM_V % TMA_UNIT == 0:
        return 0, 0
    else:
        return make_barrier(WARPGROUPS, 1), make_barrier(WARPGROUPS, 1)


@gluon.jit
def write_tile(
    acc_o,
    m_i,
    l_i,
    work,
    output,
    call,
    parity,
    WG: gl.constexpr,
    FEATURES: gl.constexpr,
    TILE: gl.constexpr,
):
    """Stores 64 rows of O, and their lse; of a part of a tile its state."""
    if call.optionals.parts is None:
        write_rows(acc_o, m_i, l_i, work, output, call, parity, WG, FEATURES, TILE)
    else:
        parts = call.optionals.parts
        state = state_so_far(acc_o, m_i, l_i, work, parts, WG, TILE)
        acc_o, m_i, l_i = state
        if is_written(work):
            write_rows(acc_o, m_i, l_i, work, output, call, parity, WG, FEATURES, TILE)
        else:
            leave_state(state, work, parts, WG=WG, TILE=TILE)


@gluon.jit
def write_rows(
    acc_o,
    m_i,
    l_i,
    work,
    output,
    call,
    parity,
    WG: gl.constexpr,
    FEATURES: gl.constexpr,
    TILE: gl.constexpr,
):
    """Rescales and stores 64 rows of O, and their lse. Tiles alternate in `parity`."""
    q_idx, rescale = finish_rows(m_i, l_i, work, output, call, WG, FEATURES, TILE)
    if FEATURES.DROPOUT:
        rescale = rescale * call.numbers.dropout_factor
    rescale = gl.convert_layout(rescale, row_of(acc_o.type.layout))
    out = acc_o * rescale[:, None]  # (64, BLOCK_DV)
    if TILE.CACHE != "":
        if call.optionals.scales.v is not None:
            out = out * scale_in(work, 1, call=call, FEATURES=FEATURES, TILE=TILE)
    store_rows(out, q_idx, work, output, parity, WG, FEATURES, TILE)


@gluon.jit
def finish_rows(
    m_i, l_i, work, output, call, WG: gl.constexpr, FEATURES: gl.constexpr, TILE: gl.constexpr
):
    """Stores the lse of 64 rows. Returns their queries, and 1 / l."""
    rows = WG * 64 + gl.arange(0, 64, m_i.type.layout)
    heads = head_of_row(work.head, rows, FEATURES=FEATURES, TILE=TILE)
    sink = load_sink(call.optionals, heads, FEATURES)
    rescale, lse = finish(m_i, l_i, sink, FEATURES)

    q_idx = query_of_row(work.start, rows, TILE=TILE)
    exists = q_idx < rows_in(work, call, FEATURES=FEATURES)
    if TILE.PACK > 1:
        exists = exists & (rows % TILE.PACK < FEATURES.GROUP)
    batch, first_q = place_in(work, FEATURES)
    if FEATURES.NATURAL:
        lse -= rounded_off(m_i, 1.4426950408889634) * 0.6931471805599453  # log2(e), ln 2
    if FEATURES.PACKED:  # rows that are not used
        lse = gl.where(q_idx < work.seqlen_q, lse, float("-inf"))
    row = (gl.to_tensor(batch).to(gl.int64) * call.sizes.nheads + heads) * call.sizes.seqlen_q
    gl.store(output.lse + (row + first_q + q_idx), lse, mask=exists)
    return q_idx, rescale


@gluon.jit
def store_rows(
    out, q_idx, work, output, parity, WG: gl.constexpr, FEATURES: gl.constexpr, TILE: gl.constexpr
):
    """Stores 64 rows of O, which are in fp32; 0 in rows that are not used, which may hold NaN."""
    dtype: gl.constexpr = output.smem.dtype
    if FEATURES.HEADDIM_V % TMA_UNIT == 0:
        place = place_of_rows(work, WG, FEATURES=FEATURES, TILE=TILE)
        store_columns(out.to(dtype), output, WG=WG, at=place, column=0, FEATURES=FEATURES)
        if FEATURES.PACKED and FEATURES.CHUNK == 0:  # else they are not this launch's
            if work.seqlen_q < work.rows_q:
                zeros = gl.full(out.shape, 0.0, dtype, out.type.layout)
                store_columns(zeros, output, WG, place_of_padding(work, WG, TILE=TILE), 0, FEATURES)
    else:
        if FEATURES.PACKED:  # in fp32: halves would be unpacked and packed
            is_used = gl.convert_layout(q_idx < work.seqlen_q, row_of(out.type.layout))
            out = gl.where(is_used[:, None], out, 0.0)
        hand_over(out.to(dtype), output, WG=WG, phase=parity)


@gluon.jit
def place_of_rows(work, WG: gl.constexpr, FEATURES: gl.constexpr, TILE: gl.constexpr):
    """A warpgroup's rows in the coordinates of the descriptor, which cuts them where the tensor or,
    of packed sequences, their used rows end: see `tma`.
    """
    m_start = work.start + WG * (64 // TILE.PACK)
    if FEATURES.PACKED:
        return work.first_q + work.seqlen_q, work.seqlen_q, work.head, m_start
    else:
        head_k, member = key_head(work.head, FEATURES, TILE=TILE)
        return work.batch, head_k, m_start, member


@gluon.jit
def place_of_padding(work, WG: gl.constexpr, TILE: gl.constexpr):
    """64 rows that no sequence uses, from the warpgroup's first one on: beyond its own, they are
    those of the next tile, and 0 as well.
    """
    m_start = gl.maximum(work.start + WG * (64 // TILE.PACK), work.seqlen_q)
    return work.first_q + work.rows_q, work.rows_q, work.head, m_start


@gluon.jit
def store_columns(out, output, WG: gl.constexpr, at, column: gl.constexpr, FEATURES: gl.constexpr):
    """Stores columns of O through the warpgroup's staging buffer, in halves where it is smaller."""
    BUFFER: gl.constexpr = output.smem.shape[2]
    if out.shape[1] > BUFFER:
        left, right = gl.split(out.reshape([64, 2, out.shape[1] // 2]).permute(0, 2, 1))
        store_columns(left, output, WG=WG, at=at, column=column, FEATURES=FEATURES)
        store_columns(right, output, WG, at, column + out.shape[1] // 2, FEATURES)
    else:
        buffer = output.smem.index(WG)
        shape: gl.constexpr = output.target.block_type.shape
        tma.store_wait(0)  # TMA has read the previous contents
        buffer.store(out)
        fence_async_shared()  # what threads wrote, before TMA reads it
        if FEATURES.PACKED:
            store_ragged(output.target, at[0], at[1], at[2], at[3], buffer, column)
        else:
            tma_store(output.target, [at[0], at[1], at[2], at[3], column], buffer.reshape(shape))


@gluon.jit
def hand_over(out, output, WG: gl.constexpr, phase):
    """Leaves O in the warpgroup's buffer for `store_partition`, in halves if it holds no more."""
    BUFFER: gl.constexpr = output.smem.shape[2]
    if out.shape[1] > BUFFER:
        left, right = gl.split(out.reshape([64, 2, out.shape[1] // 2]).permute(0, 2, 1))
        hand_over(left, output, WG=WG, phase=0)
        hand_over(right, output, WG=WG, phase=1)
    else:
        mbarrier.wait(output.empty.index(WG), phase ^ 1)
        output.smem.index(WG).store(out)
        mbarrier.arrive(output.full.index(WG), count=1)
