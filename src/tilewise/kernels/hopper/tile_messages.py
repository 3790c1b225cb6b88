"""Work-tile messages: a tile's integers, from the load warp to every other partition.

The load warp computes the work tile of a tile number and sends the fields of a NamedTuple through a
ring of two stages in shared memory. All readers process the same tiles, and the otherwise idle warp
does the divisions.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from .pipeline import make_ring, release, wait_empty, wait_full


@gluon.constexpr_function
def words_of(count):
    """The size of a message of `count` integers, a power of two as all tiles are."""
    return 1 << (count - 1).bit_length()


@gluon.jit
def make_messages(COUNT: gl.constexpr, READERS: gl.constexpr):
    """Allocates a ring of two messages of COUNT integers, which READERS partitions read."""
    layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    return make_ring(gl.int32, [words_of(COUNT)], layout, 2, 1, READERS)


@gluon.jit
def send(messages, state, fields, BY_LANE: gl.constexpr = False):
    """Sends a tuple of integers, once all readers have released the stage. BY_LANE: each lane of
    the warp holds one integer, which takes fewer registers than all of them in each lane.
    """
    WORDS: gl.constexpr = messages.buffers.shape[1]
    layout: gl.constexpr = gl.BlockedLayout([1 if BY_LANE else WORDS], [32], [1], [0])
    index = gl.arange(0, WORDS, layout)
    # The order of selections that takes the fewest instructions (Triton 3.6)
    START: gl.constexpr = 1 if BY_LANE else len(fields) - 1
    message = gl.where(index == 0, fields[0], fields[START])
    for i in gl.static_range(1, len(fields)):
        if i != START:
            message = gl.where(index == i, fields[i], message)
    wait_empty(messages, state)
    messages.buffers.index(state.stage).store(message)
    mbarrier.arrive(messages.full.index(state.stage), count=1)


@gluon.jit
def receive(messages, state, COUNT: gl.constexpr, WARPS: gl.constexpr = 4):
    """The COUNT integers of a message, in every thread of a partition of WARPS warps."""
    WORDS: gl.constexpr = messages.buffers.shape[1]
    wait_full(messages, state)
    layout: gl.constexpr = gl.BlockedLayout([WORDS], [32], [WARPS], [0])
    message = messages.buffers.index(state.stage).load(layout)
    release(messages, state)
    fields = ()
    for i in gl.static_range(COUNT):
        fields = fields + (field(message, i),)
    return fields


@gluon.jit
def field(message, i: gl.constexpr):
    """One integer of a message, of which each thread has all."""
    index = gl.arange(0, message.shape[0], message.type.layout)
    return gl.sum(gl.where(index == i, message, 0), 0)
