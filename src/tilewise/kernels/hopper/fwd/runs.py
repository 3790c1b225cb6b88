"""Runs of rows of one sequence whose keys arrive while the kernel runs: the load warp waits for the
piece that a block of keys lies in, then starts its copies.

DMA brings keys and values of other GPUs piece by piece, on a stream of its own, which writes after
each piece how many there are. The order of a tile's blocks is that of one GPU, so that each row
gets the same bits: a program waits for what comes next, and never takes another block first. A
program that waits holds its SM. So nothing that it waits for may need one.
"""

from typing import Any, NamedTuple

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ....tile.types import Lengths, Sequence
from ....tile.varlen import interleave_heads
from ...common.device_words import ARRIVED, FAILED, LATE
from ..block_list import visited
from .varlen import Ragged

# The host's table: its numbers, two orders of a head's tiles, and what each 2^SHIFT keys wait for
HEAD, FIELDS, SHIFT = gl.constexpr(5), gl.constexpr(6), gl.constexpr(8)
_FAILED, _ARRIVED, _LATE = gl.constexpr(FAILED), gl.constexpr(ARRIVED), gl.constexpr(LATE)

# Polls until $1 holds at least $2, and returns the least that a lane has read, at once where $3
# says that so many have come; after $4 ns, or where another wait has failed, what there is.
#
# DMA has written the keys, and a write of its stream, behind a fence of system scope, the word: the
# acquire at system scope orders both before what this thread does next. But TMA reads global memory
# through the async proxy, and an acquire orders accesses of the generic proxy alone. So a proxy
# fence comes between (PTX ISA, "Async proxy", membar/fence). It is executed by all lanes, as one of
# them starts the copies. `redux` and `vote` give all lanes one answer: no lane leaves the loop
# alone, behind which ptxas might let them diverge (see `copies_apart`).
AWAIT = """{
    .reg .pred comes, over;
    .reg .b32 failed;
    .reg .b64 begun, now;
    mov.b32 $0, $3;
    setp.ge.s32 comes, $3, $2;
    @comes bra.uni THERE;
    mov.u64 begun, %globaltimer;
    POLL:
    ld.acquire.sys.global.b32 $0, [$1];
    redux.sync.min.s32 $0, $0, 0xffffffff;
    setp.ge.s32 comes, $0, $2;
    @comes bra.uni CAME;
    ld.relaxed.sys.global.b32 failed, [$1 + -4];  // FAILED lies before ARRIVED
    mov.u64 now, %globaltimer;
    sub.s64 now, now, begun;
    setp.gt.s64 over, now, $4;
    setp.ne.or.s32 over, failed, 0, over;
    vote.sync.any.pred over, over, 0xffffffff;
    @!over bra.uni POLL;
    CAME:
    fence.proxy.async.global;
    THERE:
}"""
_AWAIT = gl.constexpr(AWAIT)


class ArrivedBlock(NamedTuple):
    """A block of keys as `RaggedKeyBlock` has it, and how many pieces had arrived."""

    head: tuple  # of K, and of V
    stop: gl.tensor
    size: gl.tensor
    n_start: gl.tensor
    arrived: gl.tensor


class RunTable(NamedTuple):
    """`Runs`, and the numbers of its table."""

    of_tiles: gl.tensor
    of_keys: gl.tensor
    tiles: gl.tensor  # of a head
    heads: gl.tensor  # key heads of a group
    rows: gl.tensor  # keys of the sequence: from a group to the next
    pieces: gl.tensor  # of each group
    mixed: gl.tensor  # query heads of a group whose tiles are interleaved
    words: gl.tensor
    limit: gl.tensor


@gluon.jit
def open_runs(runs):
    """Reads the numbers of the table."""
    table = runs.table
    tiles = gl.load(table)
    of_tiles = table + HEAD
    of_keys = of_tiles + 2 * FIELDS * tiles
    heads, rows, pieces = gl.load(table + 1), gl.load(table + 2), gl.load(table + 3)
    mixed, limit = gl.load(table + 4), gl.cast(runs.limit, gl.int64)
    return RunTable(of_tiles, of_keys, tiles, heads, rows, pieces, mixed, runs.words, limit)


@gluon.jit
def no_block():
    """The state before the first block, when nothing is known to have arrived."""
    return ArrivedBlock((0, 0), 0, size=0, n_start=0, arrived=0)


@gluon.jit
def open_run(tile, call, FEATURES: gl.constexpr, TILE: gl.constexpr):
    """The work tile of a tile number: groups of key heads follow each other, as their keys arrive.
    The first group has an order of tiles of its own.
    """
    runs = call.runs
    heads = runs.heads * FEATURES.GROUP
    of_group = runs.tiles * heads
    group = tile // of_group
    place, head = interleave_heads(tile - group * of_group, runs.tiles, heads, runs.mixed)
    place += gl.where(group > 0, runs.tiles, 0)
    head += group * heads
    entry = runs.of_tiles + place * FIELDS
    m_start = gl.load(entry)
    seqlen_q = gl.load(entry + 1)
    first_q = gl.load(entry + 2)
    first_k = gl.load(entry + 3)
    seqlen_k = gl.load(entry + 4)
    diagonal = gl.load(entry + 5)
    lengths = Lengths(seqlen_q, seqlen_k, diagonal=diagonal)
    seq = Sequence(lengths, 0.0, numbers=call.numbers, batch=0, head=head, modifiers=call.modifiers)
    blocks = visited(m_start, seq, FEATURES=FEATURES, TILE=TILE)
    last = gl.maximum(blocks.stop - 1, blocks.first)
    return Ragged(
        m_start,
        head,
        batch=0,
        last=last,
        first=blocks.first,
        full_first=blocks.full_first,
        full_stop=blocks.full_stop,
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_k,
        diagonal=diagonal,
        first_q=first_q,
        first_k=first_k,
        rows_q=seqlen_q,
    )


@gluon.jit
def arrived_block(work, head_k, n_start, arrived, runs):
    """The coordinates of a block of keys."""
    group = head_k // runs.heads
    head = head_k - group * runs.heads
    stop = group * runs.rows + work.first_k + work.seqlen_k
    return ArrivedBlock((head, head), stop, size=work.seqlen_k, n_start=n_start, arrived=arrived)


@gluon.jit
def await_keys(work, head_k, n_start, arrived, runs, TILE: gl.constexpr):
    """Waits until the pieces are there that hold rows of a block; `arrived` are known to be. A
    block lies in one or two entries of the table. Of what does not come within the limit the
    number is left, and no program waits again.
    """
    first = work.first_k + n_start
    last = work.first_k + gl.maximum(gl.minimum(n_start + TILE.BLOCK_N, work.seqlen_k), 1) - 1
    before, after = (
        gl.load(runs.of_keys + (first >> SHIFT)),
        gl.load(runs.of_keys + (last >> SHIFT)),
    )
    least = gl.maximum(before, after)
    group = head_k // runs.heads
    least = gl.where(least > 0, group * runs.pieces + least, 0)
    arrived_now = gl.inline_asm_elementwise(
        _AWAIT,
        "=&r,l,r,r,l",
        [runs.words + _ARRIVED, least, arrived, runs.limit],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )
    is_late = arrived_now < least
    gl.store(runs.words + _LATE, least, mask=is_late)
    gl.store(runs.words + _FAILED, 1, mask=is_late)
    return gl.maximum(arrived_now, arrived)


def _await(word: Any, least: Any, arrived: Any, limit: Any) -> torch.Tensor:
    """Returns what a poll has read, which may be less than the word holds by now."""
    from gluon_emulator.hopper.machine import running

    partition, least, arrived = running(), int(least), int(arrived)
    if arrived < least:
        if int(limit) > 0:
            partition.wait(
                lambda: int(word.flat[word.offset]) >= least,
                lambda: f"waits for piece {least}, of which {int(word.flat[word.offset])} arrived",
            )
        arrived = int(word.flat[word.offset])
        if arrived > least:
            arrived = partition.machine.random.choice((least, arrived))
        partition.arrived = max(partition.arrived, arrived)
    return torch.tensor(arrived, dtype=torch.int32)


# What this assembly means to the emulator
ASM = {AWAIT: _await}
