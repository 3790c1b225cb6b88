"""q, k and v of an FP8 call as kernels read them.

The tensor cores of Hopper take both 8-bit operands along the dimension that is summed over. Of P V
that is the keys, so V is kept as V^T, and the keys of every 16 of its columns stand in the order in
which a thread has them of S = Q K^T (`KEY_ORDER`): P then goes from the accumulator of one product
to the operand of the next without a move.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from ...errors import short

if TYPE_CHECKING:
    from ...tile.rotary import Rotary

Tensor = torch.Tensor
FP8 = torch.float8_e4m3fn
LARGEST = 448.0  # of e4m3
COLUMNS = 128  # of V^T, of which each sequence has a multiple
# Means and scales are of all rows of a sequence of so many, and of every 8th block of COLUMNS rows
# of a longer one, whose scale has room for magnitudes 4 times as large: 2 of e4m3's 15 binades
WHOLE, EVERY, ROOM = 8 * COLUMNS, 8, 4.0
# The widest O of which registers hold two levels: how far V drifts decides for wider ones alone
TWO_LEVELS = 128
# Column 4 t + 2 i + b of 16 is key 8 i + 2 t + b: thread t of a row has columns 8 i + 2 t + b of
# an accumulator, and 4 t to 4 t + 3 of an 8-bit left operand
KEY_ORDER = tuple(8 * (c // 2 % 2) + 2 * (c // 4) + c % 2 for c in range(16))


class Scales(NamedTuple):
    """The scales of q, k and v, fp32 (batch, nheads_k): 8-bit tensor times scale is the value."""

    q: Tensor
    k: Tensor
    v: Tensor

    __repr__ = short


class GivenScales(NamedTuple):
    """Scales as `Scales` has them, where the caller gave them, and else None."""

    q: Tensor | None
    k: Tensor | None
    v: Tensor | None


class Source(NamedTuple):
    """The tensors that were quantised, (batch, seqlen, nheads, headdim), where one of them requires
    a gradient; packed ones are a batch of 1.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    is_rotated: bool  # whether q and k were, before rounding
    rotary: Rotary | None = None  # by which q and k were turned

    __repr__ = short


class Lengths(NamedTuple):
    """Where sequences begin, and how much of them is in use: int32, as in a call."""

    cu_seqlens_q: Tensor | None = None
    cu_seqlens_k: Tensor | None = None
    seqused_q: Tensor | None = None
    seqused_k: Tensor | None = None

    __repr__ = short


class Quantized(NamedTuple):
    """q, k and v in float8_e4m3fn, as `tilewise.quantize` returns them; `tilewise.attention` takes
    it in place of q. `print` shows dtypes and shapes.

    Args:
        q: (batch, seqlen_q, nheads, headdim), or packed (total_q, nheads, headdim).
        k: (batch, seqlen_k, nheads_k, headdim), or packed (total_k, nheads_k, headdim).
        v_t: v transposed, (batch, nheads_k, headdim_v, columns), or packed (nheads_k, headdim_v,
            columns), with keys in the order of the tensor cores.
        scales: `scales.q`, `scales.k` and `scales.v`, fp32 (batch, nheads_k): 8-bit tensor times
            scale is the value.
        k_mean: fp32 (batch, nheads_k, headdim), the mean that was subtracted from k; None without
            `smooth`.
        v_mean: fp32 (batch, nheads_k, headdim_v), the mean of v and of its rounding error; None
            without `smooth`.
        v_drift: fp32 (), how far sums of consecutive keys of v without its mean go, if headdim_v
            is over 128.
        source: the tensors before rounding, for `backward="bf16"`; None if none requires a
            gradient.
        lengths: `cu_seqlens_q`, `cu_seqlens_k`, `seqused_q` and `seqused_k` of `tilewise.quantize`,
            with which those of a call are compared; None if there were none.
    """

    q: Tensor
    k: Tensor
    v_t: Tensor
    scales: Scales
    k_mean: Tensor | None = None
    v_mean: Tensor | None = None
    v_drift: Tensor | None = None
    source: Source | None = None
    lengths: Lengths | None = None

    __repr__ = short


def columns_of(seqlen_k: int) -> int:
    """The columns of V^T of a sequence: those past its end are 0."""
    return -(-seqlen_k // COLUMNS) * COLUMNS


def packed_columns(total_k: int, sequences: int) -> int:
    """The columns of V^T of packed sequences, wherever each of them ends."""
    return (total_k // COLUMNS + sequences) * COLUMNS


def first_column(first_k: Tensor, sequence: Tensor) -> Tensor:
    """The column of V^T at which a packed sequence begins, by the key at which it does: known
    without a sum over the sequences before it, at the price of up to COLUMNS columns for each.
    """
    return (first_k // COLUMNS + sequence) * COLUMNS


def empty_values(v: Tensor, starts: Tensor | None) -> Tensor:
    """The bits of V^T without its contents; of no sequences it is 0."""
    columns, make = columns_of(v.shape[1]), torch.empty
    if starts is not None:
        columns = packed_columns(v.shape[1], starts.shape[0] - 1)
        make = torch.zeros if starts.shape[0] == 1 else make
    return make((v.shape[0], *v.shape[2:], columns), device=v.device, dtype=torch.uint8)
