"""A cache of checked calls, by the signature of their arguments (`ops.calls.find`): the next one of
that signature is neither checked, nor is its method chosen, nor what it copies looked up again.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from ...ops.calls import Entry, find
from ...problem import NO_EXTRAS
from ..layouts.layout import Layout
from ..methods.shard_call import Prepared, ShardCall
from ..transport.halves import Arena

MOST = 256  # calls that are kept: a layout may have thousands of runs
_kept: deque[Entry] = deque()


def entry_of_call(
    layout: Any, tensors: tuple[Any, ...], *, settings: tuple[Any, ...], window: Any
) -> Entry | None:
    """Returns the entry of a call without functions and dropout."""
    if type(layout) is not Layout:
        return None
    # A known call keeps its layout, so that no other one has this number
    return find(tensors, plain=("distributed", id(layout), *settings), window=window)[0]


def known_call(entry: Entry, layout: Layout, *, arena: Arena | None) -> ShardCall | None:
    """Returns the call of an entry, if it was kept with the same layout and memory."""
    call: ShardCall | None = entry.call
    if call is None or call.prepared is None or call.layout is not layout:
        return None
    return call if call.prepared.arena() is arena else None


def keep(entry: Entry | None, call: ShardCall, *, arena: Arena | None, method: str) -> ShardCall:
    """Keeps a call that was checked, without its tensors, and returns it with room for what its
    method prepares.
    """
    if entry is None:
        return call
    call = call._replace(prepared=Prepared(arena, method))
    entry.call = call._replace(extras=NO_EXTRAS)
    _kept.append(entry)
    if len(_kept) > MOST:
        _kept.popleft().call = None
    return call
