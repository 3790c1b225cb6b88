"""Appends new keys and values to a KV cache."""

from __future__ import annotations

from typing import Any, Never

import torch

from ..errors import ArgumentError, Words, a_type
from ..features import FLOATS, refuse_gradients
from ..kernels.common.appended import Append
from ..keywords import refuses_others, unexpected
from ..ops import append as append_ops
from ..ops.calls import find
from ..ops.context_parallel import refuse_shards
from ..tile.rotary import Rotary
from . import checks
from .values import check_reach, check_starts, knows_values

Tensor = torch.Tensor
WORDS = Words(k="k_cache")


@refuses_others("tilewise.cache.append")
def append(
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    seqused_k: Tensor | None = None,
    page_table: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    slots: Tensor | None = None,
    rotary: Rotary | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    **unknown: Never,
) -> None:
    """Writes new keys and values to a KV cache, in place.

    Example:
        >>> import torch
        >>> from tilewise import cache
        >>> k_cache, v_cache = torch.zeros(2, 3, 8, 1, 4).unbind(0)  # 3 sequences of up to 8 keys
        >>> slots = torch.tensor([2, 17, -1])  # row 2 of sequence 0, row 1 of sequence 2, nowhere
        >>> cache.append(k_cache, v_cache, torch.ones(3, 1, 4), torch.ones(3, 1, 4), slots=slots)
        >>> k_cache.sum((1, 2, 3)).tolist()
        [4.0, 0.0, 4.0]

    Keys without a slot are skipped. A cache of float8_e4m3fn or int8 stores x / scale, rounded to
    nearest even and saturated to +-448 or +-127; int8 stores 0 for NaN.

    Args:
        k_cache: (batch, seqlen_k, nheads_k, headdim), or pages (num_pages, page_size, nheads_k,
            headdim) with `page_table`; any strides with a contiguous last dimension.
        v_cache: shaped as k_cache, with its own headdim_v.
        k: new keys, (batch, seqlen_new, nheads_k, headdim); (total, nheads_k, headdim) with
            `cu_seqlens_q`, those of all sequences end to end.
        v: new values, shaped as k, with its own headdim_v.
        seqused_k: int32 (batch,), keys per sequence including the new ones, which are its last; as
            `tilewise.attention` takes them next.
        page_table: int32 (batch, pages), the page of each block of page_size keys.
        cu_seqlens_q: int32 (batch + 1,), where the new keys of each sequence begin.
        slots: int64, (total,) or (batch, seqlen_new), instead of the places that seqused_k and
            page_table imply: slot s is row s % page_size of page s // page_size (without pages: of
            sequence s // seqlen_k); a negative one is skipped. If keys share a slot, the last is
            stored.
        rotary: `Rotary(cos, sin, interleaved)`, rotates k by its position from the first key of its
            sequence; it needs `seqused_k`, with slots, too.
        k_descale: fp32 scales for an 8-bit cache, as in `tilewise.attention`; None is 1. Shapes (),
            (nheads_k,) and (batch, nheads_k), which needs `seqused_k`, are read. A shape as k_cache
            without headdim is written: each new row and head gets its largest magnitude divided by
            448 or 127.
        v_descale: as k_descale, for v_cache.

    Raises:
        ArgumentError: an argument is wrong.
        NotImplementedError: a tensor requires grad.
    """
    if unknown:
        raise unexpected("tilewise.cache.append", unknown)
    new = Append(
        k_cache,
        v_cache,
        k=k,
        v=v,
        page_table=page_table,
        seqused_k=seqused_k,
        cu_seqlens_q=cu_seqlens_q,
        slots=slots,
        rotary=rotary,
        k_descale=k_descale,
        v_descale=v_descale,
    )
    entry = None
    if rotary is None or type(rotary) is Rotary:
        tensors = new.tensors
        entry, addresses = find(tensors, plain=("append", rotary is None or rotary.interleaved))
        if entry is not None and entry.call is not None:
            refuse_shards()
            if addresses is None:
                addresses = [x.data_ptr() for x in tensors if x is not None]
            if entry.call.repeats(addresses):
                return
    check_call(new)
    append_ops.append(new, entry)


def check_call(new: Append) -> None:
    """Checks all arguments but which memory is whose."""
    check_append(new)
    refuse_gradients("cached", zip(Append._fields, new))
    check_places(new)


def check_append(new: Append) -> None:
    """Checks shapes, dtypes and devices, and that every new key has a slot."""
    _check_rows(new)
    k, batch = new.k, _batch(new)
    if new.slots is None and new.seqused_k is None:
        raise ArgumentError(
            "seqused_k and slots are missing: pass seqused_k, the number of keys per sequence "
            "that includes the new ones, or slots, the place of each new key"
        )
    if new.slots is not None:
        checks.check_kind("slots", new.slots, q=k, dtypes=(torch.int64,), of="k")
        if new.slots.shape != k.shape[:-2]:
            raise ArgumentError(
                f"slots has shape {tuple(new.slots.shape)}: it must be {tuple(k.shape[:-2])}, one "
                "slot per new key"
            )
    for name, x, dims in (("page_table", new.page_table, 2), ("seqused_k", new.seqused_k, 1)):
        if x is not None:
            checks.check_kind(name, x, q=k, dtypes=(torch.int32,), of="k")
            if x.dim() != dims or x.shape[0] != batch:
                raise ArgumentError(
                    f"{name} has shape {tuple(x.shape)}: with {batch} sequences it must be "
                    f"({batch}{', pages)' if dims == 2 else ',)'}"
                )
    if new.slots is None and new.page_table is None and new.k_cache.shape[0] != batch:
        raise ArgumentError(
            f"k_cache has {new.k_cache.shape[0]} sequences and {batch} get new keys: they must be "
            "equal, unless page_table or slots says where keys go"
        )
    if new.rotary is not None:
        _check_rotary(new)
    _check_descales(new, batch)


def _batch(new: Append) -> int:
    if new.cu_seqlens_q is not None:
        return new.cu_seqlens_q.shape[0] - 1
    if new.k.dim() == 3:  # keys by slots alone
        return 0 if new.seqused_k is None else new.seqused_k.shape[0]
    return new.k.shape[0]


def _check_rows(new: Append) -> None:
    starts, named = new.cu_seqlens_q, list(zip(Append._fields[:4], new[:4]))
    for name, x in named:
        is_packed = starts is not None or (new.slots is not None and getattr(x, "ndim", 0) == 3)
        dims = 3 if name in ("k", "v") and is_packed else 4
        form = "(total, nheads_k, headdim)" if dims == 3 else "of 4 dimensions"
        checks.check_dims(name, x, dims=dims, remedy=f"it must be {form}")
    if starts is not None:
        checks.check_form("cu_seqlens_q", starts, q=new.k, of="k")
    checks.check_rows(named)
    names = "k", "k_cache", "v_cache"
    stored = checks.check_cache_dtypes(new.k, new.k_cache, v=new.v_cache, names=names)
    for name, x in named:
        if name != "k" and x.dtype != (stored if name.endswith("cache") else new.k.dtype):
            raise ArgumentError(
                f"{name}.dtype is {x.dtype} and k.dtype is {new.k.dtype}: cast them to one dtype"
            )
        checks.check_kind(name, x, q=new.k, dtypes=FLOATS if name == "k" else (x.dtype,), of="k")
    for name, x, cache in (("k", new.k, new.k_cache), ("v", new.v, new.v_cache)):
        if x.shape[-2:] != cache.shape[-2:]:
            raise ArgumentError(
                f"{name} has {x.shape[-2]} heads of headdim {x.shape[-1]} and {name}_cache has "
                f"{cache.shape[-2]} heads of headdim {cache.shape[-1]}: they must be equal"
            )
    for name, a, b in (("v", new.k, new.v), ("v_cache", new.k_cache, new.v_cache)):
        if a.shape[:-1] != b.shape[:-1]:
            raise ArgumentError(
                f"{name} has shape {tuple(b.shape)} and {name.replace('v', 'k', 1)} "
                f"{tuple(a.shape)}: they must be equal except for headdim"
            )
    if starts is not None:
        check_starts("cu_seqlens_q", starts, new.k.shape[0], "keys")


def _check_descales(new: Append, batch: int) -> None:
    """Scales, and whether a call says which sequence a key is of where they ask for it."""
    scales = ("k_descale", new.k_descale, new.k_cache), ("v_descale", new.v_descale, new.v_cache)
    for name, x, stored in scales:
        if isinstance(x, Tensor) and x.dim() == 2 and not _has_positions(new):
            raise ArgumentError(
                f"{name} has shape {tuple(x.shape)}, scales per sequence: pass seqused_k, and "
                "cu_seqlens_q if keys are packed, or scales of shape (nheads_k,)"
            )
        of = f"{name[0]}_cache"
        checks.check_descale(name, x, stored=stored, batch=batch, of=of, cache="bshd")


def _has_positions(new: Append) -> bool:
    """Whether a call says where in its sequence each key is."""
    return new.seqused_k is not None and (new.k.dim() == 4 or new.cu_seqlens_q is not None)


def _check_rotary(new: Append) -> None:
    rotary = new.rotary
    if isinstance(rotary, Rotary) and not _has_positions(new):
        raise ArgumentError(
            "rotary needs the positions of new keys: pass seqused_k, and cu_seqlens_q if they are "
            "packed"
        )
    check_rotary(rotary, new.k, of="k")


def check_rotary(rotary: Any, x: Tensor, of: str) -> None:
    """Tables for the heads of x."""
    if not isinstance(rotary, Rotary):
        raise ArgumentError(
            f"rotary is {a_type(rotary)}: it must be a tilewise.cache.Rotary or None"
        )
    check_tables(rotary, x, of=of)


def check_tables(rotary: Rotary, x: Tensor, of: str, prefix: str = "rotary.") -> None:
    """cos and sin of angles for the heads of x; their names begin with `prefix`."""
    for name, table in ((f"{prefix}cos", rotary.cos), (f"{prefix}sin", rotary.sin)):
        checks.check_kind(name, table, q=x, dtypes=FLOATS, of=of)
        most = x.shape[-1] // 2
        if table.dim() != 2 or table.shape != rotary.cos.shape or table.shape[1] > most:
            raise ArgumentError(
                f"{name} has shape {tuple(table.shape)}: both tables must be (positions, "
                f"rotary_dim / 2), rotary_dim at most headdim, {x.shape[-1]}"
            )


def check_places(new: Append) -> None:
    """Every new key has a slot in the cache, and every position a row in the rotary tables."""
    slots: Any = new.slots
    used: Any = new.seqused_k
    room = new.k_cache.shape[0] * new.k_cache.shape[1]
    if slots is not None and knows_values(slots) and bool((slots >= room).any()):
        raise ArgumentError(
            f"slots has {int(slots.max())} and the cache has {room} rows: a slot must be below "
            "that, or negative to skip its key"
        )
    if used is None or not knows_values(used):
        return
    if slots is None:
        starts: Any = new.cu_seqlens_q
        fewest = [new.k.shape[1]] * len(used) if starts is None else starts.diff().tolist()
        written = torch.tensor(fewest, device=used.device).unsqueeze(1)
        check_reach(new.k_cache, new.page_table, used, words=WORDS, least=fewest, read=written)
    longest = max(used.tolist(), default=0)
    if new.rotary is not None and longest > new.rotary.cos.shape[0]:
        raise ArgumentError(
            f"seqused_k has {longest} keys and rotary.cos has {new.rotary.cos.shape[0]} "
            "positions: pass longer tables"
        )
