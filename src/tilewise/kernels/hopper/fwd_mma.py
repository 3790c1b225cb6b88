"""The matmul warpgroups of the forward: FlashAttention-2, algorithm 1, one step ahead of itself.

While the tensor cores compute

    S(next) = Q K^T        and        O += P V

the warpgroup waits only for S(next), whose softmax then runs beside P V (FlashAttention-3, arXiv
2407.08608, algorithm 2). There is no seam between tiles: the first S of a tile runs beside the last
P V of the tile before.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ...tile.mask import apply_mask
from ...tile.score import load_slope, score, unit
from ...tile.seqlen import lengths_of
from ...tile.softmax import online_step
from ...tile.types import Lengths, Sequence
from .epilogue import head_of_row, query_of_row, write_tile
from .layouts import accumulator, column_of, left_operand, row_of
from .pipeline import after, release, start, wait_full
from .work import END, Work, is_partial, key_block, receive


class Share(NamedTuple):
    """How many of a tile's key blocks a warpgroup computes with, and how many pass after them."""

    blocks: gl.tensor
    unseen: gl.tensor  # because none of its rows sees them
    idle: gl.tensor  # because it has no rows at all


class Step(NamedTuple):
    """The softmax of a block of keys, ready to be multiplied with V."""

    p: gl.tensor  # (64, BLOCK_N), as wgmma's left operand
    alpha: gl.tensor  # the factor for everything accumulated before
    m_i: gl.tensor
    l_i: gl.tensor


class Rows(NamedTuple):
    """The rows of a tile, as scores and masks want them."""

    work: Work
    slope_log2: gl.tensor
    rows: gl.tensor


@gluon.jit
def attend_partition(
    WG: gl.constexpr, rings, output, call, FEATURES: gl.constexpr, TILE: gl.constexpr
):
    N: gl.constexpr = TILE.BLOCK_N
    DV: gl.constexpr = TILE.BLOCK_DV
    STAGES: gl.constexpr = TILE.STAGES
    S_LAYOUT: gl.constexpr = accumulator(N)
    O_LAYOUT: gl.constexpr = accumulator(DV)
    HAS_BAND: gl.constexpr = FEATURES.LEFT or FEATURES.RIGHT
    UNEVEN: gl.constexpr = TILE.WARPGROUPS == 3
    dtype: gl.constexpr = output.desc.dtype
    q_ring = rings.q[WG]
    rows = WG * 64 + gl.arange(0, 64, row_of(S_LAYOUT))
    no_scores = gl.zeros([64, N], gl.float32, S_LAYOUT)
    nothing = gl.zeros([64], gl.float32, row_of(S_LAYOUT))

    mail = start()
    q_at = start()
    k_at = start()
    v_at = start()
    # The first S of all has nothing to hide under. S = Q K^T: (64, BLOCK_N)
    work = receive(rings.mail, mail)
    mail = after(mail, 2)
    share = share_of(work, WG, call, FEATURES, TILE)
    wait_full(q_ring, q_at)
    wait_full(rings.k, k_at)
    q_tile = q_ring.slots.index(q_at.slot)
    pending_s = multiply_keys(q_tile, rings.k, k_at, no_scores)
    tile = Rows(work, slope_of(work, call.optionals, rows, FEATURES, TILE), rows)
    s = warpgroup_mma_wait(0, deps=[pending_s])
    release(rings.k, k_at)
    k_at = after(k_at, STAGES)
    s = to_scores(s, tile, key_block(work, 0, FEATURES), call, True, FEATURES, TILE)
    step = softmax(s, nothing - float("inf"), nothing, call, O_LAYOUT, dtype, FEATURES)

    while work.m_start != END:
        acc_o = gl.zeros([64, DV], gl.float32, O_LAYOUT)  # (64, BLOCK_DV)
        for i in range(1, share.blocks):
            wait_full(rings.k, k_at)
            pending_s = multiply_keys(q_tile, rings.k, k_at, no_scores)
            pending_o = accumulate_values(step, rings.v, v_at, acc_o)
            s = warpgroup_mma_wait(1, deps=[pending_s])
            release(rings.k, k_at)
            k_at = after(k_at, STAGES)
            n_block = key_block(work, i, FEATURES)
            s = to_scores(s, tile, n_block, call, HAS_BAND, FEATURES, TILE)
            step = softmax(s, step.m_i, step.l_i, call, O_LAYOUT, dtype, FEATURES)
            acc_o = warpgroup_mma_wait(0, deps=[pending_o])
            release(rings.v, v_at)
            v_at = after(v_at, STAGES)
        if UNEVEN:
            for _ in range(share.idle):  # in the order of the loads, which wait for both
                k_at = skip(rings.k, k_at, 1, STAGES)
                v_at = skip(rings.v, v_at, 1, STAGES)

        # The last P V of this tile, beside the first S of the next
        release(q_ring, q_at)
        q_at = after(q_at, TILE.Q_STAGES)
        upcoming = receive(rings.mail, mail)
        mail = after(mail, 2)
        goes_on = upcoming.m_start != END
        if UNEVEN:
            k_at = skip(rings.k, k_at, share.unseen, STAGES)
        wait_full(q_ring, q_at, pred=goes_on)
        wait_full(rings.k, k_at, pred=goes_on)
        q_tile = q_ring.slots.index(q_at.slot)
        # After the last tile S is computed from what lies there, and not used
        pending_s = multiply_keys(q_tile, rings.k, k_at, no_scores)
        pending_o = accumulate_values(step, rings.v, v_at, acc_o)
        tile = Rows(upcoming, slope_of(upcoming, call.optionals, rows, FEATURES, TILE), rows)
        s = warpgroup_mma_wait(1, deps=[pending_s])
        release(rings.k, k_at, pred=goes_on)
        k_at = after(k_at, STAGES)
        s = to_scores(s, tile, key_block(upcoming, 0, FEATURES), call, True, FEATURES, TILE)
        begun = softmax(s, nothing - float("inf"), nothing, call, O_LAYOUT, dtype, FEATURES)
        acc_o = warpgroup_mma_wait(0, deps=[pending_o])
        release(rings.v, v_at)
        v_at = after(v_at, STAGES)
        if UNEVEN:
            v_at = skip(rings.v, v_at, share.unseen, STAGES)
        write_tile(acc_o, step.m_i, step.l_i, work, output, call, WG, FEATURES, TILE)
        step = begun
        work = upcoming
        share = share_of(work, WG, call, FEATURES, TILE)
    # The copy engine still reads the last tile from shared memory
    tma.store_wait(0)


@gluon.jit
def share_of(work, WG: gl.constexpr, call, FEATURES: gl.constexpr, TILE: gl.constexpr):
    """The warpgroup's share of a tile: all of it where two warpgroups are as tall as a block."""
    blocks = work.last + 1 - work.first
    if TILE.WARPGROUPS < 3:
        return Share(blocks, 0, 0)
    else:
        ROWS: gl.constexpr = 64 // TILE.PACK
        m_start = work.m_start + WG * ROWS
        has_rows = m_start < call.sizes.seqlen_q
        unseen = 0
        if FEATURES.RIGHT:
            lengths = lengths_of(work.batch, call.sizes, call.optionals, FEATURES)
            last_seen = m_start + ROWS - 1 + lengths.diagonal + call.numbers.right
            unseen = work.last - gl.maximum(last_seen // TILE.BLOCK_N, work.first)
            # While it holds the last V it saw, the ring has no room for more to pass
            unseen = gl.maximum(gl.minimum(unseen, TILE.STAGES - 1), 0)
            unseen = gl.where(has_rows, unseen, 0)
        idle = gl.where(has_rows, 0, blocks - 1)
        return Share(blocks - unseen - idle, unseen, idle)


@gluon.jit
def skip(ring, at, count, STAGES: gl.constexpr):
    """Lets `count` slots of a ring pass unread."""
    for _ in range(count):
        wait_full(ring, at)
        release(ring, at)
        at = after(at, STAGES)
    return at


@gluon.jit
def multiply_keys(q_tile, k_ring, at, no_scores):
    """Starts S = Q K^T: (64, BLOCK_N)."""
    k_tile = k_ring.slots.index(at.slot).permute((1, 0))
    return warpgroup_mma(q_tile, k_tile, no_scores, use_acc=False, is_async=True)


@gluon.jit
def accumulate_values(step, v_ring, at, acc_o):
    """Starts O = diag(alpha) O + P V: (64, BLOCK_DV)."""
    acc_o = acc_o * step.alpha[:, None]
    wait_full(v_ring, at)
    return warpgroup_mma(step.p, v_ring.slots.index(at.slot), acc_o, is_async=True)


@gluon.jit
def softmax(s, m_i, l_i, call, O_LAYOUT: gl.constexpr, dtype: gl.constexpr, FEATURES: gl.constexpr):
    """One block of scores into the running statistics; P and alpha as O's matmul takes them."""
    numbers_only = Sequence(Lengths(0, 0, 0), 0.0, call.numbers)
    step = online_step(s, m_i, l_i, unit(numbers_only, FEATURES), True)
    p = gl.convert_layout(step.p.to(dtype), left_operand(O_LAYOUT))
    alpha = gl.convert_layout(step.alpha, row_of(O_LAYOUT))
    return Step(p, alpha, step.m_i, step.l_i)


@gluon.jit
def slope_of(work, optionals, rows, FEATURES: gl.constexpr, TILE: gl.constexpr):
    """The ALiBi slope of the tile's head, or one for each row where heads share a tile."""
    if TILE.PACK > 1 and FEATURES.ALIBI:
        heads = head_of_row(work.head, rows, FEATURES, TILE)
        return load_slope(optionals, work.batch, heads, FEATURES)[:, None]
    else:
        return load_slope(optionals, work.batch, work.head, FEATURES)


@gluon.jit
def to_scores(
    qk, tile, n_block, call, MASKED: gl.constexpr, FEATURES: gl.constexpr, TILE: gl.constexpr
):
    """Scores of one block of keys, masked where it needs it."""
    N: gl.constexpr = TILE.BLOCK_N
    work = tile.work
    lengths = lengths_of(work.batch, call.sizes, call.optionals, FEATURES)
    seq = Sequence(lengths, tile.slope_log2, call.numbers)
    q_idx = query_of_row(work.m_start, tile.rows, TILE)[:, None]
    k_idx = (n_block * N + gl.arange(0, N, column_of(qk.type.layout)))[None, :]
    s = score(qk, q_idx, k_idx, seq, FEATURES).s
    if MASKED:
        if is_partial(n_block, work):
            s = apply_mask(s, q_idx, k_idx, seq, FEATURES)
    return s
