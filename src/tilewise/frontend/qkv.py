"""Validation of q, k and v: one dtype and device, the order of their dimensions, matching
shapes.
"""

# pyright: strict, reportUnnecessaryIsInstance=false
# What callers pass may be of any type, whatever is declared.

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from ..errors import OURS, ArgumentError, Words, a_type, warn_slow
from ..features import FLOATS
from ..mods.compilers import share_batch

Tensor = torch.Tensor


def check_tensors(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    words: Words = OURS,
    dtype: torch.dtype | None = None,
    kinds: tuple[torch.dtype, ...] = FLOATS,
) -> None:
    """Dtype, device, heads, head dims and last stride of q, k and v of rank 4, in (batch, seqlen,
    nheads, headdim) order. `dtype` is that of k and v, by default q's, which is one of `kinds`.
    """
    share_batch(q, k, v)
    if _fits(q, k, v=v, kinds=kinds):
        return
    shapes = _shapes(q, k, v=v, words=words)
    for name, x in ((words.k, k), (words.v, v)):
        if x.dtype != (q.dtype if dtype is None else dtype):
            raise ArgumentError(
                f"{name}.dtype is {x.dtype} and {words.q}.dtype is {q.dtype}: cast them to "
                "one dtype"
            )
        check_device(name, x, of=words.q, q=q)
        if x.shape[0] != q.shape[0]:
            raise ArgumentError(
                f"{name} has batch {x.shape[0]} and {words.q} has batch {q.shape[0]} ({shapes}): "
                "they must be equal"
            )
    if q.dtype not in kinds:
        raise ArgumentError(
            f"{words.q}.dtype is {q.dtype}: it must be float16, bfloat16, float32 or (on the CPU) "
            f"float64, so cast {', '.join(words[:2])} and {words.v}"
        )
    for size_name, dim, (name1, x1), (name2, x2) in (
        ("seqlen", 1, (words.k, k), (words.v, v)),
        ("heads", 2, (words.k, k), (words.v, v)),
        ("headdim", 3, (words.q, q), (words.k, k)),
    ):
        sizes = [f"{size_name} {x.shape[dim]}" for x in (x1, x2)]
        if size_name == "heads":
            sizes = [f"{x1.shape[dim]} heads", f"{x2.shape[dim]}"]
        if x1.shape[dim] != x2.shape[dim]:
            raise ArgumentError(
                f"{name1} has {sizes[0]} and {name2} has {sizes[1]} ({shapes}): they must be equal"
                f"{'' if size_name == 'headdim' else _order(q, k, v=v, words=words)}"
            )
    if k.shape[2] == 0 or q.shape[2] % k.shape[2] or q.shape[2] == 0:
        raise ArgumentError(
            f"{words.q} has {q.shape[2]} heads and {words.k} has {k.shape[2]}: the heads of "
            f"{words.q} must be a multiple of those of {words.k} (GQA)"
            f"{_order(q, k, v=v, words=words)}"
        )
    for name, x in ((words.q, q), (words.k, k), (words.v, v)):
        if x.shape[3] == 0:
            raise ArgumentError(f"{name} has headdim 0 ({shapes}): headdim must be at least 1")
        if x.stride(3) != 1 and x.shape[3] != 1:
            raise ArgumentError(
                f"{name} has stride {x.stride(3)} in its last dimension: it must be contiguous, so "
                f"call {name}.contiguous()"
            )


def _order(q: Tensor, k: Tensor, v: Tensor, words: Words) -> str:
    """A remedy more, where the shapes are right with heads and lengths the other way round."""
    nheads, nheads_k = q.shape[1], k.shape[1]
    fits = nheads_k == v.shape[1] != 0 and nheads % nheads_k == 0 and k.shape[2] == v.shape[2]
    return f"; {words.order}" if fits and words.order else ""


def warn_of_order(q: Tensor, k: Tensor, v: Tensor, words: Words) -> None:
    """A warning, once, of shapes that heads and lengths the other way round would explain."""
    _, seqlen, nheads, _ = q.shape
    if q.shape == k.shape == v.shape and nheads > seqlen > 1:
        warn_slow(
            f"{words.q}, {words.k} and {words.v} are {nheads} heads of {seqlen} rows each; "
            f"{words.order} (a warning of TILEWISE_CHECK=1, once)",
            UserWarning,
        )


def _fits(q: Tensor, k: Tensor, v: Tensor, kinds: tuple[torch.dtype, ...]) -> bool:
    """All conditions of `check_tensors` in one expression: one by one they cost a short call 5 us
    more.
    """
    batch, _, nheads, headdim = q.shape
    batch_k, seqlen_k, nheads_k, headdim_k = k.shape
    batch_v, seqlen_v, nheads_v, headdim_v = v.shape
    return (
        k.dtype == v.dtype == q.dtype in kinds
        and k.device == v.device == q.device
        and batch == batch_k == batch_v
        and seqlen_k == seqlen_v
        and nheads_k == nheads_v != 0 != nheads
        and nheads % nheads_k == 0
        and headdim == headdim_k != 0 != headdim_v
        and q.stride(3) == k.stride(3) == v.stride(3) == 1
    )


def in_order(
    q: Tensor, k: Tensor, v: Tensor, layout: str, is_packed: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v as (batch, seqlen, nheads, headdim); packed ones, which come as (total, nheads,
    headdim), as a batch of 1.
    """
    if is_packed:
        if layout != "bshd":
            raise ArgumentError(
                f"layout={layout!r}: packed sequences are (total, nheads, headdim), so leave it out"
            )
        for name, x in (("q", q), ("k", k), ("v", v)):
            if not isinstance(x, torch.Tensor) or x.dim() != 3:
                shape = tuple(x.shape) if isinstance(x, torch.Tensor) else type(x).__name__
                raise ArgumentError(
                    f"{name} has shape {shape}: with cu_seqlens it must be packed, (total, nheads, "
                    "headdim)"
                )
        q, k, v = q.unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0)
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


def check_rank(q: Tensor, k: Tensor, v: Tensor, words: Words = OURS) -> None:
    """Checks that q, k and v are tensors of rank 4 (before any transpose)."""
    is_plain = type(q) is type(k) is type(v) is torch.Tensor
    if is_plain and q.ndim == k.ndim == v.ndim == 4:
        if not (q.is_nested or k.is_nested or v.is_nested):
            return
    for name, x in zip(words[:3], (q, k, v)):
        check_tensor(name, x)
        if x.dim() != 4:
            raise ArgumentError(
                f"{name} has shape {tuple(x.shape)}: it must have 4 dimensions, {words.shape}"
            )


def check_tensor(name: str, x: Tensor) -> None:
    """It is a tensor, and none of sequences of several lengths."""
    if not isinstance(x, torch.Tensor):
        raise ArgumentError(f"{name} is {a_type(x)}: it must be a torch.Tensor")
    if x.is_nested:
        raise ArgumentError(
            f"{name} is a nested tensor: call tilewise.attention with packed sequences, (total, "
            "nheads, headdim), which values() of a jagged tensor returns, and their offsets as "
            "cu_seqlens_q and cu_seqlens_k"
        )


def check_kind(
    name: str, x: Tensor, q: Tensor, dtypes: Sequence[torch.dtype], of: str = "q"
) -> None:
    """A tensor has one of some dtypes, and is on the device of `of`."""
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


def with_contiguous_rows(named: Iterable[tuple[str, Any]]) -> list[Tensor]:
    """Tensors whose last dimension is contiguous, or copies, as flash-attn and torch make them."""
    tensors: list[Any] = []
    for name, x in named:
        if isinstance(x, torch.Tensor) and x.dim() and x.shape[-1] != 1 and x.stride(-1) != 1:
            warn_slow(
                f"{name} has stride {x.stride(-1)} in its last dimension, so every call copies "
                "it: store it with that dimension contiguous"
            )
            x = x.contiguous()
        tensors.append(x)
    return tensors


def _shapes(q: Tensor, k: Tensor, v: Tensor, words: Words) -> str:
    order = (0, 2, 1, 3) if words.is_heads_first else range(4)
    said = [f"{name} {tuple(x.shape[i] for i in order)}" for name, x in zip(words[:3], (q, k, v))]
    dims = [("batch", "seqlen", "nheads", "headdim")[i] for i in order]
    return f"({', '.join(dims)}): {', '.join(said)}"
