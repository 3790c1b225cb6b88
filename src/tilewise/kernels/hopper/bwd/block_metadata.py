"""Per-block metadata: what matmul warpgroups cannot compute cheaply of a block of queries.

The indices of a block mask's blocks must be loaded, and a head's Philox output for dropout takes
60 instructions. The load warp does both: for each block that it loads it writes metadata to shared
memory, from where each thread reads it in one broadcast.

Metadata needs no barriers of its own. It is written before the load warp arrives at `full` of the
block's stage, and may be read after a wait for that. There are four slots, although Q has two
stages: the dQ of a block is added one iteration later, when its stage of Q has been released. The
metadata of step i is last read before the reader releases step i + 1, or, after the last block of a
tile, at the latest before the next tile's first iteration; that of step i + 4 is written when all
readers have released step i + 2.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ....tile.dropout import Stream, stream_of
from ..tile_messages import field
from ..work import is_partial
from .query_blocks import QueryBlock, counts_heads

METADATA_WORDS = gl.constexpr(8)


class BlockMetadata(NamedTuple):
    """A block of queries, as `query_blocks.Block`, with its mask flag and random state."""

    head: gl.tensor
    m_block: gl.tensor
    is_partial: gl.tensor  # whether it needs a mask
    stream: Stream  # of the head's random numbers


@gluon.jit
def make_metadata():
    """Allocates four slots."""
    layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    return gl.allocate_shared_memory(gl.int32, [4, METADATA_WORDS], layout)


@gluon.jit
def write_metadata(metadata, state, work, block, needs_mask, call, FEATURES: gl.constexpr):
    """Writes the metadata of the block that is loaded into a stage of the queries."""
    index = gl.arange(0, METADATA_WORDS, gl.BlockedLayout([METADATA_WORDS], [32], [1], [0]))
    message = gl.where(index == 0, block.head, block.m_block)
    message = gl.where(index == 2, needs_mask.to(gl.int32), message)
    if FEATURES.DROPOUT:
        stream = stream_of(call.optionals.dropout_rng, work.batch, head=block.head)
        for i in gl.static_range(4):
            message = gl.where(index == 4 + i, stream[i].to(gl.int32, bitcast=True), message)
    # Phases alternate, so this is the step modulo four
    metadata.index(state.stage + 2 * state.phase).store(message)


@gluon.jit
def read_metadata(metadata, step):
    """Reads the metadata of a step's block."""
    layout: gl.constexpr = gl.BlockedLayout([METADATA_WORDS], [32], [4], [0])
    message = metadata.index(step & 3).load(layout)
    stream = Stream(
        field(message, 4).to(gl.uint32, bitcast=True),
        field(message, 5).to(gl.uint32, bitcast=True),
        field(message, 6).to(gl.uint32, bitcast=True),
        field(message, 7).to(gl.uint32, bitcast=True),
    )
    return BlockMetadata(field(message, 0), field(message, 1), field(message, 2), stream)


@gluon.jit
def block_at(block, metadata, step, TILE: gl.constexpr):
    """The block of a step, which is `block` where blocks follow from arithmetic."""
    if TILE.HAS_METADATA:
        return read_metadata(metadata, step)
    else:
        return block


@gluon.jit
def block_behind(block, metadata, step, work, FEATURES: gl.constexpr, TILE: gl.constexpr):
    """The block of the step before, given that of `step` where blocks follow from arithmetic."""
    if TILE.HAS_METADATA:
        return read_metadata(metadata, step - 1)
    else:
        head, m_block = block.head, block.m_block - 1
        if FEATURES.GROUP > 1 or TILE.SPREAD > 0 or not (FEATURES.LEFT or FEATURES.RIGHT):
            m_block = gl.where(block.m_block == work.first, work.last, m_block)
        if counts_heads(FEATURES, TILE):
            head -= (block.m_block == work.begin).to(gl.int32)
        return QueryBlock(head, m_block)


@gluon.jit
def needs_mask(block, work, TILE: gl.constexpr):
    """Whether a block needs a mask."""
    if TILE.HAS_METADATA:
        return block.is_partial != 0
    else:
        return is_partial(block.m_block, work)
