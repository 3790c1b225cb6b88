"""torch's `flex_attention` as a drop-in function: its arguments, its order of dimensions and its
argument names in errors.
"""

# pyright: strict, reportUnnecessaryIsInstance=false
# What callers pass may be of any type, whatever is declared.

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Never

import torch

from ..errors import ArgumentError, a_type
from ..keywords import refuses_others, unexpected
from ..mods.block_mask import BlockMask
from ..mods.compilers import share_batch
from ..mods.flatten import check_block_mask, modifiers_of
from ..mods.scores import ScoreFunction
from ..problem import Extras
from . import sdpa
from .broadcasting import batched, with_positive_scale
from .call import call
from .checks import check_rank
from .scalars import Numbers, check_flag

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import AuxRequest

Tensor = torch.Tensor
WORDS = sdpa.WORDS._replace(captured="score_mod or block_mask has a tensor")


@refuses_others("tilewise.flex_attention")
def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: ScoreFunction | None = None,
    block_mask: BlockMask | Any = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: dict[str, Any] | None = None,
    *,
    return_aux: AuxRequest | None = None,
    **unknown: Never,
):
    """`torch.nn.attention.flex_attention.flex_attention`, with its score function and block mask,
    without a compiler.

    Example:
        >>> import torch, tilewise
        >>> from tilewise.sparse import create_block_mask
        >>> q = torch.randn(1, 4, 256, 32)
        >>> blocks = create_block_mask(lambda b, h, q_idx, kv_idx: q_idx >= kv_idx, 1, 1, 256, 256)
        >>> tilewise.flex_attention(q, q, q, block_mask=blocks).shape
        torch.Size([1, 4, 256, 32])

    Args:
        query: (batch, nheads, seqlen_q, headdim); fp16, bf16, fp32 (fp64 on the CPU).
        key: (batch or 1, nheads_k, seqlen_k, headdim); batch 1 only with a block mask.
        value: (batch or 1, nheads_k, seqlen_k, headdim_v).
        score_mod: function of (score, b, h, q_idx, kv_idx), which may use what
            `tilewise.mods.trace` lists.
        block_mask: FlexAttention's BlockMask or one of `tilewise.sparse`; `and_masks` and
            `or_masks` join. Tensors that its mask captures get no gradient.
        scale: softmax scale; 1 / sqrt(headdim) by default.
        enable_gqa: allows fewer key heads than query heads.
        return_lse: whether to return (out, lse).
        kernel_options: ignored: options of torch's kernels, which change no result.
        return_aux: an AuxRequest: returns (out, AuxOutput).

    Returns:
        out (batch, nheads, seqlen_q, headdim_v), with lse (batch, nheads, seqlen_q) if requested,
        natural log, fp32 (fp64 for fp64), differentiable, -inf for a row without keys.

    Raises:
        ArgumentError: an argument is wrong.
        NotImplementedError: `max_scores`, which no kernel stores, or no backend supports the call.

    FlexAttention (Dong et al. 2024, arXiv 2412.05496).
    """
    if unknown:
        raise unexpected("tilewise.flex_attention", unknown)
    check_rank(query, key, v=value, words=WORDS)
    has_gqa = check_flag("enable_gqa", enable_gqa)
    return_lse = _check_returns(return_lse, return_aux)
    if kernel_options is not None and not isinstance(kernel_options, dict):
        raise ArgumentError(
            f"kernel_options is {a_type(kernel_options)}: it must be a dict or None"
        )
    share_batch(query, key, value)
    _check_sharing(query, key, has_gqa=has_gqa, is_masked=block_mask is not None)
    x = batched(query, key, value=value, enable_gqa=has_gqa, words=WORDS)
    batch, nheads, seqlen_q, seqlen_k = x.scores
    sizes = batch, nheads, seqlen_q, seqlen_k
    block_mask = check_block_mask(block_mask, sizes, is_packed=False, has_band=False)
    modifiers = modifiers_of(None, score_mod, block_mask, sizes)
    query, scale = with_positive_scale(x.query, scale, words=WORDS)
    out, lse = call(
        query.transpose(1, 2),
        x.key.transpose(1, 2),
        v=x.value.transpose(1, 2),
        extras=Extras(captured=modifiers.captured),
        numbers=Numbers(scale),
        deterministic=False,
        mods=modifiers.mods,
        words=WORDS,
    )
    out, lse = out.transpose(1, 2)[..., : x.out[-1]].reshape(x.out), lse.reshape(x.out[:-1])
    if return_aux is None:
        return (out, lse) if return_lse else out
    from torch.nn.attention.flex_attention import AuxOutput

    return out, AuxOutput(lse=lse if return_aux.lse else None)


def _check_returns(return_lse: bool, return_aux: AuxRequest | None) -> bool:
    """Checks which results are requested besides out."""
    return_lse = check_flag("return_lse", return_lse)
    if return_aux is None:
        return return_lse
    if not hasattr(return_aux, "lse") or not hasattr(return_aux, "max_scores"):
        raise ArgumentError(
            f"return_aux is {a_type(return_aux)}: it must be an AuxRequest of "
            "torch.nn.attention.flex_attention, or None"
        )
    if return_lse:
        raise ArgumentError("return_lse and return_aux: pass return_aux=AuxRequest(lse=True) alone")
    if return_aux.max_scores:
        raise NotImplementedError(
            "return_aux.max_scores: kernels store the log-sum-exp of a row, not its maximum; "
            "request lse, which is at least as large, or neither"
        )
    return return_lse


def _check_sharing(query: Tensor, key: Tensor, has_gqa: bool, is_masked: bool) -> None:
    """Heads and batches of keys that serve several of queries."""
    if query.shape[1] != key.shape[1] and not has_gqa:
        raise ArgumentError(
            f"query has {query.shape[1]} heads and key has {key.shape[1]}: pass enable_gqa=True to "
            "share key heads"
        )
    if query.shape[0] != key.shape[0] and not (is_masked and key.shape[0] == 1):
        raise ArgumentError(
            f"query has batch {query.shape[0]} and key has batch {key.shape[0]}: they must be "
            "equal; with a block_mask, key and value may have batch 1"
        )
