"""Predicates, biases and memory of shapes with a `modifier`.

FlexAttention takes masks as predicates. They are written out here and, as ours, in
`tilewise.explain.modifiers`: a test holds them to be the same.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from tilewise.explain.modifiers import (
    BIASES,
    document_numbers,
    prefix_size,
    window_size,
)
from tilewise.explain.shapes import Shape

Tensor = torch.Tensor


def predicate_of(shape: Shape, device: str) -> Callable[..., Tensor] | None:
    """The mask as FlexAttention takes it."""
    if shape.modifier not in PREDICATES:
        return None
    return PREDICATES[shape.modifier](shape.seqlen_q, device)


def bias_of(shape: Shape, device: str, generator: torch.Generator) -> Tensor | None:
    """The bias of a shape that has one; head by head, as its draws are larger than it is."""
    if shape.modifier not in BIASES:
        return None
    sizes = 1, shape.nheads, shape.seqlen_q, shape.seqlen_k
    bias = torch.empty(sizes, dtype=getattr(torch, shape.dtype), device=device)
    for head in bias[0]:
        head.copy_(torch.randn(sizes[2:], device=device, generator=generator))
    return bias


def bytes_of(shape: Shape) -> int:
    """Memory of a bias with its gradient, and of what checking one head of it in fp64 takes."""
    if shape.modifier not in BIASES:
        return 0
    pairs = shape.seqlen_q * shape.seqlen_k
    copies = 2 if shape.modifier == "learned-bias" else 1
    return pairs * (shape.nheads * getattr(torch, shape.dtype).itemsize * copies + 64)


def _within_window(seqlen: int, device: str) -> Callable[..., Tensor]:
    size = window_size(seqlen)
    return lambda b, h, q_idx, kv_idx: (kv_idx <= q_idx) & (q_idx - kv_idx < size)


def _within_prefix(seqlen: int, device: str) -> Callable[..., Tensor]:
    size = prefix_size(seqlen)
    return lambda b, h, q_idx, kv_idx: (kv_idx < size) | (kv_idx <= q_idx)


def _within_document(seqlen: int, device: str) -> Callable[..., Tensor]:
    numbers = document_numbers(seqlen, device)
    return lambda b, h, q_idx, kv_idx: numbers[q_idx] == numbers[kv_idx]


def _behind_in_document(seqlen: int, device: str) -> Callable[..., Tensor]:
    numbers = document_numbers(seqlen, device)
    return lambda b, h, q_idx, kv_idx: (numbers[q_idx] == numbers[kv_idx]) & (kv_idx <= q_idx)


PREDICATES: dict[str, Callable[[int, str], Callable[..., Tensor]]] = {
    "window": _within_window,
    "prefix": _within_prefix,
    "causal": lambda seqlen, device: lambda b, h, q_idx, kv_idx: kv_idx <= q_idx,
    "documents": _within_document,
    "causal-documents": _behind_in_document,
}
