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

from ..frontend.scalars import check_numbers
from ..ops.calls import layout_key
from ..problem import OPEN, Extras, Problem, Scalars, describe
from . import rows
from .call_spec import CallSpec
from .copies import Group, in_rows, kind_of, strides_of
from .exchange import Pull, runs_in_turn
from .halves import Arena
from .key_copies import KeyCopies, key_copies, moves_of
from .layout import Layout
from .work import keys_of

if TYPE_CHECKING:
    from ..kernels.hopper.fwd.runs_launch import RunsForward, Walk

Tensor = torch.Tensor
MOST_COPIES = 128  # of a call, on the host
LEAST_BYTES = 1 << 22  # of one, in the mean: it costs the host 25 us, and shorter ones are slower


class Pieces(NamedTuple):
    """What a rank pulls of one group of heads: of itself, and of others in the order in which it
    arrives.
    """

    own: tuple[Pull, ...]
    others: tuple[Pull, ...]


def serves(arena: Arena, spec: CallSpec, q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether a call is one launch: on Hopper, of one sequence, without functions of positions."""
    if not arena.counts_pieces or q.shape[0] != 1 or spec.is_modified or not spec.layout.seqlen:
        return False
    if rows.backend_of_runs(spec, q, k, v) != "hopper":
        return False
    from ..kernels.hopper.fwd import runs_launch

    return runs_launch.serves(_problem(spec, q, k, v)[0])


def attend(arena: Any, spec: CallSpec, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """`out` and `lse` of a rank's queries, settled."""
    layout = spec.layout
    given = in_rows(k), in_rows(v)
    count = groups_of(layout, k.shape[2], layout.seqlen * k.shape[3] * k.itemsize)
    copies = copies_of(layout, spec, count, given)
    signature = f"attention (stream, {count} groups of heads at a time): {spec.signature}"
    # A block may begin before a window's first key: what lies there is hidden, and must be finite
    empty = k.new_empty if spec.sides[0] == OPEN else k.new_zeros
    shape = count, layout.seqlen, 1
    heads = k.shape[2] // count
    if k.shape == v.shape:
        pulled = [empty(*shape, 2, heads, k.shape[3])]
        found = [pulled[0][:, :, :, i] for i in (0, 1)]
    else:
        pulled = found = [empty(*shape, heads, x.shape[3]) for x in (k, v)]
    room = arena.publish(copies.nbytes, signature)
    arena.copy(copies.rows, given, [room, *pulled])
    arena.meet(signature)
    arena.begin_pieces(copies.ranks[:: len(pulled)])
    last = arena.pull(copies.pieces, pulled, counted=len(pulled))
    try:
        out, lse = launch(arena, spec, q, (k, v), found)
        arena.settle(out, lse)  # before the stream waits for copies that may never end
        return out, lse
    finally:
        arena.arrive(last)


def copies_of(
    layout: Layout, spec: CallSpec, count: int, given: tuple[Tensor, Tensor]
) -> KeyCopies:
    """Those of keys and values in `count` groups of heads, side by side where they are as wide."""
    k, v = given
    heads = k.shape[2] // count
    groups = tuple(Group(i * heads, heads) for i in range(count))
    kinds, strides = tuple(map(kind_of, given)), tuple(map(strides_of, given))
    pieces = pieces_of(layout, *spec.sides)
    lists = (moves_of(pieces.own + pieces.others),)
    beside = k.shape == v.shape
    return key_copies(layout, lists, layout.seqlen, kinds, strides, 1, groups, beside)


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
    extras = Extras(spec.alibi_slopes, spec.sinks)
    dtypes = tuple(None if x is None else x.dtype for x in extras[:2])
    looks = q.device, arena.limit, dtypes, layout_key((q, *extras[:2]))
    forward = _forward_of(*_problem(spec, q, *local), spec.layout, k.shape[2], *looks)
    return forward(q, k, v, extras, arena.words, arena.limit, **beside)


@functools.lru_cache(maxsize=256)
def _forward_of(
    problem: Problem, scalars: Scalars, layout: Layout, heads: int, *_: Any
) -> RunsForward:
    """The launch of a signature; what follows is of it, too."""
    from ..kernels.hopper.fwd.runs_launch import RunsForward

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
    from ..kernels.hopper.fwd.runs_launch import SHIFT, Run, Walk

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
