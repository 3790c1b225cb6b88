"""Labels: what matmul warpgroups have to know of a block of queries where that is no arithmetic.

The blocks that a block mask lists follow from no rule, and a head's random numbers for dropout take
60 instructions. The load warp has time for both. For each block it loads it writes a label into
shared memory, from where each thread reads it in one broadcast.

A label needs no barriers of its own. It is written before the load warp arrives at `full` of the
block's stage, and may be read after a wait for that. There are four, although Q has two stages: the
dQ of a block is added an iteration late, when its stage of Q is long released. The label of step i
is last read before the reader releases step i + 1, or, after the last block of a tile, at the
latest before the next tile's first iteration; that of step i + 4 is written when all readers have
released step i + 2.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ....tile.dropout import Stream, stream_of
from ..mailbox import field
from ..work import is_partial
from .query_blocks import block_before

WORDS = gl.constexpr(8)


class Label(NamedTuple):
    """A block of queries, as `query_blocks.Block`, and what else is known of it."""

    head: gl.tensor
    m_block: gl.tensor
    is_partial: gl.tensor  # whether it needs a mask
    stream: Stream  # of the head's random numbers


@gluon.jit
def make_labels():
    """Room for four."""
    layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    return gl.allocate_shared_memory(gl.int32, [4, WORDS], layout)


@gluon.jit
def write_label(labels, state, work, block, needs_mask, call, FEATURES: gl.constexpr):
    """Of the block that goes into a stage of the queries."""
    word = gl.arange(0, WORDS, gl.BlockedLayout([WORDS], [32], [1], [0]))
    label = gl.where(word == 0, block.head, block.m_block)
    label = gl.where(word == 2, needs_mask.to(gl.int32), label)
    if FEATURES.DROPOUT:
        stream = stream_of(call.optionals.dropout_rng, work.batch, block.head)
        for i in gl.static_range(4):
            label = gl.where(word == 4 + i, stream[i].to(gl.int32, bitcast=True), label)
    # Phases take turns, so this is the step modulo four
    labels.index(state.stage + 2 * state.phase).store(label)


@gluon.jit
def read_label(labels, step):
    """Of the block of a step."""
    layout: gl.constexpr = gl.BlockedLayout([WORDS], [32], [4], [0])
    label = labels.index(step & 3).load(layout)
    stream = Stream(
        field(label, 4).to(gl.uint32, bitcast=True),
        field(label, 5).to(gl.uint32, bitcast=True),
        field(label, 6).to(gl.uint32, bitcast=True),
        field(label, 7).to(gl.uint32, bitcast=True),
    )
    return Label(field(label, 0), field(label, 1), field(label, 2), stream)


@gluon.jit
def block_at(block, labels, step, TILE: gl.constexpr):
    """The block of a step, which is `block` where blocks follow from arithmetic."""
    if TILE.LABELLED:
        return read_label(labels, step)
    else:
        return block


@gluon.jit
def block_behind(block, labels, step, work, FEATURES: gl.constexpr, TILE: gl.constexpr):
    """The block of the step before, given that of `step` where blocks follow from arithmetic."""
    if TILE.LABELLED:
        return read_label(labels, step - 1)
    else:
        return block_before(block, work, FEATURES)


@gluon.jit
def needs_mask(block, work, TILE: gl.constexpr):
    """Whether a block needs a mask."""
    if TILE.LABELLED:
        return block.is_partial != 0
    else:
        return is_partial(block.m_block, work)
