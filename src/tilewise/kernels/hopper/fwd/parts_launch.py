"""How many parts the keys of a chunk's tiles are divided into, and the memory of their states.

A part more is a tile more to begin and a state more to write and to fold, and fills SMs that have
no tile. Queries and heads of one sequence, the window and the GPU say how many, and its own keys
how many of these it uses: so neither batch mates nor the room for keys change a bit. Of how many
tiles one program computes all parts is another question, which changes no bit: all tiles of a batch
say so.
"""

from __future__ import annotations

from typing import Any

import torch
import triton

from ....tile.types import Parts, Pipeline
from ...common.arguments import strided
from ...common.building import num_sms
from ...common.piece_states import states_in
from ...common.program import checked
from ...common.workspace import Workspace
from ..launch import Launch, programs_of
from .parts import FOLD_ROWS, fold_parts_kernel

SMS = 132  # of the GPU that calls on CPU tensors are planned for
BLOCKS = 256  # of 128 keys that a sequence is planned for, whose length only the device knows
MOST = 15  # 16 would be compiled again, as a multiple of 16
# In blocks of keys: what a part takes to begin and to end, and to be folded. An H100, headdim 128,
# one sequence: FlashAttention-3's time over ours of 32 to 384 queries on 8Ki and 32Ki keys was 0.24
# to 0.93 with whole tiles, 1.01 to 1.46 with these
COST_OF_PART, COST_OF_FOLD = 3.0, 0.7
MOST_TIME = 0.85  # of that of whole tiles
# The same where all SMs write states, and what a part takes more of a tile that one program has
COST_OF_STATE, COST_WITHIN = 5.0, 2.0


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


def whole_of(tiles: int, count: int, sms: int) -> int:
    """How many of a call's `tiles`, each of `count` parts, have one program: all, or whole turns of
    the SMs, or none.

    >>> [whole_of(32 * batch, 4, 132) for batch in (1, 2, 3, 4, 5, 8)]
    [0, 0, 0, 128, 132, 256]
    """

    def time(whole: int) -> float:
        parts = triton.cdiv((tiles - whole) * count, sms) * (BLOCKS / count + COST_OF_STATE)
        return triton.cdiv(whole, sms) * (BLOCKS + COST_WITHIN * count) + parts

    return min((0, tiles // sms * sms, tiles), key=time)


def sms_of(device: torch.device) -> int:
    """SMs that a call is planned for."""
    return num_sms(device) if device.type == "cuda" else SMS


def in_parts(args: dict[str, Any], tile: Pipeline, count: int, work: Workspace) -> dict[str, Any]:
    """The arguments of a forward whose tiles have so many parts, with memory for their states."""
    tiles, device = args["queue"].tiles, args["lse"].device
    whole = whole_of(tiles, count, sms_of(device))
    shared = (tiles - whole) * count
    queue = args["queue"]._replace(tiles=whole + shared)
    states = shared + (programs_of(queue.tiles, device) if whole else 0)
    acc_o, m_i, l_i = states_in(work, (tile.WARPGROUPS * 64 * states,), tile.BLOCK_DV)
    parts = Parts(acc_o, m_i, l_i=l_i, count=count, whole=whole)
    return args | dict(queue=queue, optionals=args["optionals"]._replace(parts=parts))


def shared_tiles(args: dict[str, Any]) -> int:
    """How many tiles' keys programs share."""
    parts = args["optionals"].parts
    return (args["queue"].tiles - parts.whole) // parts.count


def fold_of(args: dict[str, Any], plan: Any, out: Any) -> Launch:
    """The fold of all tiles that programs share, after a launch of a plan with these arguments."""
    queue, optionals = args["queue"], args["optionals"]
    named = dict(out=strided(out), lse=args["lse"], parts=optionals.parts)
    named |= dict(queue=queue._replace(counter=None), sizes=args["sizes"])
    without = optionals._replace(pages=None, parts=None, scales=None)
    named |= dict(optionals=without, scales=optionals.scales)
    tiles = shared_tiles(args)
    programs = tiles * plan.tile.WARPGROUPS * (64 // FOLD_ROWS.value)
    constants = dict(FEATURES=plan.features, TILE=plan.tile)
    return checked(Launch(fold_parts_kernel, programs, named, constants, dict(num_warps=4)))
