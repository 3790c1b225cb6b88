"""Calls of the library on runs of rows.

A run of queries [start, stop) and the keys [first, last) that it sees, in one call: the diagonal of
"bottom_right" lies `last - stop` keys further right than that of the whole sequence, by which the
window is moved back. ALiBi measures distances from the diagonal itself, so there the run is made
longer, by rows of zeros that are left out again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F

from ...problem import OPEN, Saved
from ..layouts.work import Band, Span, keys_of_span
from .shard_call import ShardCall

Tensor = torch.Tensor
BLOCK = 128  # keys: a multiple of every kernel's block


class RunCall(NamedTuple):
    """One call of the library: rows of this rank, the keys that they attend to, and their band."""

    rows: slice
    keys: slice
    band: Band
    padding: int = 0  # rows of zeros behind the others

    def saved_of(self, saved: Saved) -> Saved:
        """Cuts what the call's backward takes out of all rows and keys."""
        return map_saved(
            saved,
            queries=lambda x: pad(x[:, self.rows], self.padding),
            keys=lambda x: x[:, self.keys],
            lse=lambda x, value: pad(
                x[:, :, self.rows], self.padding, dim=2, value=value
            ).contiguous(),
        )


def map_saved(
    saved: Saved,
    *,
    queries: Callable[[Tensor], Tensor],
    lse: Callable[[Tensor, float], Tensor],
    keys: Callable[[Tensor], Tensor] = lambda x: x,
) -> Saved:
    """Changes a backward's inputs. `lse` takes the value of added rows, of which P is 0."""
    return Saved(
        dout=queries(saved.dout),
        dlse=None if saved.dlse is None else lse(saved.dlse, 0.0),
        q=queries(saved.q),
        k=keys(saved.k),
        v=keys(saved.v),
        out=queries(saved.out),
        lse=lse(saved.lse, torch.inf),
    )


def run_call(spec: ShardCall, span: Span) -> RunCall:
    """Returns the call of a span. Its blocks of keys begin where the whole sequence's do."""
    start, stop = keys_of_span(span, spec.band)
    start = span.first + (start - span.first) // BLOCK * BLOCK
    padding = stop - span.stop if spec.extras.alibi_slopes is not None else 0
    rows = slice(span.row, span.row + span.stop - span.start)
    shifted = shift_band(spec.band, stop - span.stop - padding)
    return RunCall(rows, slice(start, stop), band=shifted, padding=padding)


def shift_band(band: Band, shift: int) -> Band:
    """Returns a band about a diagonal that lies `shift` keys further right."""
    left = OPEN if band.left == OPEN else band.left + shift
    return Band(left, OPEN if band.right == OPEN else band.right - shift)


def pad(x: Tensor, rows: int, *, dim: int = 1, value: float = 0.0) -> Tensor:
    """Pads x with rows of this value behind."""
    return F.pad(x, (*(0, 0) * (x.ndim - 1 - dim), 0, rows), value=value) if rows else x
