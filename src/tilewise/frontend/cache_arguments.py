"""Arguments of `flash_attn_with_kvcache`: their kinds, which of them need others, and the keys of
each sequence without and with the new ones.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._C._functorch import peek_interpreter_stack

from ..errors import ArgumentError
from ..kernels.common import shared_memory
from ..mods.compilers import share_batch
from ..ops.calls import needs_dispatcher
from .checks import check_dims, check_kind, check_tensor
from .scalars import as_int
from .values import check_starts, knows_values

Tensor = torch.Tensor
NEEDED = {  # what an argument has no effect without
    "k": ("v",),
    "v": ("k",),
    "rotary_cos": ("k", "rotary_sin"),
    "rotary_sin": ("rotary_cos",),
    "rotary_seqlens": ("rotary_cos",),
    "cu_seqlens_k_new": ("k",),
}
COUNTS = "cache_seqlens", "cache_batch_idx", "cache_leftpad", "rotary_seqlens", "cu_seqlens_k_new"


def check_kinds(arguments: dict[str, Any]) -> None:
    """Refuses arguments that are not served or without others that they need, q, caches and scales
    that are no tensors of their rank, two tables, and a table of sequences that are moved.
    """
    for name, needed in NEEDED.items():
        for other in needed:
            if arguments[name] is not None and arguments[other] is None:
                raise ArgumentError(f"{name} without {other}: pass both, or neither")
    for name in ("qv", "q_descale"):
        if arguments[name] is not None:
            raise NotImplementedError(f"{name}: MLA and 8-bit q are not supported, so pass None")
    for name in ("q", "k_cache", "v_cache"):
        is_packed_q = name == "q" and arguments["cu_seqlens_q"] is not None
        form = "(total_q, nheads, headdim) with cu_seqlens_q" if is_packed_q else "of 4 dimensions"
        check_dims(name, arguments[name], dims=3 if is_packed_q else 4, remedy=f"it must be {form}")
    for name in ("k_descale", "v_descale"):
        if arguments[name] is not None:
            check_tensor(name, arguments[name])
    has_tables = [arguments[name] is not None for name in ("page_table", "block_table")]
    if all(has_tables):
        raise ArgumentError("page_table and block_table are two names of one table: pass one")
    is_moved = not (arguments["cache_batch_idx"] is arguments["cache_leftpad"] is None)
    if is_moved and any(has_tables):
        raise NotImplementedError(
            "cache_batch_idx and cache_leftpad with a page table, which says where each sequence "
            "lies: leave them out"
        )


def check_memory(arguments: dict[str, Any], has_new: bool) -> bool:
    """Refuses arguments in memory that a call writes, but of a traced call; whether it is one."""
    tensors = {
        name: x
        for name, x in arguments.items()
        if isinstance(x, Tensor) and x.layout == torch.strided and not x.is_nested  # else refused
    }
    is_traced = needs_dispatcher(tensors.values())
    if not (is_traced or peek_interpreter_stack() is not None or tensors["k_cache"].is_meta):
        shared_memory.check_memory(tensors, has_new)
    return is_traced


def lengths_before(arguments: dict[str, Any], batch: int, table_name: str) -> Tensor:
    """The keys of each sequence before the new ones. All counts of sequences are checked, and
    their page table.
    """
    k_cache, length = arguments["k_cache"], arguments["cache_seqlens"]
    table = arguments[table_name]
    for name in (*COUNTS, table_name):
        x = arguments[name]
        if x is None or (x is length and not (isinstance(x, Tensor) and x.ndim == 1)):
            continue
        if type(x) is not Tensor or x.dtype is not torch.int32 or x.device != k_cache.device:
            check_kind(name, x, q=k_cache, dtypes=(torch.int32,), of="k_cache")
        if torch.compiler.is_compiling() and not name.startswith("cu_"):
            share_batch(None if arguments["cu_seqlens_q"] is not None else arguments["q"], x)
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
    number = as_int(length)
    if number is None or (type(number) is int and number >> 31 not in (0, -1)):
        raise ArgumentError(
            f"cache_seqlens={length!r}: it must be an int, int32 of shape (batch,), or None"
        )
    return torch.full((batch,), number, dtype=torch.int32, device=k_cache.device)


def lengths_after(
    before: Tensor, k: Tensor, cu_seqlens_k_new: Tensor | None
) -> tuple[Tensor | None, list[int] | None]:
    """The keys of each sequence with the new ones, and how many are new, where values are known."""
    dims = 4 if cu_seqlens_k_new is None else 3
    if getattr(k, "ndim", 0) != dims:
        form = "(batch, seqlen_new, nheads_k, headdim), or packed with cu_seqlens_k_new"
        check_dims("k", k, dims=dims, remedy=f"it must be {form}")
    if cu_seqlens_k_new is not None:
        check_starts("cu_seqlens_k_new", cu_seqlens_k_new, k.shape[0], "keys")
    elif k.shape[0] != before.shape[0]:
        raise ArgumentError(
            f"k has shape {tuple(k.shape)}: with {before.shape[0]} sequences its first dimension "
            f"must be {before.shape[0]}"
        )
    new = k.shape[1] if cu_seqlens_k_new is None else cu_seqlens_k_new.diff()
    used = before + new if knows_values(before) else None
    if isinstance(new, int):
        return used, [new] * before.shape[0]
    return used, new.tolist() if isinstance(new, Tensor) and knows_values(new) else None
