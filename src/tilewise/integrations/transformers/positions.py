"""Position ids that reach a layer, read as flash attention reads them.

A sequence begins where they come back to 0. transformers' masks look at them in training alone:
with a KV cache or a padding mask, and in models whose mask is handed none, the layer is the only
place where packed rows show.
"""

from __future__ import annotations

import torch

from .opaque import ANOTHER
from .visible import Starts, Visible, assert_later, starts_from

Tensor = torch.Tensor
UNTOLD = (
    "position_ids restart within a row: under torch.compile pass cu_seq_lens_q and "
    "cu_seq_lens_k, too"
)
PACKING = (
    "packed sequences are supported if cu_seq_lens_q and cu_seq_lens_k describe them (in a batch "
    "of one row), or position_ids that restart at 0 (without padding and keys of an earlier "
    "call): pad the batch instead, or " + ANOTHER
)


def starts_by_positions(
    visible: Visible | None, position_ids: Tensor | None, q: Tensor, k: Tensor
) -> Starts | None:
    """Where the sequences begin; None if each row is one. The values are read once for all layers
    that a mask goes through.

    Raises NotImplementedError for packed rows with padding, or with keys of an earlier call.
    """
    batch, seqlen = q.shape[:2]
    if position_ids is None or seqlen == 1 or position_ids.dim() != 2:
        return None
    if position_ids.shape[1] != seqlen or position_ids.shape[0] not in (1, batch):
        return None
    answers = () if visible is None else visible.position_ids
    for ids, version, starts in answers:
        if ids is position_ids and version == version_of(position_ids):
            return starts
    restarts = (position_ids[:, 1:] == 0) | (position_ids[:, 1:] < position_ids[:, :-1])
    joined = None if visible is None else joined_of(visible, batch)
    if joined is not None:
        restarts = restarts & joined.to(restarts.device)
    if torch.compiler.is_compiling() or (q.is_cuda and torch.cuda.is_current_stream_capturing()):
        assert_later(~restarts.any(), UNTOLD)  # no value can be read
        return None
    starts: Starts | None = None
    if restarts.any():
        if joined is not None or k.shape[1] != seqlen or (position_ids[:, 1:][restarts] != 0).any():
            raise NotImplementedError(f"position_ids restart within a row: {PACKING}")
        begins = torch.nn.functional.pad(restarts, (1, 0), value=True).to(q.device)
        if visible is not None and visible.chunk is not None:
            begins = cut(begins, visible.chunk)
        once = starts_from(begins.expand(batch, -1))
        starts = Starts(once, once)
    if visible is not None:
        visible.position_ids.append((position_ids, version_of(position_ids), starts))
    return starts


def cut(begins: Tensor, chunk: int) -> Tensor:
    """Where chunks begin: at `begins` (batch, seqlen), and every `chunk` tokens behind."""
    place = torch.arange(begins.shape[1], device=begins.device)
    begun = torch.where(begins, place, 0).cummax(1).values
    return begins | ((place - begun) % chunk == 0)


def version_of(x: Tensor) -> int:
    """What changes where a tensor is written to."""
    return 0 if x.is_inference() else x._version  # inference tensors count none


def joined_of(visible: Visible, batch: int) -> Tensor | None:
    """bool (batch, queries - 1): whether a query and the one before it are real, and as far as the
    mask knows of one sequence; None if all are.
    """
    if visible.mask is not None:
        return joined_by_mask(visible, visible.mask)
    real = _real(visible, batch)
    return None if real is None else real[:, 1:] & real[:, :-1]


def joined_by_mask(visible: Visible, mask: Tensor) -> Tensor:
    """Whether a query sees its own key and the one before in a stored mask."""
    count, diagonal = visible.lengths.queries, visible.diagonal
    row = torch.arange(1, count, device=mask.device)
    key = (row + (0 if diagonal is None else diagonal)).clamp(1, visible.lengths.keys - 1)
    row = row if mask.shape[2] > 1 else 0
    return (mask[:, :, row, key] & mask[:, :, row, key - 1]).all(1)


def _real(visible: Visible, batch: int) -> Tensor | None:
    """bool (batch, queries): the queries that are no padding; None if all are real."""
    count = visible.lengths.queries
    if visible.used is not None:
        return torch.arange(count, device=visible.used.device) < visible.used[:, None]
    diagonal = visible.diagonal
    if visible.runs is None or diagonal is None:
        return None
    end = diagonal + count  # behind it are slots that are not written yet
    if all(run.start == 0 and run.stop == end for run in visible.runs):
        return None
    runs = torch.tensor(visible.runs) - diagonal
    place = torch.arange(count)
    return (place >= runs[:, :1]) & (place < runs[:, 1:])
