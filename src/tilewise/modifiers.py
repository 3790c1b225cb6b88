"""What changes scores beyond the band: a mask, a score function, a block mask. As they cross
torch.library they are names of trees (`Mods`) and tensors in a row (`Extras.captured`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch

from . import mods, scores
from .errors import ArgumentError
from .expressions import named, walk
from .problem import NO_MODS, Mods
from .sparse.block_mask import BlockLists, BlockMask
from .traced import check_sizes

Tensor = torch.Tensor
BLOCK_TENSORS = 8  # of a block mask: counts and indices, partial and full, by queries and by keys


class Modifiers(NamedTuple):
    """What modifies scores, as `Problem` and `Extras` carry it."""

    mods: Mods = NO_MODS
    captured: tuple[Tensor, ...] = ()


class Parts(NamedTuple):
    """`Extras.captured`, taken apart again."""

    partial: tuple[BlockLists, BlockLists] | None  # of n_blocks per m_block, and the transpose
    full: tuple[BlockLists, BlockLists] | None
    mask: tuple[Tensor, ...]
    score: tuple[Tensor, ...]


def modifiers_of(
    mask_mod: Callable | None,
    score_mod: Callable | None,
    block_mask: BlockMask | None,
    sizes: tuple[int, int, int, int],
) -> Modifiers:
    """The modifiers of a call, as users write them; `sizes` are batch, nheads, seqlen_q and
    seqlen_k, lengths of 0 where they are not known.
    """
    if mask_mod is None and score_mod is None and block_mask is None:
        return NO_MODIFIERS
    blocks, block = (), (0, 0)
    if block_mask is not None:
        if not isinstance(block_mask, BlockMask):
            raise ArgumentError(
                f"block_mask is a {type(block_mask).__name__}: it must be a BlockMask of "
                "tilewise.sparse (create_block_mask makes one, BlockMask.from_flex converts one)"
            )
        if mask_mod is not None:
            raise ArgumentError(
                "mask_mod and block_mask: a block mask brings its own predicate, so pass one of "
                "them; join predicates with & before the block mask is made"
            )
        mask_mod, block = block_mask.mask, block_mask.block
        by_queries, by_keys = (block_mask.partial, block_mask.full), block_mask.transposed
        blocks = tuple(x for lists in (*by_queries, *by_keys) for x in lists)
    mask = None if mask_mod is None else mods.mask(mask_mod)
    score = None if score_mod is None else scores.score(score_mod)
    for function in (mask, score):
        if function is not None:
            check_sizes(function, *sizes)
    names = Mods(
        mask="" if mask is None else mask.key,
        score="" if score is None else score.key,
        derivative="" if score is None else score.derivative.key,
        block=block,
    )
    of_mask = () if mask is None else mask.tensors
    of_score = () if score is None else score.tensors
    return Modifiers(names, (*blocks, *of_mask, *of_score))


def check_block_mask(
    block_mask: BlockMask | None, sizes: tuple[int, int, int, int], is_packed: bool, has_band: bool
) -> None:
    """A block mask says all there is to say of which keys are seen."""
    if block_mask is None:
        return
    if is_packed:
        raise ArgumentError(
            "block_mask is for sequences in a batch, and these are packed: pass mask_mod, or let "
            "tilewise.mods.document tell sequences of one long row apart"
        )
    if has_band:
        raise ArgumentError(
            "causal and window do not join a block_mask: build it of tilewise.mods.causal() or "
            "sliding_window() and the rest of the mask, joined with &"
        )
    block_mask.check(*sizes)


def take_apart(names: Mods, captured: tuple[Tensor, ...]) -> Parts:
    """Which captured tensor is whose."""
    partial = full = None
    if names.block != (0, 0):
        lists = [BlockLists(*captured[i : i + 2]) for i in range(0, BLOCK_TENSORS, 2)]
        partial, full = (lists[0], lists[2]), (lists[1], lists[3])
        captured = captured[BLOCK_TENSORS:]
    of_mask = count_tensors(names.mask)
    return Parts(partial, full, captured[:of_mask], captured[of_mask:])


@functools.lru_cache(maxsize=1024)
def count_tensors(name: str) -> int:
    """How many tensors the tree of a name reads."""
    slots = [node.value[0] for node in walk(named(name)) if node.op == "load"] if name else []
    return max(slots, default=-1) + 1


@functools.lru_cache(maxsize=1024)
def mentions(names: Mods) -> frozenset[str]:
    """What the trees are made of, "b" and "h" among it where they tell rows or heads apart."""
    return frozenset(node.op for name in names[:3] if name for node in walk(named(name)))


@functools.lru_cache(maxsize=1024)
def reads_tiles(names: Mods) -> bool:
    """Whether a mask or score function reads a number of its own for each pair."""
    trees = [named(name) for name in names[:3] if name]
    loads = [node for tree in trees for node in walk(tree) if node.op == "load"]
    return any({"q_idx", "k_idx"} <= {x.op for x in walk(load)} for load in loads)


NO_MODIFIERS = Modifiers()
