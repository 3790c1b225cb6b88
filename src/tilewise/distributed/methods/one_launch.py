"""One launch for all runs of rows of a rank: the forward of stream on Hopper GPUs. In one node it
begins before its keys have arrived.

Keys and values come by groups of key heads, so that the first tiles wait for one group alone. Of a
group a rank pulls from the ranks before it, one after the other, and the stream of the copies
writes after each piece how many have arrived; the kernel's load warp waits for the piece that its
next block lies in. What this rank has itself is there before the launch: a copy within a GPU needs
an SM, and all of these may be waiting.

Between nodes each group has a launch of its own, which begins when its keys are there: NCCL copies
on SMs.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from ...ops.calls import layout_key
from ...problem import OPEN, Problem, Scalars
from ..layouts.layout import Layout
from ..layouts.pulls import Pull, pulls_in_turn
from ..layouts.work import Band, keys_of
from ..transport.copies import ALIGN, in_rows
from ..transport.exchange import publish_copies
from ..transport.halves import HALVES, Arena
from . import rows
from .launch_copies import copies_of, in_batches
from .pulled_keys import hidden_keys
from .shard_call import ShardCall

if TYPE_CHECKING:
    from ...kernels.common.program import Planned
    from ...kernels.hopper.fwd.runs_launch import Walk

Tensor = torch.Tensor
MOST_GROUPS = 8  # with more, one group has too few tiles to end with short ones
FEW_RUNS = 2  # of each rank's rows
LEAST_BYTES = 1 << 22  # of one, in the mean: it costs the host 25 us, and shorter ones are slower


class PreparedLaunch:
    """What the calls of a signature share. K and V of one width are pulled as one tensor."""

    def __init__(
        self, arena: Any, spec: ShardCall, q: Tensor, k: Tensor, v: Tensor, *, count: int
    ) -> None:
        layout = spec.layout
        dense_k, dense_v = in_rows(k), in_rows(v)
        self.k_is_dense, self.v_is_dense = dense_k is k, dense_v is v
        self.is_joint = k.shape == v.shape
        heads = k.shape[2] // count
        # (groups, seqlen, 1, ..., headdim)
        self.shapes: tuple[tuple[int, ...], ...] = tuple(
            (count, layout.seqlen, 1, heads, x.shape[3]) for x in (k, v)
        )
        if self.is_joint:
            self.shapes = ((count, layout.seqlen, 1, 2, heads, k.shape[3]),)
        options: Any = dict(v=dense_v, count=count, nodes=arena.nodes)
        self.copies = copies_of(spec, dense_k, is_in_place=False, **options)
        in_place = copies_of(spec, dense_k, is_in_place=True, **options)
        # Two halves of whole sequences, or two of shards and the sequence: no more memory
        self.is_in_place = in_place.nbytes <= HALVES * self.copies.nbytes
        if arena.nodes is not None:  # each of which must be one rank, and its rows few messages
            self.is_in_place &= max(map(len, layout.runs)) <= FEW_RUNS and not arena.nodes.has_pairs
        if self.is_in_place:
            self.copies = in_place
        pieces = [x for pieces in self.copies.pieces for x in pieces]
        self.sources = tuple([x.rank for x in pieces])[:: len(self.shapes)]
        if arena.nodes is None:
            self.copies = in_batches(self.copies, tensors=len(self.shapes))
        self.signature = f"attention (stream, {count} groups of heads at a time): {spec.signature}"
        self.hidden = hidden_keys(layout, spec.band)
        of_group = q.shape[2] // count
        self.heads = [slice(i * of_group, (i + 1) * of_group) for i in range(count)]  # of queries
        # Where a group's part of each tensor begins, once it was launched
        self.offsets: dict[int, list[int]] = {}
        self.forward = forward_of(arena, spec, q=q, k=k, v=v, heads=heads)
        self.limit = arena.limit  # that the launch was made with


def serves(arena: Arena, spec: ShardCall, q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Tells whether a call is one launch: on Hopper, one sequence, no functions of positions."""
    if spec.prepared is not None and spec.prepared.stream is not None:
        return True
    if not (arena.counts_pieces or arena.nodes) or q.shape[0] != 1 or spec.is_modified:
        return False
    if not spec.layout.seqlen:
        return False
    if rows.backend_of_runs(spec, q, k=k, v=v) != "hopper":
        return False
    from ...kernels.hopper.fwd import runs_launch

    return runs_launch.serves(spec.on_rows(q, k, v=v, extras=spec.extras_per_head).problem)


def attend(
    arena: Any,
    spec: ShardCall,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    groups_between_nodes: Callable[..., Sequence[range]],
) -> tuple[Tensor, Tensor]:
    """Computes `out` and `lse` of a rank's queries, settled."""
    plan = None if spec.prepared is None else spec.prepared.stream
    if plan is None or plan.limit != arena.limit:
        if arena.nodes is None:
            head_bytes = spec.layout.seqlen * k.shape[3] * k.itemsize
            count = groups_of(spec.layout, k.shape[2], head_bytes=head_bytes)
        else:
            count = len(groups_between_nodes(arena, spec, q, k=k, v=v))
        plan = PreparedLaunch(arena, spec, q=q, k=k, v=v, count=count)
        if spec.prepared is not None:
            spec.prepared.stream = plan
    sources = k if plan.k_is_dense else in_rows(k), v if plan.v_is_dense else in_rows(v)
    pulled = [] if plan.is_in_place else [k.new_empty(shape) for shape in plan.shapes]
    if pulled:
        clear_hidden(pulled, plan.hidden)
    if arena.nodes is not None:
        return _attend_by_groups(arena, spec, plan, q=q, sources=sources, pulled=pulled)
    half = publish_copies(
        arena, plan.copies, signature=plan.signature, sources=sources, targets=pulled
    )
    if plan.is_in_place:
        pulled = keys_in(arena, plan, dtype=k.dtype)
        clear_hidden(pulled, plan.hidden)
    arena.barrier.expect(plan.sources)
    (last,) = arena.pull(plan.copies.pieces, [half] if plan.is_in_place else pulled)
    try:
        values = pulled[0][:, :, :, 1] if plan.is_joint else pulled[1]
        out, lse = plan.forward((q, pulled[0], values, *spec.extras[:2], arena.words))
        arena.settle([out, lse])  # before the stream waits for copies that may never end
        return out, lse
    finally:
        arena.arrive(last)


def clear_hidden(pulled: Sequence[Tensor], hidden: Sequence[tuple[int, int]]) -> None:
    """Clears keys that no query sees: what a kernel reads must be finite."""
    for start, stop in hidden:
        for x in pulled:
            x[:, start:stop] = 0


def keys_in(arena: Any, plan: PreparedLaunch, *, dtype: torch.dtype) -> list[Tensor]:
    """Views keys and values in the half of the arena that they are read in."""
    key = arena.half, plan.shapes, dtype
    views = arena.views.get(key)
    if views is None:
        sizes = [math.prod(shape) * dtype.itemsize for shape in plan.shapes]
        *starts, end = itertools.accumulate((-(-n // ALIGN) * ALIGN for n in sizes), initial=0)
        half = arena.of(arena.rank, end)
        views = arena.keep(
            key,
            [
                half[start : start + size].view(dtype).view(shape)
                for start, size, shape in zip(starts, sizes, plan.shapes)
            ],
        )
    return views


def _attend_by_groups(
    arena: Any,
    spec: ShardCall,
    plan: PreparedLaunch,
    *,
    q: Tensor,
    sources: tuple[Tensor, Tensor],
    pulled: list[Tensor],
) -> tuple[Tensor, Tensor]:
    """Launches each group once its keys have come from other nodes."""
    copies = plan.copies
    half = arena.publish(copies.nbytes, plan.signature)
    arena.copy(copies.rows, sources, targets=[half, *pulled])
    if plan.is_in_place:
        pulled = keys_in(arena, plan, dtype=q.dtype)
        if plan.hidden:
            clear_hidden(pulled, plan.hidden)
    out = q.new_empty((*q.shape[:3], pulled[-1].shape[-1]))
    lse = q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=torch.float32)
    whole = q, pulled[0], pulled[-1], *spec.extras[:2], arena.words, out, lse
    begins = [0 if x is None else x.data_ptr() for x in whole]
    arena.meet(plan.signature)  # others have come meanwhile
    if plan.is_in_place:
        exchanges, wait = [arena.begin(x) for x in copies.traffic], arena.finish
    else:
        exchanges = arena.pull(copies.pieces, pulled, traffic=copies.traffic)
        wait = arena.arrive
    for group, exchange in enumerate(exchanges):
        wait(exchange)
        offsets = plan.offsets.get(group)
        if offsets is None or not plan.forward.again_at(list(map(operator.add, begins, offsets))):
            parts = _parts(plan, whole, group=group)
            plan.forward(parts)
            starts = [0 if x is None else x.data_ptr() for x in parts]
            plan.offsets[group] = list(map(operator.sub, starts, begins))
    arena.settle([out, lse])
    return out, lse


def _parts(plan: PreparedLaunch, whole: Sequence[Any], *, group: int) -> list[Any]:
    """Views a group's part of the tensors of a launch."""
    q, keys, values, *per_head, counts, out, lse = whole
    heads, of_group = plan.heads[group], slice(group, group + 1)
    keys, values = keys[of_group], values[of_group]
    values = keys[:, :, :, 1] if plan.is_joint else values
    per_head = [x if x is None else x[..., heads] for x in per_head]
    return [q[:, :, heads], keys, values, *per_head, counts, out[:, :, heads], lse[:, heads]]


def forward_of(
    arena: Any, spec: ShardCall, q: Tensor, k: Tensor, v: Tensor, *, heads: int
) -> Planned:
    """Returns the launch of a signature, with `heads` key heads per group."""
    call = spec.on_rows(q, k, v=v, extras=spec.extras_per_head)
    extras = spec.extras[:2]
    dtypes = tuple(None if x is None else x.dtype for x in extras)
    key = q.device, dtypes, layout_key((q, *extras))
    options: Any = dict(layout=spec.layout, heads=heads, limit=arena.limit, key=key)
    return _forward_of(call.problem, call.scalars, waits=arena.nodes is None, **options)


@functools.lru_cache(maxsize=256)
def _forward_of(
    problem: Problem,
    scalars: Scalars,
    *,
    layout: Layout,
    heads: int,
    limit: int,
    waits: bool,
    key: tuple[Any, ...],
) -> Planned:
    """Makes the launch of a signature, which has the key, too; of each group, if none waits."""
    from ...kernels.hopper.fwd import runs_launch

    walk = walk_of(layout, Band(scalars.left, scalars.right), heads=heads)
    if waits:
        return runs_launch.prepare(problem, scalars, walk=walk, limit=limit)
    walk = walk._replace(waits=(0,) * len(walk.waits), pieces=0)
    fields = runs_launch.INTO
    return runs_launch.prepare(problem, scalars, walk=walk, limit=limit, fields=fields)


@functools.lru_cache(maxsize=256)
def groups_of(layout: Layout, nheads_k: int, head_bytes: int) -> int:
    """Returns the most groups of heads whose copies are not short: on all ranks the same."""
    runs = sum(map(len, layout.runs))
    counts = [
        n
        for n in range(1, MOST_GROUPS + 1)
        if nheads_k % n == 0 and 2 * head_bytes * (nheads_k // n) >= runs * LEAST_BYTES
    ]
    return max(counts, default=1)


@functools.lru_cache(maxsize=256)
def remote_pulls(layout: Layout, band: Band) -> tuple[Pull, ...]:
    """Returns what a rank pulls from others for each group of heads, as it arrives.

    >>> import tilewise.distributed as td
    >>> [tuple(pull) for pull in remote_pulls(td.zigzag(8, 2), Band(right=0))]
    [(1, 0, 2, 6)]
    """
    pulls = pulls_in_turn(layout, keys_of(layout.spans, band))
    return tuple(x for x in pulls if x.rank != layout.rank)


def walk_of(layout: Layout, band: Band, *, heads: int) -> Walk:
    """Returns the runs as the kernel takes them. The keys of one begin with those of its document,
    and so its blocks are the document's; they end with the last that is seen.
    """
    from ...kernels.hopper.fwd.runs_launch import SHIFT, Run, Walk

    pulls = remote_pulls(layout, band)
    waits = [0] * ((layout.seqlen >> SHIFT) + 1)
    for number, pull in enumerate(pulls, 1):
        for i in range(pull.start >> SHIFT, (pull.stop - 1 >> SHIFT) + 1):
            waits[i] = number
    runs = []
    for row, start, stop, first, last in layout.spans:
        end = last if band.right == OPEN else min(last, stop + band.right)
        runs.append(Run(row, stop - start, first_k=first, keys=end - first, diagonal=start - first))
    return Walk(tuple(runs), layout.seqlen, heads=heads, waits=tuple(waits), pieces=len(pulls))
