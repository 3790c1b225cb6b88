"""Contexts inside which sequences are shards, where an attention of a shard alone would be wrong
and say nothing.

Inside of `tilewise.distributed.context_parallel` the calls that know how go to it, by
`is_sharded` and `of_shards`. Inside of torch's `context_parallel` torch replaces its own attention
alone; what torch's ring itself asks of us by `enable_sdpa` are steps over whole shards. Every other
call is refused.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import torch

_MODULE = "torch.distributed.tensor.experimental._context_parallel._attention"
_attend: ContextVar[Callable[..., Any] | None] = ContextVar("tilewise_shards", default=None)
entered: int = 0  # contexts of this process; without one callers ask nothing else
_lock = threading.Lock()


@contextlib.contextmanager
def sharded_by(attend: Callable[..., Any]) -> Iterator[None]:
    """Inside, calls go to `attend`, which takes the arguments of `tilewise.attention`."""
    global entered
    with _lock:
        entered += 1
    token = _attend.set(attend)
    try:
        yield
    finally:
        _attend.reset(token)
        with _lock:
            entered -= 1


@contextlib.contextmanager
def unsharded() -> Iterator[None]:
    """Inside, calls are of whole sequences again."""
    token = _attend.set(None)
    try:
        yield
    finally:
        _attend.reset(token)


def is_sharded() -> bool:
    """Whether a call belongs to `of_shards`."""
    return entered > 0 and _attend.get() is not None


def of_shards(**asked: Any) -> Any:
    """What the context's attention gives."""
    attend = _attend.get()
    # Where a compiler breaks its graph in a function, the locals of that have names of its own
    asked = {name: x for name, x in asked.items() if not name.startswith("__")}
    return None if attend is None else attend(**asked)


def refuse_shards() -> None:
    """NotImplementedError inside of a context that this call does not know, however it came
    there.
    """
    if entered and _attend.get() is not None:
        raise NotImplementedError(
            "inside of tilewise.distributed.context_parallel q, k and v are shards of sequences, "
            "and this call would leave the keys of the other shards out: tilewise.attention, "
            "flash_attn_func and scaled_dot_product_attention are served there, without what this "
            "one was given; documents are the layout's, layout.packed(cu_seqlens)"
        )
    module = sys.modules.get(_MODULE)
    # What torch puts in its place while the context is entered; the table keeps it ever after
    if module is not None and torch.nn.functional.scaled_dot_product_attention in getattr(
        module, "_replaced_functions", ()
    ):
        raise NotImplementedError(
            "tilewise inside of torch's context_parallel: q, k and v are shards of sequences, "
            "and the keys of the other shards would be left out; inside call "
            "torch.nn.functional.scaled_dot_product_attention, which torch replaces and "
            "tilewise.enable_sdpa() has us compute, and call tilewise outside, on whole sequences "
            "(DTensors may be sharded by batch or heads)"
        )
