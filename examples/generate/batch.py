"""Chunks of many requests as the tensors of one call: packed tokens and a page table."""

from __future__ import annotations

from itertools import accumulate
from typing import NamedTuple

import torch

from .scheduler import Chunk

Tensor = torch.Tensor
NO_PAGE = -1  # past the end of a row: never read


class Batch(NamedTuple):
    """What a forward and its attention need to know of a step."""

    ids: Tensor  # (tokens,), those of all chunks end to end
    positions: Tensor  # (tokens,), each token's place in its request
    cu_seqlens_q: Tensor  # (batch + 1,), where chunks begin
    seqused_k: Tensor  # (batch,), keys of each request, this step's included
    page_table: Tensor  # (batch, width)


def batch_of(chunks: list[Chunk], width: int, device: str) -> Batch:
    """Made on the host and copied before the forward: no layer waits for it."""
    ids = [x for chunk in chunks for x in chunk.request.tokens[chunk.first : chunk.last]]
    positions = [i for chunk in chunks for i in range(chunk.first, chunk.last)]
    starts = list(accumulate((chunk.last - chunk.first for chunk in chunks), initial=0))
    rows = [chunk.request.pages for chunk in chunks]
    table = [row + [NO_PAGE] * (width - len(row)) for row in rows]
    lasts = [chunk.last for chunk in chunks]
    return Batch(
        torch.tensor(ids, device=device),
        torch.tensor(positions, device=device),
        torch.tensor(starts, dtype=torch.int32, device=device),
        torch.tensor(lasts, dtype=torch.int32, device=device),
        torch.tensor(table, dtype=torch.int32, device=device),
    )
