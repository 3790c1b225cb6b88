"""Block lists: the partial and full blocks of each row of blocks of a BlockMask."""

from __future__ import annotations

import torch

from .block_checks import BlockLists

Tensor = torch.Tensor
SKIPPED, PARTIAL, FULL, UNKNOWN = range(4)


def lists_of(flags: Tensor) -> BlockLists:
    """The flagged blocks of each row, ascending."""
    counts = flags.sum(-1, dtype=torch.int32)
    rows, blocks = flags.flatten(0, 2).nonzero().unbind(1)
    width = int(counts.max()) if counts.numel() else 0
    starts = counts.flatten().cumsum(0) - counts.flatten()
    places = torch.arange(len(rows), device=rows.device) - starts[rows]
    indices = torch.zeros(counts.numel(), width, dtype=torch.int32, device=flags.device)
    indices[rows, places] = blocks.int()
    return BlockLists(counts, indices.unflatten(0, counts.shape))


def partial_and_full(kinds: Tensor) -> tuple[BlockLists, BlockLists]:
    """The partial and the full blocks of each row."""
    return lists_of(kinds == PARTIAL), lists_of(kinds == FULL)


def kinds_of(partial: BlockLists, full: BlockLists, n_blocks: int) -> Tensor:
    """The kind of each of n_blocks blocks in a row, by the lists."""
    shape = (*partial.counts.shape, n_blocks + 1)  # the last takes the lists' padding
    kinds = partial.counts.new_zeros(shape, dtype=torch.uint8)
    for kind, (counts, indices) in ((PARTIAL, partial), (FULL, full)):
        listed = torch.arange(indices.shape[3], device=indices.device) < counts[..., None]
        kinds.scatter_(3, torch.where(listed, indices, n_blocks).long(), kind)
    return kinds[..., :n_blocks]


def cut_at_ends(kinds: Tensor, shape: tuple[int, ...], block: tuple[int, int]) -> Tensor:
    """The kinds with full blocks that run past an end as partial ones, since they are masked there;
    in place.
    """
    if shape[2] % block[0]:
        kinds[:, :, -1].clamp_(max=PARTIAL)
    if shape[3] % block[1]:
        kinds[..., -1].clamp_(max=PARTIAL)
    return kinds
