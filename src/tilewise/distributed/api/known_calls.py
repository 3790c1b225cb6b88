"""Calls that were checked, by the signature of their arguments (`ops.calls.find`): the next one of
that signature is neither checked, nor is its method chosen, nor what it copies looked up again.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

from ...ops.calls import Entry, find
from ..layouts.layout import Layout
from ..methods.call_spec import CallSpec, Found
from ..transport.halves import Arena

MOST = 256  # calls that are kept: a layout may have thousands of runs
_kept: deque[Entry] = deque()


def _no_arena() -> None:
    """A call of one rank has no arena."""


class KnownCall:
    """A checked call, without its tensors."""

    __slots__ = ("arena", "method", "spec")

    def __init__(self, arena: Arena | None, spec: CallSpec, method: str) -> None:
        # Its group may end, and its memory with it
        self.arena: Callable[[], Any] = _no_arena if arena is None else weakref.ref(arena)
        self.method = method
        self.spec = spec._replace(alibi_slopes=None, sinks=None)


def entry_of_call(
    layout: Any, tensors: tuple[Any, ...], words: tuple[Any, ...], window: Any
) -> Entry | None:
    """The entry of a call of q, k, v, ALiBi's slopes and sinks, without functions and dropout.
    `words` and `window` are the other arguments.
    """
    if type(layout) is not Layout:
        return None
    # A known call keeps its layout, so that no other one has this number
    return find(tensors, ("distributed", id(layout), *words), window)[0]


def known_call(entry: Entry | None, layout: Layout, arena: Arena | None) -> KnownCall | None:
    """What an entry has, if it was found with the same layout and memory."""
    step: Any = None if entry is None else entry.call
    is_same = step is not None and step.spec.layout is layout and step.arena() is arena
    return step if is_same else None


def keep(entry: Entry | None, arena: Arena | None, spec: CallSpec, method: str) -> CallSpec:
    """Keeps a call that was checked; the same call, which keeps what its method finds."""
    if entry is None:
        return spec
    spec = spec._replace(found=Found())
    known: Any = KnownCall(arena, spec, method)
    entry.call = known
    _kept.append(entry)
    if len(_kept) > MOST:
        _kept.popleft().call = None
    return spec
