"""V^T of an FP8 call, made in the kernel that reads it, beside its matmuls.

wgmma takes 8-bit operands along the dimension that is summed over, of P V the keys, so the kernel
needs V^T. A pass of its own before the kernel takes as long as its bytes. Here two warps of each
program, otherwise idle, transpose blocks of keys that a counter hands out, in the order in which
tiles ask for them; and a load warp waits for a block before it starts to copy it.

A program may wait for what another one transposes. That one has taken the number of the block, so
it runs; and the warps that transpose wait for nothing but their own copies. So no program waits for
one that has not begun, which may need the SM of a program that waits.
"""

from typing import Any, NamedTuple

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from ....tile.seqlen import lengths_of
from ....tile.varlen import interleave_heads
from ...common.quantized import COLUMNS
from ..compat import barrier, reinterpret, tma_load
from ..layouts import column_of, row_of, shared
from ..pipeline import Ring, advance, make_barrier, start, wait_full

WARPS = gl.constexpr(2)
STAGES = gl.constexpr(2)
KEYS = gl.constexpr(COLUMNS)  # of a block
# Of the shared words: how many blocks were handed out, and how many partitions are done; then a
# word for each block, which is 1 once its columns of V^T are there. All are 0 between launches. In
# a captured graph the first word is the counter of tiles, too
TAKEN, DONE, READY = gl.constexpr(1), gl.constexpr(2), gl.constexpr(32)

# Polls until the word of block $2 of a head is 1, and returns how many of its first blocks are
# known to be ready; at once where $3 says that enough are. Lanes read the words of 32 blocks.
#
# What warps of other programs have stored is seen behind the acquire. But TMA reads global memory
# through the async proxy, and an acquire orders accesses of the generic proxy alone. So a proxy
# fence follows (PTX ISA, "Async proxy"). `vote` gives all lanes one answer: none leaves the loop
# alone, behind which ptxas might let them diverge (see `copies_apart`).
AWAIT = """{
    .reg .pred is_ready, over;
    .reg .b32 word, lanes, lane;
    .reg .b64 at;
    mov.b32 $0, $3;
    setp.lt.s32 over, $2, $3;
    @over bra.uni THERE;
    mov.u32 lane, %laneid;
    add.s32 lane, lane, $2;
    sub.s32 word, $4, 1;
    min.s32 lane, lane, word;
    mad.wide.s32 at, lane, 4, $1;
    POLL:
    ld.acquire.gpu.global.b32 word, [at];
    setp.ne.s32 is_ready, word, 0;
    vote.sync.ballot.b32 lanes, is_ready, 0xffffffff;
    and.b32 word, lanes, 1;
    setp.eq.s32 over, word, 0;
    @over bra.uni POLL;
    fence.proxy.async.global;
    not.b32 lanes, lanes;
    brev.b32 lanes, lanes;
    clz.b32 lanes, lanes;
    add.s32 $0, lanes, $2;
    THERE:
}"""
_AWAIT = gl.constexpr(AWAIT)
# After a thread's stores of V^T, which TMA is to read, and before the word that says so
FENCE = "fence.proxy.async.global; mov.b32 $0, $1;"
_FENCE = gl.constexpr(FENCE)


class Transposing(NamedTuple):
    """V^T, its blocks, and what the programs of a launch share."""

    v_t: torch.Tensor  # uint8: (batch, nheads_k, HEADDIM_V, columns)
    words: torch.Tensor  # int32
    blocks: int  # of all heads
    levels: int  # of a head
    nheads_k: int
    heads: int  # of all sequences
    width: int  # heads whose blocks are interleaved, as their tiles are
    pieces: int  # of a block; not a constant, as a loop that is unrolled spills its addresses


@gluon.constexpr_function
def piece_keys(columns):
    """Keys that are transposed at a time: a thread has 64 numbers of them."""
    return 64 * 32 * WARPS.value // columns


@gluon.constexpr_function
def reading(columns):
    """A piece of V, (keys, columns), as threads read it: 8 neighbouring columns of each of 8 keys.

    These keys are neighbours in V^T: of column 4 t + 2 i + b and key 8 i + 2 t + b (`KEY_ORDER`)
    they have all b, i and one bit of t.
    """
    registers = [[0, 1], [0, 2], [0, 4], [1, 0], [8, 0], [2, 0]]
    lanes = [[4, 0], [16, 0], [0, 8], [0, 16], [0, 32]]
    warps = [[0, 64]] if columns == 128 else [[32, 0]]
    return gl.DistributedLinearLayout(registers, lanes, warps, [], [piece_keys(columns), columns])


@gluon.constexpr_function
def writing(columns):
    """The layout of the numbers of `reading`, in the same threads, as rows and columns of V^T: 8
    neighbouring columns of each of 8 rows, and four threads fill 32 bytes.
    """
    registers = [[0, 1], [0, 2], [0, 4], [1, 0], [2, 0], [4, 0]]
    lanes = [[0, 8], [0, 16], [8, 0], [16, 0], [32, 0]]
    warps = [[64, 0]] if columns == 128 else [[0, 32]]
    return gl.DistributedLinearLayout(registers, lanes, warps, [], [columns, piece_keys(columns)])


@gluon.jit
def make_values(DV: gl.constexpr):
    """Buffers for blocks of V, (KEYS, DV), which the warps that read them empty themselves."""
    layout: gl.constexpr = shared(KEYS, DV, dtype=gl.uint8)
    buffers = gl.allocate_shared_memory(gl.uint8, [STAGES, KEYS, DV], layout)
    return Ring(buffers, make_barrier(STAGES, 1), empty=0)


@gluon.jit
def transpose_partition(values, ring, transposing, call, FEATURES: gl.constexpr):
    """Transposes blocks until none is left. While one is transposed the next is copied, and the
    number of the one after that is asked for.
    """
    state = start()
    block = take_block(transposing)
    copy_block(values, ring, state=state, block=block, transposing=transposing)
    upcoming = take_block(transposing)
    while block < transposing.blocks:
        copy_block(values, ring, advance(state, STAGES), upcoming, transposing)
        after = take_block(transposing)
        wait_full(ring, state)
        transpose_block(ring, state, block, transposing, call, FEATURES)
        fence_stores(block)
        barrier()  # all threads have stored, and have read the stage
        gl.atomic_xchg(ready_word(block, transposing), 1, sem="release")
        state = advance(state, STAGES)
        block = upcoming
        upcoming = after
    leave(transposing, WARPS)


@gluon.jit
def take_block(transposing):
    """The number of a block that no other program has; from `blocks` on there are none."""
    return gl.atomic_add(transposing.words + TAKEN, 1, sem="relaxed")


@gluon.jit
def place_of_block(block, transposing):
    """A block's number in its head, the last keys first, and its head over all sequences."""
    return interleave_heads(block, transposing.levels, transposing.heads, transposing.width)


@gluon.jit
def ready_word(block, transposing):
    """The word that says that a block is transposed."""
    level, head = place_of_block(block, transposing)
    return transposing.words + (READY + head * transposing.levels + level)


@gluon.jit
def copy_block(values, ring, state, block, transposing):
    """Starts to copy the keys of a block, if there is one."""
    exists = block < transposing.blocks
    level, head = place_of_block(gl.minimum(block, transposing.blocks - 1), transposing)
    first_key = (transposing.levels - 1 - level) * KEYS
    full = ring.full.index(state.stage)
    shape: gl.constexpr = values.block_type.shape
    mbarrier.expect(full, values.block_type.nbytes, pred=exists)
    coordinates = [head // transposing.nheads_k, head % transposing.nheads_k, first_key, 0]
    tma_load(values, coordinates, full, ring.buffers.index(state.stage).reshape(shape), pred=exists)


@gluon.jit
def transpose_block(ring, state, block, transposing, call, FEATURES: gl.constexpr):
    """Stores the columns of V^T of a block. Those past a sequence's end are 0."""
    DV: gl.constexpr = ring.buffers.shape[2]
    N: gl.constexpr = piece_keys(DV)
    PIECES: gl.constexpr = KEYS // N
    LAYOUT: gl.constexpr = shared(N, DV, dtype=gl.uint8)
    pieces = reinterpret(ring.buffers, gl.uint8, shape=[STAGES * PIECES, N, DV], layout=LAYOUT)
    FROM: gl.constexpr = reading(DV)
    TO: gl.constexpr = writing(DV)
    level, head = place_of_block(block, transposing)
    first_key = (transposing.levels - 1 - level) * KEYS
    columns = transposing.levels * KEYS
    seqlen_k = lengths_of(
        head // transposing.nheads_k, call.sizes, optionals=call.optionals, FEATURES=FEATURES
    ).seqlen_k
    of_head = transposing.v_t + head.to(gl.int64) * (FEATURES.HEADDIM_V * columns)
    rows = gl.arange(0, DV, row_of(TO))[:, None]
    offs = rows * columns + gl.arange(0, N, column_of(TO))[None, :]
    for piece in range(transposing.pieces):
        key = first_key + piece * N
        x = pieces.index(state.stage * PIECES + piece).load(FROM)  # (keys, columns of V)
        if FEATURES.SEQUSED_K:
            is_used = key + gl.arange(0, N, row_of(FROM)) < seqlen_k
            x = gl.where(is_used[:, None], x, 0)
        # Keys 16 h + 8 i + 2 t + b to columns 16 h + 4 t + 2 i + b
        x_t = x.reshape([N // 16, 2, 4, 2, DV]).permute(4, 0, 2, 1, 3).reshape([DV, N])
        x_t = gl.convert_layout(x_t, TO)
        gl.store(of_head + key + offs, x_t, mask=rows < FEATURES.HEADDIM_V)


@gluon.jit
def fence_stores(block):
    """Orders this thread's stores before reads by TMA."""
    gl.inline_asm_elementwise(_FENCE, "=r,r", [block], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def await_values(transposing, head, n_start, known):
    """Waits until the block of V^T that column `n_start` is in is ready; returns how many of the
    head's first blocks are. `known` of them are known to be.
    """
    level = transposing.levels - 1 - n_start // KEYS
    flags = transposing.words + (READY + head * transposing.levels)
    return gl.inline_asm_elementwise(
        _AWAIT,
        "=&r,l,r,r,r",
        [flags, level, known, transposing.levels],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def leave(transposing, NUM_WARPS: gl.constexpr):
    """At the end of a partition that takes, or waits for, blocks: the last one of all programs
    resets the words for the next launch.
    """
    done = gl.atomic_add(transposing.words + DONE, 1, sem="acq_rel")
    if done == 2 * gl.num_programs(0) - 1:
        COUNT: gl.constexpr = 32 * NUM_WARPS
        offs = gl.arange(0, COUNT, gl.BlockedLayout([1], [32], [NUM_WARPS], [0]))
        for first in range(TAKEN, READY + transposing.blocks, COUNT):
            exists = first + offs < READY + transposing.blocks
            gl.store(transposing.words + first + offs, 0, mask=exists)


def _await(words: Any, level: Any, ready: Any, levels: Any) -> torch.Tensor:
    """Returns how many words are known to be 1: a poll may have seen some of those that are."""
    from gluon_emulator.hopper.machine import running

    partition, place, ready, count = running(), int(level), int(ready), int(levels)
    if place >= ready:
        flags = words.flat[words.offset : words.offset + count]
        partition.wait(lambda: int(flags[place]) != 0, lambda: f"waits for word {place}")
        ready = place + 1
        while ready < count and int(flags[ready]) and partition.machine.random.random() < 0.9:
            ready += 1
    return torch.tensor(ready, dtype=torch.int32)


# What this assembly means to the emulator
ASM = {AWAIT: _await, FENCE: lambda block: block}
