"""Small Gluon kernels for Hopper that run in the emulator and compile for sm_90.

Each uses what real kernels use: rings of TMA tiles between a producer and consumers, asynchronous
matmuls, a messages of tiles, stores through a staging buffer. `test_hopper_mutations` plants bugs
in this file's text.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from tilewise.tile.bounds import key_blocks
from tilewise.tile.mask import apply_mask
from tilewise.tile.seqlen import sequence_of
from tilewise.tile.softmax import finish, online_step

tma_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
tma_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global


class Ring(NamedTuple):
    """Tiles in shared memory, each with a barrier that says full and one that says empty."""

    tiles: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor


@gluon.jit
def make_ring(
    dtype: gl.constexpr, shape: gl.constexpr, layout: gl.constexpr, readers: gl.constexpr
):
    STAGES: gl.constexpr = shape[0]
    tiles = gl.allocate_shared_memory(dtype, shape, layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=readers)
    return Ring(tiles, full, empty)


# A copy: y = factor * x, block by block, through a staging buffer.


@gluon.jit
def copy_load(x_desc, ring, n_blocks, ROWS: gl.constexpr, STAGES: gl.constexpr):
    it = 0
    for block in range(gl.program_id(0), n_blocks, gl.num_programs(0)):
        stage = it % STAGES
        phase = (it // STAGES) & 1
        mbarrier.wait(ring.empty.index(stage), phase ^ 1)
        mbarrier.expect(ring.full.index(stage), x_desc.block_type.nbytes)
        tma_load(x_desc, [block * ROWS, 0], ring.full.index(stage), ring.tiles.index(stage))
        it += 1


@gluon.jit
def copy_store(y_desc, ring, staging, factor, n_blocks, ROWS: gl.constexpr, STAGES: gl.constexpr):
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    it = 0
    for block in range(gl.program_id(0), n_blocks, gl.num_programs(0)):
        stage = it % STAGES
        phase = (it // STAGES) & 1
        mbarrier.wait(ring.full.index(stage), phase)
        x = ring.tiles.index(stage).load(LAYOUT)
        mbarrier.arrive(ring.empty.index(stage), count=1)
        tma.store_wait(0)  # of the block before
        staging.store((x * factor).to(x.dtype))
        fence_async_shared()  # before the copy
        tma_store(y_desc, [block * ROWS, 0], staging)
        it += 1
    tma.store_wait(0)  # of the last block


@gluon.jit
def copy_kernel(
    x_desc,
    y_desc,
    factor,
    n_blocks,
    ROWS: gl.constexpr,
    COLUMNS: gl.constexpr,
    STAGES: gl.constexpr,
    num_warps: gl.constexpr,
):
    dtype: gl.constexpr = x_desc.dtype
    LAYOUT: gl.constexpr = x_desc.layout
    ring = make_ring(dtype, [STAGES, ROWS, COLUMNS], LAYOUT, 1)
    staging = gl.allocate_shared_memory(dtype, [ROWS, COLUMNS], LAYOUT)
    fence_async_shared()  # the barriers of the copy
    gl.warp_specialize(
        [
            (copy_store, (y_desc, ring, staging, factor, n_blocks, ROWS, STAGES)),
            (copy_load, (x_desc, ring, n_blocks, ROWS, STAGES)),
        ],
        [1],
        [24],
    )


# A matmul: c += a @ b, by persistent CTAs that draw tiles from a counter.


class Problem(NamedTuple):
    """Sizes of a matmul, in tiles where they count tiles."""

    n_rows: int
    n_columns: int
    n_inner: int
    stride: int  # of a row of c


class Shape(NamedTuple):
    """A tile: two consumers of 64 rows each, and how many pairs of operands are in flight."""

    N: int
    K: int
    STAGES: int


@gluon.jit
def matmul_load(a_desc, b_desc, counter, a_ring, b_tiles, messages, problem, SHAPE: gl.constexpr):
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    N: gl.constexpr = SHAPE.N
    K: gl.constexpr = SHAPE.K
    STAGES: gl.constexpr = SHAPE.STAGES
    n_tiles = problem.n_rows * problem.n_columns
    it = 0
    sent = 0
    tile = gl.program_id(0)
    while tile >= 0:
        # The last message, -1, ends the consumers.
        message = gl.where(tile < n_tiles, tile, -1)
        slot = sent % 2
        mbarrier.wait(messages.empty.index(slot), ((sent // 2) & 1) ^ 1)  # messages
        messages.tiles.index(slot).store(gl.full([1], 0, gl.int32, ONE) + message)
        mbarrier.arrive(messages.full.index(slot), count=1)
        sent += 1
        if message >= 0:
            row = tile // problem.n_columns
            column = tile % problem.n_columns
            for k in range(problem.n_inner):
                stage = it % STAGES
                phase = (it // STAGES) & 1
                mbarrier.wait(a_ring.empty.index(stage), phase ^ 1)
                full = a_ring.full.index(stage)
                mbarrier.expect(full, a_desc.block_type.nbytes + b_desc.block_type.nbytes)
                tma_load(a_desc, [row * 128, k * K], full, a_ring.tiles.index(stage))
                tma_load(b_desc, [k * K, column * N], full, b_tiles.index(stage))
                it += 1
            tile = gl.atomic_add(counter, 1, sem="relaxed") + gl.num_programs(0)
        else:
            tile = -1


@gluon.jit
def read_message(messages, n):
    ALL: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    slot = n % 2
    mbarrier.wait(messages.full.index(slot), (n // 2) & 1)  # messages
    message = gl.max(messages.tiles.index(slot).load(ALL), 0)
    mbarrier.arrive(messages.empty.index(slot), count=1)  # messages
    return message


@gluon.jit
def matmul_compute(
    wg: gl.constexpr, c_ptr, a_ring, b_tiles, messages, problem, SHAPE: gl.constexpr
):
    N: gl.constexpr = SHAPE.N
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])
    STAGES: gl.constexpr = SHAPE.STAGES
    it = 0
    received = 0
    tile = read_message(messages, received)
    while tile >= 0:
        received += 1
        acc = gl.zeros([64, N], gl.float32, ACC)
        for _ in range(problem.n_inner):
            stage = it % STAGES
            phase = (it // STAGES) & 1
            mbarrier.wait(a_ring.full.index(stage), phase)
            a = a_ring.tiles.index(stage).slice(wg * 64, 64, 0)
            token = warpgroup_mma(a, b_tiles.index(stage), acc, is_async=True)
            acc = warpgroup_mma_wait(0, deps=[token])
            mbarrier.arrive(a_ring.empty.index(stage), count=1)
            it += 1
        row = (tile // problem.n_columns) * 128 + wg * 64
        column = (tile % problem.n_columns) * N
        rows = row + gl.arange(0, 64, gl.SliceLayout(1, ACC))
        columns = column + gl.arange(0, N, gl.SliceLayout(0, ACC))
        at = c_ptr + rows[:, None].to(gl.int64) * problem.stride + columns[None, :]
        gl.store(at, gl.load(at) + acc)
        tile = read_message(messages, received)


@gluon.jit
def matmul_kernel(
    a_desc, b_desc, c_ptr, counter, problem, SHAPE: gl.constexpr, num_warps: gl.constexpr
):
    N: gl.constexpr = SHAPE.N
    K: gl.constexpr = SHAPE.K
    STAGES: gl.constexpr = SHAPE.STAGES
    dtype: gl.constexpr = a_desc.dtype
    A: gl.constexpr = a_desc.layout
    B: gl.constexpr = b_desc.layout
    MESSAGES: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    a_ring = make_ring(dtype, [STAGES, 128, K], A, 2)
    b_tiles = gl.allocate_shared_memory(dtype, [STAGES, K, N], B)
    messages = make_ring(gl.int32, [2, 1], MESSAGES, 2)
    fence_async_shared()  # the barriers of the matmul
    gl.warp_specialize(
        [
            (matmul_compute, (0, c_ptr, a_ring, b_tiles, messages, problem, SHAPE)),
            (matmul_compute, (1, c_ptr, a_ring, b_tiles, messages, problem, SHAPE)),
            (matmul_load, (a_desc, b_desc, counter, a_ring, b_tiles, messages, problem, SHAPE)),
        ],
        [4, 1],
        [200, 24],
    )


# Attention: the functions of tilewise.tile as they are, P from registers, the output through TMA.


@gluon.jit
def attention_load(
    q_desc, k_desc, v_desc, q_ring, k_ring, v_ring, seq, FEATURES: gl.constexpr, TILE: gl.constexpr
):
    STAGES: gl.constexpr = k_ring.tiles.shape[0]
    BLOCK_M: gl.constexpr = TILE.BLOCK_M
    BLOCK_N: gl.constexpr = TILE.BLOCK_N
    D: gl.constexpr = FEATURES.HEADDIM
    head = gl.program_id(1)
    m_start = gl.program_id(0) * BLOCK_M
    mbarrier.expect(q_ring.full.index(0), q_desc.block_type.nbytes)
    q = q_ring.tiles.index(0).reshape([1, BLOCK_M, D])
    tma_load(q_desc, [head, m_start, 0], q_ring.full.index(0), q)
    blocks = key_blocks(m_start, seq, FEATURES, TILE)
    for n_block in range(blocks.first, blocks.stop):
        it = n_block - blocks.first
        stage = it % STAGES
        phase = (it // STAGES) & 1
        n_start = n_block * BLOCK_N
        mbarrier.wait(k_ring.empty.index(stage), phase ^ 1)
        mbarrier.expect(k_ring.full.index(stage), k_desc.block_type.nbytes)
        k = k_ring.tiles.index(stage).reshape([1, BLOCK_N, D])
        tma_load(k_desc, [head, n_start, 0], k_ring.full.index(stage), k)
        mbarrier.wait(v_ring.empty.index(stage), phase ^ 1)
        mbarrier.expect(v_ring.full.index(stage), v_desc.block_type.nbytes)
        v = v_ring.tiles.index(stage).reshape([1, BLOCK_N, D])
        tma_load(v_desc, [head, n_start, 0], v_ring.full.index(stage), v)


@gluon.jit
def attention_compute(
    out_desc, lse_ptr, q_ring, k_ring, v_ring, seq, FEATURES: gl.constexpr, TILE: gl.constexpr
):
    BLOCK_M: gl.constexpr = TILE.BLOCK_M
    BLOCK_N: gl.constexpr = TILE.BLOCK_N
    D: gl.constexpr = FEATURES.HEADDIM
    STAGES: gl.constexpr = k_ring.tiles.shape[0]
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    P: gl.constexpr = gl.DotOperandLayout(0, ACC, 2)
    ROW: gl.constexpr = gl.SliceLayout(1, ACC)
    m_start = gl.program_id(0) * BLOCK_M
    q_idx = m_start + gl.arange(0, BLOCK_M, gl.SliceLayout(1, S))
    m_i = gl.full([BLOCK_M], float("-inf"), gl.float32, gl.SliceLayout(1, S))
    l_i = gl.zeros([BLOCK_M], gl.float32, gl.SliceLayout(1, S))
    acc_o = gl.zeros([BLOCK_M, D], gl.float32, ACC)
    zeros = gl.zeros([BLOCK_M, BLOCK_N], gl.float32, S)
    q = q_ring.tiles.index(0)
    mbarrier.wait(q_ring.full.index(0), 0)
    blocks = key_blocks(m_start, seq, FEATURES, TILE)
    for n_block in range(blocks.first, blocks.stop):
        it = n_block - blocks.first
        stage = it % STAGES
        phase = (it // STAGES) & 1
        k_idx = n_block * BLOCK_N + gl.arange(0, BLOCK_N, gl.SliceLayout(0, S))
        mbarrier.wait(k_ring.full.index(stage), phase)
        k = k_ring.tiles.index(stage).permute((1, 0))
        s_token = warpgroup_mma(q, k, zeros, use_acc=False, is_async=True)
        s = warpgroup_mma_wait(0, deps=[s_token])
        mbarrier.arrive(k_ring.empty.index(stage), count=1)
        s = apply_mask(s, q_idx[:, None], k_idx[None, :], seq, FEATURES)
        step = online_step(s, m_i, l_i, seq.numbers.scale_log2, True)
        m_i = step.m_i
        l_i = step.l_i
        acc_o = acc_o * gl.convert_layout(step.alpha, ROW)[:, None]
        p = gl.convert_layout(step.p.to(q.dtype), P)
        mbarrier.wait(v_ring.full.index(stage), phase)
        o_token = warpgroup_mma(p, v_ring.tiles.index(stage), acc_o, is_async=True)
        acc_o = warpgroup_mma_wait(0, deps=[o_token])
        mbarrier.arrive(v_ring.empty.index(stage), count=1)
    rescale, lse = finish(m_i, l_i, 0.0, FEATURES)
    acc_o = acc_o * gl.convert_layout(rescale, ROW)[:, None]
    q.store(acc_o.to(q.dtype))  # q is read no more
    fence_async_shared()
    out = q.reshape([1, BLOCK_M, D])
    tma_store(out_desc, [gl.program_id(1), m_start, 0], out)
    lse_row = lse_ptr + gl.program_id(1) * seq.lengths.seqlen_q
    gl.store(lse_row + q_idx, lse, mask=q_idx < seq.lengths.seqlen_q)
    tma.store_wait(0)


@gluon.jit
def attention_kernel(
    q_desc,
    k_desc,
    v_desc,
    out_desc,
    lse_ptr,
    optionals,
    sizes,
    numbers,
    FEATURES: gl.constexpr,
    TILE: gl.constexpr,
    num_warps: gl.constexpr,
):
    BLOCK_M: gl.constexpr = TILE.BLOCK_M
    BLOCK_N: gl.constexpr = TILE.BLOCK_N
    D: gl.constexpr = FEATURES.HEADDIM
    dtype: gl.constexpr = q_desc.dtype
    KEYS: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, D], dtype)
    QUERIES: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_M, D], dtype)
    q_full = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    mbarrier.init(q_full.index(0), count=1)
    q_ring = Ring(gl.allocate_shared_memory(dtype, [1, BLOCK_M, D], QUERIES), q_full, q_full)
    k_ring = make_ring(dtype, [2, BLOCK_N, D], KEYS, 1)
    v_ring = make_ring(dtype, [2, BLOCK_N, D], KEYS, 1)
    fence_async_shared()
    seq = sequence_of(0, gl.program_id(1), sizes, optionals, 0, numbers, FEATURES)
    gl.warp_specialize(
        [
            (
                attention_compute,
                (out_desc, lse_ptr, q_ring, k_ring, v_ring, seq, FEATURES, TILE),
            ),
            (
                attention_load,
                (q_desc, k_desc, v_desc, q_ring, k_ring, v_ring, seq, FEATURES, TILE),
            ),
        ],
        [1],
        [24],
    )
