"""Checks of the tensors of a call, by the rows of `features.py`: types, dimensions, shapes, dtypes,
devices and gradients. Dense, packed, cached and 8-bit calls pass the same functions. What tensors
hold is in `values`, numbers are in `scalars`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from ..errors import OURS, ArgumentError, Words, a_type, warn_slow
from ..features import FEATURES, FLOATS, refuse_gradients
from ..mods.compilers import share_batch
from ..problem import Extras
from ..tile.paging import batch_of
from ..tile.quantize import LIMITS, is_one_byte
from .scalars import PACKED, check_layout

Tensor = torch.Tensor
EIGHT_BITS = " or ".join(str(dtype).removeprefix("torch.") for dtype in LIMITS)


# one tensor


def check_tensor(name: str, x: Any) -> None:
    """It is a tensor, with strides, and none of sequences of several lengths."""
    if not isinstance(x, torch.Tensor):
        raise ArgumentError(f"{name} is {a_type(x)}: it must be a torch.Tensor")
    if x.is_nested:
        raise ArgumentError(
            f"{name} is a nested tensor: call tilewise.attention with packed sequences, (total, "
            "nheads, headdim), which values() of a jagged tensor returns, and their offsets as "
            "cu_seqlens_q and cu_seqlens_k"
        )
    if x.layout != torch.strided:
        raise ArgumentError(f"{name}.layout is {x.layout}: pass {name}.to_dense()")


def check_dims(name: str, x: Any, dims: int, remedy: str) -> None:
    """It is a tensor of so many dimensions; `remedy` says which."""
    is_dense = isinstance(x, torch.Tensor) and not x.is_nested and x.layout == torch.strided
    if not is_dense or x.dim() != dims:
        check_tensor(name, x)
        raise ArgumentError(f"{name} has shape {tuple(x.shape)}: {remedy}")


def check_form(name: str, x: Tensor, q: Tensor, of: str = "q") -> None:
    """Dimensions, dtype and device of an optional tensor, by its row; the caller knows sizes."""
    shape, dtypes = FEATURES[name].shapes[0], FEATURES[name].dtypes
    remedy = f"it must be ({', '.join(shape)}{',' * (len(shape) == 1)})"
    check_dims(name, x, dims=len(shape), remedy=remedy)
    if shape == ("batch + 1",) and x.shape[0] == 0:
        raise ArgumentError(f"{name} has shape {tuple(x.shape)}: {remedy}")
    check_kind(name, x, q=q, dtypes=dtypes, of=of)


def check_kind(name: str, x: Any, q: Tensor, dtypes: Sequence[torch.dtype], of: str = "q") -> None:
    """It is a tensor, has one of some dtypes, and is on the device of `of`."""
    if not isinstance(x, torch.Tensor) or x.is_nested or x.layout != torch.strided:
        check_tensor(name, x)
    if x.dtype not in dtypes:
        kinds = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise ArgumentError(f"{name}.dtype is {x.dtype}: it must be {kinds}")
    if x.device != q.device:
        check_device(name, x, of=of, q=q)


def check_device(
    name: str, x: Tensor, of: str, q: Tensor, remark: str = "", verb: str = " is"
) -> None:
    """Two tensors are on one device."""
    if x.device != q.device:
        raise ArgumentError(
            f"{name}{verb} on {x.device} and {of} is on {q.device}: move them to one device{remark}"
        )


def check_rows(named: Iterable[tuple[str, Tensor]], may_copy: bool = False) -> None:
    """The last dimension of each is contiguous."""
    for name, x in named:
        if x.stride(-1) != 1 and x.shape[-1] != 1:
            check_tensor(name, x)
            remedy = f", so call {name}.contiguous()" if may_copy else ""
            raise ArgumentError(
                f"{name} has stride {x.stride(-1)} in its last dimension: it must be "
                f"contiguous{remedy}"
            )


def with_contiguous_rows(named: Iterable[tuple[str, Any]]) -> list[Tensor]:
    """Tensors whose last dimension is contiguous, or copies, as flash-attn and torch make them."""
    tensors: list[Any] = []
    for name, x in named:
        has_strides = isinstance(x, torch.Tensor) and x.layout == torch.strided and not x.is_nested
        if has_strides and x.dim() and x.shape[-1] != 1 and x.stride(-1) != 1:
            warn_slow(
                f"{name} has stride {x.stride(-1)} in its last dimension, so every call copies "
                "it: store it with that dimension contiguous"
            )
            x = x.contiguous()
        tensors.append(x)
    return tensors


# q, k and v


def check_rank(q: Tensor, k: Tensor, v: Tensor, words: Words = OURS) -> None:
    """Checks that q, k and v are tensors of rank 4 (before any transpose)."""
    is_plain = type(q) is type(k) is type(v) is torch.Tensor
    if is_plain and q.ndim == k.ndim == v.ndim == 4:
        if not (q.is_nested or k.is_nested or v.is_nested):
            return
    for name, x in zip(words[:3], (q, k, v)):
        check_dims(name, x, dims=4, remedy=f"it must have 4 dimensions, {words.shape}")


def in_order(
    q: Any, k: Any, v: Any, layout: str, is_packed: bool, has_cache: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v as (batch, seqlen, nheads, headdim). Packed ones, (total, nheads, headdim), become
    a batch of 1; packed queries over a cache stay as they are.
    """
    packed = "queries are (total_q, nheads, headdim)" if has_cache else PACKED
    check_layout(layout, packed=packed if is_packed else "")
    if has_cache:
        where = "with a cache and cu_seqlens_q" if is_packed else "with a cache"
        for name, x in zip("qkv", (q, k, v)):
            has_rows = is_packed and name == "q"
            form = "(total_q, nheads, headdim)" if has_rows else "of 4 dimensions"
            check_dims(name, x, dims=3 if has_rows else 4, remedy=f"{where} it must be {form}")
    elif is_packed:
        for name, x in zip("qkv", (q, k, v)):
            remedy = "with cu_seqlens it must be packed, (total, nheads, headdim)"
            check_dims(name, x, dims=3, remedy=remedy)
        q, k, v = q.unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0)
    else:
        check_rank(q, k, v=v)
    if layout == "bhsd":
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    return q, k, v


def sizes_of(q: Tensor, k: Tensor, cu_seqlens: Tensor | None) -> tuple[int, int, int, int]:
    """batch, nheads, seqlen_q and seqlen_k of ordered tensors; lengths are 0 where they are packed,
    as only the device knows them.
    """
    if cu_seqlens is None:
        return q.shape[0], q.shape[2], q.shape[1], k.shape[1]
    batch = cu_seqlens.shape[0] - 1 if isinstance(cu_seqlens, Tensor) and cu_seqlens.dim() else 0
    return batch, q.shape[2], 0, 0


def check_tensors(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    words: Words = OURS,
    kinds: tuple[torch.dtype, ...] = FLOATS,
    has_cache: bool = False,
) -> None:
    """Dtype, device, heads, head dims and last stride of q, k and v of rank 4, in (batch, seqlen,
    nheads, headdim) order. q has one of `kinds`, and k and v its dtype, or with `has_cache` one of
    8 bits; pages have no batch.
    """
    share_batch(k, v, None if has_cache else q)
    if fits(q, k, v=v, kinds=kinds, has_cache=has_cache):
        return
    dtype, shapes = q.dtype, _shapes(q, k, v=v, words=words)
    if has_cache:
        if k.shape[0] != v.shape[0]:
            raise ArgumentError(
                f"{words.k} has {k.shape[0]} pages or rows and {words.v} has {v.shape[0]}: they "
                "must be equal"
            )
        dtype = check_cache_dtypes(q, k, v=v, names=(words.q, words.k, words.v))
    for name, x in ((words.k, k), (words.v, v)):
        if x.dtype != dtype:
            raise ArgumentError(
                f"{name}.dtype is {x.dtype} and {words.q}.dtype is {q.dtype}: cast them to "
                "one dtype"
            )
        check_device(name, x, of=words.q, q=q)
        if not has_cache and x.shape[0] != q.shape[0]:
            raise ArgumentError(
                f"{name} has batch {x.shape[0]} and {words.q} has batch {q.shape[0]} ({shapes}): "
                "they must be equal"
            )
    if q.dtype not in kinds:
        raise ArgumentError(
            f"{words.q}.dtype is {q.dtype}: it must be float16, bfloat16, float32 or (on the CPU) "
            f"float64, so cast {', '.join(words[:2])} and {words.v}"
        )
    for said, also, dim, (name1, x1), (name2, x2) in (
        ("seqlen {}", "seqlen {}", 1, (words.k, k), (words.v, v)),
        ("{} heads", "{}", 2, (words.k, k), (words.v, v)),
        ("headdim {}", "headdim {}", 3, (words.q, q), (words.k, k)),
    ):
        if x1.shape[dim] != x2.shape[dim]:
            raise ArgumentError(
                f"{name1} has {said.format(x1.shape[dim])} and {name2} has "
                f"{also.format(x2.shape[dim])} ({shapes}): they must be equal"
                f"{'' if dim == 3 else _order(q, k, v=v, words=words)}"
            )
    if k.shape[2] == 0 or q.shape[2] % k.shape[2] or q.shape[2] == 0:
        raise ArgumentError(
            f"{words.q} has {q.shape[2]} heads and {words.k} has {k.shape[2]}: the heads of "
            f"{words.q} must be a multiple of those of {words.k}, and at least 1 (GQA)"
            f"{_order(q, k, v=v, words=words)}"
        )
    named = (words.q, q), (words.k, k), (words.v, v)
    for name, x in named:
        if x.shape[3] == 0:
            raise ArgumentError(f"{name} has headdim 0 ({shapes}): headdim must be at least 1")
    check_rows(named, may_copy=True)


def fits(
    q: Tensor, k: Tensor, v: Tensor, kinds: tuple[torch.dtype, ...], has_cache: bool = False
) -> bool:
    """All conditions of `check_tensors` in one expression: one by one they cost a short call 5 us
    more.
    """
    batch, _, nheads, headdim = q.shape
    batch_k, seqlen_k, nheads_k, headdim_k = k.shape
    batch_v, seqlen_v, nheads_v, headdim_v = v.shape
    return (
        k.dtype == v.dtype == q.dtype in kinds
        and k.device == v.device == q.device
        and batch_k == batch_v
        and (has_cache or batch == batch_k)
        and seqlen_k == seqlen_v
        and nheads_k == nheads_v != 0 != nheads
        and nheads % nheads_k == 0
        and headdim == headdim_k != 0 != headdim_v
        and q.stride(3) == k.stride(3) == v.stride(3) == 1
    )


def _shapes(q: Tensor, k: Tensor, v: Tensor, words: Words) -> str:
    order = (0, 2, 1, 3) if words.is_heads_first else range(4)
    said = [f"{name} {tuple(x.shape[i] for i in order)}" for name, x in zip(words[:3], (q, k, v))]
    dims = [("batch", "seqlen", "nheads", "headdim")[i] for i in order]
    return f"({', '.join(dims)}): {', '.join(said)}"


def _order(q: Tensor, k: Tensor, v: Tensor, words: Words) -> str:
    """A remedy more, where the shapes are right with heads and lengths the other way round."""
    nheads, nheads_k = q.shape[1], k.shape[1]
    fits = nheads_k == v.shape[1] != 0 and nheads % nheads_k == 0 and k.shape[2] == v.shape[2]
    return f"; {words.order}" if fits and words.order else ""


# the optional tensors


def check_extras(
    q: Tensor, k: Tensor, extras: Extras, words: Words = OURS, has_cache: bool = False
) -> None:
    """Types, shapes, dtypes and devices of the optional tensors. With a cache lengths have been
    checked (`cached.check_table`); a bias is checked by `call.check_bias`.
    """
    for name, x in zip(Extras._fields, extras.optional):
        if x is not None:
            check_tensor(getattr(words, name, name), x)
    if has_cache:
        batch = batch_of(q, extras.cu_seqlens_q)
    else:
        batch = check_packing(q, k, extras=extras)
        refuse_gradients("slopes", [("alibi_slopes", extras.alibi_slopes)])
    sizes = {"nheads": q.shape[-2], "batch": batch, "batch + 1": batch + 1, "2": 2}
    for name, x in zip(Extras._fields, extras.optional):
        feature, name = FEATURES[name], getattr(words, name, name)
        if x is None or not feature.shapes:
            continue
        shapes = [tuple([sizes[size] for size in shape]) for shape in feature.shapes]
        if tuple(x.shape) not in shapes:
            count = f"{batch} sequences" if has_cache else f"batch {q.shape[0]}"
            raise ArgumentError(
                f"{name} has shape {tuple(x.shape)}: with q of {q.shape[-2]} heads and {count} it "
                f"must be {either(shapes)}"
            )
        check_kind(name, x, q=q, dtypes=feature.dtypes)
    name, remark = words.captured, " (Mask.to, BlockMask.to)"
    if has_cache:
        name, remark = "mask_mod has a tensor", " (Mask.to)"
    for x in extras.captured:
        check_device(name, x, of=words.q, q=q, remark=remark, verb="")


def check_packing(q: Tensor, k: Tensor, extras: Extras) -> int:
    """Shapes and dtypes of the packing; returns the number of sequences."""
    cu_q, cu_k = extras.cu_seqlens_q, extras.cu_seqlens_k
    if cu_q is None and cu_k is None:
        if extras.seqused_q is not None:
            raise ArgumentError("seqused_q is for packed sequences: pass cu_seqlens_q, too")
        return q.shape[0]
    if cu_q is None or cu_k is None:
        missing = "cu_seqlens_q" if cu_q is None else "cu_seqlens_k"
        raise ArgumentError(f"{missing} is missing: packed sequences need both")
    for name, x in (("cu_seqlens_q", cu_q), ("cu_seqlens_k", cu_k)):
        if x.dim() != 1 or x.shape[0] < 1 or x.shape != cu_q.shape:
            raise ArgumentError(
                f"{name} has shape {tuple(x.shape)}: cu_seqlens_q and cu_seqlens_k must both be "
                "(batch + 1,)"
            )
    return cu_q.shape[0] - 1


# 8 bits


def check_cache_dtypes(q: Tensor, k: Tensor, v: Tensor, names: tuple[str, str, str]) -> torch.dtype:
    """The dtype of a cache: that of q, which are its queries or its new keys, or one of 8 bits."""
    if not (is_one_byte(k) or is_one_byte(v)):
        return q.dtype
    q_name, k_name, v_name = names
    for name, x in ((k_name, k), (v_name, v)):
        if is_one_byte(x) and x.dtype not in LIMITS:
            raise NotImplementedError(
                f"{name}.dtype is {x.dtype}: 8-bit caches are {EIGHT_BITS}; tilewise.cache.append "
                "writes such a cache"
            )
    if k.dtype != v.dtype:
        raise ArgumentError(
            f"{k_name}.dtype is {k.dtype} and {v_name}.dtype is {v.dtype}: a cache has one dtype, "
            "so quantise both, or none"
        )
    if q.dtype not in FLOATS:
        raise ArgumentError(
            f"{q_name}.dtype is {q.dtype}: with a KV cache of {k.dtype} it must be bfloat16, "
            "float16 or (on the CPU) float32 or float64"
        )
    return k.dtype


def check_descale(
    name: str, x: Tensor | None, stored: Tensor, batch: int | None, of: str = "k", cache: str = ""
) -> Any:
    """Scales of 8-bit tensors, (..., rows, nheads_k, headdim). Those of a `cache`, which is its
    layout, may be by row, and are returned in its order; `batch` is None where nothing says which
    sequence a key is of.
    """
    if x is None:
        return None
    check_tensor(name, x)
    if cache and stored.dtype not in LIMITS:
        raise ArgumentError(
            f"{name} with {of} of {stored.dtype}: only caches of {EIGHT_BITS} have scales, so "
            "leave it out"
        )
    feature, sizes = FEATURES["k_descale"], {"nheads_k": stored.shape[2], "batch": batch}
    check_kind(name, x, q=stored, dtypes=feature.dtypes, of=of)
    shapes = [tuple([sizes[size] for size in shape]) for shape in feature.shapes]
    shapes = [shape for shape in shapes if None not in shape]
    if tuple(x.shape) in shapes:
        return x
    if not cache:
        raise ArgumentError(
            f"{name} has shape {tuple(x.shape)}: it must be (), ({stored.shape[2]},) or "
            f"{(batch, stored.shape[2])}, one number, one per key head, or one per sequence and "
            "key head, for q, too"
        )
    is_by_heads = cache == "bhsd"
    ordered = x.transpose(1, 2) if is_by_heads and x.dim() == 3 else x
    if ordered.shape == stored.shape[:-1]:
        return ordered
    rows = stored.transpose(1, 2) if is_by_heads else stored
    accepted = [*shapes, f"{tuple(rows.shape[:-1])}, that of {of} without its last dimension"]
    raise ArgumentError(
        f"{name} has shape {tuple(x.shape)}: it must be {either(accepted)}; expand() it"
    )


def either(choices: Iterable[Any]) -> str:
    """The choices with "or" between them."""
    return " or ".join(dict.fromkeys(map(str, choices)))
