"""flash-attn's function that merges results over disjoint keys."""

from __future__ import annotations

import torch

from ..errors import ArgumentError
from ..features import FLOATS
from ..kernels.common.shared_memory import check_written
from ..ops.attention import needs_dispatcher
from ..tile import split_kv
from .checks import check_kind

Tensor = torch.Tensor


def flash_attn_combine(
    out_partial: Tensor,
    lse_partial: Tensor,
    out: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """flash-attn 3's `flash_attn_combine`: merges results over disjoint keys.

    Example:
        >>> import torch, tilewise
        >>> out, lse = torch.randn(3, 2, 5, 4, 32), torch.randn(3, 2, 5, 4)  # 3 splits
        >>> out, lse = tilewise.flash_attn_combine(out, lse)
        >>> out.shape, lse.shape
        (torch.Size([2, 5, 4, 32]), torch.Size([2, 5, 4]))

    Args:
        out_partial: (splits, batch, seqlen, nheads, headdim_v), or packed (splits, total, nheads,
            headdim_v).
        lse_partial: shaped as out_partial without the last dimension, natural log.
        out: written in place; else allocated.
        out_dtype: dtype of the result; by default the dtype of out_partial.

    Returns:
        (out, lse), folded from the first split to the last in fp32 (fp64 for fp64).

    Raises:
        ArgumentError: shapes or dtypes do not match.
    """
    tensors = dict(out_partial=out_partial, lse_partial=lse_partial)
    for name, x in (tensors if out is None else tensors | dict(out=out)).items():
        check_kind(name, x, q=out_partial, dtypes=FLOATS, of="out_partial")
    dtypes = FLOATS if out is None else (out.dtype,)
    if out_dtype is not None and all(out_dtype is not dtype for dtype in dtypes):
        kind = "a dtype of floats" if out is None else f"that of out, {out.dtype}"
        raise ArgumentError(f"out_dtype={out_dtype!r}: it must be None or {kind}")
    if out_partial.dim() not in (4, 5) or out_partial.shape[:-1] != lse_partial.shape:
        raise ArgumentError(
            f"out_partial has shape {tuple(out_partial.shape)} and lse_partial "
            f"{tuple(lse_partial.shape)}: they must be (splits, batch, seqlen, nheads, headdim_v), "
            "or (splits, total, nheads, headdim_v), and the same without headdim_v"
        )
    if out is not None:
        if out.shape != out_partial.shape[1:]:
            raise ArgumentError(
                f"out has shape {tuple(out.shape)}: it must be {tuple(out_partial.shape[1:])}"
            )
        if not needs_dispatcher((out,)):
            check_written("out", out)
    exact = torch.promote_types(out_partial.dtype, torch.float32)
    acc_o, m_i = out_partial.to(exact), lse_partial.to(exact).unsqueeze(-1)
    has_keys = m_i > -torch.inf
    acc_o = acc_o.masked_fill(~has_keys, 0)  # a split without keys may hold anything
    state = split_kv.empty_state(acc_o.new_zeros(acc_o.shape[1:]))
    for part in zip(acc_o, m_i, has_keys.to(exact)):
        state = split_kv.fold(state, split_kv.SplitState._make(part))
    merged, lse = split_kv.finish(state)
    if out is not None:
        return out.copy_(merged), lse
    return merged.to(out_partial.dtype if out_dtype is None else out_dtype), lse
