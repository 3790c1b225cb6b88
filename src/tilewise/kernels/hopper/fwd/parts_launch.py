"""How many parts the keys of a chunk's tiles are divided into, and the memory of their states.

A part more is a tile more to begin and a state more to write and to fold, and fills SMs that have
no tile. Queries and heads of one sequence, the window and the GPU say how many, and its own keys
how many of these it uses: so neither batch mates nor the room for keys change a bit.
"""

from __future__ import annotations

from typing import Any

import triton

from ....tile.types import Parts, Pipeline
from ...common.arguments import strided
from ...common.program import checked
from ...common.workspace import Workspace
from ..launch import Launch
from .parts import FOLD_ROWS, fold_parts_kernel

SMS = 132  # of the GPU that calls on CPU tensors are planned for
BLOCKS = 256  # of 128 keys that a sequence is planned for, whose length only the device knows
MOST = 15  # 16 would be compiled again, as a multiple of 16
# In blocks of keys: what a part takes to begin and to end, and to be folded. An H100, headdim 128,
# one sequence: FlashAttention-3's time over ours of 32 to 384 queries on 8Ki and 32Ki keys was 0.24
# to 0.93 with whole tiles, 1.01 to 1.46 with these
COST_OF_PART, COST_OF_FOLD = 3.0, 0.7
# Of the time of whole tiles, so much at most; of several sequences parts cost more than they gain
MOST_TIME = 0.85


def count_of(tiles: int, sms: int, blocks: int = BLOCKS) -> int:
    """Parts of each of a sequence's `tiles`, which see so many blocks of keys: as many as take the
    least time where the sequence is alone, counted in blocks.

    >>> [count_of(n, 132) for n in (8, 16, 32, 64, 96, 128, 256)]
    [15, 8, 4, 2, 4, 1, 1]
    """

    def time(count: int) -> float:
        turns, length = triton.cdiv(tiles * count, sms), triton.cdiv(blocks, count)
        return turns * (length + COST_OF_PART) + COST_OF_FOLD * count

    whole = triton.cdiv(tiles, sms) * blocks
    best = min(range(1, MOST + 1), key=time)
    return best if tiles < sms and time(best) <= MOST_TIME * whole else 1


def in_parts(args: dict[str, Any], tile: Pipeline, count: int, work: Workspace) -> dict[str, Any]:
    """The arguments of a forward whose tiles have so many parts, with memory for their states."""
    queue = args["queue"]._replace(tiles=args["queue"].tiles * count)
    rows = tile.WARPGROUPS * 64 * queue.tiles
    acc_o = work.add("acc_o", (rows, tile.BLOCK_DV))
    parts = Parts(acc_o, work.add("m_i", (rows,)), work.add("l_i", (rows,)), count)
    return args | dict(queue=queue, optionals=args["optionals"]._replace(parts=parts))


def fold_of(args: dict[str, Any], plan: Any, out: Any) -> Launch:
    """The fold of all tiles, after a launch of a plan with these arguments."""
    queue, optionals = args["queue"], args["optionals"]
    named = dict(out=strided(out), lse=args["lse"], parts=optionals.parts)
    named |= dict(queue=queue._replace(counter=None), sizes=args["sizes"])
    named |= dict(optionals=optionals._replace(pages=None, parts=None))
    tiles = queue.tiles // optionals.parts.count
    programs = tiles * plan.tile.WARPGROUPS * (64 // FOLD_ROWS.value)
    constants = dict(FEATURES=plan.features, TILE=plan.tile)
    return checked(Launch(fold_parts_kernel, programs, named, constants, dict(num_warps=4)))
