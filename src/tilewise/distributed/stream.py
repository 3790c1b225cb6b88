"""Keys travel, queries stay: each rank pulls the keys and values that its queries see, whole and in
the order of the sequence, so that nothing is merged and no row is rounded twice.

Backward, each rank has a part of the gradient of every key that its queries saw (`sums`). Where
these would take much memory, heads are computed in groups, one after the other.
"""

from __future__ import annotations

import itertools
from types import ModuleType
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from ..problem import Grads, Saved
from . import one_launch, packed_runs, placed, rows
from .call_spec import CallSpec
from .copies import Group, in_rows, kind_of, strides_of
from .exchange import pulls_of
from .halves import Arena
from .key_copies import key_copies, moves_of
from .sums import summed

Tensor = torch.Tensor
NAME = "stream"
FEW_LISTS = 4  # of pulls that are waited for one by one
MOST_BYTES = 1 << 31  # of a rank's parts of the gradients of all keys, of the heads of a group


def supports(spec: CallSpec, nheads: int, nheads_k: int) -> str | None:
    """None: any number of heads, ranks and tokens, and every feature that is checked before."""
    return None


def attend(
    arena: Arena, spec: CallSpec, q: Tensor, k: Tensor, v: Tensor
) -> tuple[Tensor, Tensor | None]:
    """`out` and `lse` of a rank's rows."""
    return _Stream.apply(arena, spec, q, k, v, spec.sinks)


def by_runs(spec: CallSpec, q: Tensor) -> ModuleType:
    """What computes runs of rows: a call for each, or one for all."""
    return packed_runs if packed_runs.serves(spec, q) else rows


class _Stream(torch.autograd.Function):
    """Attention of a rank's queries to pulled keys."""

    @staticmethod
    def forward(ctx: Any, arena: Arena, spec: CallSpec, q, k, v, sinks):
        if one_launch.serves(arena, spec, q, k, v):
            out, lse = one_launch.attend(arena, spec, q, k, v)
        else:
            out, lse = _attend(arena, spec, q, k, v)
            arena.settle(out, lse)
        ctx.arena, ctx.spec = arena, spec
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout, dlse):  # pyright: ignore[reportIncompatibleMethodOverride]
        saved = Saved(dout, dlse, *ctx.saved_tensors)
        grads = backward(ctx.arena, ctx.spec, saved)
        return None, None, grads.dq, grads.dk, grads.dv, grads.dsinks


def _attend(arena: Arena, spec: CallSpec, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """`out` and `lse`, in launches that begin after copies."""
    keys = _pull(arena, spec, k, v, f"attention (stream): {spec.signature}")
    backend = rows.backend_of_runs(spec, q, k, v) if spec.bitwise else spec.backend
    if spec.is_modified or (spec.bitwise and backend is None):
        keys.arrive_all()
        return placed.attend(spec, q, keys.k, keys.v)
    return by_runs(spec, q).attend(spec, q, keys, backend)


def backward(arena: Arena, spec: CallSpec, saved: Saved) -> Grads:
    """The gradients of `attend`."""
    dout, dlse, q, k, v, out, lse = saved
    signature = f"the backward of attention (stream): {spec.signature}"
    dtype = k.dtype
    with arena.reporting():
        packing = packed_runs.packing_for(spec, q, k, v)
        keys = _pull(arena, spec, k, v, signature, packing)
        dout = torch.zeros_like(out) if dout is None else dout
        exact = rows.working_dtype(q)
        dout, q, out = (x.to(exact) for x in (dout, q, out))
        if exact != dtype:
            keys.arrive_all()
            keys = keys._replace(k=keys.k.to(exact), v=keys.v.to(exact))
        given = Saved(dout, dlse, q, keys.k, keys.v, out, lse)
        found = []
        for of_q, of_k in _groups(spec, given):
            part, of_part = _of_heads(spec, given, of_q, of_k)
            partial = _gradients(part, of_part, keys._replace(k=of_part.k, v=of_part.v))
            of_keys = summed(arena, spec, partial, f"the sums of {signature}", dtype)
            found.append(Grads(partial.dq.to(dtype), *of_keys, partial.dsinks))
            del partial  # or it would be there beside that of the next group
        grads = found[0] if len(found) == 1 else _joined(found)
        arena.settle(*grads[:3])
    if grads.dsinks is None or spec.sinks is None:
        return grads
    return grads._replace(dsinks=grads.dsinks.to(spec.sinks.dtype))


def _joined(found: list[Grads]) -> Grads:
    """Gradients of groups of heads."""
    sinks = [x.dsinks for x in found if x.dsinks is not None]
    return Grads(
        torch.cat([x.dq for x in found], 2),
        torch.cat([x.dk for x in found], 2),
        torch.cat([x.dv for x in found], 2),
        torch.cat(sinks) if sinks else None,
    )


def _gradients(spec: CallSpec, given: Saved, keys: rows.Keys) -> rows.Partial:
    if spec.is_modified:
        keys.arrive_all()
        return placed.gradients(spec, given)
    way = packed_runs if keys.is_packed else by_runs(spec, given.q)
    return way.gradients(spec, given, keys)


def _groups(spec: CallSpec, given: Saved) -> list[tuple[slice, slice]]:
    """Query heads and key heads whose gradients are computed at a time: so that parts of those of
    all keys take no more than MOST_BYTES; all where a head's number matters.
    """
    nheads, nheads_k = given.q.shape[2], given.k.shape[2]
    keys = given.k.shape[0] * spec.layout.seqlen * nheads_k  # on all ranks as many
    nbytes = keys * (given.k.shape[3] + given.v.shape[3]) * given.lse.itemsize
    groups = 1
    if not spec.uses_head_index:
        groups = next((n for n in range(1, nheads_k) if _fits(n, nheads_k, nbytes)), nheads_k)
    m, n = nheads // groups, nheads_k // groups
    return [(slice(i * m, (i + 1) * m), slice(i * n, (i + 1) * n)) for i in range(groups)]


def _fits(groups: int, nheads_k: int, nbytes: int) -> bool:
    return nheads_k % groups == 0 and nbytes <= groups * MOST_BYTES


def _of_heads(spec: CallSpec, given: Saved, of_q: slice, of_k: slice) -> tuple[CallSpec, Saved]:
    """The call of some heads."""
    dout, dlse, q, k, v, out, lse = given
    if of_k == slice(0, k.shape[2]):
        return spec, given
    slopes, sinks = spec.alibi_slopes, spec.sinks
    part = spec._replace(
        alibi_slopes=None if slopes is None else slopes[..., of_q],
        sinks=None if sinks is None else sinks[of_q],
    )
    dlse = None if dlse is None else dlse[:, of_q].contiguous()
    dout, q, out = (x[:, :, of_q] for x in (dout, q, out))
    k, v = (x[:, :, of_k] for x in (k, v))
    return part, Saved(dout, dlse, q, k, v, out, lse[:, of_q].contiguous())


def _pull(
    arena: Arena,
    spec: CallSpec,
    k: Tensor,
    v: Tensor,
    signature: str,
    packing: packed_runs.Packing | None = None,
) -> rows.Keys:
    """Keys and values of the whole sequence, those that no query here sees 0; or those of each run,
    as they are packed. Those of this rank are there; others arrive.
    """
    layout, batch = spec.layout, k.shape[0]
    given = in_rows(k), in_rows(v)
    pulls = pulls_of(layout, *spec.sides)
    if packing is None:
        lists, tokens = tuple(map(moves_of, pulls.by_span)), layout.seqlen
    else:
        lists, tokens = packed_runs.moves_into(layout, packing), packing.starts_k[-1]
    if len(lists) > FEW_LISTS:
        lists = (tuple(x for moves in lists for x in moves),)
    kinds, strides = tuple(map(kind_of, given)), tuple(map(strides_of, given))
    copies = key_copies(layout, lists, tokens, kinds, strides, batch, (Group(0, k.shape[2]),))
    empty = k.new_empty if pulls.is_whole or packing is not None else k.new_zeros
    found = [empty(batch, tokens, *x.shape[2:]) for x in given]
    room = arena.publish(copies.nbytes, signature)
    arena.copy(copies.rows, given, [room, *found])
    arena.meet(signature)
    ends = itertools.pairwise((0, *copies.ends))
    arrivals = [arena.pull(copies.pieces[a:b], found) for a, b in ends]
    arrivals *= len(layout.spans) if len(arrivals) == 1 else 1
    return rows.Keys(*found, arena, tuple(arrivals), packing is not None)
