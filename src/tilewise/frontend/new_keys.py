"""New keys of `flash_attn_with_kvcache`: one launch appends them and writes what attention reads
with them, or torch's operators compute that, and `cache.append` follows. A traced call is one
operator, which runs the function: what it refuses it refuses before it writes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.utils._python_dispatch import _disable_current_modes

from ..errors import ArgumentError
from ..features import WITH_NEW_KEYS, refuse_gradients
from ..kernels.common.appended import AppendedCall
from ..kernels.common.cached import Cached
from ..ops import append as append_ops
from ..ops.calls import Entry
from ..ops.kv_cache import empty_outputs
from ..ops.schema import operator
from ..tile.quantize import by_row
from ..tile.rotary import Rotary, rotate
from . import invariance
from .append import check_append, check_call, check_tables
from .values import knows_values

Tensor = torch.Tensor
STORED = "k", "v", "k_descale", "v_descale"  # of a `Cached`

NAMES = [x.name for x in torch._C.parse_schema("call" + WITH_NEW_KEYS).arguments]
CALLERS = {row_scales: name for name, row_scales in append_ops.SCALES.items()}

Function = TypeVar("Function", bound=Callable[..., Any])
Step = Callable[[Any], Any]  # from the decode step of a call the step of its append, too


def append_new(
    cached: Cached, call: AppendedCall, used: Tensor | None, is_kept: bool
) -> tuple[Cached, Step | None]:
    """Appends, and returns what attention reads, `cached` before, and how both are launched again.
    `used` has the keys of each sequence, where values are known.
    """
    if not append_ops.may_prepare(call):
        return append_apart(cached, call, used=used), None
    counted = call.before if used is None else used
    check_call(call.append._replace(seqused_k=counted, rotary=None))
    prologue, step = append_ops.prepare(call, is_kept)
    rotated = None if prologue.rotated is None else prologue.rotated.ptr
    q, table = call.q if rotated is None else rotated, prologue.table
    stored = cached if call.cache_leftpad is None else by_rows(cached)
    pairs = [(getattr(cached, name), getattr(stored, name)) for name in STORED]
    has_copies = any(x is not None and x.data_ptr() != y.data_ptr() for x, y in pairs)
    extras = cached.extras._replace(seqused_k=prologue.used)
    table_read = call.page_table if table is None else table
    cached = stored._replace(q=q, page_table=table_read, extras=extras)
    if step is None or has_copies:
        return cached, None
    pages = "table" if call.rows is None else "rows"
    reads = ["q" if rotated is None else "rotated", "k_cache", "v_cache"]
    reads += [pages if table is None else "padded_table", "used", *AppendedCall._fields[5:11]]
    return cached._replace(entry=Entry()), lambda decode: step.before(decode, reads)


def append_apart(cached: Cached, call: AppendedCall, used: Tensor | None) -> Cached:
    """Appends with torch's operators and `cache.append`, and returns what attention reads: on a
    CPU, compiled, and for what a launch does not take.
    """
    q, k, starts = call.q, call.k, call.cu_seqlens_k_new
    if used is None:
        used = call.before + (k.shape[1] if starts is None else starts.diff())
    new, rotary = call.append._replace(seqused_k=used, rotary=None), call.rotary
    check_call(new)
    if rotary is not None:
        base = call.before if call.rotary_seqlens is None else call.rotary_seqlens
        first_q, row_q = _positions(q, base, call.cu_seqlens_q)
        first_k, row_k = _positions(k, base, starts)
        positions_q = first_q if call.is_at_first else first_q + row_q
        q, k = rotate(q, rotary, positions_q), rotate(k, rotary, first_k + row_k)
    append_ops.append(new._replace(k=k))
    cached = cached._replace(q=q, extras=cached.extras._replace(seqused_k=used))
    leftpad = call.cache_leftpad
    return cached if leftpad is None else without_padding(cached, call.rows, leftpad=leftpad)


def check_rotation(q: Tensor, cos: Tensor, sin: Any) -> None:
    """Checks the tables of q and k."""
    check_tables(Rotary(cos, sin), q, of="q", prefix="rotary_")
    refuse_gradients("cached", (("rotary_cos", cos), ("rotary_sin", sin)))


def check_positions(call: AppendedCall) -> None:
    """Every position at which a query or a new key is rotated has a row in the tables."""
    name = "cache_seqlens" if call.rotary_seqlens is None else "rotary_seqlens"
    base = call.before if call.rotary_seqlens is None else call.rotary_seqlens
    starts = call.cu_seqlens_q, call.cu_seqlens_k_new
    if call.rotary_cos is None or not all(x is None or knows_values(x) for x in (base, *starts)):
        return
    counts = [x.shape[1] if n is None else n.diff() for x, n in zip((call.q, call.k), starts)]
    queries, keys = (torch.zeros_like(base) + n for n in counts)
    rows = torch.maximum(queries.clamp(max=1) if call.is_at_first else queries, keys)
    positions = call.rotary_cos.shape[0]
    if bool(((rows > 0) & ((base < 0) | (base + rows > positions))).any()):
        raise ArgumentError(
            f"{name}={base.tolist()} with {rows.tolist()} rows to rotate, and rotary_cos has "
            f"{positions} positions: pass longer tables, or {name} of at least 0 that fit them"
        )


def _positions(x: Tensor, base: Tensor, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
    """Where the sequence of each row begins, and the row in it."""
    if cu_seqlens is None:
        row = torch.arange(x.shape[1], device=x.device)
        return base.long().unsqueeze(1), row.expand(x.shape[0], -1)
    row = torch.arange(x.shape[0], device=x.device)
    last = max(cu_seqlens.shape[0] - 2, 0)
    sequence = torch.searchsorted(cu_seqlens[1:].long(), row, right=True).clamp(max=last)
    return base.long()[sequence], row - cu_seqlens.long()[sequence]


def by_rows(cached: Cached) -> Cached:
    """A cache, and its scales by row, as pages of one row; other scales stay as they are."""
    stored: Any = {name: getattr(cached, name) for name in STORED}
    for name, x in stored.items():
        if x is not None and x.dim() > 2:
            stored[name] = x.flatten(0, 1).unsqueeze(1)
    return cached._replace(**stored)


def without_padding(cached: Cached, rows: Tensor | None, leftpad: Tensor) -> Cached:
    """A call whose sequences, `rows` of the cache, have the keys from their padding on."""
    used: Any = cached.extras.seqused_k
    seqlen = cached.k.shape[1]
    if rows is None:
        rows = torch.arange(leftpad.shape[0], dtype=torch.int32, device=leftpad.device)[:, None]
    positions = torch.arange(seqlen, dtype=torch.int32, device=leftpad.device)
    table = rows * seqlen + leftpad.unsqueeze(1) + positions
    extras = cached.extras._replace(seqused_k=used - leftpad)
    return by_rows(cached)._replace(page_table=table, extras=extras)


def attend_traced(call: AppendedCall, arguments: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """`out` and `lse` of a call by its operator, once its shapes are checked."""
    check_append(call.append._replace(seqused_k=call.before, rotary=None))
    refuse_gradients("cached", named=zip(call._fields, call))
    arguments["is_invariant"] = invariance.is_on
    for name, row_scales in append_ops.SCALES.items():
        if by_row(arguments[name]):
            arguments[row_scales] = arguments.pop(name)
    attend = torch.ops.tilewise.flash_attn_with_kvcache
    fresh, lse = attend(**{name: arguments.get(name) for name in NAMES})
    return fresh if call.out is None else call.out, lse


def has_operator(function: Function) -> Function:
    """Decorates a function that calls `attend_traced`, and defines the operator, which runs it."""

    def kernel(args: tuple) -> tuple[Tensor, Tensor]:
        values = {CALLERS.get(name, name): x for name, x in zip(NAMES, args) if x is not None}
        values["window_size"] = tuple(values["window_size"])
        # Tensors of a subclass, and calls in a mode that is kept from them, are traced no further
        plain = {name: x.as_subclass(Tensor) for name, x in values.items() if isinstance(x, Tensor)}
        has_modes = torch._C._len_torch_dispatch_stack() > 0
        modes = _disable_current_modes() if has_modes else contextlib.nullcontext()
        if longest := values.pop("max_seqlen_q"):
            values["max_seqlen_q"] = 2 * longest - 1  # of which it is what is known
        is_on = values.pop("is_invariant")  # in a saved program perhaps not as it is here
        is_same = is_on == invariance.is_on
        with modes, contextlib.nullcontext() if is_same else invariance.batch_invariant(is_on):
            out, lse = function(**values | plain, return_softmax_lse=True)
        return out.new_empty(0) if "out" in values else out, lse

    operator(function.__name__, schema=WITH_NEW_KEYS, kernel=kernel, fake=_fake)
    return function


def _fake(args: tuple) -> tuple[Tensor, Tensor]:
    q, k_cache, v_cache, out = args[:4]
    fresh, lse = empty_outputs(Cached(q, k_cache, v=v_cache), out=out)
    return fresh if out is None else q.new_empty(0), lse
