"""Heads for rows: an all-to-all gives each rank the whole sequence of some heads, on which the call
is that of one process; another one gives the rows back (DeepSpeed-Ulysses, Jacobs et al. 2023,
arXiv 2309.14509). A rank has whole groups of query heads and their key heads.

Long calls exchange heads in groups: attention of the first begins when its heads are there, and
beside that of each group the heads of the next arrive and the rows of the one before go back. Only
the first pulls and the last are hidden by nothing.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from ...kernels.common.outputs import empty_lse
from ...ops.calls import eager_apply, resolved
from ...problem import INPUTS, Grads, Saved
from ..transport.arena import reporting
from ..transport.copies import Blocks, CopyList, Kind, are_aligned, in_rows, kind_of, places_of
from ..transport.copy_lists import heads_to_rows, rows_to_heads
from ..transport.exchange import publish_copies
from ..transport.halves import Arena
from ..transport.nodes import Nodes
from . import whole
from .grads import LEARNED, LearnedSum, QueryGrads
from .shard_call import ShardCall

Tensor = torch.Tensor
LEAST_ROWS = 1 << 16  # of query heads in a group: 512 tiles of 128, four for each SM
LEAST_OUTER_ROWS = 1 << 15  # in the last of three groups, whose way back nothing hides
SAVED = 5  # tensors per group: q, k, v, out and lse
GIVEN = 2  # gradients, of out and lse


def supports(spec: ShardCall, nheads: int, nheads_k: int) -> str | None:
    """Returns None, or why the heads cannot be dealt."""
    ranks = spec.layout.ranks
    if nheads_k % ranks:
        return f"{nheads_k} key heads cannot be dealt evenly over {ranks} ranks"
    if spec.uses_head_index:
        return "dropout, or a mask or score function of h, counts heads of the whole, not a rank's"
    return None


def attend(
    arena: Arena, spec: ShardCall, q: Tensor, k: Tensor, v: Tensor, *, return_lse: bool
) -> tuple[Tensor, Tensor | None]:
    """Computes `out` of a rank's rows, and `lse` on request."""
    if spec.prepared is not None and not spec.learns:
        out, lse, _, _ = _forward(arena, spec, q=q, k=k, v=v, return_lse=return_lse)
        return out, lse
    apply = _Heads.apply if spec.prepared is None else _apply_eagerly
    return apply(arena, spec, return_lse, q, k, v, getattr(spec.extras, LEARNED))


def _forward(
    arena: Arena, spec: ShardCall, q: Tensor, k: Tensor, v: Tensor, *, return_lse: bool
) -> tuple[Tensor, Tensor | None, list[Tensor], HeadExchange]:
    """Computes `out` and `lse`, then q, k, v, `out` and `lse` of each group, and how they came."""
    plan: HeadExchange | None = None if spec.prepared is None else spec.prepared.heads
    tensors = [q, k, v] if plan is not None and plan.is_plain else [in_rows(x) for x in (q, k, v)]
    if plan is None:
        signature = f"attention (heads): {spec.signature}"
        groups = groups_of(spec, q, k=k, v=v)
        plan = HeadExchange(spec, signature, tensors=tensors, groups=groups, nodes=arena.nodes)
        plan.is_plain = tensors[0] is q and tensors[1] is k and tensors[2] is v
        if spec.prepared is not None:
            spec.prepared.heads = plan
    incoming = IncomingHeads(arena, plan, tensors=tensors)
    results = [q.new_empty(q.shape[:3] + v.shape[3:])]
    if return_lse:
        results.append(empty_lse(q))
    title = f"the results{' with lse' if return_lse else ''} of"
    outgoing = OutgoingRows(incoming, results, title=title)
    saved: list[Tensor] = []
    for number, group in enumerate(plan.groups):
        queries, keys, values = incoming.arrive(number)
        part = spec.of_heads(query_heads(spec, q, k=k, group=group))
        out, lse = whole.attend(part, queries, k=keys, v=values)
        saved += (queries, keys, values, out, lse)
        outgoing.send(number, [out, lse] if return_lse else [out])
    outgoing.finish()
    all_lse = saved[SAVED - 1 :: SAVED] if spec.learns else []
    arena.settle(results + all_lse)  # with a NaN in lse gradients are NaN
    return results[0], results[1] if return_lse else None, saved, plan


class _Heads(torch.autograd.Function):
    """Attention of a rank's heads, in and out by rows. The backward reuses pulled heads."""

    @staticmethod
    def forward(ctx: Any, arena: Arena, spec: ShardCall, return_lse: bool, q, k, v, learned):
        out, lse, saved, ctx.plan = _forward(arena, spec, q=q, k=k, v=v, return_lse=return_lse)
        ctx.arena, ctx.spec = arena, spec
        ctx.shapes = [x.shape for x in (q, k, v)]
        ctx.save_for_backward(*saved)
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout, dlse):  # pyright: ignore[reportIncompatibleMethodOverride]
        spec = ctx.spec
        with reporting(spec.layout):
            tensors = ctx.saved_tensors  # once: a checkpoint computes them
            results = [x.new_empty(shape) for x, shape in zip(tensors, ctx.shapes)]
            dout, dlse = resolved((dout, dlse))
            if dout is None:
                dq, _, dv = results
                dout = dq.new_zeros(dq.shape[:3] + dv.shape[3:])
            options: Any = dict(exchanged=[dout, dlse], kept=tensors, results=results)
            options |= dict(groups=ctx.plan.groups, plans=ctx.plan.backwards)
            grads = _gradients(ctx.arena, spec, **options)
            return None, None, None, *grads[: INPUTS + 1]


_apply_eagerly = eager_apply(_Heads)


def backward(arena: Arena, spec: ShardCall, saved: Saved) -> Grads:
    """Computes the gradients of `attend` from rows, whose heads are exchanged once more."""
    results = [x.new_empty(x.shape) for x in (saved.q, saved.k, saved.v)]
    options: Any = dict(groups=groups_of(spec, saved.q, k=saved.k, v=saved.v), plans={})
    return _gradients(arena, spec, exchanged=saved, kept=(), results=results, **options)


def _gradients(
    arena: Arena,
    spec: ShardCall,
    *,
    exchanged: Sequence[Tensor | None],
    kept: Sequence[Tensor],
    results: list[Tensor],
    groups: tuple[range, ...],
    plans: dict[Any, HeadExchange],
) -> Grads:
    """Writes the gradients of this rank's rows into `results`: of all fields of Saved, whose heads
    are `exchanged`, or of the first ones and those that a forward has `kept` of each group. `plans`
    has those of backwards of the same forward.
    """
    tensors = [in_rows(x) for x in exchanged if x is not None]
    key = tuple([(x.shape, x.stride(), x.dtype) for x in tensors])
    plan = plans.get(key)
    if plan is None:
        present = [x is not None for x in exchanged[:GIVEN]]
        signature = f"the backward of attention (heads): {spec.signature}, with gradients {present}"
        options: Any = dict(tensors=tensors, groups=groups, nodes=arena.nodes)
        plan = plans[key] = HeadExchange(spec, signature, **options)
    incoming = IncomingHeads(arena, plan, tensors=tensors)
    outgoing = OutgoingRows(incoming, results, title="the results of")
    dq, dk, dv = results
    dlearned = LearnedSum(spec.extras)
    for number, group in enumerate(groups):
        heads = query_heads(spec, dq, k=dk, group=group)
        arrived = iter(incoming.arrive(number))
        fields = [None if x is None else next(arrived) for x in exchanged]
        saved = Saved._make((*fields, *kept[SAVED * number :][:SAVED]))
        grads = whole.backward(spec.of_heads(heads), saved, rounds=True)
        dlearned.add(grads, heads)
        outgoing.send(number, grads[:INPUTS])
        del grads  # they must not be in memory with those of the next group
    outgoing.finish()
    arena.settle(results)
    return QueryGrads(dq, dlearned.total).with_keys(dk, dv, extras=spec.extras)


class HeadExchange:
    """How heads of tensors of some shapes and strides come here, and how results go back."""

    is_plain = False  # whether calls of its signature need no copies of their tensors

    def __init__(
        self,
        spec: ShardCall,
        signature: str,
        *,
        tensors: Sequence[Tensor],
        groups: tuple[range, ...],
        nodes: Nodes | None,
    ) -> None:
        self.layout, self.groups, self.nodes = spec.layout, groups, nodes
        self.signature = signature if len(groups) == 1 else f"{len(groups)} groups of {signature}"
        kinds = tuple(self._kind_of(x) for x in tensors)
        batch = tensors[0].shape[0]
        options: Any = dict(sources=places_of(tensors), batch=batch, groups=groups, nodes=nodes)
        self.copies = rows_to_heads(self.layout, kinds, **options)
        blocks = Blocks(kinds, groups, batch=batch, tokens=self.layout.seqlen)
        # For each group where its heads of each tensor lie in the memory that they arrive in
        self.sizes = [n // x.itemsize for n, x in zip(blocks.sizes, tensors)]
        self.shapes = [
            [blocks.shape(kind, group) + x.shape[3:] for kind, x in enumerate(tensors)]
            for group in groups
        ]
        self.starts = [
            [blocks.place(kind, group).start // x.itemsize for kind, x in enumerate(tensors)]
            for group in groups
        ]
        self.back: dict[Any, CopyList] = {}
        self.backwards: dict[Any, HeadExchange] = {}

    def _kind_of(self, x: Tensor) -> Kind:
        """Returns the kind of one rank's heads."""
        kind = kind_of(x)
        return kind._replace(heads=kind.heads // self.layout.ranks)

    def to_rows(self, number: int, results: Sequence[Tensor]) -> CopyList:
        """Returns the copies by which a group of heads of dense results goes back."""
        key = number, *[(x.shape, x.dtype) for x in results]
        copies = self.back.get(key)
        if copies is None:
            kinds, group = tuple(self._kind_of(x) for x in results), self.groups[number]
            options: Any = dict(batch=results[0].shape[0], groups=self.groups, nodes=self.nodes)
            copies = self.back[key] = heads_to_rows(self.layout, kinds, group=group, **options)
        return copies


class IncomingHeads:
    """A rank's heads of tensors of its rows, which arrive group by group."""

    def __init__(self, arena: Arena, plan: HeadExchange, *, tensors: Sequence[Tensor]) -> None:
        self.arena, self.plan = arena, plan
        self.memory = [x.new_empty(n) for x, n in zip(tensors, plan.sizes)]
        copies, signature = plan.copies, plan.signature
        publish_copies(arena, copies, signature=signature, sources=tensors, targets=self.memory)
        self.marks = arena.pull(copies.pieces, self.memory, traffic=copies.traffic)

    def arrive(self, number: int) -> list[Tensor]:
        """Returns a group's heads of the whole sequence, for what the stream does next."""
        self.arena.arrive(self.marks[number])
        parts = zip(self.memory, self.plan.starts[number], self.plan.shapes[number])
        return [x[start : start + math.prod(shape)].view(shape) for x, start, shape in parts]


class OutgoingRows:
    """A rank's rows of all heads, `results`, of what is computed group by group. Those that arrive
    are placed beside the next group's attention, as its last programs leave SMs idle.
    """

    def __init__(self, incoming: IncomingHeads, results: Sequence[Tensor], *, title: str) -> None:
        self.arena, self.plan, self.results = incoming.arena, incoming.plan, results
        self.signature = f"{title} {incoming.plan.signature}"
        self.marks = incoming.marks
        self.memory: list[Tensor] = []  # that pieces arrive in, kept until they are placed

    def send(self, number: int, tensors: Sequence[Tensor]) -> None:
        """Sends the heads of a group to the ranks that have their rows."""
        arena, results = self.arena, self.results
        copies = self.plan.to_rows(number, results)
        self.finish()  # before the barrier, which says that all have read what they were to
        sources = [x.contiguous() for x in tensors]
        publish_copies(arena, copies, signature=self.signature, sources=sources, targets=results)
        self.memory = [results[0].new_empty(copies.placed_nbytes, dtype=torch.uint8)]
        place = functools.partial(arena.copy, copies.placed, self.memory, targets=results)
        self.marks = arena.pull(copies.pieces, self.memory, traffic=copies.traffic, then=place)

    def finish(self) -> None:
        """Waits until all rows are placed, for what the stream does next."""
        for mark in self.marks:
            self.arena.arrive(mark)


def groups_of(spec: ShardCall, q: Tensor, k: Tensor, v: Tensor) -> tuple[range, ...]:
    """Returns the groups of key heads: two halves, where each has work for all of a GPU. If query
    heads share no keys, exchanges are long beside kernels, and the first and the last group small.
    """
    nheads_k = k.shape[2] // spec.layout.ranks
    rows = q.shape[0] * spec.layout.seqlen * (q.shape[2] // k.shape[2])  # of a key head
    least = -(-LEAST_ROWS // max(rows, 1))
    half, first = nheads_k // 2, nheads_k // 4
    # A group's heads lie in the memory of all: TMA wants them at multiples of 16 bytes
    if half < least or not are_aligned(q, k, v):
        return (range(nheads_k),)
    last = -(-LEAST_OUTER_ROWS // max(rows, 1))
    if k.shape[2] != q.shape[2] or first < last:
        return range(half), range(half, nheads_k)
    end = nheads_k - last
    return range(first), range(first, end), range(end, nheads_k)


def query_heads(spec: ShardCall, q: Tensor, k: Tensor, *, group: range) -> slice:
    """Returns the query heads of a group of this rank's, among all."""
    ratio = q.shape[2] // k.shape[2]
    first = spec.layout.rank * (q.shape[2] // spec.layout.ranks) + group.start * ratio
    return slice(first, first + len(group) * ratio)
