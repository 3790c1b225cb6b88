"""Heads for rows: an all-to-all gives each rank the whole sequence of some heads, on which the call
is that of one process; another one gives the rows back (DeepSpeed-Ulysses, Jacobs et al. 2023,
arXiv 2309.14509). A rank has whole groups of query heads and their key heads.

Long calls exchange heads in groups: attention of the first begins when its heads are there, and
beside that of each group the heads of the next arrive and the rows of the one before go back. Only
the first pulls and the last are hidden by nothing.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from ...ops.calls import eager_apply, resolved
from ...problem import Grads, Saved
from ..transport.arena import reporting
from ..transport.copies import Group, Kind, Strides, are_aligned, in_rows, kind_of, strides_of
from ..transport.halves import Arena
from ..transport.head_copies import ToRows, to_heads, to_rows
from . import whole
from .call_spec import CallSpec

Tensor = torch.Tensor
LEAST_ROWS = 1 << 16  # of query heads in a group: 512 tiles of 128, four for each SM


def supports(spec: CallSpec, nheads: int, nheads_k: int) -> str | None:
    """None, or why the heads cannot be dealt."""
    ranks = spec.layout.ranks
    if nheads_k % ranks:
        return f"{nheads_k} key heads cannot be dealt evenly over {ranks} ranks"
    if spec.uses_head_index:
        return "dropout, or a mask or score function of h, counts heads of the whole, not a rank's"
    return None


def attend(
    arena: Arena, spec: CallSpec, q: Tensor, k: Tensor, v: Tensor, return_lse: bool
) -> tuple[Tensor, Tensor | None]:
    """`out` of a rank's rows, and `lse` where it is asked for."""
    if spec.found is None:
        return _Heads.apply(arena, spec, return_lse, q, k, v, spec.sinks)
    if spec.learns:
        return _apply_eagerly(arena, spec, return_lse, q, k, v, spec.sinks)
    results, _, _ = _forward(arena, spec, return_lse, q, k, v)
    return results[0], results[1] if return_lse else None


def _forward(
    arena: Arena, spec: CallSpec, return_lse: bool, q: Tensor, k: Tensor, v: Tensor
) -> tuple[list[Tensor], list[Tensor], tuple[Group, ...]]:
    """The results; of each group its q, k, v, `out` and `lse`; and the groups."""
    way = None if spec.found is None else spec.found.to_heads
    tensors = [q, k, v] if way is not None and way.is_plain else _given((q, k, v))
    if way is None:
        signature = f"attention (heads): {spec.signature}"
        way = Way(spec, signature, groups_of(spec, q, k, v), tensors)
        way.is_plain = tensors[0] is q and tensors[1] is k and tensors[2] is v
        if spec.found is not None:
            spec.found.to_heads = way
    pulled = Pulled(arena, way, tensors)
    results = [q.new_empty(*q.shape[:3], v.shape[3])]
    if return_lse:
        exact = torch.promote_types(q.dtype, torch.float32)
        results.append(q.new_empty(q.shape[0], q.shape[2], q.shape[1], dtype=exact))
    what = f"the results{' with lse' if return_lse else ''} of"
    returned = Returned(pulled, results, what)
    saved: list[Tensor] = []
    for number, group in enumerate(way.groups):
        mine, keys, values = pulled.arrive(number)
        out, lse = whole.attend(spec, mine, keys, values, heads_of(spec, q, k, group))
        saved += (mine, keys, values, out, lse)
        returned.send(number, [out, lse] if return_lse else [out])
    returned.finish()
    arena.settle(*results, *(saved[4::5] if spec.learns else ()))  # with it gradients are NaN
    return results, saved, way.groups


class _Heads(torch.autograd.Function):
    """Attention of a rank's heads, in and out by rows. The backward takes the heads that the
    forward has pulled.
    """

    @staticmethod
    def forward(ctx: Any, arena: Arena, spec: CallSpec, return_lse: bool, q, k, v, sinks):
        results, saved, groups = _forward(arena, spec, return_lse, q, k, v)
        ctx.args = arena, spec, groups, [x.shape for x in (q, k, v)]
        ctx.save_for_backward(*saved)
        ctx.set_materialize_grads(False)
        return results[0], results[1] if return_lse else None

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout, dlse):  # pyright: ignore[reportIncompatibleMethodOverride]
        arena, spec, groups, shapes = ctx.args
        with reporting(spec.layout):
            saved, (dout, dlse) = ctx.saved_tensors, resolved((dout, dlse))
            results = [x.new_empty(shape) for x, shape in zip(saved, shapes)]
            present = [x is not None for x in (dout, dlse)]
            signature = (
                f"the backward of attention (heads): {spec.signature}, with gradients {present}"
            )
            if dout is None:
                dq, _, dv = results
                dout = dq.new_zeros(*dq.shape[:3], dv.shape[3])
            tensors = _given((dout,) if dlse is None else (dout, dlse))
            pulled = Pulled(arena, Way(spec, signature, groups, tensors), tensors)

            def of_group(number: int) -> Saved:
                dout, *dlses = pulled.arrive(number)
                dlse = dlses[0] if dlses else None
                return Saved(dout, dlse, *saved[5 * number : 5 * number + 5])

            return None, None, None, *_gradients(spec, results, of_group, pulled)


_apply_eagerly = eager_apply(_Heads)


def backward(arena: Arena, spec: CallSpec, saved: Saved) -> Grads:
    """The gradients of `attend`, of what a compiled graph has kept, which is rows: heads are
    exchanged for them once more.
    """
    signature = f"the backward of attention (heads): {spec.signature}"
    groups = groups_of(spec, *saved[2:5])
    tensors = _given([x for x in saved if x is not None])
    pulled = Pulled(arena, Way(spec, signature, groups, tensors), tensors)

    def of_group(number: int) -> Saved:
        dout, *arrived = pulled.arrive(number)
        dlse = None if saved.dlse is None else arrived.pop(0)
        return Saved(dout, dlse, *arrived)

    results = [x.new_empty(x.shape) for x in saved[2:5]]
    return _gradients(spec, results, of_group, pulled)


def _gradients(
    spec: CallSpec, results: list[Tensor], of_group: Callable[[int], Saved], pulled: Pulled
) -> Grads:
    """Writes the gradients of this rank's rows into `results`, from each group's heads."""
    dq, dk, _ = results
    returned = Returned(pulled, results, "the results of")
    dsinks = None if spec.sinks is None else torch.zeros_like(spec.sinks)
    for number, group in enumerate(pulled.way.groups):
        heads = heads_of(spec, dq, dk, group)
        grads = whole.backward(spec, of_group(number), heads, rounds=True)
        if dsinks is not None and grads.dsinks is not None:
            dsinks[heads] = grads.dsinks.to(dsinks.dtype)
        returned.send(number, grads[:3])
        del grads  # or they would be there beside those of the next group
    returned.finish()
    pulled.arena.settle(*results)
    return Grads(results[0], results[1], results[2], dsinks)


class Way:
    """How heads of tensors of these shapes and strides, (batch, tokens, heads, headdim) or (batch,
    heads, tokens), come to this rank, and how those of results go back.
    """

    is_plain = False  # whether calls of its signature need no copies of their tensors

    def __init__(
        self, spec: CallSpec, signature: str, groups: tuple[Group, ...], given: Sequence[Tensor]
    ) -> None:
        self.layout, self.groups = spec.layout, groups
        self.signature = signature if len(groups) == 1 else f"{len(groups)} groups of {signature}"
        ranks, batch = self.layout.ranks, given[0].shape[0]
        kinds = tuple(_kind_of(x, ranks) for x in given)
        self.copies = to_heads(self.layout, kinds, tuple(map(_strides_of, given)), batch, groups)
        sizes = zip(self.copies.found.sizes, given)
        self.sizes = [n // x.itemsize for n, x in sizes]
        self.parts = [self._parts(group, given) for group in groups]
        self.back: dict[Any, ToRows] = {}

    def _parts(self, group: Group, given: Sequence[Tensor]) -> list[tuple[int, int, Any]]:
        """Where the heads of a group lie among the numbers that arrive, and their shape."""
        blocks, found = self.copies.found, []
        for kind, x in enumerate(given):
            width, by_head = blocks.width(kind, group), blocks.kinds[kind].by_head
            shape = (width, blocks.tokens) if by_head else (blocks.tokens, width, *x.shape[3:])
            shape = blocks.batch, *shape
            start = blocks.place(kind, group, 0).start // x.itemsize
            found.append((start, start + math.prod(shape), shape))
        return found

    def to_rows(self, number: int, results: Sequence[Tensor]) -> ToRows:
        """The way back of a group of heads of dense results."""
        key = number, *[(x.shape, x.dtype) for x in results]
        found = self.back.get(key)
        if found is None:
            kinds = tuple(_kind_of(x, self.layout.ranks) for x in results)
            group, batch = self.groups[number], results[0].shape[0]
            found = self.back[key] = to_rows(self.layout, kinds, batch, self.groups, group)
        return found


class Pulled:
    """A rank's heads of tensors of its rows, which arrive group by group."""

    def __init__(self, arena: Arena, way: Way, given: Sequence[Tensor]) -> None:
        self.arena, self.way = arena, way
        self.found = [x.new_empty(n) for x, n in zip(given, way.sizes)]
        room = arena.publish(way.copies.nbytes, way.signature)
        arena.copy(way.copies.rows, given, [room, *self.found])
        arena.meet(way.signature)
        self.marks = arena.pull_all(way.copies.pieces, self.found)

    def arrive(self, number: int) -> list[Tensor]:
        """The heads of a group of the whole sequence, for what the stream does next."""
        self.arena.arrive(self.marks[number])
        parts = zip(self.found, self.way.parts[number])
        return [x[start:stop].view(shape) for x, (start, stop, shape) in parts]


class Returned:
    """A rank's rows of all heads, `results`, of what is computed group by group."""

    def __init__(self, pulled: Pulled, results: Sequence[Tensor], what: str) -> None:
        self.arena, self.way, self.results = pulled.arena, pulled.way, results
        self.signature = f"{what} {pulled.way.signature}"
        self.begun = pulled.marks
        self.late: tuple[ToRows, Tensor] | None = None  # what is not placed yet

    def send(self, number: int, tensors: Sequence[Tensor]) -> None:
        """Gives the heads of a group to the ranks whose rows they are of."""
        arena, result = self.arena, self.results[0]
        copies = self.way.to_rows(number, self.results)
        self._arrive()  # before the barrier, which says that all have read what they were to
        room = arena.publish(copies.nbytes, self.signature)
        arena.copy(copies.rows, [x.contiguous() for x in tensors], [room, *self.results])
        arena.meet(self.signature)
        pulled = result.new_empty(copies.pulled, dtype=torch.uint8)
        self.begun = [arena.pull(copies.pieces, [pulled])]
        self._place()  # of the group before
        self.late = copies, pulled

    def finish(self) -> None:
        """All rows are there, for what the stream does next."""
        self._arrive()
        self._place()

    def _arrive(self) -> None:
        for mark in self.begun:
            self.arena.arrive(mark)

    def _place(self) -> None:
        if self.late is not None:
            copies, pulled = self.late
            self.arena.copy(copies.placed, [pulled], self.results)


def groups_of(spec: CallSpec, q: Tensor, k: Tensor, v: Tensor) -> tuple[Group, ...]:
    """The groups in which a rank's key heads are exchanged: two halves, where these have work for
    all of a GPU. All ranks find the same.
    """
    nheads_k = k.shape[2] // spec.layout.ranks
    rows = q.shape[0] * spec.layout.seqlen * (q.shape[2] // k.shape[2])  # of a key head
    least = -(-LEAST_ROWS // max(rows, 1))
    # A group's heads lie in the memory of all: TMA wants them at multiples of 16 bytes
    sizes = sizes_of(nheads_k, least) if are_aligned(q, k, v) else [nheads_k]
    return tuple(map(Group, itertools.accumulate(sizes, initial=0), sizes))


def sizes_of(nheads_k: int, least: int) -> list[int]:
    """The key heads of each group, `least` or more.

    >>> sizes_of(4, 1), sizes_of(5, 2), sizes_of(3, 2)
    ([2, 2], [2, 3], [3])
    """
    half = nheads_k // 2
    return [half, nheads_k - half] if half >= least else [nheads_k]


def heads_of(spec: CallSpec, q: Tensor, k: Tensor, group: Group) -> slice:
    """The query heads of a group of this rank's, among all."""
    width = q.shape[2] // k.shape[2]
    first = spec.layout.rank * (q.shape[2] // spec.layout.ranks) + group.first * width
    return slice(first, first + group.size * width)


def _given(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Tensors as they are copied from: of a token's heads side by side."""
    return [in_rows(x) if x.dim() == 4 else x.contiguous() for x in tensors]


def _kind_of(x: Tensor, ranks: int) -> Kind:
    """The kind of one rank's heads."""
    if x.dim() == 3:
        return Kind(x.shape[1] // ranks, x.itemsize, by_head=True)
    kind = kind_of(x)
    return kind._replace(heads=kind.heads // ranks)


def _strides_of(x: Tensor) -> Strides:
    if x.dim() == 3:
        return x.stride(0) * x.itemsize, x.itemsize, x.stride(1) * x.itemsize
    return strides_of(x)
