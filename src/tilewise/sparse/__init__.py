"""Masks by blocks: which tiles a kernel may skip, and which need no mask."""

from .block_mask import BlockLists, BlockMask, create_block_mask

__all__ = ["BlockLists", "BlockMask", "create_block_mask"]
