"""One dense attention: lengths known, padding cut off, the mask a band in plain integers.

A `Dense` is a call on the CPU whose `seqused_k` has been applied as slices. Its tensors are
views in (batch, nheads, seqlen, headdim) order. A side of the band that hides nothing is open.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

from ...features import FEATURES
from ...mods.expressions import Node
from ...mods.flat import captured_by_mask, captured_by_score
from ...problem import INPUTS, NO_EXTRAS, OPEN, Extras, Grads, Mods, Problem, Scalars

Tensor = torch.Tensor
OF_HEADS = [name for name, x in FEATURES.items() if ("nheads",) in x.shapes]


class Dense(NamedTuple):
    """The inputs of one dense attention, and its band."""

    q: Tensor
    k: Tensor
    v: Tensor
    scalars: Scalars
    diagonal: int = 0
    extras: Extras = NO_EXTRAS
    modifiers: Modifiers | None = None
    has_plain_scores: bool = True  # products times scale


class Modifiers(NamedTuple):
    """Inputs that depend on more than the distance between a query and a key."""

    first: int  # the index of the first row of the batch, or of a packed sequence
    mods: Mods
    of_mask: tuple[Tensor, ...]  # captured tensors
    of_score: tuple[Tensor, ...]
    extras: Extras  # with the bias of these rows of the batch
    scalars: Scalars
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
    row: slice = slice(None),
    used: int | None = None,
    first: int = 0,
    targets: tuple[Target, ...] = (),
) -> Dense:
    """Some rows of the batch with their `used` keys, the band reduced to the sides that hide
    something; `first` is the number of the call's first row.
    """
    q, k, v = q[row], k[row, :used], v[row, :used]
    slopes = extras.alibi_slopes
    if slopes is not None and slopes.dim() == 2:
        extras = extras._replace(alibi_slopes=slopes[row])
    seqlen_q, seqlen_k = q.shape[1], k.shape[1]
    diagonal = seqlen_k - seqlen_q if problem.align == "bottom_right" else 0
    left, right = scalars.left, scalars.right
    if seqlen_q - 1 + diagonal - left <= 0:
        left = OPEN
    if diagonal + right >= seqlen_k - 1:
        right = OPEN
    modifiers = None
    if problem.is_modified:
        mods, captured = problem.mods, extras.captured
        modifiers = Modifiers(
            first + (row.start or 0),
            mods,
            of_mask=captured_by_mask(mods, captured),
            of_score=captured_by_score(mods, captured),
            extras=extras._replace(bias=rows_of(extras.bias, row)),
            scalars=scalars,
            targets=targets,
        )
    return Dense(
        q=q.transpose(1, 2),
        k=k.transpose(1, 2),
        v=v.transpose(1, 2),
        scalars=scalars._replace(left=left, right=right),
        diagonal=diagonal,
        extras=extras,
        modifiers=modifiers,
        has_plain_scores=problem.has_plain_scores,
    )


def rows_of(bias: Tensor | None, row: slice) -> Tensor | None:
    """The part of a bias, or of its gradient, for some rows of the batch."""
    return bias if bias is None or bias.shape[0] == 1 else bias[row]


def of_heads(extras: Extras, function: Callable[[Tensor], Tensor]) -> Extras:
    """The extras with an entry a head, as a function turns them, and no others."""
    tensors = {name: getattr(extras, name) for name in OF_HEADS}
    return Extras(**{name: None if x is None else function(x) for name, x in tensors.items()})


def sums_of(grads: Grads, lse: Tensor) -> Grads:
    """Gradients whose optional ones are zeros of the dtype of `lse`, to add up parts."""
    named = zip(Grads._fields[INPUTS:], grads[INPUTS:])
    return grads._replace(**{name: lse.new_zeros(x.shape) for name, x in named if x is not None})


def copy_sums(grads: Grads, sums: Grads) -> Grads:
    """The gradients, with the sums written to the optional ones."""
    for grad, total in zip(grads[INPUTS:], sums[INPUTS:]):
        if grad is not None:
            grad.copy_(total)
    return grads


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
        if dense.scalars.left >= 0:
            first = max(0, start + dense.diagonal - dense.scalars.left)
            full_first = max(0, stop - 1 + dense.diagonal - dense.scalars.left)
        if dense.scalars.right >= 0:
            last = min(seqlen_k, stop + dense.diagonal + dense.scalars.right)
            full_last = min(seqlen_k, start + dense.diagonal + dense.scalars.right + 1)
        yield QueryRange(
            start, stop, first=first, last=last, full_first=full_first, full_last=full_last
        )
