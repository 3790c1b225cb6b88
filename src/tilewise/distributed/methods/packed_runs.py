"""Many runs of rows in one call, as packed sequences: each run is a sequence whose keys are those
that it sees. Their last key is on the diagonal of their last row, as bottom-right has it.

Where runs see keys one after another, as those of documents mostly do, and of short windows, the
keys stay where they are: a sequence has those up to the next one's first, of which `seqused_k` uses
some. Where they overlap, keys are copied for each run; those of two are pulled so, for a backward.
"""

from __future__ import annotations

import functools
import itertools
from typing import NamedTuple

import torch

from ...frontend.call import call
from ...problem import OPEN, Between, Extras, Saved
from ..layouts.layout import Layout, Run
from ..layouts.pulls import runs_in_turn
from ..transport.key_copies import Moves, moves_of
from . import rows
from .call_spec import CallSpec
from .rows import Give, Gradients, Keys, gradients_of, piece_of

Tensor = torch.Tensor
MOST_KEYS = 4  # copied of each of the sequence's, in the mean
FEW = 2  # runs, of which each is a call that begins as soon as its own keys have arrived


class Packing(NamedTuple):
    """Where the runs begin among the queries and among the keys, and how many they use; and the
    keys that are copied for each, None where they stay.
    """

    starts_q: tuple[int, ...]
    starts_k: tuple[int, ...]
    used: tuple[int, ...] | None
    copied: tuple[Run, ...] | None


def serves(spec: CallSpec, q: Tensor, few: int = FEW) -> bool:
    """Whether runs are packed: there are many, one window is that of all, and not too many keys are
    copied.
    """
    left, right = spec.sides
    is_one_band = right == 0 or (left == OPEN and right == OPEN and spec.alibi_slopes is None)
    if q.shape[0] != 1 or len(spec.layout.spans) <= few or not is_one_band:
        return False
    return packing_of(spec.layout, left, right).starts_k[-1] <= MOST_KEYS * spec.layout.seqlen


def reads_between(spec: CallSpec, q: Tensor) -> bool:
    """Whether calls on packed runs read keys that none of these sees: those between theirs."""
    return serves(spec, q) and packing_of(spec.layout, *spec.sides).copied is None


def packing_for(spec: CallSpec, q: Tensor, k: Tensor, v: Tensor) -> Packing | None:
    """The packing of a backward on Hopper of two runs that see the same keys: a launch for each
    ends with idle SMs, and its parts would have to be added. Such keys are pulled twice; under
    zigzag all ranks then pull as many.
    """
    if spec.is_modified or len(spec.layout.spans) != FEW or not serves(spec, q, FEW - 1):
        return None
    packing = packing_of(spec.layout, *spec.sides)
    is_served = rows.backend_of_runs(spec, q, k, v) == "hopper"
    return packing if is_served and packing.copied is not None else None


@functools.lru_cache(maxsize=256)
def moves_into(layout: Layout, packing: Packing, left: int) -> tuple[Moves, ...]:
    """Which rows of which ranks go where keys are packed, for each run: those that it sees."""
    found = zip(packing.starts_k, packing.copied or (), _first_seen(layout, packing, left))
    return tuple(
        moves_of(runs_in_turn(layout, [(seen, keys[1])]), at - keys[0]) for at, keys, seen in found
    )


@functools.lru_cache(maxsize=256)
def hidden_in(layout: Layout, packing: Packing, left: int) -> tuple[Run, ...]:
    """Where keys are packed that a run does not see, though its first block begins with them."""
    found = zip(packing.starts_k, packing.copied or (), _first_seen(layout, packing, left))
    return tuple((at, at + seen - keys[0]) for at, keys, seen in found if seen > keys[0])


def _first_seen(layout: Layout, packing: Packing, left: int) -> list[int]:
    """The first key that each run sees."""
    firsts = [keys[0] for keys in packing.copied or ()]
    if left == OPEN:
        return firsts
    return [max(a, span.first, span.start - left) for a, span in zip(firsts, layout.spans)]


@functools.lru_cache(maxsize=256)
def packing_of(layout: Layout, left: int, right: int) -> Packing:
    """The sequences of a layout's runs.

    >>> import tilewise.distributed as td
    >>> layout = td.striped(1200, 2, block=200)
    >>> packing_of(layout, 50, 0)
    Packing(starts_q=(0, 200, 400, 600), starts_k=(0, 256, 640, 1200), used=(200, 344, 360), ...
    """
    spec = CallSpec(
        layout, window=(None if left == OPEN else left, None if right == OPEN else right)
    )
    keys = [piece_of(spec, span).keys for span in layout.spans]
    starts_q = [span.row for span in layout.spans] + [layout.tokens]
    if any(a.stop > b.start for a, b in itertools.pairwise(keys)):
        sizes = (x.stop - x.start for x in keys)
        starts_k = itertools.accumulate(sizes, initial=0)
        return Packing(
            tuple(starts_q), tuple(starts_k), None, tuple((x.start, x.stop) for x in keys)
        )
    starts_k, used = [x.start for x in keys] + [layout.seqlen], [x.stop - x.start for x in keys]
    if starts_k[0] > 0:  # keys that no run sees are of a sequence without queries
        starts_q, starts_k, used = [0, *starts_q], [0, *starts_k], [0, *used]
    return Packing(tuple(starts_q), tuple(starts_k), tuple(used), None)


@functools.lru_cache(maxsize=256)
def _on(packing: Packing, device: torch.device) -> tuple[Tensor, Tensor, Tensor | None]:
    def there(x: tuple[int, ...]) -> Tensor:
        return torch.tensor(x, dtype=torch.int32, device=device)

    used = None if packing.used is None else there(packing.used)
    return there(packing.starts_q), there(packing.starts_k), used


def _extras(spec: CallSpec, packing: Packing, device: torch.device, sinks: Tensor | None) -> Extras:
    starts_q, starts_k, used = _on(packing, device)
    return Extras(spec.alibi_slopes, sinks, used, None, starts_q, starts_k)


def _memory(packing: Packing, known: Keys) -> list[Tensor]:
    """Where K and V are packed."""
    whole = [known.k, known.v]
    if packing.copied is None or known.is_packed:
        return whole
    return [x.new_empty(1, packing.starts_k[-1], *x.shape[2:]) for x in whole]


def _arrive(packing: Packing, known: Keys, into: list[Tensor]) -> None:
    """Fills that memory, for what the stream does next."""
    known.arrive_all()
    if packing.copied is not None and not known.is_packed:
        for x, whole in zip(into, (known.k, known.v)):
            torch.cat([whole[:, a:b] for a, b in packing.copied], 1, out=x)


def attend(spec: CallSpec, q: Tensor, known: Keys, backend: str | None) -> tuple[Tensor, Tensor]:
    """`out` and `lse` of a rank's queries, as `rows.attend` has them."""
    packing = packing_of(spec.layout, *spec.sides)
    keys = _memory(packing, known)
    _arrive(packing, known, keys)
    return call(
        *(q, *keys),
        extras=_extras(spec, packing, q.device, spec.sinks),
        numbers=(spec.scale, spec.softcap, 0.0),
        window=("bottom_right", *spec.sides),
        deterministic=spec.deterministic,
        backend=backend,
    )


def gradients(spec: CallSpec, saved: Saved, known: Keys, give: Give) -> Gradients:
    """Gradients of a rank's queries, as `rows.gradients` has them."""
    packing, lse = packing_of(spec.layout, *spec.sides), saved.lse
    memory = _memory(packing, known)
    k, v = memory
    runs = tuple((at, *keys) for at, keys in zip(packing.starts_k, packing.copied or ()))
    sinks = None if spec.sinks is None else spec.sinks.to(lse.dtype)
    extras = _extras(spec, packing, k.device, sinks)
    saved = saved._replace(k=k, v=v, lse=lse.contiguous())
    between = Between(
        lambda: _arrive(packing, known, memory), lambda found: give(found.dk, found.dv, runs)
    )
    found = gradients_of(spec, saved, "bottom_right", *spec.sides, extras, between=between)
    return Gradients(found.dq, found.dsinks)
