"""The call of one process on the whole sequence: what every method's result is held to, what one
rank computes by itself, and what a rank computes on its heads.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from ...frontend.scalars import is_long
from ...problem import INPUTS, Grads, Saved
from .rows import attend_run, gradients_of
from .run_calls import map_saved
from .shard_call import ShardCall

Tensor = torch.Tensor


def attend(spec: ShardCall, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Computes `out` and `lse` of all tokens in their order, (batch, seqlen, heads, headdim)."""
    batch, seqlen = q.shape[:2]
    options = _options(spec, q)
    if spec.layout.cu_seqlens is None:
        return attend_run(spec, q, k=k, v=v, **options)
    q, k, v = (x.flatten(0, 1)[None] for x in (q, k, v))
    out, lse = attend_run(spec, q, k=k, v=v, **options)
    lse = lse[0].unflatten(1, (batch, seqlen)).transpose(0, 1)
    return out[0].unflatten(0, (batch, seqlen)), lse


def backward(spec: ShardCall, saved: Saved, *, rounds: bool = False) -> Grads:
    """Computes the gradients of `attend`; those of keys in fp32 as parts of sums, or rounded."""
    batch, seqlen = saved.q.shape[:2]
    options = _options(spec, saved.q)
    if spec.layout.cu_seqlens is None:
        return gradients_of(spec, saved, rounds=rounds, **options)
    saved = map_saved(
        saved,
        queries=lambda x: x.flatten(0, 1)[None],
        keys=lambda x: x.flatten(0, 1)[None],
        lse=lambda x, _: x.transpose(0, 1).flatten(1, 2)[None],
    )
    grads = gradients_of(spec, saved, rounds=rounds, **options)
    dq, dk, dv = (x[0].unflatten(0, (batch, seqlen)) for x in grads[:INPUTS])
    return grads._replace(dq=dq, dk=dk, dv=dv)


def _options(spec: ShardCall, q: Tensor) -> dict[str, Any]:
    """Returns the options of the call. Documents, of all rows of the batch, lie end to end."""
    layout, options = spec.layout, dict(band=spec.band, align=spec.align, extras=spec.extras)
    if layout.cu_seqlens is None:
        return options
    starts = _packed_on(layout.cu_seqlens, layout.seqlen, batch=q.shape[0], device=q.device)
    extras = spec.extras._replace(cu_seqlens_q=starts, cu_seqlens_k=starts)
    return options | dict(extras=extras, is_long=is_long(layout.longest))


@functools.lru_cache(maxsize=256)
def _packed_on(starts: tuple[int, ...], seqlen: int, *, batch: int, device: torch.device) -> Tensor:
    """Returns where they begin, int32: cached, as a copy to a GPU makes the host wait for it."""
    all_starts = [row * seqlen + start for row in range(batch) for start in starts[:-1]]
    all_starts.append(batch * seqlen)
    with torch.inference_mode(False):  # calls that use it may want gradients
        return torch.tensor(all_starts, dtype=torch.int32, device=device)


def alone(spec: ShardCall, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Makes the call of a single rank, which has all tokens in its own order."""
    layout = spec.layout
    if layout.runs[0] == ((0, layout.seqlen),):
        return attend(spec, q, k=k, v=v)
    q, k, v = (layout.unshard([x]) for x in (q, k, v))
    out, lse = attend(spec, q, k=k, v=v)
    return layout.shard(out), layout.shard(lse, 2)


def alone_backward(spec: ShardCall, saved: Saved) -> Grads:
    """Computes the gradients of `alone`."""
    layout = spec.layout
    whole = map_saved(
        saved,
        queries=lambda x: layout.unshard([x]),
        keys=lambda x: layout.unshard([x]),
        lse=lambda x, _: layout.unshard([x], 2),
    )
    grads = backward(spec, whole)
    dq, dk, dv = (layout.shard(x) for x in grads[:INPUTS])
    return grads._replace(dq=dq, dk=dk, dv=dv)
