"""flash-attn 2's functions of q, k and v, or k and v, stacked in one tensor."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from ..errors import ArgumentError
from ..keywords import refuses_others, unexpected
from .checks import check_dims
from .flash_attn import flash_attn_func, flash_attn_varlen_func

Tensor = torch.Tensor
Function = TypeVar("Function", bound=Callable[..., Any])

OPEN_ENDED = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
_PARAMETERS = inspect.signature(flash_attn_func).parameters
_NO_OPTIONS = {"q", "k", "v", "q_descale", "k_descale", "v_descale", "out_dtype"}  # FP8's are none
OPTIONS = {name: x for name, x in _PARAMETERS.items() if name not in _NO_OPTIONS}


def _shows_options(function: Function) -> Function:
    """Decorates a function that ends in `*flags, **options`: its signature shows OPTIONS there."""
    named = [x for x in inspect.signature(function).parameters.values() if x.kind not in OPEN_ENDED]
    signature = inspect.Signature([*named, *OPTIONS.values()])
    function.__signature__ = signature  # pyright: ignore[reportFunctionMemberAccess]
    return refuses_others(f"tilewise.{function.__name__}")(function)


def _check_options(name: str, options: dict[str, Any]) -> None:
    if unknown := [x for x in options if x not in OPTIONS]:
        raise unexpected(f"tilewise.{name}", unknown)


@_shows_options
def flash_attn_qkvpacked_func(qkv: Tensor, *flags: Any, **options: Any):
    """`flash_attn_func` on q, k and v stacked in one tensor, which is read in place.

    Example:
        >>> import torch, tilewise
        >>> tilewise.flash_attn_qkvpacked_func(torch.randn(1, 16, 3, 2, 32), causal=True).shape
        torch.Size([1, 16, 2, 32])

    Args:
        qkv: (batch, seqlen, 3, nheads, headdim).

    The other arguments are those of `flash_attn_func`, but for those of FP8.

    Returns:
        out (batch, seqlen, nheads, headdim); lse is fp32 (batch, nheads, seqlen).

    Raises:
        ArgumentError: an argument is wrong.
        NotImplementedError: no backend supports the call; the message has each backend's reason.
    """
    _check_options("flash_attn_qkvpacked_func", options)
    q, k, v = _unpack("qkv", qkv, parts=3)
    return flash_attn_func(q, k, v, *flags, **options)


@_shows_options
def flash_attn_kvpacked_func(q: Tensor, kv: Tensor, *flags: Any, **options: Any):
    """`flash_attn_func` on k and v stacked in one tensor, which is read in place.

    Example:
        >>> import torch, tilewise
        >>> q, kv = torch.randn(1, 4, 6, 32), torch.randn(1, 16, 2, 2, 32)
        >>> tilewise.flash_attn_kvpacked_func(q, kv).shape
        torch.Size([1, 4, 6, 32])

    Args:
        q: (batch, seqlen_q, nheads, headdim).
        kv: (batch, seqlen_k, 2, nheads_k, headdim).

    The other arguments are those of `flash_attn_func`, but for those of FP8.

    Returns:
        out (batch, seqlen_q, nheads, headdim); lse is fp32 (batch, nheads, seqlen_q).

    Raises:
        ArgumentError: an argument is wrong.
        NotImplementedError: no backend supports the call; the message has each backend's reason.
    """
    _check_options("flash_attn_kvpacked_func", options)
    k, v = _unpack("kv", kv, parts=2)
    return flash_attn_func(q, k, v, *flags, **options)


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor, cu_seqlens: Tensor, max_seqlen: int | None = None, *flags: Any, **options: Any
):
    """`flash_attn_varlen_func` on q, k and v stacked in one tensor, which is read in place.

    Example:
        >>> import torch, tilewise
        >>> starts = torch.tensor([0, 3, 16], dtype=torch.int32)
        >>> tilewise.flash_attn_varlen_qkvpacked_func(torch.randn(16, 3, 2, 32), starts).shape
        torch.Size([16, 2, 32])

    Args:
        qkv: (total, 3, nheads, headdim).
        cu_seqlens: int32 (batch + 1,), where sequences begin.
        max_seqlen: upper bound of lengths, as in `flash_attn_varlen_func`; optional.
        flags: the arguments of `flash_attn_varlen_func` from `dropout_p` on, by place.
        options: the same by name; not `block_table`.

    Returns:
        out (total, nheads, headdim); lse is fp32 (nheads, total).

    Raises:
        ArgumentError: an argument is wrong.
        NotImplementedError: no backend supports the call; the message has each backend's reason.
    """
    q, k, v = _unpack("qkv", qkv, parts=3, dim=1)
    lengths = cu_seqlens, cu_seqlens, max_seqlen, max_seqlen
    return flash_attn_varlen_func(q, k, v, *lengths, *flags, **options)


def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    *flags: Any,
    **options: Any,
):
    """`flash_attn_varlen_func` on k and v stacked in one tensor, which is read in place.

    Example:
        >>> import torch, tilewise
        >>> starts = torch.tensor([0, 3, 16], dtype=torch.int32)
        >>> q, kv = torch.randn(16, 4, 32), torch.randn(16, 2, 2, 32)
        >>> tilewise.flash_attn_varlen_kvpacked_func(q, kv, starts, starts).shape
        torch.Size([16, 4, 32])

    Args:
        q: (total_q, nheads, headdim).
        kv: (total_k, 2, nheads_k, headdim).
        cu_seqlens_q: int32 (batch + 1,), where the queries of each sequence begin.
        cu_seqlens_k: int32 (batch + 1,), where its keys begin.
        max_seqlen_q: upper bound of query lengths, as in `flash_attn_varlen_func`; optional.
        max_seqlen_k: as max_seqlen_q, for keys.
        flags: the arguments of `flash_attn_varlen_func` from `dropout_p` on, by place.
        options: the same by name; not `block_table`.

    Returns:
        out (total_q, nheads, headdim); lse is fp32 (nheads, total_q).

    Raises:
        ArgumentError: an argument is wrong.
        NotImplementedError: no backend supports the call; the message has each backend's reason.
    """
    k, v = _unpack("kv", kv, parts=2, dim=1)
    lengths = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    return flash_attn_varlen_func(q, k, v, *lengths, *flags, **options)


def _unpack(name: str, packed: Tensor, parts: int, dim: int = 2) -> tuple[Tensor, ...]:
    rows = "batch, seqlen" if dim == 2 else "total"
    remedy = f"it must be ({rows}, {parts}, nheads, headdim)"
    check_dims(name, packed, dims=dim + 3, remedy=remedy)
    if packed.shape[dim] != parts:
        raise ArgumentError(f"{name} has shape {tuple(packed.shape)}: {remedy}")
    return packed.unbind(dim)
