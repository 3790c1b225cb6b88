"""Keys travel, queries stay: each rank pulls the keys and values that its queries see, whole and in
the order of the sequence, so that nothing is merged and no row is rounded twice.

Backward, each rank has a part of the gradient of every key that its queries saw, which the owners
of keys add (`sums`); of some heads at a time, where all would take much memory.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch

from ...problem import INPUTS, Grads, Saved
from ..transport.halves import Arena
from . import one_launch, packed_runs, placed, rows
from .grads import joined
from .pulled_keys import pull_keys
from .run_calls import map_saved
from .shard_call import ShardCall
from .sums import Sums

Tensor = torch.Tensor
MOST_BYTES = 1 << 31  # of a rank's parts of the gradients of all keys, of the heads of a group
MOST_GROUPS = 4  # of heads, whose keys come from other nodes one after another
# Of query heads in such a group. With half, 8Ki tokens on each of two H200s took 1.87 ms for 1.82
LEAST_ROWS = 1 << 17
# Of pairs of a query and a key, in a backward. With a quarter, 16Ki tokens took 28.6 ms for 26.1
LEAST_PAIRS = 1 << 34


def supports(spec: ShardCall, nheads: int, nheads_k: int) -> str | None:
    """Supports any number of heads, ranks and tokens, and every feature that is checked before."""
    return None


def forward(
    arena: Arena, spec: ShardCall, q: Tensor, k: Tensor, v: Tensor
) -> tuple[Tensor, Tensor]:
    """Computes `out` and `lse` of a rank's rows."""
    if one_launch.serves(arena, spec, q=q, k=k, v=v):
        return one_launch.attend(arena, spec, q=q, k=k, v=v, groups_between_nodes=groups_of)
    out, lse = _attend(arena, spec, q=q, k=k, v=v)
    arena.settle([out, lse])
    return out, lse


def by_runs(spec: ShardCall, q: Tensor) -> ModuleType:
    """Returns the module that computes runs of rows: in a call for each, or one for all."""
    return packed_runs if packed_runs.serves(spec, q) else rows


def _attend(
    arena: Arena, spec: ShardCall, q: Tensor, k: Tensor, v: Tensor
) -> tuple[Tensor, Tensor]:
    """Computes `out` and `lse` in launches that begin after copies."""
    backend = rows.backend_of_runs(spec, q, k=k, v=v) if spec.bitwise else spec.backend
    is_placed = spec.is_modified or (spec.bitwise and backend is None)
    signature = f"attention (stream): {spec.signature}"
    reads_all = is_placed or packed_runs.reads_between(spec, q)
    groups = groups_of(arena, spec, q, k=k, v=v)
    pulled = pull_keys(
        arena, spec, k=k, v=v, signature=signature, reads_all=reads_all, groups=groups
    )
    module = placed if is_placed else by_runs(spec, q)
    spec = spec if is_placed else spec._replace(backend=backend)
    if len(groups) == 1:
        return module.attend(spec, q, pulled=pulled[0])
    results = []
    for group, keys in zip(groups, pulled):
        heads = query_heads(group, nheads=q.shape[2], nheads_k=k.shape[2])
        results.append(module.attend(spec.of_heads(heads), q[:, :, heads], pulled=keys))
    return torch.cat([out for out, _ in results], 2), torch.cat([lse for _, lse in results], 1)


def backward(arena: Arena, spec: ShardCall, saved: Saved) -> Grads:
    """Computes the gradients of `forward`, in as many groups of heads as leave little memory."""
    q, k, v, out = saved.q, saved.k, saved.v, saved.out
    signature = f"the backward of attention (stream): {spec.signature}"
    dtype, exact = k.dtype, rows.working_dtype(q)
    packing = packed_runs.packing_for(spec, q, k=k, v=v)
    module = by_runs(spec, q) if packing is None else packed_runs
    reads_all = packing is None and packed_runs.reads_between(spec, q)
    if spec.is_modified:
        module, reads_all = placed, True
    groups = groups_of(arena, spec, q, k=k, v=v, parts_in=saved.lse.dtype)
    pulled = pull_keys(
        arena,
        spec,
        k=k,
        v=v,
        signature=signature,
        reads_all=reads_all,
        groups=groups,
        packing=packing,
    )
    dout = torch.zeros_like(out) if saved.dout is None else saved.dout
    dout, q, out = (x.to(exact) for x in (dout, q, out))
    query_grads, key_grads, added = [], [], None
    for group, keys in zip(groups, pulled):
        if exact != dtype:
            keys.arrive_all()
            keys = keys._replace(k=keys.k.to(exact), v=keys.v.to(exact))
        part = saved._replace(dout=dout, q=q, out=out)
        of_group, part = _of_heads(spec, part, group=group, nheads_k=k.shape[2])
        part = part._replace(k=keys.k, v=keys.v)
        sums = Sums(arena, spec, signature=f"the sums of {signature}", dtype=dtype)
        query_grads.append(module.gradients(of_group, part, pulled=keys, add_key_grads=sums.begin))
        sums.add_all()
        if arena.nodes is None:  # groups are to save memory: parts go at once
            key_grads.append(sums.finish())
            continue
        if added is not None:
            key_grads.append(added.finish())
        added = sums  # its last parts come from other nodes as the next group is computed
    if added is not None:
        key_grads.append(added.finish())
    dk, dv = (x[0] if len(x) == 1 else torch.cat(x, 2) for x in zip(*key_grads))
    grads = joined(query_grads).with_keys(dk, dv, extras=spec.extras)
    arena.settle(grads[:INPUTS])
    return grads


def groups_of(
    arena: Arena, spec: ShardCall, q: Tensor, k: Tensor, v: Tensor, *, parts_in: Any = None
) -> tuple[range, ...]:
    """Returns key heads that are computed together: parts for all keys, in a dtype if there are
    any, take up to MOST_BYTES. Between nodes keys of a group arrive as the one before is computed.
    """
    layout, nheads_k = spec.layout, k.shape[2]
    nbytes, least = 0, 1
    if parts_in is not None:
        widths = (k.shape[3] + v.shape[3]) * parts_in.itemsize
        nbytes = k.shape[0] * layout.seqlen * nheads_k * widths
    if spec.uses_head_index or (arena.nodes is None and nbytes <= MOST_BYTES):
        return (range(nheads_k),)
    counts = [n for n in range(1, nheads_k + 1) if nheads_k % n == 0]
    if arena.nodes is not None:
        queries = q.shape[0] * (layout.seqlen // layout.ranks) * q.shape[2]
        most = queries // LEAST_ROWS if parts_in is None else queries * layout.seqlen // LEAST_PAIRS
        least = max([1, *(n for n in counts if n <= min(MOST_GROUPS, most))])
    least = max(least, -(-nbytes // MOST_BYTES))
    heads = nheads_k // next((n for n in counts if n >= least), nheads_k)
    return tuple(range(first, first + heads) for first in range(0, nheads_k, heads))


def query_heads(group: range, *, nheads: int, nheads_k: int) -> slice:
    """Returns the query heads of a group of key heads."""
    ratio = nheads // nheads_k
    return slice(group.start * ratio, group.stop * ratio)


def _of_heads(
    spec: ShardCall, saved: Saved, *, group: range, nheads_k: int
) -> tuple[ShardCall, Saved]:
    """Returns the call of a group's query heads."""
    if len(group) == nheads_k:
        return spec, saved
    heads = query_heads(group, nheads=saved.q.shape[2], nheads_k=nheads_k)
    part = map_saved(
        saved, queries=lambda x: x[:, :, heads], lse=lambda x, _: x[:, heads].contiguous()
    )
    return spec.of_heads(heads), part
