"""Sequences packed in rows: where they begin, and whether all sources of that agree.

transformers says it in three ways. `cu_seq_lens_q` and `cu_seq_lens_k` come with the call
(FlashAttentionKwargs: `DataCollatorWithFlattening(return_flash_attn_kwargs=True)` makes them), in a
batch of one row. Position ids that restart come to the mask function, and to most layers, where
flash attention reads them. Each is enough. What the mask says and `cu_seq_lens` are compared, once
a forward (under torch.compile by an assertion that runs with the graph). A mask that knows of one
sequence only contradicts nothing: no position ids were passed, or the model hands it none
(gpt-oss), or there is a KV cache or a padding mask, with which transformers looks at none. Then
`cu_seq_lens` decide unverified, as they do with flash attention; without them the position ids that
reach the layer do, and they are read once a forward.
"""

from __future__ import annotations

import torch

from ...errors import ArgumentError
from .opaque import ANOTHER
from .positions import UNTOLD, cut, joined_by_mask, starts_by_positions
from .visible import Band, Lengths, Starts, Visible, assert_later, starts_from

Tensor = torch.Tensor
STARTS = ("cu_seq_lens_q", "cu_seq_lens_k")
# Related arguments: nothing here needs the longest, and seq_idx indexes the same sequences.
BESIDE = ("max_length_q", "max_length_k", "seq_idx")
UNKNOWN = (
    "the mask does not know of these sequences: position_ids tell it of them, without padding and "
    f"a KV cache; {ANOTHER}"
)
DISAGREE = (
    "cu_seq_lens_q, cu_seq_lens_k and the mask (of position_ids that restart) tell of different "
    "sequences: pass one of them, or the same in both"
)


def starts_of(visible: Visible | None, kwargs: dict, q: Tensor, k: Tensor) -> Starts | None:
    """Where the sequences begin; None for rows that are not packed. What is understood is taken out
    of `kwargs`.
    """
    of_q, of_k = (kwargs.get(name) for name in STARTS)
    if of_q is None and of_k is None:
        starts = _told_otherwise(visible, kwargs.get("position_ids"), q=q, k=k)
        if starts is None:
            return None if visible is None else visible.starts
    else:
        starts = _told_by_lengths(visible, of_q, of_k=of_k, q=q)
    for name in (*STARTS, *BESIDE):
        kwargs.pop(name, None)
    return starts


def _told_by_lengths(
    visible: Visible | None, of_q: Tensor | None, of_k: Tensor | None, q: Tensor
) -> Starts | None:
    if of_q is None or of_k is None:
        missing = STARTS[0] if of_q is None else STARTS[1]
        raise ArgumentError(f"{' and '.join(STARTS)} come together: {missing} is missing")
    starts = Starts(of_q, of_k)
    _check_one_row(visible, q.shape[0])
    if visible is not None and visible.mask is not None:
        return _known_by_mask(visible, visible.mask, starts_of_both=starts)
    if visible is not None and visible.chunk is not None:
        return _chunked(visible, visible.chunk, given=starts)
    if visible is not None and visible.begins is not None:
        _agree(visible, visible.begins[0], given=starts)
    return Starts(of_q.to(q.device, torch.int32), of_k.to(q.device, torch.int32))


def _told_otherwise(
    visible: Visible | None, position_ids: Tensor | None, q: Tensor, k: Tensor
) -> Starts | None:
    """Starts by the mask, where it has seen position ids, or by those that reach the layer."""
    if visible is not None and visible.begins is not None and visible.chunk is None:
        if visible.starts is not None:
            return visible.starts
        # No value can be read in a compiled graph, so a window's mask need not have seen them.
        assert_later(~visible.begins[:, 1:].any(), UNTOLD)
    return starts_by_positions(visible, position_ids, q=q, k=k)


def _check_one_row(visible: Visible | None, batch: int) -> None:
    if batch != 1:
        raise NotImplementedError(
            "cu_seq_lens_q: packed sequences are supported in one row, and this batch has "
            f"{batch}: flatten it into one (DataCollatorWithFlattening does)"
        )
    if visible is not None and (visible.runs is not None or visible.used is not None):
        raise NotImplementedError(
            "cu_seq_lens_q and an attention_mask with padding: leave the mask out, packed rows "
            "have none"
        )


def _known_by_mask(visible: Visible, mask: Tensor, starts_of_both: Starts) -> None:
    """A stored mask hides the sequences from each other."""
    seqlen, kv_length = visible.lengths
    if seqlen != kv_length:
        raise NotImplementedError(f"cu_seq_lens_q and keys of an earlier call: {UNKNOWN}")
    for starts in starts_of_both:
        if any(starts is other for other in visible.agreed):
            continue
        begins = _begins_from(starts.to(mask.device), seqlen)
        is_known = ~(begins[1:] & joined_by_mask(visible, mask)[0]).any()
        if torch.compiler.is_compiling():
            assert_later(is_known, UNKNOWN)
            continue
        if not is_known:
            raise NotImplementedError(f"cu_seq_lens_q: {UNKNOWN}")
        visible.agreed.append(starts)


def _chunked(visible: Visible, chunk: int, given: Starts) -> Starts:
    """Sequences of which each is cut in chunks, from its own beginning on."""
    if visible.begins is None:
        raise NotImplementedError(
            "cu_seq_lens_q and chunked attention: supported for whole sequences, without a KV "
            f"cache and torch.compile; pad the batch instead, or {ANOTHER}"
        )
    begins = visible.begins
    cuts = []
    for starts in given:
        begins_of_lengths = _begins_from(starts.to(begins.device), begins.shape[1])[None]
        cuts.append(cut(begins_of_lengths, chunk))
    alone = cut(torch.zeros_like(begins), chunk)
    is_mask = torch.equal(begins, alone) or torch.equal(begins, cuts[0])
    if not is_mask or not torch.equal(cuts[0], cuts[1]):
        raise ArgumentError(DISAGREE)
    once = starts_from(cuts[0])
    return Starts(once, once)


def _agree(visible: Visible, begins: Tensor, given: Starts) -> None:
    """Checks that the mask's sequences, which begin at `begins`, are those of `given`."""
    if torch.compiler.is_compiling():
        for starts in given:
            assert_later(_are_those_of(begins, starts), DISAGREE)
        return
    for starts in given:
        if any(starts is other for other in visible.agreed):  # an earlier layer asked
            continue
        if not _are_those_of(begins, starts):
            raise ArgumentError(DISAGREE)
        visible.agreed.append(starts)


def _are_those_of(begins: Tensor, starts: Tensor) -> Tensor:
    """Whether both tell of the same sequences, or `begins` of one alone. A sequence of length 0
    begins where the next one does, or where the row ends.
    """
    seqlen, starts = begins.shape[0], starts.to(begins.device)
    is_same = (_begins_from(starts, seqlen) == begins).all() & (starts[-1] == seqlen)
    return is_same | ~begins[1:].any()


def _begins_from(starts: Tensor, seqlen: int) -> Tensor:
    """bool (seqlen,): the places that `starts` names."""
    begins = torch.zeros(seqlen + 1, dtype=torch.bool, device=starts.device)
    return begins.index_fill(0, starts.long().clamp(0, seqlen), True)[:seqlen]


def apart(starts: Starts, band: Band, q: Tensor, k: Tensor) -> Visible:
    """Packed rows as a stored mask: what is added to scores counts keys through the row."""
    lengths = Lengths(q.shape[1], k.shape[1])
    is_shared = starts.queries is starts.keys or torch.equal(starts.queries, starts.keys)
    if lengths.queries != lengths.keys or not is_shared:
        raise NotImplementedError(
            "position_bias and packed sequences whose keys are not their queries: pad the batch "
            f"instead, or {ANOTHER}"
        )
    begins = torch.zeros(q.shape[0] * lengths.queries + 1, dtype=torch.long, device=q.device)
    begins = begins.index_fill(0, starts.queries.to(q.device).long(), 1)[:-1]
    number = begins.cumsum(0).view(q.shape[0], 1, lengths.queries)
    return Visible(band, 0, lengths=lengths, mask=number[..., None] == number[:, :, None])
