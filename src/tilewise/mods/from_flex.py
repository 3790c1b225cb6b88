"""FlexAttention's BlockMask as ours: its lists as they are, its mask_mod traced.

Both are found once for a block mask, as lists are looked at on their device. A mask_mod may read
something else at the next call, so it is traced again, or known to read the same
(`tilewise.mods.trace_cache`).
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch

from ..errors import ArgumentError, a_type
from . import masks
from .block_checks import BlockLists, check_lists, check_shape
from .block_lists import FULL, SKIPPED, cut_at_ends, kinds_of, partial_and_full
from .expressions import BOOL, Node
from .masks import Mask
from .trace_cache import Same

Create = TypeVar("Create", bound=Callable[..., Any])
BlockMask = Any  # `block_mask.BlockMask`, whose file imports this one, and its class
# Its arguments of create_block_mask, as ours; some choose how torch makes or walks a mask
NAMES = {
    **{"mask_mod": "mask", "B": "batch", "H": "nheads"},
    **{"Q_LEN": "seqlen_q", "KV_LEN": "seqlen_k", "BLOCK_SIZE": "block"},
    **dict.fromkeys(("_compile", "separate_full_blocks", "compute_dq_write_order"), ""),
    "dq_kv_order": "",
}
EVERYTHING = Node(BOOL, (), True)
Facts = tuple | None  # of lists and a mask; None where tensors do not count writes


# What a block mask of FlexAttention was when it was converted, and what it became
_converted: weakref.WeakKeyDictionary[Any, tuple[Facts, BlockMask]] = weakref.WeakKeyDictionary()


def takes_its_names(create: Create) -> Create:
    """Decorates our create_block_mask, so that it takes FlexAttention's arguments, too."""

    @functools.wraps(create)
    def create_block_mask(*args, **named):
        for theirs in named.keys() & NAMES.keys():
            ours, value = NAMES[theirs], named.pop(theirs)
            if ours in named:
                raise TypeError(f"create_block_mask() got both {ours}= and {theirs}=")
            named |= {ours: value} if ours else {}
        return create(*args, **named)

    return cast(Create, create_block_mask)


def converted_once(block_mask: Any, ours: Any) -> BlockMask:
    """`converted`, or what it gave before where nothing was written to since."""
    if torch.compiler.is_compiling():
        raise ArgumentError(
            f"block_mask is {a_type(block_mask)}, which torch.compile cannot trace: "
            "convert it outside of the graph, with tilewise.sparse.BlockMask.from_flex, or build "
            "it with create_block_mask"
        )
    _check_kind(block_mask)
    facts, tilewise_mask = _converted.get(block_mask, (None, None))
    if facts is None or facts != _facts(block_mask, masks.mask(block_mask.mask_mod)):
        facts, tilewise_mask = _converted[block_mask] = converted(block_mask, ours)
    return tilewise_mask


def converted(block_mask: Any, ours: Any) -> tuple[Facts, BlockMask]:
    """What a block mask of FlexAttention is, and one of our class. A compiler that gave up before
    goes on with each function that is called, and warns of what it cannot trace in this one.
    """
    _check_kind(block_mask)
    dynamo = sys.modules.get("torch._dynamo")
    return (_converted_of if dynamo is None else dynamo.disable(_converted_of))(block_mask, ours)


def _converted_of(block_mask: Any, ours: Any) -> tuple[Facts, BlockMask]:
    counts, indices = block_mask.kv_num_blocks, block_mask.kv_indices
    if counts.ndim != 3:
        raise ArgumentError(
            f"block_mask.kv_num_blocks has shape {tuple(counts.shape)}: it must be (batch, nheads, "
            "m_blocks)"
        )
    partial = BlockLists(counts.int(), indices.int())
    full = BlockLists(torch.zeros_like(partial.counts), partial.indices[..., :0])
    if block_mask.full_kv_num_blocks is not None:
        full = BlockLists(block_mask.full_kv_num_blocks.int(), block_mask.full_kv_indices.int())
    mask = masks.mask(block_mask.mask_mod)
    shape, block = (*counts.shape[:2], *block_mask.seq_lengths), tuple(block_mask.BLOCK_SIZE)
    check_shape(shape, block)
    m_blocks, n_blocks = (-(-n // size) for n, size in zip(shape[2:], block))
    for name, lists in (("partial", partial), ("full", full)):
        rows = (*shape[:2], m_blocks)
        check_lists(f"{name}, by queries,", lists, rows=rows, blocks=n_blocks)
    kinds = cut_at_ends(kinds_of(partial, full, n_blocks=n_blocks), shape, block=block)
    partial, full = partial_and_full(kinds)
    tilewise_mask = ours(mask, shape, block=block, partial=partial, full=full)
    if mask.expr is EVERYTHING:
        tilewise_mask = _as_listed(tilewise_mask)
    return _facts(block_mask, mask), tilewise_mask


def _check_kind(block_mask: Any) -> None:
    from torch.nn.attention import flex_attention

    if not isinstance(block_mask, flex_attention.BlockMask):
        raise ArgumentError(
            f"block_mask is {a_type(block_mask)}: it must be a BlockMask of "
            "tilewise.sparse (create_block_mask makes one) or of "
            "torch.nn.attention.flex_attention"
        )


def _facts(block_mask: Any, mask: Mask) -> Facts:
    """What tells its lists, how often each was written to, and its mask from others."""
    names = "kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices"
    lists = [x for name in names if (x := getattr(block_mask, name)) is not None]
    if any(x.is_inference() for x in lists):
        return None
    versions = tuple(x._version for x in lists)
    return mask.expr, versions, *map(Same, lists), *map(Same, mask.tensors)


def _as_listed(block_mask: BlockMask) -> BlockMask:
    """A block mask with a mask that sees what the lists do, for those who ask no list."""
    listed = block_mask.kinds() != SKIPPED
    if bool(listed.all()):
        return block_mask
    shape, block = block_mask.shape, block_mask.block
    (batch, nheads, *_), (block_m, block_n) = shape, block

    def sees(b, h, q_idx, kv_idx):
        row, head = (b if batch > 1 else 0), (h if nheads > 1 else 0)
        return listed[row, head, q_idx // block_m, kv_idx // block_n]

    kinds = torch.where(listed, FULL, SKIPPED).to(torch.uint8)
    partial, full = partial_and_full(cut_at_ends(kinds, shape, block=block))
    return type(block_mask)(masks.mask(sees), shape, block=block, partial=partial, full=full)
