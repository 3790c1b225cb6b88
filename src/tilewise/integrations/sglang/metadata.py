"""Where the tokens of an SGLang batch are: the tensors of a `Step`, which are filled on the device
from `ForwardBatch` and from the table of each request's slots.
"""

from __future__ import annotations

from typing import Any

import torch

from ...mods.masks import tree
from ..engines import Step

Tensor = torch.Tensor


def queries_of_each(batch: Any) -> int | None:
    """How many queries every request of a batch has; None if they differ."""
    mode = batch.forward_mode
    if mode.is_decode_or_idle():
        return 1
    if mode.is_target_verify():
        if getattr(batch.spec_info, "ragged_verify_layout", None) is not None:
            raise NotImplementedError(
                "tilewise verifies the same number of drafts for every request: set "
                "SGLANG_RAGGED_VERIFY_MODE=static"
            )
        return batch.spec_info.draft_token_num
    if mode.name in ("EXTEND", "MIXED", "SPLIT_PREFILL"):
        return None
    raise NotImplementedError(
        f"tilewise does not support a batch of mode {mode.name}: use --attention-backend triton"
    )


def new_step(batch: int, *, pages: int, device: Any) -> Step:
    """A step without tokens: requests that pad a graph have page 0, which holds nothing."""

    def zeros(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.int32, device=device)

    return Step(zeros(batch + 1), seqused_k=zeros(batch), page_table=zeros(batch, pages))


def first_of(step: Step, batch: int) -> Step:
    """The first requests of a step, in the same memory."""
    return Step(
        step.cu_seqlens_q[: batch + 1],
        seqused_k=step.seqused_k[:batch],
        page_table=step.page_table[:batch],
    )


def fill(step: Step, batch: Any, *, slots: Tensor, page_size: int) -> None:
    """Fills the tensors of a step of as many requests. A graph may record it: no shape depends on
    what tensors hold, and nothing is read on the host. `slots` is int32 (requests, tokens), the
    slot of each token; those of a page follow each other.
    """
    queries = queries_of_each(batch)
    step.seqused_k.copy_(batch.seq_lens)
    if batch.forward_mode.is_target_verify():  # whose drafts `seq_lens` leaves out
        step.seqused_k.add_(queries)
    if queries is None:
        torch.cumsum(batch.extend_seq_lens, 0, dtype=torch.int32, out=step.cu_seqlens_q[1:])
    else:
        torch.arange(0, len(step.cu_seqlens_q) * queries, queries, out=step.cu_seqlens_q)
    first_slots = slots[:, : step.page_table.shape[1] * page_size : page_size]
    torch.index_select(first_slots, 0, batch.req_pool_indices, out=step.page_table)
    if page_size > 1:
        step.page_table.div_(page_size, rounding_mode="floor")


def cells_of(mask: Tensor, *, seq_lens: Tensor, drafts: int) -> Tensor:
    """The drafts x drafts cells of each request, from a mask whose rows have the keys before the
    drafts, too. Requests that pad a graph have no rows in it, and get any cells.
    """
    widths = seq_lens + drafts
    starts = (widths * drafts).cumsum(0) - widths * drafts + seq_lens
    draft = torch.arange(drafts, device=mask.device)
    places = starts[:, None, None] + draft[:, None] * widths[:, None, None] + draft
    return mask[places.clamp(max=mask.numel() - 1).flatten()]


def draft_tree(step: Step, cells: Tensor, *, drafts: int) -> Any:
    """The `mask_mod` of a step that verifies trees, computed on the device: `cells` has drafts x
    drafts bools for each request, whether one attends to the other.
    """
    rows = cells[: len(step.seqused_k) * drafts**2].view(-1, drafts).to(torch.int64)
    bits = (rows << torch.arange(drafts, device=cells.device)).sum(1)
    return tree(bits, seqused_k=step.seqused_k, cu_seqlens_q=step.cu_seqlens_q)
