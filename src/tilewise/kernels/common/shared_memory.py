"""Which tensors share memory: whether two elements of one that is written lie at one address, and
whether two tensors have an address in common. Both are exact, and read no element.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from typing import Any

import torch

from ...errors import ArgumentError
from ...tile.quantize import by_row

Tensor = torch.Tensor
PLACES = "slots", "page_table", "block_table", "cache_batch_idx"  # of rows of a cache
MOST_SUMS = 20_000  # that are tried; strides that ask for more are of no tensor that programs make

Term = tuple[int, int, int]  # a stride, and how often it is taken at least and at most


def check_written(name: str, x: Any) -> None:
    """Refuses a tensor that cannot be written in place: a lazily negated view, and one whose
    elements share memory.
    """
    if x.is_neg():
        raise ArgumentError(
            f"{name} is a lazily negated view (is_neg()), and it is written in place: pass the "
            "tensor that it is a view of, or resolve_neg() it and copy back"
        )
    if overlaps(x):
        raise ArgumentError(
            f"{name} has shape {tuple(x.shape)} and strides {x.stride()}, with which elements "
            f"share memory, and it is written: pass {name}.contiguous()"
        )


def check_apart(
    names: Sequence[str], tensors: Sequence[Any], written: int, is_pool: bool = False
) -> None:
    """Refuses tensors of which the first, so many, are written where one of these shares memory
    with another. With `is_pool` one pool has the pages of the first two, which share none of the
    same number.
    """
    spans = [(0, 0) if x is None or not x.numel() else span_of(x) for x in tensors]
    for i in range(written):
        first, stop = spans[i]
        for j in range(i + 1, len(spans)):
            other, end = spans[j]
            if first < end and other < stop:
                pages = slice(0, 1 if is_pool and j == 1 else None)
                if share_memory(tensors[i][pages], tensors[j][pages]):
                    raise ArgumentError(
                        f"{names[i]} is written and shares memory with {names[j]}: give it memory "
                        f"of its own, or clone() {names[j]}"
                    )


def check_memory(tensors: dict[str, Any], has_new: bool = True) -> None:
    """Refuses a call that would write memory which it writes or reads elsewhere: `out`, and with
    new keys the caches and their scales by row. Tensors have the names of the caller.
    """
    scales = [name for name in ("k_descale", "v_descale") if by_row(tensors.get(name))]
    written = ["k_cache", "v_cache", *scales] if has_new else []
    written += ["out"] if tensors.get("out") is not None else []
    for name in written:
        check_written(name, tensors[name])
    names = *written, *(name for name in tensors if name not in written)
    ordered: list[Any] = [tensors[name] for name in names]
    # One pool of pages may hold both: then page n of K may not be page n of V
    has_places = any(tensors.get(name) is not None for name in PLACES)
    is_pool = has_new and has_places and ordered[0].stride() == ordered[1].stride()
    check_apart(names, ordered, written=len(written), is_pool=is_pool)


def span_of(x: Tensor) -> tuple[int, int]:
    """The addresses between which a tensor that is not empty lies."""
    first, strides = x.data_ptr(), x.stride()
    last = sum(map(operator.mul, x.shape, strides)) - sum(strides)
    return first, first + (last + 1) * x.itemsize


def overlaps(x: Tensor) -> bool:
    """Whether two elements of a tensor lie at one address."""
    return not x.is_contiguous() and _overlaps(tuple(x.shape), x.stride())


@functools.lru_cache(maxsize=1024)
def _overlaps(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    if 0 in shape:
        return False
    steps = sorted(((stride, n - 1) for n, stride in zip(shape, strides) if n > 1), reverse=True)
    if steps and steps[-1][0] == 0:
        return True
    # Two elements whose first indices that differ do so along step i
    for i, (stride, most) in enumerate(steps):
        terms = [(step, -n, n) for step, n in steps[i + 1 :]]
        if _has_sum(0, [(stride, 1, most), *terms]):
            return True
    return False


def share_memory(x: Any, y: Any) -> bool:
    """Whether two tensors that are not empty have a byte in common."""
    apart = y.data_ptr() - x.data_ptr()
    of_x, of_y = ((tuple(z.shape), z.stride(), z.itemsize) for z in (x, y))
    return _share_memory(apart, of_x, of_y)


@functools.lru_cache(maxsize=1024)
def _share_memory(apart: int, x: tuple, y: tuple) -> bool:
    least: dict[int, int] = {1: 1 - y[2]}  # bytes of an element
    most: dict[int, int] = {1: x[2] - 1}
    for (shape, strides, size), bound in ((x, most), (y, least)):
        for n, stride in zip(shape, strides):
            step = stride * size
            least.setdefault(step, 0)
            most.setdefault(step, 0)
            bound[step] += n - 1 if bound is most else 1 - n
    terms = [(step, least[step], most[step]) for step in sorted(most, reverse=True) if step]
    return _has_sum(apart, terms)


def _has_sum(wanted: int, terms: list[Term]) -> bool:
    """Whether strides, by size, the largest first, have a sum of this, each taken as often as it
    may be. True where that is too long to find out.
    """
    ranges = [(0, 0)]  # of the sums of the last terms
    for stride, least, most in reversed(terms):
        low, high = ranges[-1]
        ranges.append((low + stride * least, high + stride * most))
    sums, tried = [(wanted, 0)], 0  # what is left of a sum, and the number of terms in it
    while sums:
        missing, i = sums.pop()
        if i == len(terms):  # whose ranges have left nothing missing
            return True
        stride, least, most = terms[i]
        low, high = ranges[len(terms) - 1 - i]
        first = max(least, -((high - missing) // stride))
        last = min(most, (missing - low) // stride)
        tried += max(0, last - first + 1)
        if tried > MOST_SUMS:
            return True
        sums += [(missing - n * stride, i + 1) for n in range(first, last + 1)]
    return False
