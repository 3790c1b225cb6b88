"""`tilewise.quantize`: q, k and v to e4m3 for `attention` with FP8 products."""

from __future__ import annotations

from typing import Any, Never

import torch

from ..errors import ArgumentError
from ..features import refuse_gradients
from ..kernels.common.quantized import GivenScales, Lengths, Quantized, Source
from ..kernels.cpu.quantize import Steps
from ..keywords import refuses_others, unexpected
from ..ops import quantize as ops
from ..ops.attention import needs_grad
from ..ops.calls import find
from ..problem import Extras
from ..tile.rotary import Rotary
from .append import check_rotary
from .checks import check_extras, check_tensors, in_order
from .fp8 import expanded_scale
from .scalars import check_flag
from .values import check_signs, check_values, longest_known

Tensor = torch.Tensor


@refuses_others("tilewise.quantize")
def quantize(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    rotate: bool = True,
    smooth: bool | str = True,
    scales: tuple[Tensor | None, Tensor | None, Tensor | None] | None = None,
    rotary: Rotary | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    seqused_k: Tensor | None = None,
    seqused_q: Tensor | None = None,
    layout: str = "bshd",
    **unknown: Never,
) -> Quantized:
    """Quantises q, k and v to float8_e4m3fn with scales, for `tilewise.attention`.

    Example:
        >>> import torch, tilewise
        >>> q = torch.randn(2, 128, 8, 64)
        >>> k, v = torch.randn(2, 2, 128, 2, 64).unbind(0)
        >>> x = tilewise.quantize(q, k, v)
        >>> x.k.dtype, x.scales.k.shape
        (torch.float8_e4m3fn, torch.Size([2, 2]))
        >>> tilewise.attention(x, causal=True).shape
        torch.Size([2, 128, 8, 64])

    Each sequence and key head has one scale; q's covers all query heads of a key head. It maps the
    largest magnitude to 448, or to between 112 and 448 for more than 1,024 rows, as only some rows
    are inspected before rounding. Scales and means depend on all keys, so with a causal mask later
    tokens change earlier outputs by rounding; with `scales` and `smooth=False` they do not.

    Args:
        q: (batch, seqlen_q, nheads, headdim); (total_q, nheads, headdim) with `cu_seqlens_q`.
        k: (batch, seqlen_k, nheads_k, headdim), or packed.
        v: as k, with its own headdim_v.
        rotate: flips signs of q's and k's channels and mixes them by a Hadamard transform, in
            blocks as wide as the largest power of two that divides headdim: q k^T does not change,
            and outlier channels spread over all.
        smooth: subtracts k's and v's means over keys before rounding (over every 8th block of 128
            for more than 1,024 keys), and adds v's to the output in fp32, with v's mean rounding
            error. "v" does so for v only, for calls with sinks or softcap.
        scales: (q, k, v), fp32 (), (nheads_k,) or (batch, nheads_k), for example from a
            calibration; larger values saturate. None computes it from the data.
        rotary: `tilewise.cache.Rotary(cos, sin, interleaved)`, applied to q and k first, in fp32.
            Key positions start at 0 in each sequence, and queries are its last keys in use, as
            with `causal=True`; queries before the first key have position 0. The tables have no
            gradient.
        cu_seqlens_q: as in `tilewise.attention`; pass the same there.
        cu_seqlens_k: as cu_seqlens_q, for keys.
        seqused_k: keys in use per sequence; the others do not count and may have any values.
        seqused_q: queries in use per packed sequence, likewise.
        layout: "bshd" or "bhsd", for q, k and v; a `Quantized` has its own order.

    Returns:
        A NamedTuple with q, k, v_t (values transposed, keys permuted for the tensor cores), scales,
        k_mean, v_mean, and the source tensors if one requires a gradient. Above headdim_v 128 also
        v_drift: how far sums over consecutive keys of the centered v go, in units of its spread.

    Raises:
        ArgumentError: an argument is wrong.
        NotImplementedError: a scale or a table requires a gradient.

    FlashAttention-3 (Shah et al. 2024, arXiv 2407.08608), section 3.3; SageAttention (Zhang et al.
    2024, arXiv 2410.02367), section 4.2.
    """
    if unknown:
        raise unexpected("tilewise.quantize", unknown)
    is_packed = cu_seqlens_q is not None or cu_seqlens_k is not None
    lengths = Lengths(cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k)
    is_three = isinstance(scales, (tuple, list)) and len(scales) == 3
    own_scales = tuple(scales) if is_three and scales is not None else (None, None, None)
    turning = rotary if type(rotary) is Rotary else (None, None, None)
    plain = "quantize", rotate, smooth, layout, is_three, rotary is turning, turning[2]
    entry = None
    if (scales is None or is_three) and (rotary is None or rotary is turning):
        entry, _ = find((q, k, v, *own_scales, *lengths, *turning[:2]), plain=plain)
    call = None if entry is None else entry.call
    q, k, v = in_order(q, k, v, layout, is_packed)
    if call is None:
        call = ops.CallQuantize(_steps(rotate, smooth))
        check_tensors(q, k, v=v)
        extras = Extras(None, None, seqused_k, seqused_q, cu_seqlens_q, cu_seqlens_k)
        check_extras(q, k, extras=extras)
        check_values(q, k, extras=extras)
        if rotary is not None:
            rotary = _tables(rotary, k, of=lengths)
        if entry is not None:
            entry.call = call
    sequences = q.shape[0] if cu_seqlens_q is None else cu_seqlens_q.shape[0] - 1
    checked_scales = _scales(scales, k, sequences)
    check_signs(zip(("scales.q", "scales.k"), checked_scales))
    source = Source(q, k, v, call.steps.rotate, rotary) if needs_grad((q, k, v)) else None
    with torch.no_grad():
        inputs = q.detach(), k.detach(), v.detach()
        quantized = ops.quantize(call, inputs, checked_scales, lengths, rotary)
    if is_packed:
        quantized = quantized._replace(q=quantized.q[0], k=quantized.k[0], v_t=quantized.v_t[0])
    some = None if cu_seqlens_q is cu_seqlens_k is seqused_q is seqused_k is None else lengths
    # Dynamo of torch 2.11 returns no tuple of `_replace`
    fields = {**dict(zip(Quantized._fields, quantized)), "source": source, "lengths": some}
    return Quantized(**fields)


def _steps(rotate: Any, smooth: Any) -> Steps:
    is_rotated = check_flag("rotate", rotate)
    is_v = isinstance(smooth, str) and smooth == "v"
    smooth_v = is_v or check_flag("smooth", smooth, remark=' or "v"')
    return Steps(is_rotated, smooth_v and not is_v, smooth_v=smooth_v)


def _tables(rotary: Any, k: Tensor, of: Lengths) -> Rotary:
    """Rotary tables, with a row for each key where lengths are known."""
    check_rotary(rotary, k, of="k")
    is_interleaved = check_flag("rotary.interleaved", rotary.interleaved)
    refuse_gradients("tables", [("rotary.cos", rotary.cos), ("rotary.sin", rotary.sin)])
    longest = longest_known(k.shape[1], starts=of.cu_seqlens_k, used=of.seqused_k)
    if longest > rotary.cos.shape[0]:
        raise ArgumentError(
            f"rotary.cos has {rotary.cos.shape[0]} positions and k has {longest} keys: pass "
            "longer tables"
        )
    return Rotary(rotary.cos, rotary.sin, interleaved=is_interleaved)


def _scales(scales: Any, k: Tensor, sequences: int) -> GivenScales:
    """The caller's scales as kernels take them, None for those that the tensors give."""
    scales = (None, None, None) if scales is None else scales
    if not isinstance(scales, (tuple, list)) or len(scales) != 3:
        raise ArgumentError(
            f"scales={scales!r}: it must be a tuple of three, for q, k and v, each a tensor or None"
        )
    named = [(f"scales.{name}", x) for name, x in zip(GivenScales._fields, scales)]
    refuse_gradients("scales", named)
    expanded = (
        None if x is None else expanded_scale(name, x, k=k, sequences=sequences)
        for name, x in named
    )
    return GivenScales._make(expanded)
