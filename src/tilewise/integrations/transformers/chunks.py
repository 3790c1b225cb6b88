"""Chunked attention: a query sees the keys before it that are in its own chunk of positions.

Chunks are counted from a row's first real token (Llama 4). Each is a sequence by itself, so a batch
of chunked rows is served as packed sequences: chunks in order, row after row. Where they begin is
computed from lengths and padding alone, and no value is read, so that a compiled step over a static
cache is served, too.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from .visible import Starts

Tensor = torch.Tensor


class Span(NamedTuple):
    """Positions one after another. To a compiler a range would be a constant."""

    first: Any  # an int, or a tensor for queries over a static cache
    length: int


def chunk_of(config, local_size: int | None) -> int | None:
    """The chunk's size, where a mask of this `local_size` is said to be chunked."""
    size = getattr(config, "attention_chunk_size", None)
    return size if size is not None and size == local_size else None


def left_padding(attention_mask: Tensor | None, batch: int, device) -> Tensor:
    """int64 (batch,): the tokens before each row's first real one, as transformers counts them."""
    if attention_mask is None:
        return torch.zeros(batch, dtype=torch.long, device=device)
    return (attention_mask.cumsum(-1) == 0).sum(-1)


def is_chunked(predicate, chunk: int, padding: Tensor, queries: Span, keys: Span) -> Tensor:
    """Whether `predicate` is that of these chunks, by diagonals (or one query's keys)."""
    device, stop = padding.device, keys.first + keys.length
    q_idx = (torch.arange(queries.length, device=device) + queries.first)[:, None]
    if queries.length == 1:
        k_idx = (torch.arange(keys.length, device=device) + keys.first)[None]
    else:
        near = {size + step for size in (0, chunk) for step in (-1, 0, 1)}
        offsets = near | {1 << power for power in range(keys.length.bit_length())}
        offsets |= {-offset for offset in offsets}
        k_idx = q_idx + torch.tensor(sorted(offsets), device=device)
    exists = (k_idx >= keys.first) & (k_idx < stop)
    k_idx = k_idx.clamp(keys.first, stop - 1)
    b = torch.arange(padding.shape[0], device=device).view(-1, 1, 1, 1)
    sees = predicate(b, torch.zeros_like(b[:1]), q_idx[None, None], k_idx[None, None])
    q_chunk, k_chunk = ((idx - padding.view(-1, 1, 1, 1)) // chunk for idx in (q_idx, k_idx))
    return ((sees == ((q_chunk == k_chunk) & (k_idx <= q_idx))) | ~exists).all()


def chunk_starts(chunk: int, padding: Tensor, queries: Span, keys: Span) -> Starts:
    """Where the chunks of all rows begin.

    A row has the same number of them whatever its padding; some are empty. Its last holds keys
    without a query: slots of a static cache behind the last query.
    """
    number = (keys.length - 1) // chunk + 2
    begin = padding + (keys.first - padding) // chunk * chunk  # of the first key's chunk
    steps = torch.arange(1, number + 1, device=padding.device)
    edges = begin[:, None] + chunk * steps  # (batch, number), positions
    edges = (edges - queries.first).clamp(max=queries.length)  # from the first to behind the last
    k_edges = (edges + (queries.first - keys.first)).clamp(min=0)
    return Starts(_flat(edges.clamp(min=0), queries.length), keys=_flat(k_edges, keys.length))


def kept_keys(starts: Tensor, stops: Tensor, length: int) -> Tensor:
    """int32: how many keys of each chunk come before its row's padding on the right, which begins
    at `stops` (batch,) of `length` keys.
    """
    row = torch.arange(stops.shape[0], device=stops.device)
    stops = (stops + length * row).repeat_interleave((starts.numel() - 1) // stops.shape[0])
    begins, ends = starts[:-1].long(), starts[1:].long()
    return (torch.minimum(ends, stops) - begins).clamp(min=0).to(torch.int32)


def _flat(edges: Tensor, length: int) -> Tensor:
    """Places in each row of `length`, as places in all rows side by side: (rows * n + 1,)."""
    rows = edges.shape[0]
    edges = torch.nn.functional.pad(edges, (1, 0))  # a row's first place begins one
    edges = edges + length * torch.arange(rows, device=edges.device)[:, None]
    return torch.nn.functional.pad(edges.flatten(), (0, 1), value=rows * length).to(torch.int32)
