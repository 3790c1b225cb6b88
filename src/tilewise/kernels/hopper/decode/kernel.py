"""Decoding for Hopper in one launch: warps that only load, a warpgroup that only computes.

Programs stay on their SMs. A counter hands out parts of tiles, then slices of folds; which sequence
a number lies in, each load warp finds from the lengths on the device (`tile.split_schedule`). So
the host plans nothing, and one captured graph serves any lengths.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from ...common.lengths import for_all_lengths
from ..dependents import start_dependents
from ..layouts import shared
from ..pipeline import Ring, allocate_barrier, allocate_ring, make_barrier
from .attend import Scratch, attend_partition
from .barriers import make_barriers
from .copy import copy_partition
from .load import Sources, fetches_descriptors, load_partition
from .queries import query_partition
from .scales import have_scales, room_for_scales
from .work import DecodeCall, make_work_messages


class Rings(NamedTuple):
    """What passes through shared memory to the warpgroup."""

    q: Ring  # (BLOCK_M, BLOCK_D)
    k: Ring  # (1, 1, BLOCK_N, BLOCK_D)
    v: Ring  # (1, 1, BLOCK_N, BLOCK_DV)
    messages: Ring  # what to work on
    ready: Any  # a barrier: the load warp may begin to fill these
    k_scales: Any = 0  # (STAGES, BLOCK_N), where each row has its own
    v_scales: Any = 0


@for_all_lengths(("table.stride", "table.num_pages", "sizes", "numbers"))
@gluon.jit
def hopper_decode_kernel(
    q,
    k,
    v,
    table,
    output,
    counters,
    optionals,
    sizes,
    numbers,
    scales,
    FEATURES: gl.constexpr,
    TILE: gl.constexpr,
):
    if FEATURES.CHUNK > 0:
        start_dependents()  # chunks, on SMs that are free
    dtype: gl.constexpr = q.ptr.dtype.element_ty
    M: gl.constexpr = TILE.BLOCK_M
    N: gl.constexpr = TILE.BLOCK_N
    D: gl.constexpr = TILE.BLOCK_D
    DV: gl.constexpr = TILE.BLOCK_DV
    # Keys and values are as they are stored. (1, 1, keys, columns), as TMA has it: parts of a slot
    # are copied, and cannot be reshaped
    stored: gl.constexpr = dtype if TILE.CACHE == "" else gl.int8
    k_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([1, 1, N, D], stored)
    v_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([1, 1, N, DV], stored)
    WARPGROUPS: gl.constexpr = TILE.WARPGROUPS
    k_ring = allocate_ring(stored, [1, 1, N, D], layout=k_layout, STAGES=TILE.STAGES)
    # Two warpgroups' blocks of values are cleared before they are full, behind one barrier more
    MORE: gl.constexpr = 1 if WARPGROUPS > 1 and TILE.BY_TMA else 0
    v_ring = allocate_ring(stored, [1, 1, N, DV], layout=v_layout, STAGES=TILE.STAGES, MORE=MORE)
    q_buffers = gl.allocate_shared_memory(
        dtype, [TILE.Q_STAGES * WARPGROUPS, M, D], shared(M, D, dtype=dtype)
    )
    q_full, q_empty = allocate_barrier(TILE.Q_STAGES), allocate_barrier(TILE.Q_STAGES)
    queries = Ring(q_buffers, q_full, empty=q_empty)
    READERS: gl.constexpr = 1 + WARPGROUPS + (not TILE.BY_TMA)
    ready = 0
    if WARPGROUPS == 1:
        # What the matmul warpgroup makes, and what TMA copies of nothing
        ready = make_barrier(1, 1 + fetches_descriptors(TILE.BY_TMA, WARPGROUPS))
        fence_async_shared()  # which arrives at it through the async proxy
    rings = Rings(queries, k_ring, v=v_ring, messages=make_work_messages(READERS), ready=ready)
    if TILE.CACHE != "":
        rings = with_scales(rings, scales, TILE=TILE)
    state, probabilities, maxima, sums = 0, 0, 0, 0
    if TILE.STATE_IN_SHARED:
        layout: gl.constexpr = gl.SwizzledSharedLayout(2, 1, 8, [1, 0])
        state = gl.allocate_shared_memory(gl.float32, [M, DV], layout)
    if TILE.SWAPPED:
        probabilities = gl.allocate_shared_memory(dtype, [2, M, N], shared(M, N, dtype=dtype))
        by_row: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0, 1])
        maxima = gl.allocate_shared_memory(gl.float32, [M, 4], by_row)
        sums = gl.allocate_shared_memory(gl.float32, [M, 4], by_row)
    smem = Scratch(state, probabilities, maxima=maxima, sums=sums)
    if WARPGROUPS > 1:
        make_barriers(rings, scales, TILE=TILE)
    # Made here: of numbers that are 1, Triton (3.6) forgets the values in tuples of tuples
    call = DecodeCall(optionals, sizes, numbers=numbers, scales=scales)
    sources = Sources(k, v, table=table)
    # The attend warps have what these leave: more where rows or their scales are copied, too
    HAS_ROW_SCALES: gl.constexpr = have_scales(scales.k_row, scales.v_row)
    LOAD: gl.constexpr = registers_of(TILE.CACHE, TILE.PROGRAMS, is_copy=HAS_ROW_SCALES)
    COPY: gl.constexpr = registers_of(TILE.CACHE, TILE.PROGRAMS, is_copy=True)
    COPY_WARPS: gl.constexpr = TILE.COPY_WARPS
    if WARPGROUPS == 2 and TILE.BY_TMA:
        gl.warp_specialize(
            [
                (attend_partition, (0, rings, smem, output, counters, call, FEATURES, TILE)),
                (attend_partition, (1, rings, smem, output, counters, call, FEATURES, TILE)),
                (load_partition, (sources, rings, counters, call, FEATURES, TILE)),
                (query_partition, (rings, q, output, call, FEATURES, TILE)),
            ],
            [4, 1, 1],
            [224, 56, 56],
        )
    elif WARPGROUPS == 2:
        gl.warp_specialize(
            [
                (attend_partition, (0, rings, smem, output, counters, call, FEATURES, TILE)),
                (attend_partition, (1, rings, smem, output, counters, call, FEATURES, TILE)),
                (load_partition, (sources, rings, counters, call, FEATURES, TILE)),
                (query_partition, (rings, q, output, call, FEATURES, TILE)),
                (copy_partition, (sources, rings, call, FEATURES, TILE)),
            ],
            [4, 1, 1, 2],
            [208, 96, 96, 96],
        )
    elif TILE.BY_TMA:
        gl.warp_specialize(
            [
                (attend_partition, (0, rings, smem, output, counters, call, FEATURES, TILE)),
                (load_partition, (sources, rings, counters, call, FEATURES, TILE)),
                (query_partition, (rings, q, output, call, FEATURES, TILE)),
            ],
            [1, 1],
            [LOAD, LOAD],
        )
    else:
        gl.warp_specialize(
            [
                (attend_partition, (0, rings, smem, output, counters, call, FEATURES, TILE)),
                (load_partition, (sources, rings, counters, call, FEATURES, TILE)),
                (query_partition, (rings, q, output, call, FEATURES, TILE)),
                (copy_partition, (sources, rings, call, FEATURES, TILE)),
            ],
            [1, 1, COPY_WARPS],
            [LOAD, LOAD, COPY],
        )


@gluon.constexpr_function
def registers_of(cache, programs, is_copy):
    """Registers per thread of a warp that starts copies, or copies rows or their scales itself."""
    if programs > 1:
        return 64 if is_copy else 56
    if cache == "":
        return 96 if is_copy else 56
    return 112


@gluon.jit
def with_scales(rings, scales, TILE: gl.constexpr):
    """Rings of keys and values with room for the scales of their rows."""
    k_scales = room_for_scales(scales.k_row, TILE.STAGES, TILE.BLOCK_N)
    v_scales = room_for_scales(scales.v_row, TILE.STAGES, TILE.BLOCK_N)
    return Rings(rings.q, rings.k, rings.v, rings.messages, rings.ready, k_scales, v_scales)
