"""Argument validation of caches of 8 bits: dtypes, and scales."""

from __future__ import annotations

import torch

from ..errors import ArgumentError
from ..tile.quantize import LIMITS, is_one_byte
from .qkv import DTYPES, check_kind, check_tensor

Tensor = torch.Tensor
KINDS = " or ".join(str(dtype).removeprefix("torch.") for dtype in LIMITS)


def check_cache_dtypes(k: Tensor, v: Tensor, words: tuple[str, str] = ("k", "v")) -> bool:
    """Whether k and v are a cache of 8 bits."""
    if not (is_one_byte(k) or is_one_byte(v)):
        return False
    for name, x in zip(words, (k, v)):
        if is_one_byte(x) and x.dtype not in LIMITS:
            raise NotImplementedError(
                f"{name}.dtype is {x.dtype}: 8-bit caches are {KINDS}; tilewise.cache.append "
                "writes such a cache"
            )
    if k.dtype != v.dtype:
        raise ArgumentError(
            f"{words[0]}.dtype is {k.dtype} and {words[1]}.dtype is {v.dtype}: a cache has one "
            "dtype, so quantise both, or none"
        )
    return True


def check_query_dtype(q: Tensor, k: Tensor, name: str = "q") -> None:
    """The dtype of q, or of new keys, with a cache of 8 bits."""
    if q.dtype not in DTYPES:
        raise ArgumentError(
            f"{name}.dtype is {q.dtype}: with a KV cache of {k.dtype} it must be bfloat16, float16 "
            "or (on the CPU) float32 or float64"
        )


def check_descale(
    name: str, x: Tensor | None, cache: tuple[str, Tensor], batch: int | None, layout: str = "bshd"
) -> Tensor | None:
    """Scales of a cache (pages or batch, rows, nheads_k, ...), those by row in its order. `batch`
    is None where nothing says which sequence a key is of.
    """
    if x is None:
        return None
    check_tensor(name, x)
    of, kept = cache
    if kept.dtype not in LIMITS:
        raise ArgumentError(
            f"{name} with {of} of {kept.dtype}: only caches of {KINDS} have scales, so leave it out"
        )
    check_kind(name, x, kept, (torch.float32,), of)
    nheads_k = kept.shape[2]
    ordered = x.transpose(1, 2) if layout == "bhsd" and x.dim() == 3 else x
    shapes = [(), (nheads_k,), kept.shape[:-1]]
    if batch is not None:
        shapes.insert(2, (batch, nheads_k))
    if tuple(ordered.shape) not in [tuple(shape) for shape in shapes]:
        rows = tuple(kept.shape[:-1])
        rows = (rows[0], rows[2], rows[1]) if layout == "bhsd" else rows
        asked = [*map(str, shapes[:-1]), f"{rows}, that of {of} without its last dimension"]
        raise ArgumentError(
            f"{name} has shape {tuple(x.shape)}: it must be {' or '.join(asked)}; expand() it"
        )
    return ordered
