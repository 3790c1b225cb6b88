"""Block masks: which tiles of a mask are skipped, partial (masked) or full.

Per m_block, two lists of n_blocks: partial (some pair is seen, or the tile runs past an end) and
full (every pair is seen); what is on neither list is skipped. Two lists per n_block, for the
backward, are their transpose. The layout is FlexAttention's (Dong et al. 2024, arXiv:2412.05496).
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any, Never

import torch
from torch._C._functorch import is_batchedtensor

from ..errors import ArgumentError
from ..keywords import refuses_others, unexpected
from . import from_flex, masks
from .block_checks import BlockLists, check_lists, check_shape
from .block_lists import FULL, SKIPPED, UNKNOWN, cut_at_ends, kinds_of, partial_and_full
from .documents import Documents, documents_of
from .ends import MAX_END_ROWS, EndRows, Ends, says_ends
from .evaluation import evaluate
from .expressions import INDICES
from .function import check_sizes
from .intervals import Blocks, bound
from .masks import Mask, Predicate

Tensor = torch.Tensor
Shape = tuple[int, int, int, int]
# What is held at once: 8-byte values, a few of each kind alive per operator of the mask.
TILES_AT_ONCE = 1 << 20
PAIRS_AT_ONCE = 1 << 20


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class BlockMask:
    """A mask with its partial and full blocks; batch and nheads are 1 where all share one mask.

    Example:
        >>> from tilewise.mods import causal
        >>> blocks = create_block_mask(causal(), 1, 1, 512, 512)
        >>> blocks
        BlockMask((1, 1, 512, 512), block=(128, 128), 4 partial, 6 full, 37.5% skipped)
        >>> blocks.full.counts[0, 0], blocks.full.indices[0, 0, 3]
        (tensor([0, 1, 2, 3], dtype=torch.int32), tensor([0, 1, 2], dtype=torch.int32))
    """

    mask: Mask
    shape: Shape  # batch, nheads, seqlen_q, seqlen_k
    block: tuple[int, int]  # BLOCK_M, BLOCK_N
    partial: BlockLists  # of n_blocks, per m_block
    full: BlockLists
    # (partial, full) of m_blocks, per n_block: what a backward walks
    transposed: tuple[BlockLists, BlockLists] | None = None
    ends: Ends | None = None  # of rows and columns, where these are intervals
    documents: Documents | None = None  # where it is a mask of documents
    for_kernels: Mask = dataclasses.field(init=False)  # the same mask as kernels are given it

    def __post_init__(self) -> None:
        check_shape(self.shape, self.block)
        object.__setattr__(self, "for_kernels", _for_kernels(self.mask, self.ends))
        self._check_lists(self.partial, self.full, side="by queries")
        if self.transposed is None:
            object.__setattr__(self, "transposed", self._by_keys())
        else:
            partial, full = self.transposed
            self._check_lists(partial, full, side="by keys")

    def _check_lists(self, partial: BlockLists, full: BlockLists, side: str) -> None:
        batch, nheads, *blocks = self.grid
        whole = [seqlen // size for seqlen, size in zip(self.shape[2:], self.block)]
        if side == "by keys":
            blocks, whole = blocks[::-1], whole[::-1]
        rows = batch, nheads, blocks[0]
        check_lists(f"partial, {side},", partial, rows=rows, blocks=blocks[1])
        check_lists(f"full, {side},", full, rows=rows, blocks=whole[1])
        cut = BlockLists(full.counts[:, :, whole[0] :], full.indices[:, :, whole[0] :])
        check_lists(f"full, {side},", cut, rows=(*rows[:2], blocks[0] - whole[0]), blocks=0)

    def _by_keys(self) -> tuple[BlockLists, BlockLists]:
        return partial_and_full(self.kinds().transpose(2, 3))

    @property
    def lists(self) -> tuple[BlockLists, BlockLists, BlockLists, BlockLists]:
        """Partial and full by queries, and the two by keys."""
        return (self.partial, self.full, *(self.transposed or self._by_keys()))

    @property
    def grid(self) -> Shape:
        """batch, nheads, m_blocks, n_blocks."""
        return _grid(self.shape, self.block)

    def kinds(self) -> Tensor:
        """uint8 (batch, nheads, m_blocks, n_blocks): 0 skipped, 1 partial, 2 full."""
        return kinds_of(self.partial, self.full, n_blocks=self.grid[3])

    def sparsity(self) -> float:
        """The percentage of blocks that are skipped; it synchronizes."""
        listed = sum(int(lists.counts.sum()) for lists in (self.partial, self.full))
        count = self.partial.counts.numel() * self.grid[3]
        return 100 * (1 - listed / count) if count else 0.0

    def check(self, batch: int, nheads: int, seqlen_q: int, seqlen_k: int) -> None:
        """Checks that the mask fits attention of this shape.

        Raises:
            ArgumentError: it does not.
        """
        lengths = (batch, nheads, seqlen_q, seqlen_k)
        for size, n, index in zip(self.shape, lengths, INDICES):
            if size != n and (size != 1 or index[1:] or self.mask.depends_on(index)):
                raise ArgumentError(
                    f"block_mask has (batch, nheads, seqlen_q, seqlen_k) {self.shape} and the "
                    f"call has {lengths}: build it for the shape of the call"
                )

    def documents_in(self, q: Tensor, k: Tensor, v: Tensor) -> Documents | None:
        """The packed sequences of a document mask, where views of q, k and v are packed."""
        documents, (batch, tokens) = self.documents, q.shape[:2]
        if documents is None or documents.batch != batch:
            return None
        is_view = all(batch == 1 or x.stride(0) == tokens * x.stride(1) for x in (q, k, v))
        return documents if is_view else None

    def to(self, device: torch.device | str) -> BlockMask:
        """A copy on another device, with the mask's captured tensors."""
        lists = [BlockLists(x.counts.to(device), x.indices.to(device)) for x in self.lists]
        ends = None if self.ends is None else Ends._make(x.to(device) for x in self.ends)
        documents = None if self.documents is None else self.documents.to(device)
        return BlockMask(
            self.mask.to(device),
            self.shape,
            block=self.block,
            partial=lists[0],
            full=lists[1],
            transposed=(lists[2], lists[3]),
            ends=ends,
            documents=documents,
        )

    def __repr__(self) -> str:
        partial, full = (int(lists.counts.sum()) for lists in (self.partial, self.full))
        return (
            f"BlockMask({self.shape}, block={self.block}, {partial} partial, {full} full, "
            f"{self.sparsity():.1f}% skipped)"
        )

    @classmethod
    def from_flex(cls, block_mask) -> BlockMask:
        """Converts a BlockMask of `torch.nn.attention.flex_attention`.

        Args:
            block_mask: its mask_mod must be traceable, its BLOCK_SIZE of multiples of 16. Its lists
                must cover its mask_mod; without a mask_mod they are the mask.
        """
        _, tilewise_mask = from_flex.converted(block_mask, cls)
        return tilewise_mask


def block_mask_of(block_mask: Any) -> BlockMask | None:
    """A block mask as callers pass it, ours or FlexAttention's."""
    if block_mask is None or isinstance(block_mask, BlockMask):
        return block_mask
    return from_flex.converted_once(block_mask, BlockMask)


@from_flex.takes_its_names
@refuses_others("tilewise.sparse.create_block_mask")
def create_block_mask(
    mask: Mask | Predicate,
    batch: int | None,
    nheads: int | None,
    seqlen_q: int,
    seqlen_k: int,
    device: torch.device | str | None = None,
    block: int | tuple[int, int] = (128, 128),
    **unknown: Never,
) -> BlockMask:
    """Finds the partial and full blocks of a mask without storing seqlen_q x seqlen_k of anything.

    Example:
        >>> doc_ids = torch.arange(1024, dtype=torch.int32) // 256
        >>> create_block_mask(
        ...     lambda b, h, q_idx, kv_idx: doc_ids[q_idx] == doc_ids[kv_idx], 1, 1, 1024, 1024
        ... )
        BlockMask((1, 1, 1024, 1024), block=(128, 128), 0 partial, 16 full, 75.0% skipped)

    Interval arithmetic on the mask's tree (`tilewise.mods.intervals`) settles most blocks at once;
    the others are evaluated pair by pair. Memory: one byte per block, the lists, and for up to 2^20
    blocks at a time 32 bytes per open block, plus 16 bytes per block (or 8 per pair) and live
    operator in the mask.

    On a GPU, creating a mask synchronizes: once per 2^20 blocks, twice per list, and three times to
    detect interval and document masks. Using it does not. For interval masks, kernels read only
    the ends (`ends`, 16 bytes per query and key of a head). Document masks (`documents`) run as
    packed sequences, if nothing else in the call depends on positions.

    It takes FlexAttention's arguments, too: mask_mod, B, H, Q_LEN, KV_LEN and BLOCK_SIZE, and
    `_compile` and other hints, which are ignored.

    Args:
        mask: a Mask, or any predicate of (b, h, q_idx, kv_idx) that `tilewise.mods.mask` takes.
        batch: batch size; becomes 1 if the mask does not use b. None means 1.
        nheads: query heads; becomes 1 if the mask does not use h. None means 1.
        seqlen_q: queries.
        seqlen_k: keys.
        device: where to build; by default the device of the captured tensors, else the CPU.
        block: (BLOCK_M, BLOCK_N), or one number for both, multiples of 16. Tiles of a kernel are
            the largest powers of two that divide them, so odd multiples of 16 are slow.

    Raises:
        ArgumentError: an extent or a block size is wrong, the predicate cannot be traced, or a
            captured tensor is too short or on another device.

    FlexAttention (Dong et al. 2024, arXiv 2412.05496).
    """
    if unknown:
        raise unexpected("tilewise.sparse.create_block_mask", unknown)
    mask = masks.mask(mask)
    if any(map(is_batchedtensor, mask.tensors)):  # lists are as long as their values say
        raise NotImplementedError("create_block_mask inside torch.vmap: pass its mask as mask_mod")
    batch, nheads = (1 if n is None else n for n in (batch, nheads))
    block = (block, block) if isinstance(block, int) else block
    shape = (batch, nheads, seqlen_q, seqlen_k)
    check_shape(shape, block)
    check_sizes(mask, shape)
    device = mask.device(device)
    rows, nheads = (
        n if mask.depends_on(i) else min(n, 1) for n, i in ((batch, "b"), (nheads, "h"))
    )
    shape = (rows, nheads, seqlen_q, seqlen_k)
    grid = _grid(shape, block)
    kinds = torch.empty(grid, dtype=torch.uint8, device=device)
    is_small = rows * nheads * (seqlen_q + seqlen_k) <= MAX_END_ROWS
    end_rows = EndRows(shape, grid, block, device) if is_small and kinds.numel() else None
    with torch.no_grad():
        for slab in _slabs(grid, shape, block=block):
            _classify(mask, shape, block=block, kinds=kinds, slab=slab, end_rows=end_rows)
    partial, full = partial_and_full(cut_at_ends(kinds, shape, block=block))
    ends = None if end_rows is None else end_rows.ends()
    documents = documents_of(ends, batch)
    block = block[0], block[1]  # the caller's may be a list
    return BlockMask(mask, shape, block, partial, full, ends=ends, documents=documents)


def _for_kernels(mask: Mask, ends: Ends | None) -> Mask:
    """The mask that kernels are given: that of its ends, where it has some."""
    if ends is not None:
        return ends.mask()
    if says_ends(mask.key):  # but its rows were not found to be intervals
        return mask & (lambda b, h, q_idx, kv_idx: q_idx >= 0)
    return mask


def _grid(shape: Shape, block: tuple[int, int]) -> Shape:
    batch, nheads, seqlen_q, seqlen_k = shape
    return batch, nheads, -(-seqlen_q // block[0]), -(-seqlen_k // block[1])


def _slabs(grid: Shape, shape: Shape, block: tuple[int, int]) -> Iterator[tuple[range, ...]]:
    """Ranges of batch, head and m_block that hold at most TILES_AT_ONCE tiles, and positions."""
    batch, nheads, m_blocks, n_blocks = grid
    if not batch * nheads * m_blocks * n_blocks:
        return
    per_head = max(m_blocks * n_blocks, shape[2], shape[3])
    steps = (
        max(1, TILES_AT_ONCE // (per_head * nheads)),
        max(1, TILES_AT_ONCE // per_head),
        max(1, TILES_AT_ONCE // max(n_blocks, block[0])),
    )
    batches, heads, rows = (
        [range(i, min(i + step, n)) for i in range(0, n, step)] for n, step in zip(grid, steps)
    )
    yield from itertools.product(batches, heads, rows)


def _positions(blocks: range, size: int, seqlen: int, device: torch.device) -> Tensor:
    """The positions in blocks: int64 (blocks, size), the last real one repeated."""
    positions = torch.arange(blocks.start * size, blocks.stop * size, device=device)
    return positions.clamp_(max=seqlen - 1).view(-1, size)


def _classify(
    mask: Mask,
    shape: Shape,
    block: tuple[int, int],
    kinds: Tensor,
    slab: tuple[range, ...],
    end_rows: EndRows | None,
) -> None:
    """Fills in the kinds of one slab, and what its rows and columns see."""
    batches, heads, m_blocks = slab
    device = kinds.device
    blocks = Blocks(
        b=torch.arange(batches.start, batches.stop, device=device)[:, None, None, None],
        h=torch.arange(heads.start, heads.stop, device=device)[:, None, None],
        q_idx=_positions(m_blocks, block[0], seqlen=shape[2], device=device),
        k_idx=_positions(range(kinds.shape[3]), block[1], seqlen=shape[3], device=device),
    )
    lo, hi = bound(mask.expr, blocks, tensors=mask.tensors)
    part = kinds[tuple(slice(r.start, r.stop) for r in slab)]
    part.copy_(torch.where(lo, FULL, torch.where(hi, UNKNOWN, SKIPPED)).to(torch.uint8))
    if end_rows is not None:
        end_rows.add_full(slab, part == FULL)
    _settle(mask, blocks, kinds=part, slab=slab, end_rows=end_rows)


def _settle(
    mask: Mask, blocks: Blocks, kinds: Tensor, slab: tuple[range, ...], end_rows: EndRows | None
) -> None:
    """Evaluates every pair of the tiles that intervals left open, some tiles at a time."""
    unknown = (kinds == UNKNOWN).nonzero()
    pairs = blocks.q_idx.shape[1] * blocks.k_idx.shape[1]
    for tiles in unknown.split(max(1, PAIRS_AT_ONCE // pairs)):
        b, h, m, n = tiles.unbind(1)
        sees = evaluate(
            mask.expr,
            blocks.b.flatten()[b, None, None],
            h=blocks.h.flatten()[h, None, None],
            q_idx=blocks.q_idx[m][:, :, None],
            k_idx=blocks.k_idx[n][:, None, :],
            tensors=mask.tensors,
        )
        # A mask of few indices answers for more than one pair, or tile, at once
        if end_rows is not None:
            of_pairs = sees.expand(len(tiles), blocks.q_idx.shape[1], blocks.k_idx.shape[1])
            end_rows.add_pairs(slab, tiles, is_seen=of_pairs)
        sees = sees.expand(torch.broadcast_shapes(sees.shape, (len(tiles), 1, 1))).flatten(1)
        kinds[b, h, m, n] = sees.any(1).to(torch.uint8) + sees.all(1).to(torch.uint8)
