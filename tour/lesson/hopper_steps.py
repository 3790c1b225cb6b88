"""The kernels of lesson 07: one attention forward in five steps.

Steps 1 and 2 are kernels of one warpgroup. From step 3 on a kernel is put together,
by `specialised`, of a function that loads and one that computes, each on warps of
its own.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from tilewise.tile.softmax import online_step

from .hopper_parts import (
    Step,
    accumulator,
    empty_state,
    fill,
    left_operand,
    load_tile,
    make_barriers,
    make_pipeline,
    release,
    rescale,
    wait_empty,
    wait_full,
    write_rows,
)


@gluon.jit
def step1_kernel(q_desc, k_desc, v_desc, out, seqlen, scale):
    """Loads a block, waits for it, multiplies."""
    N: gl.constexpr = k_desc.block_type.shape[0]
    D: gl.constexpr = k_desc.block_type.shape[1]
    dtype: gl.constexpr = q_desc.dtype
    q = gl.allocate_shared_memory(dtype, [64, D], q_desc.layout)
    k = gl.allocate_shared_memory(dtype, [N, D], k_desc.layout)
    v = gl.allocate_shared_memory(dtype, [N, D], v_desc.layout)
    q_full = make_barriers(1, 1)
    k_full = make_barriers(1, 1)
    v_full = make_barriers(1, 1)
    fence_async_shared()
    first = gl.program_id(1) * seqlen  # the head's first row
    row = first + gl.program_id(0) * 64
    load_tile(q_desc, row, q_full.index(0), q)
    mbarrier.wait(q_full.index(0), 0)
    m_i, l_i, acc_o = empty_state(N, D)
    no_scores = gl.zeros([64, N], gl.float32, accumulator(N))
    for i in range(seqlen // N):
        load_tile(k_desc, first + i * N, k_full.index(0), k)
        load_tile(v_desc, first + i * N, v_full.index(0), v)
        mbarrier.wait(k_full.index(0), i & 1)  # each iteration ends one phase
        s = warpgroup_mma(q, k.permute((1, 0)), no_scores, use_acc=False)
        p, m_i, l_i, alpha = online_step(s, m_i, l_i, scale, False)
        acc_o = rescale(acc_o, alpha)
        mbarrier.wait(v_full.index(0), i & 1)
        acc_o = warpgroup_mma(left_operand(p, D, dtype), v, acc_o)
    write_rows(acc_o, l_i, out, row)


@gluon.jit
def step2_kernel(q_desc, k_desc, v_desc, out, seqlen, scale):
    """Loads the next block while this one is multiplied."""
    N: gl.constexpr = k_desc.block_type.shape[0]
    D: gl.constexpr = k_desc.block_type.shape[1]
    dtype: gl.constexpr = q_desc.dtype
    q = gl.allocate_shared_memory(dtype, [64, D], q_desc.layout)
    k = gl.allocate_shared_memory(dtype, [2, N, D], k_desc.layout)
    v = gl.allocate_shared_memory(dtype, [2, N, D], v_desc.layout)
    q_full = make_barriers(1, 1)
    k_full = make_barriers(2, 1)
    v_full = make_barriers(2, 1)
    fence_async_shared()
    first = gl.program_id(1) * seqlen
    row = first + gl.program_id(0) * 64
    load_tile(q_desc, row, q_full.index(0), q)
    load_tile(k_desc, first, k_full.index(0), k.index(0))
    load_tile(v_desc, first, v_full.index(0), v.index(0))
    mbarrier.wait(q_full.index(0), 0)
    m_i, l_i, acc_o = empty_state(N, D)
    no_scores = gl.zeros([64, N], gl.float32, accumulator(N))
    for i in range(seqlen // N):
        stage, phase = i % 2, (i // 2) & 1
        following = (i + 1) * N
        if following < seqlen:
            row_after, other = first + following, 1 - stage
            load_tile(k_desc, row_after, k_full.index(other), k.index(other))
            load_tile(v_desc, row_after, v_full.index(other), v.index(other))
        mbarrier.wait(k_full.index(stage), phase)
        s = warpgroup_mma(
            q, k.index(stage).permute((1, 0)), no_scores, use_acc=False
        )
        p, m_i, l_i, alpha = online_step(s, m_i, l_i, scale, False)
        acc_o = rescale(acc_o, alpha)
        mbarrier.wait(v_full.index(stage), phase)
        acc_o = warpgroup_mma(left_operand(p, D, dtype), v.index(stage), acc_o)
    write_rows(acc_o, l_i, out, row)


@gluon.jit
def compute_in_order(
    WG: gl.constexpr, q, q_full, keys, values, out, row, seqlen, scale
):
    """A consumer warpgroup: it releases K and V as soon as it has read them."""
    N: gl.constexpr = keys.tiles.shape[1]
    D: gl.constexpr = keys.tiles.shape[2]
    m_i, l_i, acc_o = empty_state(N, D)
    no_scores = gl.zeros([64, N], gl.float32, accumulator(N))
    mbarrier.wait(q_full.index(WG), 0)
    for i in range(seqlen // N):
        k = wait_full(keys, i)
        s = warpgroup_mma(q.index(WG), k.permute((1, 0)), no_scores, use_acc=False)
        release(keys, i)  # S is there, so K has been read
        p, m_i, l_i, alpha = online_step(s, m_i, l_i, scale, False)
        acc_o = rescale(acc_o, alpha)
        v = wait_full(values, i)
        acc_o = warpgroup_mma(left_operand(p, D, q.dtype), v, acc_o)
        release(values, i)
    write_rows(acc_o, l_i, out, row + WG * 64)


@gluon.jit
def compute_ahead(
    WG: gl.constexpr, q, q_full, keys, values, out, row, seqlen, scale
):
    """Starts S of the next block before O += P V: softmax runs beside P V."""
    N: gl.constexpr = keys.tiles.shape[1]
    D: gl.constexpr = keys.tiles.shape[2]
    m_i, l_i, acc_o = empty_state(N, D)
    no_scores = gl.zeros([64, N], gl.float32, accumulator(N))
    mbarrier.wait(q_full.index(WG), 0)
    first_k = wait_full(keys, 0)
    s = warpgroup_mma(
        q.index(WG), first_k.permute((1, 0)), no_scores, use_acc=False
    )
    release(keys, 0)
    p, m_i, l_i, alpha = online_step(s, m_i, l_i, scale, False)
    p = left_operand(p, D, q.dtype)
    for i in range(1, seqlen // N):
        k = wait_full(keys, i)
        pending_s = warpgroup_mma(
            q.index(WG), k.permute((1, 0)), no_scores, use_acc=False, is_async=True
        )
        v = wait_full(values, i - 1)
        pending_o = warpgroup_mma(p, v, acc_o, is_async=True)
        s = warpgroup_mma_wait(1, deps=[pending_s])  # the older one is over
        release(keys, i)
        p, m_i, l_i, alpha = online_step(s, m_i, l_i, scale, False)
        acc_o = warpgroup_mma_wait(0, deps=[pending_o])
        release(values, i - 1)
        # after P V of the block before, whose maximum was another
        acc_o = rescale(acc_o, alpha)
        p = left_operand(p, D, q.dtype)
    last = seqlen // N - 1
    acc_o = warpgroup_mma(p, wait_full(values, last), acc_o)
    release(values, last)
    write_rows(acc_o, l_i, out, row + WG * 64)


@gluon.jit
def load_partition(q, q_full, keys, values, descs, row, first, seqlen):
    """The producer warp: Q once, then K and V, each when its stage is empty."""
    N: gl.constexpr = keys.tiles.shape[1]
    WARPGROUPS: gl.constexpr = q.shape[0]
    for wg in gl.static_range(WARPGROUPS):
        load_tile(descs[0], row + wg * 64, q_full.index(wg), q.index(wg))
    for i in range(seqlen // N):
        wait_empty(keys, i)
        fill(keys, i, descs[1], first + i * N)
        wait_empty(values, i)
        fill(values, i, descs[2], first + i * N)


def specialised(compute, warpgroups=1, load=load_partition, stages=2):
    """A step whose kernel has a load warp and one or two computing warpgroups."""
    WARPGROUPS, STAGES = gl.constexpr(warpgroups), gl.constexpr(stages)

    @gluon.jit
    def specialised_kernel(q_desc, k_desc, v_desc, out, seqlen, scale):
        D: gl.constexpr = q_desc.block_type.shape[1]
        q = gl.allocate_shared_memory(
            q_desc.dtype, [WARPGROUPS, 64, D], q_desc.layout
        )
        q_full = make_barriers(WARPGROUPS, 1)
        # empty when all warpgroups have read
        keys = make_pipeline(k_desc, STAGES, WARPGROUPS)
        values = make_pipeline(v_desc, STAGES, WARPGROUPS)
        # barriers are made before other warps and copies use them
        fence_async_shared()
        first = gl.program_id(1) * seqlen
        row = first + gl.program_id(0) * 64 * WARPGROUPS
        loading = (
            q,
            q_full,
            keys,
            values,
            (q_desc, k_desc, v_desc),
            row,
            first,
            seqlen,
        )
        first_half = (0, q, q_full, keys, values, out, row, seqlen, scale)
        if WARPGROUPS == 1:
            # The first function runs on the kernel's own four warps, the second on
            # one more, which needs 24 registers per thread: it computes next to
            # nothing
            gl.warp_specialize([(compute, first_half), (load, loading)], [1], [24])
        else:
            second_half = (1, q, q_full, keys, values, out, row, seqlen, scale)
            gl.warp_specialize(
                [(compute, first_half), (compute, second_half), (load, loading)],
                [4, 1],
                [232, 40],  # of 3 * 168 at the launch: see the lesson
            )

    return Step(specialised_kernel, 64 * warpgroups)
