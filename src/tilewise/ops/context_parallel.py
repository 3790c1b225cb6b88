"""Contexts inside which sequences are shards, where an attention of a shard alone would be wrong
and say nothing.

Inside of `tilewise.distributed.context_parallel` the calls that know how go to it, by
`is_sharded` and `innermost`. Inside of torch's `context_parallel` torch replaces its own attention
alone; what torch's ring itself asks of us by `enable_sdpa` are steps over whole shards. Every other
call is refused.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import torch

_MODULE = "torch.distributed.tensor.experimental._context_parallel._attention"
# The attentions of the contexts that the process is inside of, the innermost last. Of the process,
# not of a thread: autograd computes on threads of its own what a checkpoint has dropped. And what a
# compiler reads, so that a graph which was compiled outside is not run inside.
contexts: list[Callable[..., Any]] = []
_whole: ContextVar[bool] = ContextVar("tilewise_whole", default=False)


@contextlib.contextmanager
def sharded_by(attend: Callable[..., Any]) -> Iterator[None]:
    """Inside, calls go to `attend`, which takes the arguments of `tilewise.attention`."""
    contexts.append(attend)
    try:
        yield
    finally:
        contexts.pop()


class unsharded:  # a function by its name; contextlib would take the host longer
    """Inside, calls of this thread are of whole sequences again."""

    def __enter__(self) -> None:
        self.token = _whole.set(True)

    def __exit__(self, *error: object) -> None:
        _whole.reset(self.token)


def is_sharded() -> bool:
    """Whether a call belongs to the innermost context."""
    if not contexts:
        return False
    return torch.compiler.is_compiling() or not _whole.get()  # compilers trace no `unsharded`


def innermost() -> Any:
    """The innermost context, which takes the arguments of `tilewise.attention`: its `layout`, and
    `reporting(*tensors)`, inside of which an error is one of all ranks.
    """
    return contexts[-1]


def refuse_shards() -> None:
    """NotImplementedError inside of a context that this call does not know, however it came
    there.
    """
    if contexts and is_sharded():
        raise NotImplementedError(
            "inside tilewise.distributed.context_parallel q, k and v are shards of sequences, "
            "and this call would leave out the keys of the other shards: tilewise.attention, "
            "flash_attn_func and scaled_dot_product_attention are supported there, without the "
            "arguments of this call; documents belong in the layout, layout.packed(cu_seqlens)"
        )
    module = sys.modules.get(_MODULE)
    # torch's replacement while the context is entered; the table keeps it afterwards
    if module is not None and torch.nn.functional.scaled_dot_product_attention in getattr(
        module, "_replaced_functions", ()
    ):
        raise NotImplementedError(
            "tilewise inside torch's context_parallel: q, k and v are shards of sequences, and "
            "the keys of the other shards would be left out; call "
            "torch.nn.functional.scaled_dot_product_attention there, which torch replaces and "
            "tilewise.enable_sdpa() computes, and tilewise outside, on whole sequences (DTensors "
            "may be sharded by batch or heads)"
        )
