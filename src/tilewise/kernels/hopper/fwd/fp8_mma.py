"""The matmul warpgroups of the forward in FP8.

The tensor cores of Hopper add 8-bit products to an accumulator of about 14 bits: what is added to
a large sum is lost, more with every block of keys (a V of mean 1 and 16Ki keys: O is 18 % off). So
each block's P V gets registers of its own, and is added to O in fp32:

    O = alpha O + P V

which takes a fused multiply-add where rescaling takes a multiplication. Of 256 columns registers do
not hold O twice. Where the mean of V was taken off (`quantize`) and the rest drifts little along
the keys, O stays small and O += P V, as in 16 bits; else halves of the columns alternate
(`fp8_halves`).

The loop begins with the exponentials of the block before, so that it carries S and not P, of which
LLVM would hold each byte in a register of its own; ptxas puts them among the matmuls of the next S.
To headdim 64 the two warpgroups alternate at them (ping-pong scheduling, FlashAttention-3, arXiv
2407.08608, section 3.1): meanwhile the tensor cores multiply for the other one.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ....tile.fp8 import unit_of
from ....tile.score import exp_scale, in_units
from ....tile.seqlen import modifiers_of
from ....tile.types import Lengths, Sequence
from ...common.quantized import TWO_LEVELS
from ..layouts import accumulator, column_of, fp8_accumulator, row_of
from ..operands import add_sums, row_factor, whole_sums
from ..pipeline import advance, make_barrier, parity_of, release_by_threads, start, wait_full
from ..rescale import rescale, rescale_factors
from ..row_max import integers_suffice
from ..work import END, KernelCall, key_block, key_head
from .epilogue import OUT_COLUMNS, finish_rows, store_rows
from .fp8_operand import LOWEST, TOP, exponentials, exponents, no_sums
from .scores import open_rows, to_scores
from .varlen import receive_tile

# In base 2: a maximum may grow by so much before O is rescaled. P stays below 2^(TOP + LAG), which
# is less than the 448 of e4m3
LAG = gl.constexpr(0.75)
# Of V, in keys, to which O of over 128 columns is in one level: it takes some 1e-5 of the sums for
# each key, so 5e-3 (a model of the accumulator, docs/design/hopper-fp8.md)
MOST_DRIFT = gl.constexpr(512.0)


class Scales(NamedTuple):
    """What 8-bit tensors are multiplied with, by (sequence, key head); and, or None, the mean that
    V lost before it was rounded, (sequence, key head, HEADDIM_V), and how far V then drifts.
    """

    q: gl.tensor
    k: gl.tensor
    v: gl.tensor
    v_mean: gl.tensor
    v_drift: gl.tensor
    nheads_k: gl.tensor


@gluon.jit
def attend_partition(
    WG: gl.constexpr,
    rings,
    pingpong,
    output,
    scales,
    call,
    FEATURES: gl.constexpr,
    TILE: gl.constexpr,
):
    N: gl.constexpr = TILE.BLOCK_N
    DV: gl.constexpr = TILE.BLOCK_DV
    STAGES: gl.constexpr = TILE.STAGES
    S_LAYOUT: gl.constexpr = accumulator(N)
    TWO_LEVELS: gl.constexpr = has_two_levels(DV)
    LAG_OF_M: gl.constexpr = 0.0 if TWO_LEVELS else LAG
    q_ring = rings.q[WG]
    kv_ring = rings.kv_ring
    rows = WG * 64 + gl.arange(0, 64, row_of(S_LAYOUT))
    no_scores = gl.zeros([64, N], gl.float32, fp8_accumulator(N))
    no_output = gl.zeros([64, DV], gl.float32, fp8_accumulator(DV))
    no_max = gl.full([64], LOWEST, gl.float32, row_of(S_LAYOUT))
    no_alpha = gl.full([64], 0.0, gl.float32, row_of(S_LAYOUT))
    modifiers = modifiers_of(call.optionals)
    call = KernelCall(call.queue, call.optionals, call.sizes, call.numbers, modifiers)

    messages_state = start()
    q_state = start()
    state = start()
    phase = gl.to_tensor(0)
    if WG == 1:  # the other one begins
        signal_pingpong(pingpong, WG, TILE=TILE)
    # The first S overlaps with nothing. S = Q K^T: (64, BLOCK_N)
    work = receive_tile(rings.messages, messages_state, FEATURES=FEATURES)
    messages_state = advance(messages_state, 2)
    has_tile = work.start != END if FEATURES.PACKED else True
    wait_full(q_ring, q_state, pred=has_tile)
    wait_full(kv_ring, state, pred=has_tile)
    q_tile = q_ring.buffers.index(q_state.stage)
    pending_s = multiply_keys(q_tile, kv_ring, state=state, no_scores=no_scores)
    unit = load_unit(work, scales, FEATURES=FEATURES, TILE=TILE)
    tile = open_rows(work, rows, call=call, FEATURES=FEATURES, TILE=TILE)
    s = warpgroup_mma_wait(0, deps=[pending_s])
    if has_tile:
        release_by_threads(kv_ring, state)
    state = advance(state, STAGES)
    s, m_i = scores_of(s, tile, 0, no_max, None, unit, call, FEATURES, TILE)

    while work.start != END:
        acc_o = no_output  # (64, BLOCK_DV)
        l_i = no_sums(N, DV)
        alpha = no_alpha
        scale = scale_of(unit, call, FEATURES=FEATURES)
        blocks = work.last + 1 - work.first
        for i in range(1, blocks):
            wait_full(kv_ring, state)
            y = exponents(s, m_i, scale=scale)
            wait_pingpong(pingpong, phase, WG=WG, TILE=TILE)
            pending_s = multiply_keys(q_tile, kv_ring, state=state, no_scores=no_scores)
            p, sums = exponentials(y, DV)
            l_i = add_sums(l_i, alpha, sums=sums)
            signal_pingpong(pingpong, WG, TILE=TILE)
            phase ^= 1
            pending_o = multiply_values(p, kv_ring, state, acc_o, no_output, TWO_LEVELS)
            by_integers = integers_suffice(m_i, LAG_OF_M)
            s = warpgroup_mma_wait(1, deps=[pending_s])
            # With the branch of a mask where none is needed, too: see `to_scores`
            s, m_new = scores_of(s, tile, i, m_i, by_integers, unit, call, FEATURES, TILE)
            product = warpgroup_mma_wait(0, deps=[pending_o])
            release_by_threads(kv_ring, state)
            state = advance(state, STAGES)
            if TWO_LEVELS:
                acc_o = add_product(acc_o, alpha, product=product)
                alpha = gl.exp2(m_i - m_new)
            else:
                m_new = gl.where(m_new - m_i > LAG, m_new, m_i)
                alpha, grows = rescale_factors(m_i, m_new, start=work.start, PINNED=False)
                O_LAYOUT: gl.constexpr = fp8_accumulator(DV)
                acc_o = rescale(product, row_factor(alpha, O_LAYOUT), row_factor(grows, O_LAYOUT))
            m_i = m_new

        # The last P V of this tile overlaps with the first S of the next
        release_by_threads(q_ring, q_state)
        q_state = advance(q_state, TILE.Q_STAGES)
        upcoming = receive_tile(rings.messages, messages_state, FEATURES=FEATURES)
        messages_state = advance(messages_state, 2)
        goes_on = upcoming.start != END
        wait_full(q_ring, q_state, pred=goes_on)
        wait_full(kv_ring, state)
        q_tile = q_ring.buffers.index(q_state.stage)
        # After the last tile S is computed from what lies there, and not used
        y = exponents(s, m_i, scale=scale)
        wait_pingpong(pingpong, phase, WG=WG, TILE=TILE)
        pending_s = multiply_keys(q_tile, kv_ring, state=state, no_scores=no_scores)
        p, sums = exponentials(y, DV)
        l_i = add_sums(l_i, alpha, sums=sums)
        signal_pingpong(pingpong, WG, TILE=TILE)
        phase ^= 1
        pending_o = multiply_values(p, kv_ring, state, acc_o, no_output, TWO_LEVELS)
        unit = load_unit(upcoming, scales, FEATURES=FEATURES, TILE=TILE)
        tile = open_rows(upcoming, rows, call=call, FEATURES=FEATURES, TILE=TILE)
        s = warpgroup_mma_wait(1, deps=[pending_s])
        s, m_begun = scores_of(s, tile, 0, no_max, None, unit, call, FEATURES, TILE)
        product = warpgroup_mma_wait(0, deps=[pending_o])
        release_by_threads(kv_ring, state)
        state = advance(state, STAGES)
        if TWO_LEVELS:
            product = add_product(acc_o, alpha, product=product)
        parity = parity_of(q_state, TILE.Q_STAGES) ^ 1  # of this tile; q_state is the next one's
        l_i = whole_sums(l_i, row_of(S_LAYOUT))
        write_tile(product, m_i, l_i, work, output, scales, call, parity, WG, FEATURES, TILE)
        m_i = m_begun
        work = upcoming
    # TMA still reads the last tile from shared memory
    tma.store_wait(0)


@gluon.constexpr_function
def has_two_levels(columns):
    """Whether registers hold O of so many columns, and a block's P V."""
    return columns <= TWO_LEVELS


@gluon.constexpr_function
def takes_turns(columns):
    """Whether the warpgroups alternate. With 128 and 256 columns they do as well, or better, where
    neither waits (docs/design/hopper-fp8.md).
    """
    return columns <= 64


@gluon.jit
def make_pingpong():
    """A barrier for each warpgroup, at which it waits until the other one's exponentials are
    computed. Two pieces of memory: of one, Triton would put a barrier of the warps between a wait
    and an arrival.
    """
    return make_barrier(1, 128), make_barrier(1, 128)


@gluon.jit
def wait_pingpong(pingpong, phase, WG: gl.constexpr, TILE: gl.constexpr):
    """Waits until the other warpgroup has computed its exponentials, where they alternate.
    Exponents come before, so that the turn is short.
    """
    if takes_turns(TILE.BLOCK_DV):
        mbarrier.wait(pingpong[WG].index(0), phase)


@gluon.jit
def signal_pingpong(pingpong, WG: gl.constexpr, TILE: gl.constexpr):
    """Signals by every thread, as nothing that it wrote must be seen: `release_by_threads`."""
    if takes_turns(TILE.BLOCK_DV):
        async_copy.mbarrier_arrive(pingpong[1 - WG].index(0), increment_count=False)


@gluon.jit
def multiply_keys(q_tile, kv_ring, state, no_scores):
    """Starts S = Q K^T: (64, BLOCK_N)."""
    k_tile = kv_ring.k.index(state.stage).permute((1, 0))
    return warpgroup_mma(q_tile, k_tile, no_scores, use_acc=False, is_async=True)


@gluon.jit
def multiply_values(p, kv_ring, state, acc_o, no_output, TWO_LEVELS: gl.constexpr):
    """Starts P V on its own, or O += P V: (64, BLOCK_DV)."""
    v_tile = kv_ring.v.index(state.stage).permute((1, 0))
    if TWO_LEVELS:
        return warpgroup_mma(p, v_tile, no_output, use_acc=False, is_async=True)
    else:
        return warpgroup_mma(p, v_tile, acc_o, is_async=True)


@gluon.jit
def add_product(acc_o, alpha, product):
    """O = alpha O + P V."""
    layout: gl.constexpr = acc_o.type.layout
    return acc_o * row_factor(alpha, layout)[:, None] + product


@gluon.jit
def scores_of(
    qk, tile, i, m_i, by_integers, unit, call, FEATURES: gl.constexpr, TILE: gl.constexpr
):
    """Scores of the i-th block of keys and the maxima with them: see `to_scores`."""
    qk = gl.convert_layout(qk, accumulator(TILE.BLOCK_N), assert_trivial=True)
    numbers = in_units(call.numbers, unit)
    call = KernelCall(call.queue, call.optionals, call.sizes, numbers, call.modifiers)
    n_block = key_block(tile.work, i, call=call, FEATURES=FEATURES, TILE=TILE)
    return to_scores(
        qk, 0, tile, i, n_block, m_i, by_integers, call, gl.float32, True, FEATURES, TILE
    )


@gluon.jit
def place_of_scale(work, scales, FEATURES: gl.constexpr, TILE: gl.constexpr):
    """Where the scales of a tile's sequence and key head are."""
    head_k, _ = key_head(work.head, FEATURES, TILE=TILE)
    return work.batch * scales.nheads_k + head_k


@gluon.jit
def load_unit(work, scales, FEATURES: gl.constexpr, TILE: gl.constexpr):
    """What Q K^T of a tile is multiplied with."""
    offset = place_of_scale(work, scales, FEATURES=FEATURES, TILE=TILE)
    is_tile = work.start != END
    q_scale = gl.load(scales.q + offset, mask=is_tile, other=0.0)
    return unit_of(q_scale, gl.load(scales.k + offset, mask=is_tile, other=0.0))


@gluon.jit
def scale_of(unit, call, FEATURES: gl.constexpr):
    """The factor that the exponent still has to apply to a score."""
    numbers = in_units(call.numbers, unit)
    return exp_scale(Sequence(Lengths(0, 0, diagonal=0), 0.0, numbers=numbers), FEATURES)


@gluon.jit
def write_tile(
    acc_o,
    m_i,
    l_i,
    work,
    output,
    scales,
    call,
    parity,
    WG: gl.constexpr,
    FEATURES: gl.constexpr,
    TILE: gl.constexpr,
):
    """Rescales and stores 64 rows of O, and their lse. Tiles alternate in `parity`."""
    offset = place_of_scale(work, scales, FEATURES=FEATURES, TILE=TILE)
    v_scale, means = gl.load(scales.v + offset), load_means(offset, scales, FEATURES, TILE)
    q_idx, factor = finish_rows(m_i - TOP, l_i, work, output, call, WG, FEATURES, TILE)
    O_LAYOUT: gl.constexpr = acc_o.type.layout
    out = acc_o * row_factor(factor * v_scale, O_LAYOUT)[:, None]
    if scales.v_mean is not None:
        # Probabilities sum up to 1, but for the sink's, which has no value; to 0 without keys
        out = add_means(out, row_factor(l_i * factor, O_LAYOUT), means=means)
    store_rows(out, q_idx, work, output, parity, WG, FEATURES, TILE)


@gluon.jit
def load_means(at, scales, FEATURES: gl.constexpr, TILE: gl.constexpr):
    """The mean that V of a key head lost, of 128 columns after 128: a number a thread. Loads of all
    columns that a thread has of O would be 64, of which registers hold few at a time.
    """
    means = ()
    if scales.v_mean is not None:
        DV: gl.constexpr = TILE.BLOCK_DV
        COUNT: gl.constexpr = min(DV, OUT_COLUMNS)
        for column in gl.static_range(0, DV, COUNT):
            offs_d = column + gl.arange(0, COUNT, gl.BlockedLayout([1], [32], [4], [0]))
            exists = offs_d < FEATURES.HEADDIM_V
            row = scales.v_mean + at * FEATURES.HEADDIM_V
            means = means + (gl.load(row + offs_d, mask=exists, other=0.0),)
    return means


@gluon.jit
def add_means(out, share, means):
    """O + share x mean, of as many columns at a time: means reach threads by shared memory."""
    if len(means) > 1:
        left, right = gl.split(out.reshape([64, 2, out.shape[1] // 2]).permute(0, 2, 1))
        left = add_means(left, share, means=means[:1])
        right = add_means(right, share, means=means[1:])
        return joined(left, right)
    else:
        mean = gl.convert_layout(means[0], column_of(out.type.layout))
        return out + gl.convert_layout(share, row_of(out.type.layout))[:, None] * mean[None, :]


@gluon.jit
def joined(left, right):
    """The two halves side by side: each number stays in its register."""
    columns: gl.constexpr = 2 * left.shape[1]
    pairs = gl.join(left, right).permute(0, 2, 1).reshape([64, columns])
    return gl.convert_layout(pairs, fp8_accumulator(columns), assert_trivial=True)
