"""A cache of checked calls, by the signature of their arguments (`ops.calls.find`): the next one of
that signature is neither checked, nor is its method chosen, nor what it copies looked up again.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

from ...ops.calls import Entry, find
from ...problem import NO_EXTRAS
from ..layouts.layout import Layout
from ..methods.call_spec import CallSpec, Prepared
from ..transport.halves import Arena

MOST = 256  # calls that are kept: a layout may have thousands of runs
_kept: deque[Entry] = deque()


class KnownCall:
    """A checked call, without its tensors."""

    __slots__ = ("arena", "method", "spec")

    def __init__(self, arena: Arena | None, spec: CallSpec, method: str) -> None:
        # Its group may end, and its memory with it
        self.arena: Callable[[], Any] = (lambda: None) if arena is None else weakref.ref(arena)
        self.method = method
        self.spec = spec._replace(extras=NO_EXTRAS)


def entry_of_call(
    layout: Any, tensors: tuple[Any, ...], *, settings: tuple[Any, ...], window: Any
) -> Entry | None:
    """Returns the entry of a call without functions and dropout."""
    if type(layout) is not Layout:
        return None
    # A known call keeps its layout, so that no other one has this number
    return find(tensors, ("distributed", id(layout), *settings), window=window)[0]


def known_call(entry: Entry | None, layout: Layout, *, arena: Arena | None) -> KnownCall | None:
    """Returns the call of an entry, if it was kept with the same layout and memory."""
    step: Any = None if entry is None else entry.call
    is_same = step is not None and step.spec.layout is layout and step.arena() is arena
    return step if is_same else None


def keep(entry: Entry | None, spec: CallSpec, *, arena: Arena | None, method: str) -> CallSpec:
    """Keeps a call that was checked, and returns it with room for what its method prepares."""
    if entry is None:
        return spec
    spec = spec._replace(prepared=Prepared())
    step: Any = KnownCall(arena, spec, method=method)
    entry.call = step
    _kept.append(entry)
    if len(_kept) > MOST:
        _kept.popleft().call = None
    return spec
