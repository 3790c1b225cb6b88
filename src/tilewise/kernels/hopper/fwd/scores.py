"""From S = Q K^T to the scores and probabilities that a warpgroup goes on with: functions of
positions, a bias, masks, dropout.

Where a modifier reads memory, it is asked for before the wait for S where registers allow it.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ....tile.dropout import stream_of
from ....tile.ends import RowInterval, load_ends
from ....tile.score import exp_scale, load_slope, score_without_bias
from ....tile.softmax import running_max
from ....tile.types import Lengths, Sequence
from ..bias import add_bias, load_bias
from ..hide import hide, hide_outside
from ..layouts import accumulator, column_of
from ..row_max import running_max_of
from ..work import Work, needs_mask
from .convert import numbers_in, unit_of_keys
from .dropout import drop_pairs
from .pairs import UNPACKS, to_pairs
from .rows import head_of_row, query_of_row
from .varlen import lengths_in


class TileRows(NamedTuple):
    """The rows of a tile, for scores and masks."""

    work: Work
    rows: gl.tensor
    slope_log2: gl.tensor
    stream: tuple  # of dropout's random numbers
    interval: RowInterval  # keys, of a mask that keeps such ends
    unit: gl.tensor  # of scores; not 1 where an 8-bit cache has scales


@gluon.jit
def open_rows(work, rows, call, FEATURES: gl.constexpr, TILE: gl.constexpr):
    """The rows of a tile, with what is loaded once for all its blocks."""
    slope_log2 = slope_of(work, call.optionals, rows=rows, FEATURES=FEATURES, TILE=TILE)
    stream = 0
    if FEATURES.DROPOUT:
        stream = stream_of(call.optionals.dropout_rng, work.batch, head=work.head)
    interval = RowInterval(0, 0)
    if FEATURES.ENDS:
        q_idx = gl.maximum(work.start, 0) + rows  # memory is read there, after the last tile, too
        interval = load_ends(q_idx, work.batch, head=work.head, ends=call.modifiers.mask_tensors)
    unit = unit_of_keys(work, call, FEATURES=FEATURES, TILE=TILE)
    return TileRows(work, rows, slope_log2, stream=stream, interval=interval, unit=unit)


@gluon.jit
def scale_of(tile, call, FEATURES: gl.constexpr, TILE: gl.constexpr):
    """The factor that the exponent applies to the scores of a tile."""
    numbers = numbers_in(tile.unit, call, TILE=TILE)
    return exp_scale(Sequence(Lengths(0, 0, diagonal=0), 0.0, numbers=numbers), FEATURES)


@gluon.jit
def slope_of(work, optionals, rows, FEATURES: gl.constexpr, TILE: gl.constexpr):
    """The ALiBi slope of the tile's head, or one for each row where heads share a tile."""
    if TILE.PACK > 1 and FEATURES.ALIBI:
        heads = head_of_row(work.head, rows, FEATURES=FEATURES, TILE=TILE)
        return load_slope(optionals, work.batch, head=heads, FEATURES=FEATURES)[:, None]
    else:
        return load_slope(optionals, work.batch, head=work.head, FEATURES=FEATURES)


@gluon.constexpr_function
def is_prefetched(dtype):
    """Whether registers hold a block's bias in addition to its S: at 16 bits, or as pairs."""
    return dtype != gl.float32


@gluon.jit
def prefetch_bias(tile, n_block, call, FEATURES: gl.constexpr, TILE: gl.constexpr):
    """The bias of a block, loaded while its S is computed, where registers hold both."""
    if FEATURES.BIAS and not TILE.BIAS_COPIED:
        if is_prefetched(call.modifiers.bias.ptr.dtype.element_ty):
            return load_bias(tile.work, tile.rows, n_block=n_block, call=call, TILE=TILE)
        else:
            return 0
    else:
        return 0


@gluon.jit
def scale_scores(s, kv_ring, state, call, TILE: gl.constexpr):
    """S of a block times the scales of its keys, if each row of a cache of 8 bits has its own."""
    if TILE.CACHE != "":
        if call.optionals.scales.k_row is not None:
            s = s * kv_ring.k_scales.index(state.stage).load(column_of(s.type.layout))[None, :]
    return s


@gluon.jit
def scales_of_values(kv_ring, state, call, TILE: gl.constexpr):
    """The scales of a block's values, (1, BLOCK_N), if each row has its own; else 1. They have the
    stage of its keys.
    """
    if TILE.CACHE == "" or call.optionals.scales.v_row is None:
        return 1.0
    else:
        COLUMNS: gl.constexpr = column_of(accumulator(TILE.BLOCK_N))
        return kv_ring.v_scales.index(state.stage).load(COLUMNS)[None, :]


@gluon.jit
def to_scores(
    qk,
    bias,
    tile,
    i,
    n_block,
    m_i,
    by_integers,
    call,
    dtype: gl.constexpr,
    MASKED: gl.constexpr,
    FEATURES: gl.constexpr,
    TILE: gl.constexpr,
):
    """Scores of the i-th block of keys, masked where it needs it, and the maxima with them.

    The branch does more than save the mask: the compiler may not move the wait for P V before it.
    So maxima belong inside, and overlap with P V. `by_integers` is of `integers_suffice`, or None.
    """
    HAS_SCORE_MOD: gl.constexpr = FEATURES.SCORE_MOD is not None
    HAS_MASK_MOD: gl.constexpr = FEATURES.MASK_MOD is not None
    work = tile.work
    m_start = work.start
    if (
        HAS_SCORE_MOD or HAS_MASK_MOD or FEATURES.ENDS
    ):  # they may read memory at these positions, after the last tile, too
        m_start = gl.maximum(m_start, 0)
    q_idx = query_of_row(m_start, tile.rows, TILE=TILE)[:, None]
    n_start = n_block * TILE.BLOCK_N
    k_idx, seq = keys_of(n_start, tile, call, HAS_SCORE_MOD, False, FEATURES, TILE)
    s = score_without_bias(qk, q_idx, k_idx=k_idx, seq=seq, FEATURES=FEATURES).s
    if FEATURES.BIAS:
        if TILE.BIAS_COPIED or is_prefetched(call.modifiers.bias.ptr.dtype.element_ty):
            s = add_bias(s, bias, dtype=dtype)
        else:
            s = add_bias(s, load_bias(work, tile.rows, n_block, call, TILE), dtype=gl.float32)
    # The unit of m, which is natural where something is added
    scale = exp_scale(seq, FEATURES)
    if FEATURES.NATURAL:
        scale = 1.0
    # Not those of the score function, whose positions would be kept for this
    k_idx, seq = keys_of(n_start, tile, call, HAS_MASK_MOD, HAS_SCORE_MOD, FEATURES, TILE)
    if not MASKED:
        m_i = running_max_of(s, m_i, scale=scale, by_integers=by_integers)
    elif needs_mask(work, i, n_block=n_block, FEATURES=FEATURES):
        if FEATURES.ENDS:
            first, stop = tile.interval.first[:, None], tile.interval.stop[:, None]
            stop = gl.minimum(stop - seq.origin, seq.lengths.seqlen_k)
            s = hide_outside(s, RowInterval(first - seq.origin, stop))
        else:
            s = hide(s, q_idx, k_idx=k_idx, seq=seq, FEATURES=FEATURES)
        m_i = running_max(s, m_i, exp_scale=scale)
    else:
        m_i = running_max_of(s, m_i, scale=scale, by_integers=by_integers)
    return s, m_i


@gluon.jit
def keys_of(
    n_start,
    tile,
    call,
    TRUE: gl.constexpr,
    APART: gl.constexpr,
    FEATURES: gl.constexpr,
    TILE: gl.constexpr,
):
    """The keys of a block and the sequence they belong to, both counted from the block on where
    nothing takes TRUE positions and registers are short: with lengths in them, or APART from other
    positions.
    """
    work = tile.work
    lengths = lengths_in(work, call, FEATURES=FEATURES)
    offs_n = gl.arange(0, TILE.BLOCK_N, column_of(accumulator(TILE.BLOCK_N)))
    origin = 0
    if TRUE:
        k_idx = true_keys(offs_n[None, :], n_start)
    else:
        origin = n_start + (offs_n[None, :] & 6)
        k_idx, lengths = from_block(offs_n[None, :], n_start, lengths=lengths)
    seq = Sequence(
        lengths,
        tile.slope_log2,
        numbers=numbers_in(tile.unit, call, TILE=TILE),
        batch=work.batch,
        head=work.head,
        modifiers=call.modifiers,
        origin=origin,
    )
    return k_idx, seq


@gluon.jit
def from_block(column, n_start, lengths):
    """Keys and lengths counted from a block of keys on, for masks and distances.

    A thread holds columns 8 i + 2 t and 8 i + 2 t + 1 of an accumulator, t being its place among
    the four threads of a row. With 2 t on the side of the lengths, which are already in registers,
    keys are constants: a mask then takes no register and no addition a column, and three
    warpgroups of 160 registers a thread do not spill.
    """
    before = n_start + (column & 6)
    seqlen_k, diagonal = lengths.seqlen_k - before, lengths.diagonal - before
    return column - (column & 6), Lengths(lengths.seqlen_q, seqlen_k, diagonal=diagonal)


@gluon.jit
def true_keys(column, n_start):
    """Positions of keys in the same two parts, for functions that ask for them: what a thread adds
    for each column is a constant. Else 32 column numbers stay in registers through the loop.
    """
    k_idx = (n_start + (column & 6)) + (column - (column & 6))
    return gl.max_contiguous(gl.multiple_of(k_idx, [1, 2]), [1, 2])


@gluon.jit
def dropout(
    p, tile, n_block, call, dtype: gl.constexpr, FEATURES: gl.constexpr, TILE: gl.constexpr
):
    """P in 16 bits; with dropout what is kept of it, in pairs. Sums are taken before, and the
    factor of what is kept joins 1 / l. Three warpgroups carry pairs where Triton would unpack P.

    Random words could be drawn before, while S is computed: that took as long. What counts here is
    how many instructions a block has, not where they stand.
    """
    if FEATURES.DROPOUT:
        threshold = call.numbers.dropout_threshold
        n_start = n_block * TILE.BLOCK_N
        return drop_pairs(p, tile.stream, tile.work.start, n_start, tile.rows, threshold, dtype)
    elif UNPACKS and TILE.WARPGROUPS == 3:
        return to_pairs(p, dtype)
    else:
        return p.to(dtype)
