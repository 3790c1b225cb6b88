"""Arguments of `flash_attn_with_kvcache`: their kinds, which of them need others, and the keys of
each sequence without and with the new ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..errors import ArgumentError, Words
from ..mods.compilers import share_batch
from .checks import check_dims, check_kind, check_tensor
from .scalars import as_int
from .values import knows_values

Tensor = torch.Tensor
NEEDED = {  # what an argument has no effect without
    "k": ("v",),
    "v": ("k",),
    "rotary_cos": ("k", "rotary_sin"),
    "rotary_sin": ("rotary_cos",),
    "rotary_seqlens": ("rotary_cos",),
    "cu_seqlens_k_new": ("k",),
}


def check_kinds(
    unserved: Sequence[Any],
    inputs: Sequence[Any],
    descales: Sequence[Any],
    arguments: dict[str, Any],
    is_packed: bool,
) -> None:
    """Refuses qv and q_descale, `arguments` without others that they need, and q, caches and
    scales that are no tensors of their rank.
    """
    for name, needed in NEEDED.items():
        for other in needed:
            if arguments[name] is not None and arguments[other] is None:
                raise ArgumentError(f"{name} without {other}: pass both, or neither")
    for name, x in zip(("qv", "q_descale"), unserved):
        if x is not None:
            raise NotImplementedError(f"{name}: MLA and 8-bit q are not supported, so pass None")
    for name, x in zip(("q", "k_cache", "v_cache"), inputs):
        is_packed_q = is_packed and name == "q"
        form = "(total_q, nheads, headdim) with cu_seqlens_q" if is_packed_q else "of 4 dimensions"
        check_dims(name, x, dims=3 if is_packed_q else 4, remedy=f"it must be {form}")
    for name, x in zip(("k_descale", "v_descale"), descales):
        if x is not None:
            check_tensor(name, x)


def lengths_before(
    counts: dict[str, Any],
    batch: int,
    k_cache: Tensor,
    table: Tensor | None,
    rows: Tensor | None,
    words: Words,
) -> Tensor:
    """The keys of each sequence before the new ones. All `counts` of sequences are checked, and
    their page table; `rows` has a first dimension of so many.
    """
    length = counts["cache_seqlens"]
    for name, x in (*counts.items(), (words.page_table, table)):
        if x is None or (x is length and not (isinstance(x, Tensor) and x.ndim == 1)):
            continue
        if type(x) is not Tensor:
            check_tensor(name, x)
        check_kind(name, x, q=k_cache, dtypes=(torch.int32,), of="k_cache")
        if torch.compiler.is_compiling() and not name.startswith("cu_"):
            share_batch(rows, x)
        size, is_table = batch + name.startswith("cu_"), x is table
        if x.ndim != 1 + is_table or x.shape[0] != size:
            form = f"({size}, pages)" if is_table else f"({size},)"
            raise ArgumentError(
                f"{name} has shape {tuple(x.shape)}: with {batch} sequences it must be {form}"
            )
    if isinstance(length, Tensor) and length.ndim == 1:
        return length
    if length is None:
        length = k_cache.shape[1] * (1 if table is None else table.shape[1])
    length = as_int(length)
    if length is None:
        raise ArgumentError(
            f"cache_seqlens={counts['cache_seqlens']!r}: it must be an int, int32 of shape "
            "(batch,), or None"
        )
    return torch.full((batch,), length, dtype=torch.int32, device=k_cache.device)


def lengths_after(
    before: Tensor, k: Tensor, cu_seqlens_k_new: Tensor | None
) -> tuple[Tensor | None, list[int] | None]:
    """The keys of each sequence with the new ones, and how many are new, where values are known."""
    dims = 4 if cu_seqlens_k_new is None else 3
    if getattr(k, "ndim", 0) != dims:
        form = "(batch, seqlen_new, nheads_k, headdim), or packed with cu_seqlens_k_new"
        check_dims("k", k, dims=dims, remedy=f"it must be {form}")
    new = k.shape[1] if cu_seqlens_k_new is None else cu_seqlens_k_new.diff()
    used = before + new if knows_values(before) else None
    if isinstance(new, int):
        return used, [new] * before.shape[0]
    return used, new.tolist() if isinstance(new, Tensor) and knows_values(new) else None
