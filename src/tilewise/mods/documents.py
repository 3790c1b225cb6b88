"""Masks of documents, which are packed sequences: the pairs of one document are seen, or its causal
half, and no others.

Attention under such a mask is attention over the documents one by one. Packed kernels begin each
document with a tile of its own, where a tile of the mask's grid lies across two documents and is
masked on both sides.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from .ends import Ends

Tensor = torch.Tensor


class Documents(NamedTuple):
    """The documents of all sequences of a batch, one sequence behind the other."""

    batch: int
    cu_seqlens: Tensor  # int32 (documents + 1,)
    longest: int
    causal: bool

    @property
    def are_many(self) -> bool:
        """Whether there are more documents than sequences."""
        return len(self.cu_seqlens) - 1 > self.batch

    def to(self, device: torch.device | str) -> Documents:
        """A copy on another device."""
        return self._replace(cu_seqlens=self.cu_seqlens.to(device))


def documents_of(ends: Ends | None, batch: int) -> Documents | None:
    """The documents that a mask's rows tell of, or None for another mask; it waits for the device.
    `batch` sequences have the mask, which may be one for all of them.

    >>> from tilewise import mods, sparse
    >>> ids = torch.tensor([0, 0, 0, 1, 1])
    >>> mask = mods.document(ids) & mods.causal()
    >>> sparse.create_block_mask(mask, 1, 1, 5, 5).documents
    Documents(batch=1, cu_seqlens=tensor([0, 3, 5], dtype=torch.int32), longest=3, causal=True)
    """
    if ends is None or ends.first_key.shape != ends.first_query.shape:
        return None
    rows, nheads, seqlen = ends.first_key.shape
    if nheads != 1 or not batch * seqlen:
        return None
    first, stop = ends.first_key[:, 0], ends.stop_key[:, 0]
    q_idx = torch.arange(seqlen, dtype=first.dtype, device=first.device)
    begins = first == q_idx
    is_last = torch.cat([begins[:, 1:], begins.new_ones(rows, 1)], 1)
    # A row that begins no document sees keys from the same one on as the row before it
    goes_on = torch.cat([begins[:, :1], first[:, 1:] == first[:, :-1]], 1)
    is_one = (begins | goes_on).all()
    is_causal = (stop == q_idx + 1).all()
    is_full = torch.where(is_last, stop == q_idx + 1, stop == stop.roll(-1, 1)).all()
    starts = begins.expand(batch, seqlen).flatten().nonzero()[:, 0]
    if not len(starts):  # every query sees a key before its own, or none up to its own
        return None
    cu_seqlens = torch.cat([starts, starts.new_full((1,), batch * seqlen)])
    # In one copy from the device
    facts = torch.stack([is_one, is_causal, is_full, cu_seqlens.diff().amax()]).tolist()
    has_documents, causal, full, longest = facts
    if not has_documents or not (causal or full):
        return None
    return Documents(batch, cu_seqlens.int(), longest=longest, causal=bool(causal))
