"""The matmul warpgroups where O of over 128 columns is in two levels, for a V that has its mean, or
drifts: see `fp8_mma`.

Registers hold O and half of a block's P V, while nothing else is in flight. So halves of the
columns alternate, and S of the next block is started behind them:

    O[:, half] = alpha O[:, half] + P V[:, half]

The softmax of a warpgroup overlaps with matmuls of the other one only. In exchange the error does
not grow with the keys, and V may have any mean.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma, warpgroup_mma, warpgroup_mma_wait

from ....tile.seqlen import modifiers_of
from ..layouts import accumulator, fp8_accumulator, row_of
from ..operands import add_sums, whole_sums
from ..pipeline import advance, parity_of, release_by_threads, start, wait_full
from ..row_max import integers_suffice
from ..work import END, KernelCall
from .fp8_mma import add_product, joined, load_unit, multiply_keys, scale_of, scores_of, write_tile
from .fp8_operand import LOWEST, exponentials, exponents, no_sums
from .scores import open_rows
from .varlen import receive_tile

HALF = gl.constexpr(128)  # columns


@gluon.jit
def attend_in_halves(
    WG: gl.constexpr, rings, output, scales, call, FEATURES: gl.constexpr, TILE: gl.constexpr
):
    N: gl.constexpr = TILE.BLOCK_N
    S_LAYOUT: gl.constexpr = accumulator(N)
    q_ring = rings.q[WG]
    kv_ring = rings.kv_ring
    rows = WG * 64 + gl.arange(0, 64, row_of(S_LAYOUT))
    no_scores = gl.zeros([64, N], gl.float32, fp8_accumulator(N))
    no_half = gl.zeros([64, HALF], gl.float32, fp8_accumulator(HALF))
    no_max = gl.full([64], LOWEST, gl.float32, row_of(S_LAYOUT))
    modifiers = modifiers_of(call.optionals)
    call = KernelCall(call.queue, call.optionals, call.sizes, call.numbers, modifiers)

    messages_state = start()
    q_state = start()
    state = start()
    work = receive_tile(rings.messages, messages_state, FEATURES=FEATURES)
    messages_state = advance(messages_state, 2)

    while work.start != END:
        wait_full(q_ring, q_state)
        wait_full(kv_ring, state)
        q_tile = q_ring.buffers.index(q_state.stage)
        unit = load_unit(work, scales, FEATURES=FEATURES, TILE=TILE)
        scale = scale_of(unit, call, FEATURES=FEATURES)
        tile = open_rows(work, rows, call=call, FEATURES=FEATURES, TILE=TILE)
        left, right = no_half, no_half  # halves of O: (64, HALF)
        m_i = no_max
        l_i = no_sums(N, HALF)
        blocks = work.last + 1 - work.first
        for i in range(blocks):
            # A stage has K of this block, and V of the one before: S = Q K^T, (64, BLOCK_N)
            pending_s = multiply_keys(q_tile, kv_ring, state=state, no_scores=no_scores)
            by_integers = integers_suffice(m_i, 0.0)  # of the first block they do not
            s = warpgroup_mma_wait(0, deps=[pending_s])
            release_by_threads(kv_ring, state)
            state = advance(state, TILE.STAGES)
            if i == blocks - 1:  # the next Q comes before the stage that has this block's V
                release_by_threads(q_ring, q_state)
            wait_full(kv_ring, state)
            s, m_new = scores_of(s, tile, i, m_i, by_integers, unit, call, FEATURES, TILE)
            alpha = gl.exp2(m_i - m_new)
            p, sums = exponentials(exponents(s, m_new, scale=scale), HALF)
            l_i = add_sums(l_i, alpha, sums=sums)
            m_i = m_new
            left = add_values(left, alpha, p, kv_ring, state, 0, no_half)
            right = add_values(right, alpha, p, kv_ring, state, 1, no_half)

        q_state = advance(q_state, TILE.Q_STAGES)
        parity = parity_of(q_state, TILE.Q_STAGES) ^ 1  # of this tile; q_state is the next one's
        l_i = whole_sums(l_i, row_of(S_LAYOUT))
        acc_o = joined(left, right)
        write_tile(acc_o, m_i, l_i, work, output, scales, call, parity, WG, FEATURES, TILE)
        work = receive_tile(rings.messages, messages_state, FEATURES=FEATURES)
        messages_state = advance(messages_state, 2)
    # TMA still reads the last tile from shared memory
    tma.store_wait(0)


@gluon.jit
def add_values(acc, alpha, p, kv_ring, state, PART: gl.constexpr, no_half):
    """A half of the columns of O = alpha O + P V."""
    v_half = kv_ring.v.index(state.stage).slice(PART * HALF, HALF, 0).permute((1, 0))
    pending = warpgroup_mma(p, v_half, no_half, use_acc=False, is_async=True)
    return add_product(acc, alpha, product=warpgroup_mma_wait(0, deps=[pending]))
