"""FlashAttention-3's `attention_chunk`: a query attends to the chunk of keys that contains its
diagonal.

    (q_idx + seqlen_k - seqlen_q) // chunk == k_idx // chunk

A band that spans one chunk on either side joins it, so that kernels skip what lies further away.
"""

from __future__ import annotations

import functools
import operator
from typing import Any

import torch

from ..errors import ArgumentError
from ..mods.compilers import gives_constant
from ..mods.flat import NO_MODIFIERS, FlatMods
from ..mods.masks import Mask, chunked, mask
from ..problem import OPEN, Extras, Mods
from .scalars import Numbers, as_int

Tensor = torch.Tensor


def check_chunk(chunk: Any) -> int:
    """The length of a chunk, 0 for none."""
    size = chunk if type(chunk) is int else as_int(chunk)
    if size is None or size < 0:
        raise ArgumentError(
            f"attention_chunk={chunk!r}: it must be an int, the number of keys per chunk, or 0 "
            "for no chunks"
        )
    # A compiler makes a graph for each: it is part of the code
    return min(operator.index(size), 2**31 - 1)


def within_chunk(numbers: Numbers, chunk: int) -> Numbers:
    """The numbers with a band that no chunk reaches beyond."""
    if not chunk:
        return numbers
    sides = numbers.sides("window_size")
    left, right = (chunk - 1 if n == OPEN else min(n, chunk - 1) for n in sides)
    return numbers._replace(window=(left, right))


def chunk_of_batch(chunk: int, q: Tensor, k: Tensor) -> FlatMods:
    """The mask of chunks for (batch, seqlen, nheads, headdim)."""
    if not chunk or q.shape[1] == k.shape[1]:
        return mask_of_chunks(chunk)
    diagonal = q.new_full((q.shape[0],), k.shape[1] - q.shape[1], dtype=torch.int32)
    return mask_of_chunks(chunk, diagonal)


def chunk_of_packed(chunk: int, extras: Extras) -> FlatMods:
    """The mask of chunks for packed sequences, by their lengths; it stays on the device. What is
    wrong with those is for their own checks to say.
    """
    used_k, used_q = extras.seqused_k, extras.seqused_q
    starts_q, starts_k = extras.cu_seqlens_q, extras.cu_seqlens_k
    if starts_q is None or starts_k is None:
        return NO_MODIFIERS
    if not chunk or (starts_q is starts_k and used_q is used_k):
        return mask_of_chunks(chunk)
    lengths = used_k, used_q, starts_q, starts_k
    there = [x for x in lengths if x is not None]
    if any(not isinstance(x, Tensor) or x.dim() != 1 for x in there):
        return NO_MODIFIERS
    keys = starts_k.diff() if used_k is None else used_k
    queries = starts_q.diff() if used_q is None else used_q
    if keys.shape != queries.shape or keys.device != queries.device:
        return NO_MODIFIERS
    return mask_of_chunks(chunk, keys - queries)


def mask_of_chunks(chunk: int, diagonal: Tensor | None = None) -> FlatMods:
    """The mask of chunks, in place of a `mask_mod`, which a compiler would trace. `diagonal` is the
    key on the diagonal of query 0 of each sequence, where that is not 0; nor is it given for a KV
    cache, whose queries are the last keys.
    """
    if not chunk:
        return NO_MODIFIERS
    captured = () if diagonal is None else (diagonal,)
    return FlatMods(Mods(mask=_name(chunk, diagonal is not None)), captured)


@gives_constant
def _name(chunk: int, is_shifted: bool) -> str:
    return _mask(chunk, is_shifted).key


@functools.lru_cache(maxsize=64)
def _mask(chunk: int, is_shifted: bool) -> Mask:
    if not is_shifted:
        return chunked(chunk)
    diagonal = torch.zeros(1, dtype=torch.int32, device="cpu")
    return mask(lambda b, h, q_idx, kv_idx: (q_idx + diagonal[b]) // chunk == kv_idx // chunk)
