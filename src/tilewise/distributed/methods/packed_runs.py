"""Many runs of rows in one call, as packed sequences: each run is a sequence whose keys are those
that it sees. Their last key is on the diagonal of their last row, as bottom-right has it.

Where runs see keys one after another, as those of documents mostly do, and of short windows, the
keys stay where they are: a sequence has those up to the next one's first, of which `seqused_k` uses
some. Where they overlap, keys are copied for each run; those of two are pulled so, for a backward.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any, NamedTuple

import torch

from ...kernels.common.row_table import Table
from ...problem import OPEN, Between, Grads, Saved, Scalars
from ..layouts.layout import Layout
from ..layouts.pulls import Pull, pulls_in_turn
from ..layouts.work import Band, KeyRun
from ..transport.copies import Place, places_of, rows_between
from . import rows
from .grads import QueryGrads
from .rows import AddKeyGrads, PulledKeys, attend_run, gradients_of
from .run_calls import run_call
from .shard_call import ShardCall

Tensor = torch.Tensor
MOST_KEYS = 4  # copied of each of the sequence's, in the mean
FEW = 2  # runs, of which each is a call that begins as soon as its own keys have arrived


class Packing(NamedTuple):
    """Where runs begin among queries and keys, how many keys they use, and which are copied."""

    starts_q: tuple[int, ...]
    starts_k: tuple[int, ...]
    used: tuple[int, ...] | None
    copied: tuple[KeyRun, ...] | None


def serves(spec: ShardCall, q: Tensor, *, few: int = FEW) -> bool:
    """Tells whether runs are packed: many, with one band, and not too many copied keys."""
    band = spec.band
    is_open = band == Band() and spec.extras.alibi_slopes is None
    if q.shape[0] != 1 or len(spec.layout.spans) <= few or not (band.right == 0 or is_open):
        return False
    return packing_of(spec.layout, band).starts_k[-1] <= MOST_KEYS * spec.layout.seqlen


def reads_between(spec: ShardCall, q: Tensor) -> bool:
    """Tells whether calls on packed runs read keys that none of these sees, between theirs."""
    return serves(spec, q) and packing_of(spec.layout, spec.band).copied is None


def packing_for(spec: ShardCall, q: Tensor, k: Tensor, v: Tensor) -> Packing | None:
    """Returns the packing of a backward on Hopper of two runs that see the same keys, or None."""
    # A launch for each ends with idle SMs, and its parts would have to be added. Shared keys are
    # pulled twice; under zigzag all ranks then pull as many
    if spec.is_modified or len(spec.layout.spans) != FEW or not serves(spec, q, few=FEW - 1):
        return None
    packing = packing_of(spec.layout, spec.band)
    is_served = rows.backend_of_runs(spec, q, k=k, v=v) == "hopper"
    return packing if is_served and packing.copied is not None else None


@functools.lru_cache(maxsize=256)
def pulls_into(layout: Layout, packing: Packing, left: int) -> tuple[tuple[Pull, ...], ...]:
    """Returns, for each run, which rows become its packed keys: those that it sees."""
    pulls = []
    for keys, span in zip(packing.copied or (), layout.spans):
        first = keys.start if left == OPEN else max(keys.start, span.first, span.start - left)
        shift = keys.row - keys.start
        of_run = [
            Pull(rank, row, start=start + shift, stop=stop + shift)
            for rank, row, start, stop in pulls_in_turn(layout, [(first, keys.stop)])
        ]
        pulls.append(tuple(of_run))
    return tuple(pulls)


@functools.lru_cache(maxsize=256)
def packing_of(layout: Layout, band: Band) -> Packing:
    """Packs the runs of a layout as sequences.

    >>> import tilewise.distributed as td
    >>> layout = td.striped(1200, 2, block=200)
    >>> packing_of(layout, Band(50, 0))
    Packing(starts_q=(0, 200, 400, 600), starts_k=(0, 256, 640, 1200), used=(200, 344, 360), ...
    """
    spec = ShardCall(layout, scalars=Scalars(1.0, left=band.left, right=band.right))
    keys = [run_call(spec, span).keys for span in layout.spans]
    sizes = [x.stop - x.start for x in keys]
    starts_q = [span.row for span in layout.spans] + [layout.tokens]
    if any(a.stop > b.start for a, b in itertools.pairwise(keys)):
        starts_k = tuple(itertools.accumulate(sizes, initial=0))
        copied = tuple(KeyRun(row, x.start, stop=x.stop) for row, x in zip(starts_k, keys))
        return Packing(tuple(starts_q), starts_k, used=None, copied=copied)
    starts_k = [x.start for x in keys] + [layout.seqlen]
    if starts_k[0] > 0:  # keys that no run sees are of a sequence without queries
        starts_q, starts_k, sizes = [0, *starts_q], [0, *starts_k], [0, *sizes]
    return Packing(tuple(starts_q), tuple(starts_k), used=tuple(sizes), copied=None)


@functools.lru_cache(maxsize=256)
def _lengths_on(packing: Packing, device: torch.device) -> dict[str, Tensor]:
    """Returns the lengths of packed sequences, as a call takes them, by name."""
    lengths: dict[str, Any] = dict(cu_seqlens_q=packing.starts_q, cu_seqlens_k=packing.starts_k)
    if packing.used is not None:
        lengths["seqused_k"] = packing.used
    return {name: torch.tensor(x, dtype=torch.int32, device=device) for name, x in lengths.items()}


def _memory(packing: Packing, pulled: PulledKeys) -> list[Tensor]:
    """Returns memory for packed K and V."""
    whole = [pulled.k, pulled.v]
    if packing.copied is None or pulled.is_packed:
        return whole
    return [x.new_empty((1, packing.starts_k[-1], *x.shape[2:])) for x in whole]


def _fill(packing: Packing, pulled: PulledKeys, *, memory: list[Tensor]) -> None:
    """Fills that memory, for what the stream does next."""
    pulled.arrive_all()
    if packing.copied is not None and not pulled.is_packed:
        whole = pulled.k, pulled.v
        copies = _copies_of(packing, places_of(whole), heads=pulled.k.shape[2])
        pulled.arena.copy(copies, whole, targets=memory)


@functools.lru_cache(maxsize=256)
def _copies_of(packing: Packing, places: tuple[Place, ...], *, heads: int) -> Table:
    """Lists the copies of whole tensors at these places to packed ones of the same heads."""
    copies = []
    for place, (row, start, stop) in itertools.product(places, packing.copied or ()):
        source, target = place.moved(start), place.moved(row)
        copies.append(rows_between(source, target, tokens=stop - start, heads=heads))
    return Table(copies)


def attend(spec: ShardCall, q: Tensor, pulled: PulledKeys) -> tuple[Tensor, Tensor]:
    """Computes `out` and `lse` of a rank's queries, like `rows.attend`."""
    packing = packing_of(spec.layout, spec.band)
    k, v = memory = _memory(packing, pulled)
    _fill(packing, pulled, memory=memory)
    extras = spec.extras_per_head._replace(**_lengths_on(packing, q.device))
    return attend_run(spec, q, k=k, v=v, band=spec.band, extras=extras)


def gradients(
    spec: ShardCall, saved: Saved, pulled: PulledKeys, *, add_key_grads: AddKeyGrads
) -> QueryGrads:
    """Computes gradients of a rank's queries, like `rows.gradients`."""
    packing, lse = packing_of(spec.layout, spec.band), saved.lse
    k, v = memory = _memory(packing, pulled)
    extras = spec.summing_in(lse.dtype).extras_per_head
    extras = extras._replace(**_lengths_on(packing, k.device))

    def add(grads: Grads) -> None:
        add_key_grads(grads.dk, grads.dv, runs=packing.copied or ())

    grads = gradients_of(
        spec,
        saved._replace(k=k, v=v, lse=lse.contiguous()),
        band=spec.band,
        extras=extras,
        between=Between(lambda: _fill(packing, pulled, memory=memory), add),
    )
    return QueryGrads.of(grads)
