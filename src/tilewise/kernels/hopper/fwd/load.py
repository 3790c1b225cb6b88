"""The load warp of the forward: it keeps the rings full and computes nothing.

One thread of it starts the copies; Hopper's copy engine (TMA) does the rest. It runs ahead of the
matmuls, into the next tile, until the rings are full.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from ....tile.seqlen import modifiers_of
from ....tile.varlen import Hint
from ..bias import copy_bias
from ..compat import tma_load
from ..mailbox import send
from ..pipeline import Cursor, after, load, start, wait_empty
from ..tma import load_ragged
from ..work import END, LANES, Call, draw, drawn_tile, key_block, key_head, set_back
from .varlen import find_tile, no_more, open_in_batch, open_ragged, place_in


class Sources(NamedTuple):
    """What is copied."""

    q: tma.tensor_descriptor
    k: tma.tensor_descriptor
    v: tma.tensor_descriptor
    bias: tma.tensor_descriptor  # where it is copied, else None
    further: tuple  # with `seqused_k`: heads of K, and of V, from a batch to the next


class Block(NamedTuple):
    """Where a block of keys lies."""

    batch: gl.tensor
    head: gl.tensor
    n_start: gl.tensor


class RaggedBlock(NamedTuple):
    """The same where a sequence may end inside the tensor: see `tma`."""

    head: tuple  # of K, and of V
    stop: gl.tensor
    size: gl.tensor
    n_start: gl.tensor


class Progress(NamedTuple):
    """Where the warp stands in the rings, and the block whose V is still to come."""

    mail: Cursor
    q: Cursor
    steps: Cursor
    bias: Cursor
    before: Block
    has_before: gl.tensor  # the first step of all has no V, the last one no K


@gluon.jit
def load_partition(sources, rings, call, FEATURES: gl.constexpr, TILE: gl.constexpr):
    modifiers = modifiers_of(call.optionals)
    call = Call(call.queue, call.optionals, call.sizes, call.numbers, modifiers)
    at = Progress(start(), start(), start(), start(), nowhere(FEATURES), False)
    tile = gl.program_id(0)
    if FEATURES.PACKED:
        found = find_tile(tile, Hint(0, 0), call, FEATURES, TILE)
        while found.is_tile:
            m_start = found.m_block * TILE.BLOCK_M
            work = open_ragged(m_start, found.head, found.batch, call, FEATURES, TILE)
            at, tile = load_tile(sources, rings, at, work, call, FEATURES, TILE)
            found = find_tile(tile, found.hint, call, FEATURES, TILE)
        tiles = found.tiles
        has_values = at.has_before  # there may have been no tile
    else:
        tiles = call.queue.tiles
        while tile < tiles:
            work = open_in_batch(tile, call, FEATURES, TILE)
            at, tile = load_tile(sources, rings, at, work, call, FEATURES, TILE)
        has_values = True
    set_back(call.queue, tile, tiles)
    load_step(rings.steps, at.steps, sources, at.before, False, at.before, has_values)
    send(rings.mail, at.mail, no_more(END, FEATURES))


@gluon.jit
def load_tile(sources, rings, at, work, call, FEATURES: gl.constexpr, TILE: gl.constexpr):
    """Says what the tile is, and loads its queries and the keys that they visit. Returns the next
    tile's number, too.
    """
    q_shape: gl.constexpr = sources.q.block_type.shape
    WARPGROUPS: gl.constexpr = TILE.WARPGROUPS
    mail, q_at, steps_at, bias_at, before, has_before = at
    send(rings.mail, mail, work)
    mail = after(mail, 2)
    batch, first_q = place_in(work, FEATURES)
    head_k, member = key_head(work.head, FEATURES, TILE)
    for i in gl.static_range(WARPGROUPS):
        m_start = first_q + work.start + i * (64 // TILE.PACK)
        load(rings.q[i], q_at, sources.q, [batch, head_k, m_start, member, 0], q_shape)
    q_at = after(q_at, TILE.Q_STAGES)
    last = work.last - work.first
    drawn = gl.zeros([32], gl.int32, LANES)
    for i in range(last + 1):
        # The answer takes a microsecond, which the full ring hides. A number drawn sooner would
        # fall to a program with a long tile still before it, and another would wait for that at
        # the end (headdim 256 causal, 16Ki: 0.97 of FlashAttention-3)
        drawn = draw(call.queue, i == last)
        n_start = key_block(work, i, call, FEATURES, TILE) * TILE.BLOCK_N
        block = block_of(work, batch, head_k, n_start, sources, FEATURES)
        load_step(rings.steps, steps_at, sources, block, True, before, has_before)
        steps_at = after(steps_at, TILE.STAGES)
        copy_bias(sources.bias, rings.bias, bias_at, work, n_start, call, TILE)
        bias_at = after(bias_at, 1)
        before = block
        has_before = True
    return Progress(mail, q_at, steps_at, bias_at, before, has_before), drawn_tile(drawn)


@gluon.jit
def nowhere(FEATURES: gl.constexpr):
    """Before the first block."""
    if FEATURES.PACKED or FEATURES.SEQUSED_K:
        return RaggedBlock((0, 0), 0, 0, 0)
    else:
        return Block(0, 0, 0)


@gluon.jit
def block_of(work, batch, head_k, n_start, sources, FEATURES: gl.constexpr):
    """Where a block of keys lies."""
    if FEATURES.PACKED or FEATURES.SEQUSED_K:
        heads = head_k + batch * sources.further[0], head_k + batch * sources.further[1]
        return RaggedBlock(heads, work.first_k + work.seqlen_k, work.seqlen_k, n_start)
    else:
        return Block(batch, head_k, n_start)


@gluon.jit
def load_step(steps, at, sources, keys, has_keys, values, has_values):
    """Fills a slot with K of one block and V of another, as soon as it is empty; the copy engine
    arrives at `full` when the last byte of both is there.
    """
    K_BYTES: gl.constexpr = sources.k.block_type.nbytes
    V_BYTES: gl.constexpr = sources.v.block_type.nbytes
    wait_empty(steps, at)
    full = steps.full.index(at.slot)
    mbarrier.expect(full, K_BYTES + V_BYTES, pred=has_keys & has_values)
    mbarrier.expect(full, K_BYTES, pred=has_keys & (not has_values))
    mbarrier.expect(full, V_BYTES, pred=(not has_keys) & has_values)
    load_rows(sources.k, keys, 0, full, steps.k.index(at.slot), has_keys)
    load_rows(sources.v, values, 1, full, steps.v.index(at.slot), has_values)


@gluon.jit
def load_rows(desc, block, WHICH: gl.constexpr, full, slot, pred):
    """Of K (WHICH is 0) or V."""
    shape: gl.constexpr = desc.block_type.shape
    if len(shape) == 5:
        stop, size, head = block.stop, block.size, block.head[WHICH]
        load_ragged(desc, stop, size, head, block.n_start, full, slot, pred)
    else:
        at = [block.batch, block.head, block.n_start, 0]
        tma_load(desc, at, full, slot.reshape(shape), pred=pred)
