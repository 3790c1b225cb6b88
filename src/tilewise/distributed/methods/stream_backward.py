"""The backward of stream: gradients of a rank's queries, and its parts of those of all keys, which
their owners add (`sums`); of some heads at a time, where all would take much memory.
"""

from __future__ import annotations

import torch

from ...problem import Grads, Saved
from ..transport.copies import Group
from ..transport.halves import Arena
from . import packed_runs, placed, rows
from .call_spec import CallSpec
from .pulled_keys import pull_keys
from .sums import Sums

Tensor = torch.Tensor
MOST_BYTES = 1 << 31  # of a rank's parts of the gradients of all keys, of the heads of a group


def backward(arena: Arena, spec: CallSpec, saved: Saved) -> Grads:
    """The gradients of `stream.attend`."""
    dout, _, q, k, v, out, _ = saved
    signature = f"the backward of attention (stream): {spec.signature}"
    dtype, exact = k.dtype, rows.working_dtype(q)
    packing = packed_runs.packing_for(spec, q, k, v)
    reads_all = spec.is_modified or (packing is None and packed_runs.reads_between(spec, q))
    keys = pull_keys(arena, spec, k, v, signature, reads_all, packing)
    dout = torch.zeros_like(out) if dout is None else dout
    dout, q, out = (x.to(exact) for x in (dout, q, out))
    if exact != dtype:
        keys.arrive_all()
        keys = keys._replace(k=keys.k.to(exact), v=keys.v.to(exact))
    exact_saved = saved._replace(dout=dout, q=q, out=out)
    grads = _in_groups(arena, spec, exact_saved, keys, signature)
    arena.settle(*grads[:3])
    if grads.dsinks is None or spec.sinks is None:
        return grads
    return grads._replace(dsinks=grads.dsinks.to(spec.sinks.dtype))


def _in_groups(
    arena: Arena, spec: CallSpec, given: Saved, keys: rows.Keys, signature: str
) -> Grads:
    """By as many groups of heads as leave little memory."""
    dtype, nheads_k = given.k.dtype, given.k.shape[2]
    parts, of_keys = [], []
    for group in _groups(spec, given):
        part, of_part = _of_heads(spec, given, group, nheads_k)
        heads = slice(group.first, group.first + group.size)
        of_group = keys._replace(k=keys.k[:, :, heads], v=keys.v[:, :, heads])
        sums = Sums(arena, spec, f"the sums of {signature}", dtype)
        of_part = of_part._replace(k=of_group.k, v=of_group.v)
        parts.append(_gradients(part, of_part, of_group, sums.begin))
        of_keys.append(sums.finish())
    dq, dsinks = _joined(parts)
    dk, dv = (x[0] if len(x) == 1 else torch.cat(x, 2) for x in zip(*of_keys))
    return Grads(dq.to(dtype), dk, dv, dsinks)


def _joined(found: list[rows.Gradients]) -> tuple[Tensor, Tensor | None]:
    """The gradients of queries and sinks of groups of heads."""
    if len(found) == 1:
        return found[0].dq, found[0].dsinks
    sinks = [x.dsinks for x in found if x.dsinks is not None]
    return torch.cat([x.dq for x in found], 2), torch.cat(sinks) if sinks else None


def _gradients(spec: CallSpec, given: Saved, keys: rows.Keys, give: rows.Give) -> rows.Gradients:
    if spec.is_modified:
        keys.arrive_all()
        return placed.gradients(spec, given, give)
    if keys.is_packed or packed_runs.serves(spec, given.q):
        return packed_runs.gradients(spec, given, keys, give)
    return rows.gradients(spec, given, keys, give)


def _groups(spec: CallSpec, given: Saved) -> list[Group]:
    """Key heads whose gradients are computed at a time: so that parts of those of all keys take no
    more than MOST_BYTES; all where a head's number matters.
    """
    nheads_k = given.k.shape[2]
    keys = given.k.shape[0] * spec.layout.seqlen * nheads_k
    nbytes = keys * (given.k.shape[3] + given.v.shape[3]) * given.lse.itemsize
    groups = 1
    if not spec.uses_head_index:
        groups = next((n for n in range(1, nheads_k) if _fits(n, nheads_k, nbytes)), nheads_k)
    heads = nheads_k // groups
    return [Group(i * heads, heads) for i in range(groups)]


def _fits(groups: int, nheads_k: int, nbytes: int) -> bool:
    return nheads_k % groups == 0 and nbytes <= groups * MOST_BYTES


def _of_heads(spec: CallSpec, given: Saved, group: Group, nheads_k: int) -> tuple[CallSpec, Saved]:
    """The call of a group's query heads."""
    dout, dlse, q, k, v, out, lse = given
    if group.size == nheads_k:
        return spec, given
    each = q.shape[2] // nheads_k
    heads = slice(group.first * each, (group.first + group.size) * each)
    slopes, sinks = spec.alibi_slopes, spec.sinks
    part = spec._replace(
        alibi_slopes=None if slopes is None else slopes[..., heads],
        sinks=None if sinks is None else sinks[heads],
    )
    dlse = None if dlse is None else dlse[:, heads].contiguous()
    dout, q, out = (x[:, :, heads] for x in (dout, q, out))
    return part, Saved(dout, dlse, q, k, v, out, lse[:, heads].contiguous())
