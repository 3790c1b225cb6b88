"""One launch for all runs of rows of a rank, which begins before its keys have arrived: the forward
of stream on Hopper GPUs.

Keys and values come by groups of key heads, so that the first tiles wait for one group alone. Of a
group a rank pulls from the ranks before it, one after the other, and the stream of the copies
writes after each piece how many have arrived; the kernel's load warp waits for the piece that its
next block lies in. What this rank has itself is there before the launch: a copy within a GPU needs
an SM, and all of these may be waiting.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ...frontend.scalars import check_numbers
from ...kernels.common.arguments import aligned
from ...ops.calls import layout_key
from ...problem import OPEN, Extras, Problem, Scalars, describe
from ..layouts.layout import Layout
from ..layouts.pulls import Pull, runs_in_turn, shared_rows
from ..layouts.work import keys_of
from ..transport.copies import Group, in_rows, kind_of, strides_of
from ..transport.halves import Arena
from ..transport.key_copies import KeyCopies, key_copies, moves_of
from . import rows
from .call_spec import CallSpec
from .pulled_keys import hidden_keys

if TYPE_CHECKING:
    from ...kernels.hopper.fwd.runs_launch import RunsForward, Walk

Tensor = torch.Tensor
MOST_COPIES = 128  # of a call, on the host
LEAST_BYTES = 1 << 22  # of one, in the mean: it costs the host 25 us, and shorter ones are slower


class Pieces(NamedTuple):
    """What a rank pulls of one group of heads: of itself, and of others in the order in which it
    arrives.
    """

    own: tuple[Pull, ...]
    others: tuple[Pull, ...]


class Prepared(NamedTuple):
    """What the calls of a signature have in common. K and V lie side by side in what is pulled
    where they are as wide.
    """

    copies: KeyCopies
    sources: tuple[int, ...]  # the ranks that pieces come from
    signature: str
    shapes: tuple[tuple[int, ...], ...]  # of what is pulled, (groups, seqlen, 1, ..., headdim)
    is_beside: bool
    at_v: int  # bytes from K to V, where they lie so
    hidden: tuple[tuple[int, int], ...]  # rows of what is pulled that are cleared
    is_plain: tuple[bool, bool, bool]  # whether q, k and v are read where they are
    forward: RunsForward
    limit: int  # that it was made with


def serves(arena: Arena, spec: CallSpec, q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether a call is one launch: on Hopper, of one sequence, without functions of positions."""
    if spec.found is not None and spec.found.one_launch is not None:
        return True
    if not arena.counts_pieces or q.shape[0] != 1 or spec.is_modified or not spec.layout.seqlen:
        return False
    if rows.backend_of_runs(spec, q, k, v) != "hopper":
        return False
    from ...kernels.hopper.fwd import runs_launch

    return runs_launch.serves(_problem(spec, q, k, v)[0])


def attend(arena: Any, spec: CallSpec, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """`out` and `lse` of a rank's queries, settled."""
    of = None if spec.found is None else spec.found.one_launch
    if of is not None and of.limit == arena.limit:
        given = k if of.is_plain[1] else in_rows(k), v if of.is_plain[2] else in_rows(v)
    else:
        given = in_rows(k), in_rows(v)
        of = prepared(arena, spec, q, (k, v), given)
        if spec.found is not None:
            spec.found.one_launch = of
    pulled = [k.new_empty(shape) for shape in of.shapes]
    for start, stop in of.hidden:  # what a kernel reads must be finite
        for x in pulled:
            x[:, start:stop] = 0
    room = arena.publish(of.copies.nbytes, of.signature)
    arena.copy(of.copies.rows, given, [room, *pulled])
    arena.meet(of.signature)
    arena.begin_pieces(of.sources)
    last = arena.pull(of.copies.pieces, pulled, counted=len(pulled))
    try:
        out, lse = _launched(arena, of, spec, q, (k, v), pulled)
        arena.settle(out, lse)  # before the stream waits for copies that may never end
        return out, lse
    finally:
        arena.arrive(last)


def prepared(
    arena: Any,
    spec: CallSpec,
    q: Tensor,
    local: tuple[Tensor, Tensor],
    given: tuple[Tensor, Tensor],
) -> Prepared:
    """What is looked up once for a signature; `given` are the local keys and values in rows."""
    layout, (k, v) = spec.layout, local
    count = groups_of(layout, k.shape[2], layout.seqlen * k.shape[3] * k.itemsize)
    copies = copies_of(layout, spec, count, given)
    shape, heads = (count, layout.seqlen, 1), k.shape[2] // count
    is_beside = k.shape == v.shape
    shapes: tuple[tuple[int, ...], ...] = tuple((*shape, heads, x.shape[3]) for x in given)
    if is_beside:
        shapes = ((*shape, 2, heads, k.shape[3]),)
    return Prepared(
        copies,
        copies.ranks[:: len(shapes)],
        f"attention (stream, {count} groups of heads at a time): {spec.signature}",
        shapes,
        is_beside,
        heads * k.shape[3] * k.itemsize,
        hidden_keys(layout, *spec.sides),
        (aligned(q), given[0] is k, given[1] is v),
        forward_of(arena, spec, q, local, heads),
        arena.limit,
    )


def _launched(
    arena: Any, of: Prepared, spec: CallSpec, q: Tensor, local: tuple, pulled: list[Tensor]
) -> tuple[Tensor, Tensor]:
    """The launch, by addresses alone where the kernel has been launched before."""
    if of.is_plain[0]:
        start = pulled[0].data_ptr()
        keys = start, start + of.at_v if of.is_beside else pulled[1].data_ptr()
        extras = spec.alibi_slopes, spec.sinks
        if (found := of.forward.again(q, *keys, extras, arena.words)) is not None:
            return found
    views = [pulled[0][:, :, :, i] for i in (0, 1)] if of.is_beside else pulled
    return launch(arena, spec, q, local, views)


def copies_of(
    layout: Layout, spec: CallSpec, count: int, given: tuple[Tensor, Tensor]
) -> KeyCopies:
    """Copies of keys and values in `count` groups of heads, side by side where they are as wide."""
    k, v = given
    heads = k.shape[2] // count
    groups = tuple(Group(i * heads, heads) for i in range(count))
    kinds, strides = tuple(map(kind_of, given)), tuple(map(strides_of, given))
    pieces, shared = pieces_of(layout, *spec.sides), shared_rows(layout, *spec.sides)
    lists = (moves_of(pieces.own + pieces.others),)
    beside = k.shape == v.shape
    return key_copies(layout, lists, layout.seqlen, kinds, strides, 1, groups, shared, beside)


def launch(
    arena: Any,
    spec: CallSpec,
    q: Tensor,
    local: tuple[Tensor, Tensor],
    found: list[Tensor],
    **beside: Any,
) -> tuple[Tensor, Tensor]:
    """The kernel's launch; `local` are this rank's keys and values, `found` (groups, seqlen, 1,
    heads, headdim) those of the sequence. `beside` is for the emulator.
    """
    k, v = (x.flatten(0, 1).transpose(0, 1) for x in found)
    forward = forward_of(arena, spec, q, local, k.shape[2])
    extras = Extras(spec.alibi_slopes, spec.sinks)
    return forward(q, k, v, extras, arena.words, arena.limit, **beside)


def forward_of(
    arena: Any, spec: CallSpec, q: Tensor, local: tuple[Tensor, Tensor], heads: int
) -> RunsForward:
    """The launch of a signature, with so many key heads a group."""
    extras = spec.alibi_slopes, spec.sinks
    dtypes = tuple(None if x is None else x.dtype for x in extras)
    looks = q.device, arena.limit, dtypes, layout_key((q, *extras))
    return _forward_of(*_problem(spec, q, *local), spec.layout, heads, *looks)


@functools.lru_cache(maxsize=256)
def _forward_of(
    problem: Problem, scalars: Scalars, layout: Layout, heads: int, *_: Any
) -> RunsForward:
    """The launch of a signature; what follows is of it, too."""
    from ...kernels.hopper.fwd.runs_launch import RunsForward

    walk = walk_of(layout, scalars.left, scalars.right, heads)
    return RunsForward(problem, scalars, walk)


def _problem(spec: CallSpec, q: Tensor, k: Tensor, v: Tensor) -> tuple[Problem, Scalars]:
    scale, softcap = check_numbers(spec.scale, spec.softcap, q.shape[3], q.dtype)
    scalars = Scalars(scale, softcap, *spec.sides)
    extras = Extras(spec.alibi_slopes, spec.sinks)
    problem = describe(q, k, v, extras, scalars, "bottom_right", spec.deterministic)
    return problem, scalars


@functools.lru_cache(maxsize=256)
def groups_of(layout: Layout, nheads_k: int, head_bytes: int) -> int:
    """In how many groups heads are pulled: as many as leave few copies, none of them short. All
    ranks find the same number.
    """
    runs = sum(map(len, layout.runs))
    found = [
        n
        for n in range(1, nheads_k + 1)
        if nheads_k % n == 0
        and 2 * n * runs <= MOST_COPIES
        and 2 * head_bytes * (nheads_k // n) >= runs * LEAST_BYTES
    ]
    return max(found, default=1)


@functools.lru_cache(maxsize=256)
def pieces_of(layout: Layout, left: int, right: int) -> Pieces:
    """The pulls of a layout under a band.

    >>> import tilewise.distributed as td
    >>> pieces_of(td.zigzag(8, 2), -1, 0)
    Pieces(own=((0, 0, 0, 2), (0, 2, 6, 8)), others=((1, 0, 2, 6),))
    """
    found = tuple(runs_in_turn(layout, keys_of(layout.spans, left, right)))
    own = tuple(x for x in found if x[0] == layout.rank)
    return Pieces(own, tuple(x for x in found if x[0] != layout.rank))


def walk_of(layout: Layout, left: int, right: int, heads: int) -> Walk:
    """The runs as the kernel takes them. The keys of one begin with those of its document, and so
    its blocks are the document's; they end with the last that is seen.
    """
    from ...kernels.hopper.fwd.runs_launch import SHIFT, Run, Walk

    others = pieces_of(layout, left, right).others
    waits = [0] * ((layout.seqlen >> SHIFT) + 1)
    for number, (*_, start, stop) in enumerate(others, 1):
        for i in range(start >> SHIFT, (stop - 1 >> SHIFT) + 1):
            waits[i] = number
    runs = []
    for row, start, stop, first, last in layout.spans:
        end = last if right == OPEN else min(last, stop + right)
        runs.append(Run(row, stop - start, first, end - first, start - first))
    return Walk(tuple(runs), layout.seqlen, heads, tuple(waits), len(others))
