"""Pipelines of the backward: the load warp's sources, and the rings of tiles in shared memory."""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

from ..layouts import column_groups, shared
from ..pipeline import KVRing, Ring, make_barrier
from ..tile_messages import make_messages
from ..work import WORK_FIELDS
from .block_metadata import make_metadata
from .ordered_add import AddBarriers
from .work_tile import RAGGED_FIELDS


class Sources(NamedTuple):
    """The load warp's sources."""

    q: tma.tensor_descriptor
    do: tma.tensor_descriptor
    k: tma.tensor_descriptor
    v: tma.tensor_descriptor
    stats: tma.tensor_descriptor  # -lse and -delta
    bias: tma.tensor_descriptor  # where it is copied, else None
    heads_per_batch: tuple  # with `seqused_k`: heads of K, and of V, from a batch to the next


class QueryRing(NamedTuple):
    """The pipeline of query blocks, with their statistics and metadata: two stages."""

    q: gl.shared_memory_descriptor  # (2, BLOCK_M, BLOCK_D), or groups of its columns
    do: gl.shared_memory_descriptor  # (2, BLOCK_M, BLOCK_DV)
    minus_lse: gl.shared_memory_descriptor  # (2, 1, BLOCK_M)
    minus_delta: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    metadata: gl.shared_memory_descriptor  # (4, WORDS), see block_metadata.py


class Rings(NamedTuple):
    """All pipelines of the kernel."""

    keys: KVRing  # tiles of K and V: one stage
    queries: QueryRing
    score_buffers: tuple  # P and dS between the matmul warpgroups
    messages: Ring
    add_barriers: AddBarriers
    bias: tuple = 0  # see bias.py


@gluon.jit
def make_queries(dtype: gl.constexpr, TILE: gl.constexpr):
    """Allocates the pipeline of queries, with two consumers."""
    M: gl.constexpr = TILE.BLOCK_M
    D: gl.constexpr = TILE.BLOCK_D // column_groups(TILE.BLOCK_D)
    DV: gl.constexpr = TILE.BLOCK_DV
    GROUPS: gl.constexpr = column_groups(TILE.BLOCK_D)
    q = gl.allocate_shared_memory(dtype, [2 * GROUPS, M, D], shared(M, D, dtype=dtype))
    do = gl.allocate_shared_memory(dtype, [2, M, DV], shared(M, DV, dtype=dtype))
    row: gl.constexpr = shared(1, M, dtype=gl.float32)
    minus_lse = gl.allocate_shared_memory(gl.float32, [2, 1, M], row)
    minus_delta = gl.allocate_shared_memory(gl.float32, [2, 1, M], row)
    full, empty = make_barrier(2, 1), make_barrier(2, 2)
    return QueryRing(q, do, minus_lse, minus_delta, full, empty, make_metadata())


@gluon.jit
def make_tile_messages(TILE: gl.constexpr):
    """The work-tile messages to both matmul warpgroups, and, where they add to dQ, to two warps of
    ordered accumulation or one that counts tiles.
    """
    READERS: gl.constexpr = (4 if TILE.ORDERED else 3) if TILE.HAS_DQ else 2
    COUNT: gl.constexpr = RAGGED_FIELDS if TILE.RAGGED else WORK_FIELDS
    return make_messages(COUNT, READERS)
