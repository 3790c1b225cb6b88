"""Checks of what tensors hold: lengths, page tables, slots, scales, and how large scores may get.
They run at every call, and only where values may be read; shapes and dtypes have been checked.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch._C._functorch import peek_interpreter_stack

from ..errors import OURS, ArgumentError, Words
from ..kernels.common.cached import Cached
from ..kernels.common.quantized import Lengths
from ..problem import Extras, Scalars
from ..switches import is_on
from ..tile.paging import capacity

Tensor = torch.Tensor

# Kernels subtract the maximum from scaled scores in one multiply-add, which leaves the rounding of
# the scaled maximum as an exponent: half of its last bit, 8 at 2^28, where P may leave fp16, and
# 128 at 2^32, where it leaves fp32
LARGEST_SCORE = 2.0**27


def knows_values(x: Tensor) -> bool:
    """Whether the checks may read a tensor's values: on the CPU, and on a GPU with
    TILEWISE_CHECK=1, as it synchronizes. Never while traced.
    """
    if type(x) is not Tensor or torch.compiler.is_compiling():
        return False
    if torch._C._len_torch_dispatch_stack() or peek_interpreter_stack():
        return False
    return x.device.type == "cpu" or is_on("TILEWISE_CHECK")


def check_values(q: Tensor, k: Tensor, extras: Extras, words: Words = OURS) -> None:
    """Lengths of sequences that are rows of a batch or packed."""
    starts = ("cu_seqlens_q", extras.cu_seqlens_q, q), ("cu_seqlens_k", extras.cu_seqlens_k, k)
    for name, x, rows in starts:
        if x is not None:
            check_starts(name, x, rows.shape[1], words=words, nheads=rows.shape[2])
    for name in ("seqused_q", "seqused_k"):
        used = getattr(extras, name)
        if used is not None and knows_values(used):
            starts = getattr(extras, name.replace("seqused", "cu_seqlens"))
            room = torch.full_like(used, k.shape[1]) if starts is None else starts.diff()
            if bool(((used < 0) | (used > room)).any()):
                raise ArgumentError(
                    f"{name}={used.tolist()}: it must be at least 0 and at most the number of "
                    f"rows per sequence, {room.tolist()}"
                )


def check_starts(
    name: str, starts: Tensor, total: int, rows: str = "rows", words: Words = OURS, nheads: int = -1
) -> None:
    """Where packed sequences begin; there may be more rows behind the last. With `nheads` rows the
    dimensions may have another order.
    """
    if not knows_values(starts):
        return
    values = starts.tolist()
    if values[0] != 0 or values[-1] > total or any(a > b for a, b in itertools.pairwise(values)):
        raise ArgumentError(
            f"{name}={values}: it must begin with 0, never decrease, and end with at most the "
            f"number of packed {rows}, {total}{f'; {words.order}' if values[-1] == nheads else ''}"
        )


def check_cached_values(cached: Cached, words: Words = OURS) -> None:
    """Lengths and pages of a call with a cache."""
    starts, q = cached.extras.cu_seqlens_q, cached.q
    if starts is not None:
        check_starts("cu_seqlens_q", starts, q.shape[0], "queries")
    used, read = cached.extras.seqused_k, last_read(q, starts, left=cached.scalars.left)
    check_reach(cached.k, cached.page_table, seqused_k=used, words=words, read=read)


def last_read(q: Tensor, cu_seqlens_q: Tensor | None, left: int) -> int | Tensor | None:
    """How many of the last keys of each sequence its queries see through a window; None for all."""
    if left < 0:
        return None
    if cu_seqlens_q is None:
        return q.shape[1] + left
    return (cu_seqlens_q.diff() + left).unsqueeze(1) if knows_values(cu_seqlens_q) else None


def check_reach(
    k: Tensor,
    page_table: Tensor | None,
    seqused_k: Tensor | None,
    *,
    words: Words = OURS,
    least: list[int] | None = None,
    read: int | Tensor | None = None,
) -> None:
    """Checks that every key in use has a slot, in an existing page: `least` are the fewest keys of
    each sequence, new ones, and `read` is how many of its last ones are read, None for all.
    """
    tensors = [x for x in (seqused_k, page_table) if x is not None]
    if not tensors or not all(map(knows_values, tensors)):
        return
    if page_table is not None and page_table.shape[:1] != tensors[0].shape[:1]:
        return  # a wrong shape has its own error
    room = capacity(k, page_table)
    is_paged = page_table is not None and words.page_table != "cache_batch_idx"
    unit = "page" if is_paged else "sequence"
    lengths = [room] * len(tensors[0]) if seqused_k is None else seqused_k.tolist()
    if any(not fewest <= n <= room for n, fewest in zip(lengths, least or [0] * len(lengths))):
        place = f"{words.k} has {room} rows per sequence"
        if page_table is not None and is_paged:
            place = (
                f"{words.page_table} has {page_table.shape[1]} pages of {k.shape[1]} keys per "
                f"sequence, room for {room} keys"
            )
        fewest = "0" if not any(least or ()) else f"as many as new keys, {least}"
        raise ArgumentError(
            f"{words.seqused_k}={lengths}: it must be at least {fewest}, and {place}: widen it, or "
            "shorten the sequences"
        )
    if page_table is None:
        return
    entry = torch.arange(page_table.shape[1], device=page_table.device)
    is_wrong = (page_table < 0) | (page_table >= k.shape[0])
    used = torch.tensor(lengths, device=entry.device).unsqueeze(1)
    is_wrong &= entry * k.shape[1] < used
    if read is not None:
        is_wrong &= (entry + 1) * k.shape[1] > used - read
    if bool(is_wrong.any()):
        row, column = is_wrong.nonzero()[0].tolist()
        raise ArgumentError(
            f"{words.page_table}{[row, column][: 1 + is_paged]} is {int(page_table[row, column])}, "
            f"a {unit} that the {lengths[row]} keys in use reach: it must be at least 0 and below "
            f"the number of {unit}s in {words.k}, {k.shape[0]}"
        )
    if least is not None:
        size, first = k.shape[1], used - torch.tensor(least, device=entry.device).unsqueeze(1)
        rows = [page_table * size + (n - entry * size).clamp(0, size) for n in (first, used)]
        starts, order = rows[0][rows[0] < rows[1]].sort()
        is_twice = starts[1:] < rows[1][rows[0] < rows[1]][order][:-1]
        if bool(is_twice.any()):
            slot = int(starts[1:][is_twice][0])
            raise ArgumentError(
                f"{words.page_table} has new keys write row {slot % size} of {unit} {slot // size} "
                "twice: give each sequence rows of its own for new keys"
            )


def check_leftpad(leftpad: Tensor, used: Tensor) -> None:
    """The padding of each sequence leaves no fewer than 0 of its keys."""
    if knows_values(leftpad) and knows_values(used) and leftpad.shape == used.shape:
        if bool(((leftpad < 0) | (leftpad > used)).any()):
            raise ArgumentError(
                f"cache_leftpad={leftpad.tolist()}: it must be at least 0 and at most the keys of "
                f"its sequence, {used.tolist()}"
            )


def check_longest(bounds: dict[str, Any], starts: Sequence[Any], used: Sequence[Any]) -> None:
    """No packed sequence is longer than its bound, where it may be read how long they are."""
    for (name, bound), ends, rows in zip(bounds.items(), starts, used):
        counts = ends if rows is None else rows
        if type(bound) is int and getattr(counts, "ndim", 0) == 1 and counts.dtype is torch.int32:
            if bound < (longest := longest_known(0, ends, rows)):
                raise ArgumentError(
                    f"{name}={bound}: a packed sequence has {longest} rows, so pass at least that"
                )


def longest_known(seqlen: int, starts: Tensor | None, used: Tensor | None) -> int:
    """The keys of the longest sequence; 0 where only a device knows."""
    if starts is None and used is None:
        return seqlen
    counts = starts if used is None else used
    if counts is None or not knows_values(counts):
        return 0
    return max((counts.diff() if used is None else counts).tolist(), default=0)


def check_signs(named: Iterable[tuple[str, Tensor | None]]) -> None:
    """Refuses scales of q and k below 0: kernels compare products before they are scaled. That of v
    may have any sign.
    """
    for name, x in named:
        if x is not None and knows_values(x) and bool((x < 0).any()):
            raise ArgumentError(
                f"{name} has {x.min().item():.3g}: a scale of q or k must be at least 0; negate q "
                "instead"
            )


def check_same_lengths(before: Lengths, extras: Extras) -> None:
    """A call has the lengths that a `Quantized` was made with; rows that were in use may be fewer
    now.
    """
    for name, quantized_with in before._asdict().items():
        called_with = getattr(extras, name)
        if quantized_with is None or quantized_with is called_with:
            continue
        if called_with is None or called_with.shape != quantized_with.shape:
            is_other = True
        elif called_with.device != quantized_with.device or not knows_values(called_with):
            continue
        elif name.startswith("cu_"):
            is_other = bool((called_with != quantized_with).any())
        else:
            is_other = bool((called_with > quantized_with).any())
        if is_other:
            raise ArgumentError(
                f"{name} is {_value(called_with)} and the Quantized was made with "
                f"{_value(quantized_with)}: pass the same {name} to tilewise.quantize and "
                "tilewise.attention"
            )


def _value(x: Tensor | None) -> Any:
    """What a message says of lengths."""
    if x is None:
        return None
    return x.tolist() if knows_values(x) else f"{x.dtype} of shape {tuple(x.shape)}"


def check_scores(q: Tensor, k: Tensor, scalars: Scalars, words: Words = OURS) -> None:
    """The norms of q and k, or a cap, allow no score past LARGEST_SCORE: on a GPU it would give
    NaN. It synchronizes with the device, so it runs only with TILEWISE_CHECK=1.
    """
    if q.numel() == 0 or k.numel() == 0 or scalars.highest_score <= LARGEST_SCORE:
        return
    norms = [torch.linalg.vector_norm(x, dim=-1, dtype=torch.float64).amax().item() for x in (q, k)]
    score = scalars.scale * norms[0] * norms[1]
    if score > LARGEST_SCORE:
        raise ArgumentError(
            f"rows of {words.q} have norms up to {norms[0]:.3g}, rows of {words.k} up to "
            f"{norms[1]:.3g}, and {words.scale} is {scalars.scale:.3g}: scores may reach "
            f"{score:.3g}, and scores above 2^27 may give NaN on a GPU; scale {words.q} down"
        )
