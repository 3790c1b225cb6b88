"""Kernel arguments: tensors with their strides, and scalars in base 2."""

from __future__ import annotations

import functools
import math
from typing import Any

import torch

from ...mods.block_checks import BlockLists
from ...mods.ends import says_ends
from ...mods.flat import block_lists, captured_by_mask, captured_by_score
from ...problem import NO_EXTRAS, NO_MODS, Extras, Mods, Problem, Scalars
from ...tile.dropout_numbers import factor_of, threshold_of
from ...tile.types import Bias, Features, Lists, Modifiers, Numbers, Optionals, Sizes, Strided
from .alignment import TMA, VECTORS, fits

LOG2_E = math.log2(math.e)
Tensor = torch.Tensor


@functools.lru_cache(maxsize=4096)
def features_of(problem: Problem, has_fast_tanh: bool = False) -> Features:
    """The constexpr record that selects a kernel's code; `has_fast_tanh`: on GPUs of NVIDIA."""
    has_ends = problem.mods.block != NO_MODS.block and says_ends(problem.mods.mask)
    return Features(
        HEADDIM=problem.headdim,
        HEADDIM_V=problem.headdim_v,
        GROUP=problem.group,
        LEFT=problem.has_left,
        RIGHT=problem.has_right,
        TOP_LEFT=problem.align == "top_left",
        SOFTCAP=problem.has_softcap,
        FAST_TANH=has_fast_tanh and problem.has_softcap,
        ALIBI=problem.has_alibi,
        SINKS=problem.has_sinks,
        SEQUSED_K=problem.has_seqused_k,
        SEQUSED_Q=problem.has_seqused_q,
        PACKED=problem.is_packed,
        BIAS=problem.has_bias,
        DROPOUT=problem.has_dropout,
        MASK_M=problem.mods.block[0],
        MASK_N=problem.mods.block[1],
        MASK_MOD=None if has_ends else _function(problem.mods.mask),
        SCORE_MOD=_function(problem.mods.score),
        SCORE_DERIVATIVE=_function(problem.mods.derivative),
        PRECISION="ieee",
        NATURAL=problem.has_natural_scores,
        ENDS=has_ends,
    )


def _function(name: str) -> Any:
    if not name:
        return None
    from ...mods.codegen import function_of  # imports Triton

    return function_of(name)


def strided(x: Tensor) -> Strided:
    """A (batch, seqlen, nheads, headdim) tensor as kernels take it."""
    return Strided(x, x.stride(0), x.stride(1), x.stride(2))


def strided_of(x: Tensor) -> Strided:
    """A batch, pages, or packed rows as a batch of one."""
    batch, row, head = x.stride()[:3] if x.dim() == 4 else (0, *x.stride()[:2])
    return Strided(x, batch, row, head=head)


def scales_of(name: str, scale: Tensor | None) -> dict[str, Any]:
    """Fields of a record for scales of any kind: them, and their strides over sequences, or over
    pages where each row has its own; over rows, if so; over heads.
    """
    batch = row = head = None
    if scale is not None and scale.dim() == 3:
        batch, row, head = scale.stride()
    elif scale is not None:
        batch, head = (0, 0, *scale.stride())[-2:]
    return {name: scale, f"{name}_batch": batch, f"{name}_row": row, f"{name}_head": head}


def aligned(x: Tensor) -> bool:
    """Whether one tensor descriptor can read all of x: rows, heads and batches at multiples of 16
    bytes, and none of them repeated.
    """
    return fits(x, TMA)


def fits_descriptor(x: Tensor) -> bool:
    """Whether a tensor descriptor of its own can read each head of x: aligned rows that do not
    repeat. Heads and batches may, but their strides count even where there is one of them.
    """
    strides = all(stride * x.itemsize % TMA.bytes == 0 for stride in x.stride()[:3])
    return strides and x.stride(1) > 0 and fits(x, VECTORS)


def sizes_of(q: Tensor, k: Tensor, extras: Extras = NO_EXTRAS) -> Sizes:
    """The call's lengths."""
    return Sizes(extras.sequences, q.shape[2], q.shape[1], k.shape[1])


def numbers_of(scalars: Scalars, seqlen_q: int, seqlen_k: int) -> Numbers:
    """Scale and softcap in base 2.

    Window sides are cut to what the lengths can reach, so that sums of indices stay in 32
    bits for lengths up to 2^30.
    """
    reach, threshold = max(seqlen_q, seqlen_k), threshold_of(scalars.dropout_p)
    return Numbers(
        scale=scalars.scale,
        scale_log2=scalars.scale * LOG2_E,
        softcap_log2=scalars.softcap * LOG2_E,
        scale_over_softcap=scalars.scale / scalars.softcap if scalars.softcap > 0 else 0.0,
        left=min(scalars.left, reach),
        right=min(scalars.right, reach),
        dropout_threshold=float(threshold),
        dropout_factor=factor_of(threshold),
    )


def optionals_of(extras: Extras, mods: Mods = NO_MODS) -> Optionals:
    """The optional tensors as kernels take them."""
    slopes, rng = contiguous_of(extras.alibi_slopes), contiguous_of(extras.dropout_rng)
    bias, captured = extras.bias, extras.captured
    per_batch = slopes is not None and slopes.dim() == 2
    optionals = Optionals(
        alibi_slopes=slopes,
        alibi_batch=slopes.stride(0) if per_batch else 0,
        sinks=contiguous_of(extras.sinks),
        seqused_k=contiguous_of(extras.seqused_k),
        seqused_q=contiguous_of(extras.seqused_q),
        cu_seqlens_q=contiguous_of(extras.cu_seqlens_q),
        cu_seqlens_k=contiguous_of(extras.cu_seqlens_k),
        dropout_rng=rng,
    )
    if bias is None and rng is None and not captured and mods == NO_MODS:
        return optionals
    from ...mods.codegen import captured_of

    by_queries, by_keys = lists_of(block_lists(mods, captured))
    modifiers = Modifiers(
        bias=0 if bias is None else bias_of(bias),
        mask_tensors=captured_of(captured_by_mask(mods, captured)) or 0,
        score_tensors=captured_of(captured_by_score(mods, captured)) or 0,
        by_queries=by_queries,
        by_keys=by_keys,
    )
    return optionals._replace(modifiers=modifiers)


def contiguous_of(x: Tensor | None) -> Tensor | None:
    """x.contiguous(), which takes three times as long where x is contiguous."""
    return x if x is None or x.is_contiguous() else x.contiguous()


def bias_of(x: Tensor) -> Bias:
    """A bias, or its gradient, as kernels take it."""
    batch, head, row, column = (0 if n == 1 else stride for n, stride in zip(x.shape, x.stride()))
    return Bias(x, batch, head=head, row=row, column=column)


def lists_of(lists: list[BlockLists]) -> tuple[Lists | int, Lists | int]:
    """The lists of a block mask as kernels take them, by queries and by keys."""
    if not lists:
        return 0, 0
    queries, full_queries, keys, full_keys = lists
    query_blocks, key_blocks = queries.counts.shape[2], keys.counts.shape[2]
    return _lists(queries, full_queries, key_blocks), _lists(keys, full_keys, query_blocks)


def _lists(partial: BlockLists, full: BlockLists, blocks: int) -> Lists:
    batch, nheads, rows = partial.counts.shape
    return Lists(
        partial_counts=contiguous_of(partial.counts),
        partial=contiguous_of(partial.indices),
        partial_width=partial.indices.shape[3],
        full_counts=contiguous_of(full.counts),
        full=contiguous_of(full.indices),
        full_width=full.indices.shape[3],
        batch_rows=0 if batch == 1 else nheads * rows,
        head_rows=0 if nheads == 1 else rows,
        blocks=blocks,
    )
