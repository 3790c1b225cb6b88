"""Block lists, and what a block mask may be: blocks that tiles make up, and lists of blocks."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..errors import ArgumentError, short

Tensor = torch.Tensor
SIZES = range(16, 1 << 31, 16)  # rows of a block: multiples of those of the smallest tile


class BlockLists(NamedTuple):
    """Block-sparse indices: for each (batch, nheads, block), the blocks of the other side,
    ascending.

    Args:
        counts: int32 (batch, nheads, blocks), the number of blocks on each list.
        indices: int32 (batch, nheads, blocks, width), the blocks; zeros after the first `counts`.
    """

    counts: Tensor
    indices: Tensor

    __repr__ = short


def check_shape(shape: tuple[int, ...], block: tuple[int, int]) -> None:
    """The extents and the block of a mask; else an ArgumentError."""
    for name, n in zip(("batch", "nheads", "seqlen_q", "seqlen_k"), shape, strict=True):
        if not isinstance(n, int) or isinstance(n, bool) or n < 0:
            raise ArgumentError(f"{name}={n!r}: it must be an int of at least 0")
    check_block(block)


def check_block(block: tuple[int, int]) -> None:
    """A block that tiles of kernels, whose sides are powers of two, make up."""
    is_pair = isinstance(block, (tuple, list)) and len(block) == 2
    if not is_pair or any(not isinstance(n, int) or n not in SIZES for n in block):
        raise ArgumentError(
            f"block={block!r}: it must be a pair (BLOCK_M, BLOCK_N) of multiples of "
            f"{SIZES.step} below 2^31, such as (128, 128)"
        )


def check_lists(
    name: str, lists: tuple[Tensor, Tensor], rows: tuple[int, ...], blocks: int
) -> None:
    """Lists (counts, indices) for `rows` (batch, nheads, blocks of one side), which number `blocks`
    of the other; it waits for the device.
    """
    check_form(name, lists, rows=rows)
    counts, indices = lists
    if type(counts) is not Tensor or counts.is_meta or torch.compiler.is_compiling():
        return
    is_count = (counts >= 0) & (counts <= indices.shape[3])
    is_block = (indices >= 0) & (indices < max(blocks, 1))
    is_block |= torch.arange(indices.shape[3], device=counts.device) >= counts[..., None]
    if bool(is_count.all() & is_block.all() & (counts <= blocks).all()):
        return
    end = " that end within the sequence: list the others as partial" if "full" in name else ""
    raise ArgumentError(
        f"{name} of a BlockMask: counts must be at most {indices.shape[3]}, the width of the "
        f"indices, and indices at least 0 and below {blocks}, the number of blocks{end}"
    )


def check_form(name: str, lists: tuple[Tensor, Tensor], rows: tuple[int, ...]) -> None:
    """The dtypes and shapes of such lists, for which nothing waits."""
    counts, indices = lists
    is_form = counts.dtype == indices.dtype == torch.int32 and indices.ndim == 4
    if not is_form or tuple(counts.shape) != rows or tuple(indices.shape[:3]) != rows:
        raise ArgumentError(
            f"{name} of a BlockMask has counts {tuple(counts.shape)} of {counts.dtype} and indices "
            f"{tuple(indices.shape)} of {indices.dtype}: they must be int32, {rows} and "
            f"{(*rows, 'width')}"
        )
