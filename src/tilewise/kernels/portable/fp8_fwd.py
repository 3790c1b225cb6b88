"""The FP8 forward: `attn_fwd_kernel` (fwd.py) of q, k and V^T in e4m3, two products of 8 bits each
step (fp8_step.py).

Keys are visited downwards. Under a causal mask a sink, a first key that all rows attend to most,
then comes last: the other keys' P is relative to the largest of them, and not too small for e4m3.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ...tile.bounds import key_blocks
from ...tile.fp8 import not_constant, unit_of
from ...tile.schedule import find_query_tile
from ...tile.score import in_units
from ...tile.seqlen import modifiers_of, offsets_of, sequence_of
from ...tile.softmax import finish, load_sink
from ...tile.types import Sizes, Strided
from ..common.io import from_row, load_once, open_rows, row_stats, store_rows
from .fp8_order import first_column
from .fp8_step import attend_fp8, operand
from .step import RowState


class OfHead(NamedTuple):
    """Numbers of a sequence's key head: their memory, and its strides; further dimensions are
    contiguous.
    """

    ptr: Any
    sequence: int
    head: int


class Quantization(NamedTuple):
    """What was quantised is the 8-bit tensor times its scale; of v, plus its mean."""

    q: OfHead
    k: OfHead
    v: OfHead
    v_mean: OfHead | None


@triton.jit
def fp8_fwd_kernel(
    q,
    k,
    v_t,
    out,
    lse,
    quantization,
    optionals,
    sizes,
    numbers,
    FEATURES: tl.constexpr,
    TILE: tl.constexpr,
):
    BLOCK_M: tl.constexpr = TILE.BLOCK_M
    BLOCK_N: tl.constexpr = TILE.BLOCK_N
    BLOCK_D: tl.constexpr = TILE.BLOCK_D
    BLOCK_DV: tl.constexpr = TILE.BLOCK_DV
    D: tl.constexpr = FEATURES.HEADDIM
    DV: tl.constexpr = FEATURES.HEADDIM_V
    if isinstance(sizes.seqlen_k, int):  # 1
        sizes = Sizes(sizes.packed, sizes.nheads, sizes.seqlen_q, not_constant(sizes.seqlen_k))
    tile, lane = tl.program_id(0), tl.arange(0, 32)
    m_block, head, sequence = find_query_tile(tile, lane, sizes, optionals, FEATURES, BLOCK_M)
    if FEATURES.PACKED:
        if sequence >= sizes.packed:  # the grid has programs enough for any lengths
            return
    m_start = m_block * BLOCK_M
    head_k = head // FEATURES.GROUP
    q_scale = load_number(quantization.q, sequence, head_k)
    unit = unit_of(q_scale, load_number(quantization.k, sequence, head_k))
    modifiers, numbers = modifiers_of(optionals), in_units(numbers, unit)
    seq = sequence_of(sequence, head, sizes, optionals, modifiers, numbers, FEATURES)
    offsets = offsets_of(sequence, sizes, optionals, FEATURES)
    batch, seqlen_q, seqlen_k = offsets.batch, seq.lengths.seqlen_q, seq.lengths.seqlen_k
    q, out = from_row(q, offsets.first_q), from_row(out, offsets.first_q)
    k = from_row(k, offsets.first_k)
    if FEATURES.PACKED:
        column = first_column(offsets.first_k, sequence)
        v_t = Strided(v_t.ptr + column, v_t.batch, v_t.row, v_t.head)
    k_rows = open_rows(k, batch, head_k, seqlen_k, BLOCK_N, D, BLOCK_D, False)
    v_rows = open_rows(v_t, batch, head_k, DV, BLOCK_DV, BLOCK_N, BLOCK_N, False)
    # (BLOCK_M, BLOCK_D)
    q_tile = operand(load_once(q, batch, head, m_start, seqlen_q, BLOCK_M, D, BLOCK_D))

    state = RowState(
        tl.zeros([BLOCK_M, BLOCK_DV], tl.float32),
        tl.full([BLOCK_M], float("-inf"), tl.float32),
        tl.zeros([BLOCK_M], tl.float32),
    )
    blocks = key_blocks(m_start, seq, FEATURES, TILE)
    # As in `attn_fwd_kernel`: a ragged tail alone is not worth starting a pipeline for
    HAS_BAND: tl.constexpr = FEATURES.LEFT or FEATURES.RIGHT
    TAIL_STAGES: tl.constexpr = None if HAS_BAND or BLOCK_D > 128 else 1
    for i in tl.range(blocks.stop - blocks.full_stop, num_stages=TAIL_STAGES):
        n_start = (blocks.stop - 1 - i) * BLOCK_N
        state = attend_fp8(
            state, q_tile, k_rows, v_rows, n_start, m_start, seq, FEATURES, TILE, True
        )
    for i in range(blocks.full_stop - blocks.full_first):
        n_start = (blocks.full_stop - 1 - i) * BLOCK_N
        state = attend_fp8(
            state, q_tile, k_rows, v_rows, n_start, m_start, seq, FEATURES, TILE, False
        )
    if FEATURES.LEFT:
        for i in range(blocks.full_first - blocks.first):
            n_start = (blocks.full_first - 1 - i) * BLOCK_N
            state = attend_fp8(
                state, q_tile, k_rows, v_rows, n_start, m_start, seq, FEATURES, TILE, True
            )

    sink = load_sink(optionals, head, FEATURES)
    rescale, row_lse = finish(state.m_i, state.l_i, sink, FEATURES)
    v_scale = load_number(quantization.v, sequence, head_k)
    acc_o = state.acc_o * (rescale * v_scale)[:, None]
    if quantization.v_mean is not None:
        # What of the row's softmax is not the sink: 0 without keys
        share = state.l_i * rescale
        acc_o += share[:, None] * load_mean(quantization.v_mean, sequence, head_k, DV, BLOCK_DV)
    # Packed, addresses of O from those of Q would take registers in the loops
    m_start = not_constant(m_start) if FEATURES.PACKED else m_start
    q_idx = m_start + tl.arange(0, BLOCK_M)
    if FEATURES.PACKED:  # rows that are not used
        acc_o = tl.where((q_idx < seqlen_q)[:, None], acc_o, 0.0)
        row_lse = tl.where(q_idx < seqlen_q, row_lse, float("-inf"))
    store_rows(out, batch, head, acc_o, m_start, offsets.rows_q, BLOCK_M, DV, BLOCK_DV)
    lse_row = row_stats(lse, batch, head, sizes) + offsets.first_q
    tl.store(lse_row + q_idx, row_lse, mask=q_idx < offsets.rows_q)


@triton.jit
def address_of(x, sequence, head):
    """Where the numbers of a sequence's key head lie."""
    return x.ptr + sequence.to(tl.int64) * x.sequence + head * x.head


@triton.jit
def load_number(x, sequence, head):
    """A sequence's key head's number."""
    return tl.load(address_of(x, sequence, head))


@triton.jit
def load_mean(x, sequence, head, DV: tl.constexpr, BLOCK_DV: tl.constexpr):
    """A row, (1, BLOCK_DV), that is 0 past DV."""
    columns = tl.arange(0, BLOCK_DV)
    return tl.load(address_of(x, sequence, head) + columns, mask=columns < DV, other=0.0)[None, :]
