"""q, k and v to e4m3 and back, in plain torch on any device: what every quantising kernel must
give.

    q, k   turned by the angles of their positions, in fp32, where there are rotary tables
    q, k   sign flip and Hadamard transform of headdim, the same for both: q k^T stays as it is, and
           an outlier of one channel is spread over all of them
    k, v   minus their means over keys in use (`sample_of`). Scores of a row shift by a constant,
           which softmax does not see; the mean of v is added to out in fp32, with that of what
           rounding takes from v (`with_loss`): whatever was taken off comes back
    scale  the largest magnitude of a sequence and key head / 448, or an upper bound / 448
           (`scale_of`); that of q over its group of heads
    codes  times 1 / scale, which is rounded once, to nearest even and saturated
    V^T    keys along the last dimension, those of every 16 in KEY_ORDER, 0 where none is in use

Hadamard: FlashAttention-3 (Shah et al. 2024, arXiv 2407.08608), section 3.3, after QuIP (Chee et
al. 2023, arXiv 2307.13304). Means: SageAttention (Zhang et al. 2024, arXiv 2410.02367), section
4.2.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from ...problem import Extras
from ...tile.quantize import SMALLEST
from ...tile.rotary import Rotary
from ...tile.rotary import rotate as turned_at
from ..common.quantized import (
    COLUMNS,
    EVERY,
    FP8,
    LARGEST,
    ROOM,
    TWO_LEVELS,
    WHOLE,
    Lengths,
    Quantized,
    Scales,
    columns_of,
    empty_values,
    first_column,
    packed_columns,
)
from .hadamard import rotate

Tensor = torch.Tensor


class Steps(NamedTuple):
    """The steps before rounding that are taken."""

    rotate: bool
    smooth_k: bool
    smooth_v: bool


class Rows(NamedTuple):
    """The rows of one side of a call: (batch, seqlen), packed (1, total)."""

    count: int  # of sequences
    sequence: Tensor | None  # (total,), of each packed row; None: the rows of a batch
    position: Tensor  # (seqlen,) or (total,), in its sequence
    is_used: Tensor | None  # (batch, seqlen) or (1, total); None: all
    used: Tensor  # (sequences, 1, 1), how many are in use, in fp64


def rows_of(x: Tensor, starts: Tensor | None, used: Tensor | None) -> Rows:
    """The rows of q or of k, by their cu_seqlens and seqused."""
    batch, seqlen = x.shape[:2]
    row = torch.arange(seqlen, device=x.device)
    if starts is None:
        counts = row.new_full((batch,), seqlen) if used is None else used.long()
        is_used = None if used is None else row < counts.unsqueeze(1)
        return Rows(batch, None, position=row, is_used=is_used, used=_by_sequence(counts))
    starts, count = starts.long(), starts.shape[0] - 1
    sequence = torch.searchsorted(starts[1:], row, right=True).clamp(max=max(count - 1, 0))
    position = row - starts[sequence]
    counts = starts.diff() if used is None else used.long()
    if count == 0:
        return Rows(0, sequence, position=position, is_used=None, used=_by_sequence(counts))
    is_used = (position < counts[sequence]).unsqueeze(0)
    return Rows(count, sequence, position=position, is_used=is_used, used=_by_sequence(counts))


def _by_sequence(counts: Tensor) -> Tensor:
    return counts.double()[:, None, None]


def sample_of(rows: Rows) -> Rows:
    """The rows in use whose mean and largest magnitude are found before rounding: all of a sequence
    that has up to WHOLE, and of a longer one every block of COLUMNS whose number EVERY divides, so
    that kernels read the others once. Any vector may be taken off all keys, and a mean of n of them
    is off by their spread / sqrt(n).
    """
    if not rows.count:
        return rows
    used, apart = rows.used.flatten(), EVERY * COLUMNS
    is_long, is_taken = used > WHOLE, rows.position % apart < COLUMNS
    if rows.sequence is None:
        is_used = ~is_long.unsqueeze(1) | is_taken
    else:
        is_used = (~is_long[rows.sequence] | is_taken).unsqueeze(0)
    if rows.is_used is not None:
        is_used = is_used & rows.is_used
    taken = used // apart * COLUMNS + (used % apart).clamp(max=COLUMNS)
    return rows._replace(is_used=is_used, used=_by_sequence(torch.where(is_long, taken, used)))


def turned(x: Tensor, rotary: Rotary, rows: Rows, keys: Rows | None = None) -> Tensor:
    """x (batch, seqlen, heads, headdim) by the angles of its positions: queries, which come with
    the rows of their keys, are the last of the keys in use.
    """
    position = rows.position
    if keys is not None and rows.count:
        before = (keys.used - rows.used).long().flatten()
        if rows.sequence is None:
            position = position + before.unsqueeze(1)
        else:
            position = position + before[rows.sequence]
    return turned_at(x, rotary, positions=position)


def quantize(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    steps: Steps,
    scales: tuple[Tensor | None, ...],
    of: Lengths,
    rotary: Rotary | None = None,
) -> Quantized:
    """Quantizes 4-dimensional tensors; `scales` are those that are given, (batch, nheads_k)."""
    of_q = rows_of(q, of.cu_seqlens_q, used=of.seqused_q)
    of_k = rows_of(k, of.cu_seqlens_k, used=of.seqused_k)
    q, k, v = used_rows(q.float(), of_q), used_rows(k.float(), of_k), used_rows(v.float(), of_k)
    if rotary is not None:
        q, k = turned(q, rotary, rows=of_q, keys=of_k), turned(k, rotary, rows=of_k)
        q, k = used_rows(q, of_q), used_rows(k, of_k)  # a 0 may be -0 now
    if steps.rotate:
        q, k = rotate(q), rotate(k)
    some_q, some_k = sample_of(of_q), sample_of(of_k)
    # Of wide values the mean is that of all, as one sum of them in the tensor cores shows what is
    # left of it
    drifts = steps.smooth_v and v.shape[3] > TWO_LEVELS
    some_v = of_k if drifts else some_k
    k_mean = mean(k, some_k) if steps.smooth_k else None
    v_mean = mean(v, some_v) if steps.smooth_v else None
    if k_mean is not None:
        k = used_rows(k - of_each(k_mean, of_k), of_k)
    if v_mean is not None:
        v = used_rows(v - of_each(v_mean, of_k), of_k)
    scale_q, scale_k, scale_v = scales
    if scale_q is None:
        scale_q = scale_of(q, of_q, some=some_q, group=q.shape[2] // k.shape[2])
    if scale_k is None:
        scale_k = scale_of(k, of_k, some=some_k, group=1)
    if scale_v is None:
        scale_v = scale_of(v, of_k, some=some_v, group=1)
    q8 = rounded(q, of_heads(scale_q, of_q, group=q.shape[2] // k.shape[2])).contiguous()
    k8 = rounded(k, of_heads(scale_k, of_k, group=1)).contiguous()
    v8 = rounded(v, of_heads(scale_v, of_k, group=1)).contiguous()
    v_drift = None
    if v_mean is not None:
        if drifts:
            v_drift = drift_of(v, of_k, starts=of.cu_seqlens_k)
        v_mean = with_loss(v_mean, v, codes=v8, scale=scale_v, rows=of_k, starts=of.cu_seqlens_k)
    v_t = transposed_values(v8, of.seqused_k, cu_seqlens_k=of.cu_seqlens_k)
    scales = Scales(scale_q, scale_k, v=scale_v)
    return Quantized(q8, k8, v_t=v_t, scales=scales, k_mean=k_mean, v_mean=v_mean, v_drift=v_drift)


def prepare_quantize(steps: Steps) -> Callable[..., Quantized]:
    """`quantize` (q, k, v, scales, of, rotary) of these steps."""
    return lambda q, k, v, scales, of, rotary: quantize(q, k, v, steps, scales, of, rotary)


def prepare_transposed() -> Callable[..., Tensor]:
    """`transposed_values`."""
    return transposed_values


def lengths_of(extras: Extras) -> Lengths:
    """The lengths of a call."""
    return Lengths(extras.cu_seqlens_q, extras.cu_seqlens_k, extras.seqused_q, extras.seqused_k)


def dequantize(x: Quantized, of: Lengths) -> tuple[Tensor, Tensor, Tensor]:
    """What q, k and v stand for, in fp32: still rotated, k without its mean, v with it."""
    of_q = rows_of(x.q, of.cu_seqlens_q, used=of.seqused_q)
    of_k = rows_of(x.k, of.cu_seqlens_k, used=of.seqused_k)
    group = x.q.shape[2] // x.k.shape[2]
    q = x.q.float() * of_heads(x.scales.q, of_q, group=group)
    k = x.k.float() * of_heads(x.scales.k, of_k, group=1)
    v = natural_values(x.v_t, x.k.shape[1], cu_seqlens_k=of.cu_seqlens_k).float()
    v = v * of_heads(x.scales.v, of_k, group=1)
    return q, k, v if x.v_mean is None else v + of_each(x.v_mean, of_k)


# per sequence and head


def used_rows(x: Tensor, rows: Rows) -> Tensor:
    """(batch, seqlen, heads, headdim) with 0 in rows that are not in use, whatever they hold."""
    return x if rows.is_used is None else torch.where(rows.is_used[..., None, None], x, 0)


def mean(x: Tensor, rows: Rows) -> Tensor:
    """(sequences, heads, headdim), of the rows in use."""
    x = used_rows(x, rows)
    if rows.sequence is None:
        total = x.sum(1, dtype=torch.float64)
    else:
        total = x.new_zeros((rows.count, *x.shape[2:]), dtype=torch.float64)
        if rows.count:
            total = total.index_add(0, rows.sequence, x[0].double())
    return (total / rows.used.clamp(min=1)).float()


def scale_of(x: Tensor, rows: Rows, some: Rows, group: int) -> Tensor:
    """(sequences, heads / group): takes the largest magnitude to the largest of e4m3; or, of a
    sequence of which only some rows were looked at, ROOM times theirs, unless another is larger.
    """
    largest = largest_of(x, rows, group=group)
    sampled = largest_of(used_rows(x, some), rows, group=group)
    is_near = (some.used < rows.used).flatten(1) & (largest / ROOM <= sampled)
    return torch.where(is_near, sampled / (LARGEST / ROOM), largest / LARGEST).clamp(min=SMALLEST)


def largest_of(x: Tensor, rows: Rows, group: int) -> Tensor:
    """The largest magnitude, (sequences, heads / group)."""
    largest = x.abs().unflatten(2, (-1, group)).flatten(3) if group > 1 else x.abs()
    if x.shape[1] == 0:
        return x.new_zeros(rows.count, x.shape[2] // group)
    if rows.sequence is None:
        return largest.amax((1, 3))
    largest = largest[0].amax(2)
    index = rows.sequence.unsqueeze(1).expand_as(largest)
    result = largest.new_zeros(max(rows.count, 1), largest.shape[1])
    return result.scatter_reduce(0, index, largest, "amax")[: rows.count]


def rounded(x: Tensor, scale: Tensor) -> Tensor:
    """The codes of fp32 numbers. Kernels multiply, as a division takes ten times as long."""
    return (x * scale.reciprocal()).clamp(-LARGEST, LARGEST).to(FP8)


def with_loss(
    v_mean: Tensor, v: Tensor, codes: Tensor, scale: Tensor, rows: Rows, starts: Tensor | None
) -> Tensor:
    """v_mean and a share of the mean of what rounding took from v, which had lost its mean: with
    all of it the mean over all keys is that of v.

    What rounding takes from a part of the keys goes with its own size. A row under a mask that sees
    such a part, of size s^2 in the mean of squares, beside S^2 of all, is on average no farther off
    with a share of at most 2 s^2 / S^2: so the smallest block of COLUMNS keys limits the share.
    """
    if not rows.count or not v.shape[1]:
        return v_mean
    scaled = v * of_heads(scale, rows, group=1).reciprocal()
    lost = used_rows(scaled.clamp(-LARGEST, LARGEST) - codes.float(), rows).double()
    blocks = _blocks_of(rows, v.shape[1], starts=starts)
    sums = _sums_of(lost, blocks)
    squares = sums.square().sum(2)
    sizes = torch.where(blocks.keys > 0, squares / blocks.keys.clamp(min=1), torch.inf)
    index, none = blocks.sequence, lost.new_zeros(rows.count, v.shape[2])
    sequence = index.unsqueeze(1).expand_as(sizes)
    least = (none + torch.inf).scatter_reduce(0, sequence, sizes, "amin")
    used = rows.used.flatten(1).clamp(min=1)
    of_all = (none.index_add(0, index, squares) / used).clamp(min=SMALLEST)
    share = (2 * least / of_all).clamp(max=1.0).unsqueeze(2)
    total = lost.new_zeros(v_mean.shape).index_add(0, index, sums) / used.unsqueeze(2)
    return v_mean + (share * scale.unsqueeze(2) * total).float()


def drift_of(v: Tensor, rows: Rows, starts: Tensor | None) -> Tensor:
    """How far sums of consecutive keys of v, which had lost its mean, go: in keys' worth of its
    spread, of the sequence and head where that is the most.

    What a short accumulator takes from a sum of products goes with the sum and with how many of
    them it has of one sign. With R the largest sum over consecutive blocks of COLUMNS keys in a
    channel, and s the root of the mean of squares there, these are R / s keys. Channels count by
    their R, as the norm of the error over that of the sums does: sqrt(sum R^4 / s^2 / sum R^2). Of
    n independent keys it is some 1.4 sqrt(n), and n a / 2 where the mean of half of them is a
    spreads above, and of the others below.
    """
    if not rows.count or not v.shape[1]:
        return v.new_zeros((), dtype=torch.float32)
    none = v.new_zeros((rows.count, *v.shape[2:]), dtype=torch.float64)
    blocks, x = _blocks_of(rows, v.shape[1], starts=starts), v.double()
    sums = _sums_of(x, blocks)
    squares = none.index_add(0, blocks.sequence, _sums_of(x.square(), blocks))
    ends = sums.cumsum(0)  # of all sequences: differences are of one
    ends = torch.stack([ends - sums, ends])
    sequence = blocks.sequence[:, None, None].expand_as(sums)
    high = (none - torch.inf).scatter_reduce(0, sequence, ends.amax(0), "amax")
    low = (none + torch.inf).scatter_reduce(0, sequence, ends.amin(0), "amin")
    largest = (high - low).square()
    of_spread = largest / (squares / rows.used.clamp(min=1))
    weighted = torch.where(squares == 0, 0, of_spread * largest).sum(2)
    ratio = weighted / largest.sum(2)
    return torch.where(weighted == 0, 0, ratio).sqrt().amax().float()


class _Blocks(NamedTuple):
    """Blocks of COLUMNS keys of one sequence, numbered as V^T has them."""

    of_row: Tensor  # (batch, seqlen), or (total,)
    sequence: Tensor  # of each block
    keys: Tensor  # (blocks, 1), how many are in use


def _sums_of(x: Tensor, blocks: _Blocks) -> Tensor:
    """(batch, seqlen, heads, headdim) over the keys of each block."""
    sums = x.new_zeros((blocks.keys.shape[0], *x.shape[2:]))
    return sums.index_add(0, blocks.of_row.flatten(), x.flatten(0, 1))


def _blocks_of(rows: Rows, seqlen: int, starts: Tensor | None) -> _Blocks:
    every, position = torch.arange(rows.count, device=rows.used.device), rows.position // COLUMNS
    if starts is None or rows.sequence is None:
        per_sequence = columns_of(seqlen) // COLUMNS
        first, count = per_sequence * every, per_sequence * rows.count
        of_row = first.unsqueeze(1) + position
    else:
        first, count = starts[:-1].long() // COLUMNS + every, packed_columns(seqlen, rows.count)
        count //= COLUMNS
        of_row = first[rows.sequence] + position
    block = torch.arange(count, device=first.device)
    sequence = torch.searchsorted(first, block, right=True) - 1
    before = COLUMNS * (block - first[sequence])
    keys = (rows.used.flatten()[sequence] - before).clamp(0, COLUMNS)
    return _Blocks(of_row, sequence, keys=keys.unsqueeze(1))


def of_each(x: Tensor, rows: Rows) -> Tensor:
    """(sequences, heads, ...) for each row, (batch, 1, heads, ...) or (1, total, heads, ...)."""
    if rows.sequence is None:
        return x.unsqueeze(1)
    if not rows.count:  # rows of no sequence
        return x.new_zeros((1, 1, *x.shape[1:]))
    return x[rows.sequence].unsqueeze(0)


def of_heads(scale: Tensor, rows: Rows, group: int) -> Tensor:
    """(sequences, nheads_k) for each row and head, to broadcast over headdim."""
    return of_each(scale.repeat_interleave(group, 1) if group > 1 else scale, rows).unsqueeze(-1)


# V^T


def column_of(key: Tensor) -> Tensor:
    """The column of V^T of a key of a sequence, the inverse of KEY_ORDER."""
    return key // 16 * 16 + 4 * (key % 8 // 2) + 2 * (key % 16 // 8) + key % 2


def columns(rows: Rows, starts: Tensor | None) -> Tensor:
    """The column of V^T of each row of k."""
    column = column_of(rows.position)
    if starts is None or rows.sequence is None:
        return column
    return column + first_column(starts.long()[rows.sequence], rows.sequence)


def transposed_values(v: Tensor, seqused_k: Tensor | None, cu_seqlens_k: Tensor | None) -> Tensor:
    """V^T, (batch, nheads_k, headdim_v, columns), of e4m3 (batch, seqlen_k, nheads_k, headdim_v):
    0 where no key is in use.
    """
    rows = rows_of(v, cu_seqlens_k, used=seqused_k)
    if not rows.count:
        return empty_values(v, cu_seqlens_k).view(v.dtype)
    total = columns_of(v.shape[1])
    if rows.sequence is not None:
        total = packed_columns(v.shape[1], rows.count)
    bits = used_rows(v.view(torch.int8), rows)
    column = columns(rows, cu_seqlens_k)
    v_t = bits.new_zeros((v.shape[0], total, *v.shape[2:])).index_copy(1, column, bits)
    return v_t.permute(0, 2, 3, 1).contiguous().view(v.dtype)


def natural_values(v_t: Tensor, seqlen_k: int, cu_seqlens_k: Tensor | None) -> Tensor:
    """The inverse, (batch, seqlen_k, nheads_k, headdim_v)."""
    like = v_t.new_empty(v_t.shape[0], seqlen_k)
    rows = rows_of(like, cu_seqlens_k, used=None)
    if not rows.count:
        return v_t.new_zeros((v_t.shape[0], seqlen_k, *v_t.shape[1:3]))
    column = columns(rows, cu_seqlens_k)
    bits = v_t.view(torch.int8).index_select(3, column)
    return bits.permute(0, 3, 1, 2).contiguous().view(v_t.dtype)
