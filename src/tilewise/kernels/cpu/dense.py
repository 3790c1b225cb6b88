"""One dense attention: lengths known, padding cut off, the mask a band in plain integers.

A `Dense` is a call on the CPU whose `seqused_k` has been applied as slices. Its tensors are
views in (batch, nheads, seqlen, headdim) order. A side of the band that hides nothing is open.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from ...mods.expressions import Node
from ...mods.flatten import take_apart
from ...problem import NO_MODS, OPEN, Extras, Mods, Problem, Scalars

Tensor = torch.Tensor


class Dense(NamedTuple):
    """The inputs of one dense attention, and its band."""

    q: Tensor
    k: Tensor
    v: Tensor
    alibi_slopes: Tensor | None
    sinks: Tensor | None
    scale: float
    softcap: float
    diagonal: int
    left: int
    right: int
    more: More | None = None


class More(NamedTuple):
    """Inputs that depend on more than the distance between a query and a key."""

    first: int  # the index of the first row of the batch, or of a packed sequence
    mods: Mods
    of_mask: tuple[Tensor, ...]  # captured tensors
    of_score: tuple[Tensor, ...]
    bias: Tensor | None  # of these rows of the batch
    rng: Tensor | None
    dropout_p: float
    targets: tuple[Target, ...] = ()


class Target(NamedTuple):
    """A load of the score function from a captured tensor that requires grad."""

    load: Node
    slope: Node  # the function's derivative by what is read
    grad: Tensor  # of the whole tensor, to be added to


def make_dense(
    problem: Problem,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    extras: Extras,
    scalars: Scalars,
    first: int = 0,
    targets: tuple[Target, ...] = (),
) -> Dense:
    """The call without `seqused_k`, its band reduced to the sides that hide something."""
    seqlen_q, seqlen_k = q.shape[1], k.shape[1]
    diagonal = seqlen_k - seqlen_q if problem.align == "bottom_right" else 0
    left, right = scalars.left, scalars.right
    if seqlen_q - 1 + diagonal - left <= 0:
        left = OPEN
    if diagonal + right >= seqlen_k - 1:
        right = OPEN
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    slopes, sinks = extras.alibi_slopes, extras.sinks
    more = None
    if problem.mods != NO_MODS or problem.has_bias or problem.has_dropout:
        parts = take_apart(problem.mods, extras.captured)
        tensors = parts.mask, parts.score, extras.bias, extras.dropout_rng
        more = More(first, problem.mods, *tensors, scalars.dropout_p, targets)
    band = diagonal, left, right, more
    return Dense(q, k, v, slopes, sinks, scalars.scale, scalars.softcap, *band)


class QueryRange(NamedTuple):
    """A block of queries [start, stop) and the keys it sees.

    Keys [first, last) are seen by some query; [full_first, full_last), a part of them, by all.
    """

    start: int
    stop: int
    first: int
    last: int
    full_first: int
    full_last: int


def rows(dense: Dense, block: int) -> Iterator[QueryRange]:
    """Blocks of queries from the top, each with its band of keys."""
    seqlen_q, seqlen_k = dense.q.shape[2], dense.k.shape[2]
    for start in range(0, seqlen_q, block):
        stop = min(start + block, seqlen_q)
        first = full_first = 0
        last = full_last = seqlen_k
        if dense.left >= 0:
            first = max(0, start + dense.diagonal - dense.left)
            full_first = max(0, stop - 1 + dense.diagonal - dense.left)
        if dense.right >= 0:
            last = min(seqlen_k, stop + dense.diagonal + dense.right)
            full_last = min(seqlen_k, start + dense.diagonal + dense.right + 1)
        yield QueryRange(start, stop, first, last, full_first, full_last)
