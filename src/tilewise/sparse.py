"""Masks by blocks: which tiles a kernel may skip, and which need no mask."""

from .mods.block_checks import BlockLists
from .mods.block_mask import BlockMask, create_block_mask

__all__ = ["BlockLists", "BlockMask", "create_block_mask"]
