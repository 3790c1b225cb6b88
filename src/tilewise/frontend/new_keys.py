"""New keys of `flash_attn_with_kvcache`: one launch appends them and writes what attention reads
with them, or torch's operators compute that, and `cache.append` follows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..errors import ArgumentError
from ..features import refuse_gradients
from ..kernels.common.appended import AppendedCall
from ..ops import append as append_ops
from ..tile.rotary import Rotary, rotate
from .append import check_call, check_tables
from .values import check_leftpad

Tensor = torch.Tensor


Step = Callable[[Any], Any]  # from the decode step of a call the step of its append, too


def append_new(
    call: AppendedCall, used: Tensor | None, is_kept: bool
) -> tuple[AppendedCall, Step | None]:
    """Appends, and returns the call without its new keys, which are among those `before`, and how
    both are launched again. `used` has the keys of each sequence, where values are known.
    """
    if not append_ops.may_prepare(call):
        return append_apart(call, used), None
    counted = call.before if used is None else used
    check_call(call.append._replace(seqused_k=counted, rotary=None))
    refuse_gradients("cached", [("q", call.q)])
    if call.leftpad is not None and used is not None:
        check_leftpad(call.leftpad, used)
    prologue, step = append_ops.prepare(call, is_kept)
    rotated = None if prologue.rotated is None else prologue.rotated.ptr
    q, table = call.q if rotated is None else rotated, prologue.table
    table_read = call.page_table if table is None else table
    appended = call._replace(q=q, before=prologue.used, table=table_read, rows=None)
    if step is None:
        return appended, None
    pages = "table" if call.rows is None else "rows"
    reads = [
        "q" if rotated is None else "rotated",
        "k_cache",
        "v_cache",
        pages if table is None else "padded_table",
        "used",
        *AppendedCall._fields[5:11],
    ]
    return appended, lambda decode: step.before(decode, reads)


def append_apart(call: AppendedCall, used: Tensor | None) -> AppendedCall:
    """Appends with torch's operators and `cache.append`: on a CPU, compiled, and for what a launch
    does not take.
    """
    q, k, starts = call.q, call.k, call.cu_seqlens_k
    rotary = call.rotary
    if rotary is not None:
        base = call.before if call.rotary_seqlens is None else call.rotary_seqlens
        first_q, row_q = _positions(q, base, call.cu_seqlens_q)
        first_k, row_k = _positions(k, base, starts)
        positions_q = first_q if call.is_at_first else first_q + row_q
        q, k = rotate(q, rotary, positions_q), rotate(k, rotary, first_k + row_k)
    if used is None:
        used = call.before + (k.shape[1] if starts is None else starts.diff())
    new = call.append._replace(k=k, seqused_k=used, rotary=None)
    check_call(new)
    append_ops.append(new)
    if call.leftpad is None:
        return call._replace(q=q, before=used, table=call.page_table, rows=None)
    rows = None if call.rows is None else call.rows.squeeze(1)
    used, table = without_padding(call.k_cache, used, rows=rows, leftpad=call.leftpad)
    return call._replace(q=q, before=used, table=table, rows=None)


def check_rotation(q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor | None) -> None:
    """Checks the tables of q and k."""
    if k is None or sin is None:
        missing = "k" if k is None else "rotary_sin"
        raise ArgumentError(f"rotary_cos without {missing}: pass rotary_cos, rotary_sin, k and v")
    check_tables(Rotary(cos, sin), q, of="q")


def _positions(x: Tensor, base: Tensor, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
    """Where the sequence of each row begins, and the row in it."""
    if cu_seqlens is None:
        row = torch.arange(x.shape[1], device=x.device)
        return base.long().unsqueeze(1), row.expand(x.shape[0], -1)
    row = torch.arange(x.shape[0], device=x.device)
    last = max(cu_seqlens.shape[0] - 2, 0)
    sequence = torch.searchsorted(cu_seqlens[1:].long(), row, right=True).clamp(max=last)
    return base.long()[sequence], row - cu_seqlens.long()[sequence]


def as_pages(x: Any) -> Any:
    """A cache, or scales by row of one, as pages of one row; other scales as they are."""
    return x if x is None or x.dim() < 3 else x.flatten(0, 1).unsqueeze(1)


def without_padding(
    k_cache: Tensor, used: Tensor, rows: Tensor | None, leftpad: Tensor
) -> tuple[Tensor, Tensor]:
    """The keys of each sequence, and the page table of a cache as pages of one row: a sequence has
    those from its padding on.
    """
    check_leftpad(leftpad, used)
    if rows is None:
        rows = torch.arange(used.shape[0], dtype=torch.int32, device=leftpad.device)
    seqlen = k_cache.shape[1]
    positions = torch.arange(seqlen, dtype=torch.int32, device=leftpad.device)
    return used - leftpad, (rows * seqlen + leftpad).unsqueeze(1) + positions
