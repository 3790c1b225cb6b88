"""Masks, score functions and block masks, as users write them, in the form of `flat`."""

from __future__ import annotations

import functools
from typing import Any

import torch

from ..errors import ArgumentError
from ..problem import Mods
from . import masks, scores
from .block_mask import BlockMask, block_mask_of
from .compilers import gives_constant, holds
from .flat import NO_MODIFIERS, FlatMods
from .function import check_sizes

Tensor = torch.Tensor


def modifiers_of(
    mask_mod: masks.Predicate | FlatMods | None,
    score_mod: scores.ScoreFunction | None,
    block_mask: BlockMask | None,
    sizes: tuple[int, int, int, int],
) -> FlatMods:
    """The modifiers of a call, as users write them; `sizes` are batch, nheads, seqlen_q and
    seqlen_k, lengths of 0 where they are not known.
    """
    if mask_mod is None and score_mod is None and block_mask is None:
        return NO_MODIFIERS
    if isinstance(mask_mod, FlatMods):
        return mask_mod
    blocks, block = (), (0, 0)
    if block_mask is not None:
        if mask_mod is not None:
            raise ArgumentError(
                "mask_mod with block_mask: a block mask has its own predicate, so pass one of "
                "them; join predicates with & before you build the block mask"
            )
        mask_mod, block = block_mask.for_kernels, block_mask.block
        blocks = tuple(x for lists in block_mask.lists for x in lists)
    mask = None if mask_mod is None else masks.mask(mask_mod)
    score = None if score_mod is None else scores.score(score_mod)
    for function in (mask, score):
        if function is not None:
            check_sizes(function, sizes)
    names = Mods(
        mask="" if mask is None else mask.key,
        score="" if score is None else score.key,
        derivative="" if score is None else score.derivative.key,
        block=block,
    )
    of_mask = () if mask is None else mask.tensors
    of_score = () if score is None else score.tensors
    return FlatMods(names, (*blocks, *of_mask, *of_score))


def modifiers_by(visible: Tensor) -> FlatMods:
    """A mask that is a bool tensor and broadcasts over (batch, nheads, seqlen_q, seqlen_k)."""
    along = [holds(n > 1, True) for n in visible.shape]  # lengths may be a compiler's symbols
    if not any(along):  # one bool for all pairs, which is read without an index
        visible = visible.reshape(())
    return FlatMods(Mods(mask=_reads(tuple(along))), (visible,))


@gives_constant
def _reads(along: tuple[bool, ...]) -> str:
    """The name of a mask that reads a bool tensor `along` the dimensions that are not shared."""
    return _reading(along).key


@functools.cache
def _reading(along: tuple[bool, ...]) -> masks.Mask:
    x = torch.ones([1 + is_own for is_own in along], dtype=torch.bool, device="cpu")
    return masks.mask(lambda *at: x[tuple(i if is_own else 0 for i, is_own in zip(at, along))])


def check_block_mask(
    block_mask: Any, sizes: tuple[int, int, int, int], is_packed: bool, has_band: bool
) -> BlockMask | None:
    """A block mask, as callers pass it, that fits a call without packed sequences and a band."""
    block_mask = block_mask_of(block_mask)
    if block_mask is None:
        return None
    if is_packed:
        raise ArgumentError(
            "block_mask does not support packed sequences: pass mask_mod, or put the sequences "
            "into one row and build the block mask of tilewise.mods.document"
        )
    if has_band:
        raise ArgumentError(
            "causal and window do not combine with a block_mask: build it from "
            "tilewise.mods.causal() or sliding_window(), joined with & to the rest of the mask"
        )
    batch, nheads, seqlen_q, seqlen_k = sizes
    block_mask.check(batch, nheads, seqlen_q=seqlen_q, seqlen_k=seqlen_k)
    return block_mask
