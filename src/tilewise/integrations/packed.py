"""Sequences packed in one row: where they begin, and whether all who say so agree.

transformers says it twice. `cu_seq_lens_q` and `cu_seq_lens_k` come with the call
(FlashAttentionKwargs: `DataCollatorWithFlattening(return_flash_attn_kwargs=True)` makes them), and
position ids that start anew come to the mask function. Either is enough; where both are there they
are compared, once a forward (under torch.compile by an assertion that runs with the graph). A mask
that knows of one sequence only contradicts nothing: no position ids were passed, or the model hands
it none (gpt-oss), or there is a KV cache, with which transformers looks at none. Then `cu_seq_lens`
decide unverified, as they do with flash attention; without them the row is one sequence, as it is
with eager attention.
"""

from __future__ import annotations

import torch

from ..errors import ArgumentError
from .visible import Visible, runs_of

Tensor = torch.Tensor
STARTS = ("cu_seq_lens_q", "cu_seq_lens_k")
# What comes beside them: nothing here needs the longest, and seq_idx numbers the same sequences.
BESIDE = ("max_length_q", "max_length_k", "seq_idx")
DISAGREE = (
    "cu_seq_lens_q, cu_seq_lens_k and the mask (of position_ids that start anew) tell of different "
    "sequences: pass one of them, or the same in both"
)
UNTOLD = (
    "position_ids start anew within a row: under torch.compile pass cu_seq_lens_q and "
    "cu_seq_lens_k, too"
)


def starts_of(
    mask: Tensor | Visible | None, kwargs: dict, query: Tensor
) -> tuple[Tensor, Tensor] | None:
    """Where the sequences of a row begin, by queries and by keys, and behind the last where it
    ends; None for rows that are not packed. What is understood is taken out of `kwargs`.
    """
    visible = mask if isinstance(mask, Visible) else None
    begins = None if visible is None else visible.begins
    given = [kwargs.get(name) for name in STARTS]
    if all(starts is None for starts in given):
        if begins is None:
            return None
        if visible.starts is None:  # no value can be read in a compiled graph
            torch._assert_async(~begins[1:].any(), UNTOLD)
            return None
        found = visible.starts, visible.starts
    else:
        for name, starts in zip(STARTS, given):
            if starts is None:
                raise ArgumentError(f"{' and '.join(STARTS)} come together: {name} is missing")
        _check_one_row(mask, query.shape[0])
        if begins is not None:
            _agree(visible, given)
        found = tuple(starts.to(query.device, torch.int32) for starts in given)
    for name in (*STARTS, *BESIDE):
        kwargs.pop(name, None)
    return found


def _check_one_row(mask: Tensor | Visible | None, batch: int) -> None:
    if batch != 1:
        raise NotImplementedError(
            f"cu_seq_lens_q: packed sequences are served in one row, and this batch has {batch}: "
            "flatten it into one (DataCollatorWithFlattening does)"
        )
    if isinstance(mask, Visible):
        is_padded = mask.runs is not None or mask.used is not None
    else:
        is_padded = mask is not None and runs_of(mask, 0, mask.shape[1]) is not None
    if is_padded:
        raise NotImplementedError(
            "cu_seq_lens_q and an attention_mask with padding: leave the mask out, packed rows "
            "have none"
        )


def _agree(visible: Visible, given: list[Tensor]) -> None:
    """The mask knows of the sequences that `given` tell of."""
    if torch.compiler.is_compiling():
        for starts in given:
            torch._assert_async(_are_those_of(visible.begins, starts), DISAGREE)
        return
    for starts in given:
        if any(starts is other for other in visible.agreed):  # an earlier layer asked
            continue
        if not _are_those_of(visible.begins, starts):
            raise ArgumentError(DISAGREE)
        visible.agreed.append(starts)


def _are_those_of(begins: Tensor, starts: Tensor) -> Tensor:
    """Whether both tell of the same sequences, or `begins` of one alone. A sequence of length 0
    begins where the next one does, or where the row ends.
    """
    seqlen, starts = begins.shape[0], starts.to(begins.device)
    told = torch.zeros(seqlen + 1, dtype=torch.bool, device=begins.device)
    told = told.index_fill(0, starts.long().clamp(0, seqlen), True)
    is_same = (told[:seqlen] == begins).all() & (starts[-1] == seqlen)
    return is_same | ~begins[1:].any()
