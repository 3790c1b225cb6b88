"""Shards of keys in turn, results merged: each rank attends to one rank's keys after another and
folds what it gets by the log-sum-exp, in fp32 (Liu et al. 2023, arXiv 2310.01889).

It needs room for one shard of keys at a time and rounds more than the other methods: `out` is not
that of one process to the bit, so it serves only calls that do not ask for it. A sink joins once,
after the last shard.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator

import torch

from ...problem import OPEN, Extras, Grads, Saved
from ...reference import merge_states
from ..layouts.work import Band, Span
from ..transport.exchange import Published, publish_rows
from ..transport.halves import Arena
from .grads import QueryGrads, gradient_of_sink, join_sink
from .placed import place
from .rows import attend_run, gradients_of, working_dtype
from .run_calls import RunCall, shift_band
from .shard_call import ShardCall
from .sums import Sums

Tensor = torch.Tensor


def supports(spec: ShardCall, nheads: int, nheads_k: int) -> str | None:
    """Returns None, or why results cannot be merged."""
    if spec.bitwise and spec.layout.ranks > 1:
        differs = "it merges results, which differ from those of one process in the last bits"
        return f"{differs}: pass bitwise=False"
    if spec.is_modified or spec.extras.alibi_slopes is not None:
        return "a shard of keys knows no positions in the whole for ALiBi, masks and dropout"
    return None


def call_between(queries: Span, keys: Span, band: Band) -> RunCall | None:
    """Returns the call of two spans; None where no query of the one sees a key of the other."""
    if queries.first != keys.first:  # of another document
        return None
    first_q, stop_q, first_k, stop_k = queries.start, queries.stop, keys.start, keys.stop
    if band.right != OPEN:
        first_q = max(first_q, first_k - band.right)
        stop_k = min(stop_k, stop_q + band.right)
    if band.left != OPEN:
        stop_q = min(stop_q, stop_k + band.left)
        first_k = max(first_k, first_q - band.left)
    if first_q >= stop_q or first_k >= stop_k:
        return None
    to_row, to_key = queries.row - queries.start, keys.row - keys.start
    rows = slice(first_q + to_row, stop_q + to_row)
    # Of "bottom_right", whose diagonal ends with the last key
    shifted = shift_band(band, stop_k - stop_q)
    return RunCall(rows, slice(first_k + to_key, stop_k + to_key), band=shifted)


def calls_by_rank(spec: ShardCall) -> dict[int, list[RunCall]]:
    """Returns the calls on each rank's keys, this rank's first; none of ranks that are not seen."""
    layout = spec.layout
    calls = {}
    for step in range(layout.ranks):
        rank = (layout.rank - step) % layout.ranks
        pairs = itertools.product(layout.spans, layout.at(rank).spans)
        found_calls = (call_between(queries, keys, band=spec.band) for queries, keys in pairs)
        calls[rank] = [x for x in found_calls if x is not None]
    return {rank: x for rank, x in calls.items() if x}


def keys_in_turn(published: Published, ranks: Iterable[int]) -> Iterator[list[Tensor]]:
    """Yields K and V of each rank, (batch, tokens, heads, headdim), as the next are pulled."""
    arena, upcoming, arrival = published.arena, None, None
    for rank in ranks:
        rows = [published.pull(rank, number) for number in (0, 1)]
        copies = [torch.empty_like(x, dtype=working_dtype(x)) for x in rows]
        with arena.copying():
            for copy, x in zip(copies, rows):
                copy.copy_(x)
            mark = arena.mark()
        if upcoming is not None:
            arena.arrive(arrival)
            yield upcoming
        upcoming, arrival = [x.transpose(0, 1) for x in copies], mark
    if upcoming is not None:
        arena.arrive(arrival)
        yield upcoming


def forward(
    arena: Arena, spec: ShardCall, q: Tensor, k: Tensor, v: Tensor
) -> tuple[Tensor, Tensor]:
    """Computes `out` and `lse` of a rank's rows, by one shard of keys after another."""
    signature = f"attention (ring): {spec.signature}"
    tensors = [k.transpose(0, 1), v.transpose(0, 1)]
    published = publish_rows(arena, signature, tensors=tensors, counts=spec.layout.counts)
    exact = torch.promote_types(q.dtype, torch.float32)
    total = q.new_zeros(q.shape[:3] + v.shape[3:], dtype=exact)
    lse = q.new_full((q.shape[0], q.shape[2], q.shape[1]), -torch.inf, dtype=exact)
    calls = calls_by_rank(spec)
    for rank, (keys, values) in zip(calls, keys_in_turn(published, calls)):
        for x in calls[rank]:
            part, part_lse = attend_run(
                spec,
                q[:, x.rows].to(keys.dtype),
                keys[:, x.keys],
                v=values[:, x.keys],
                band=x.band,
                extras=Extras(),
            )
            before, lse_before = total[:, x.rows], lse[:, :, x.rows]
            merged, merged_lse = merge_states(before, lse_before, out2=part, lse2=part_lse)
            total[:, x.rows], lse[:, :, x.rows] = merged, merged_lse
    total, lse = join_sink(total, lse, extras=spec.extras)
    out = total.to(q.dtype)
    arena.settle([out, lse])
    return out, lse


def backward(arena: Arena, spec: ShardCall, saved: Saved) -> Grads:
    """Computes the gradients of `forward`, with P of the whole row."""
    dlse, k, v, out, lse = saved.dlse, saved.k, saved.v, saved.out, saved.lse
    signature = f"the backward of attention (ring): {spec.signature}"
    tensors = [k.transpose(0, 1), v.transpose(0, 1)]
    published = publish_rows(arena, signature, tensors=tensors, counts=spec.layout.counts)
    dout = torch.zeros_like(out) if saved.dout is None else saved.dout
    dout, q, out = (x.to(working_dtype(saved.q)) for x in (dout, saved.q, out))
    dq = torch.zeros_like(q, dtype=lse.dtype)
    dk, dv = (lse.new_zeros((x.shape[0], spec.layout.seqlen, *x.shape[2:])) for x in (k, v))
    plain, calls = spec._replace(extras=Extras()), calls_by_rank(spec)
    for rank, (keys, values) in zip(calls, keys_in_turn(published, calls)):
        of_keys = Saved(dout, dlse, q=q, k=keys, v=values, out=out, lse=lse)
        parts = [torch.zeros_like(x, dtype=lse.dtype) for x in (keys, values)]
        for x in calls[rank]:
            grads = gradients_of(plain, x.saved_of(of_keys), band=x.band)
            dq[:, x.rows] += grads.dq
            parts[0][:, x.keys] += grads.dk
            parts[1][:, x.keys] += grads.dv
        for total, part in zip((dk, dv), parts):
            place(spec.layout.at(rank), part, whole=total)
    sums = Sums(arena, spec, signature=f"the sums of {signature}", dtype=k.dtype)
    sums.begin(dk, dv)
    dk, dv = sums.finish()
    arena.settle([dq, dk, dv])
    dlearned = gradient_of_sink(spec.extras, dout, out=out, lse=lse, dlse=dlse)
    return QueryGrads(dq, dlearned).with_keys(dk, dv, extras=spec.extras)
