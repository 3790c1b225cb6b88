"""`context_parallel`: inside of it, models that call tilewise attend to whole sequences, of which
each rank has its shard. Nothing is patched: the calls look for the context.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from ...ops.context_parallel import sharded_by
from ..layouts.layout import Layout
from ..transport.arena import reporting
from .attention import attention, check_layout


@contextlib.contextmanager
def context_parallel(
    layout: Layout, *, method: str | None = None, bitwise: bool = True
) -> Iterator[None]:
    """Makes tilewise's calls inside the `with` block attend to the whole sharded sequence.

    Example:
        >>> import torch, tilewise, tilewise.distributed as td
        >>> layout = td.zigzag(64, 1)  # one rank; in a program, the process group
        >>> q, k, v = (layout.shard(x) for x in torch.randn(3, 2, 64, 4, 32))
        >>> with td.context_parallel(layout):
        ...     out = tilewise.attention(q, k, v, causal=True)
        >>> torch.equal(out, layout.shard(tilewise.attention(q, k, v, causal=True)))
        True

    That includes `tilewise.attention`, `flash_attn_func` and its packed variants,
    `scaled_dot_product_attention` (torch's after `enable_sdpa`), and transformers' models loaded
    with `attn_implementation="tilewise"`. q, k and v are this rank's rows, as many queries as keys.
    Shard inputs with `layout.shard(ids)` and `layout.shard(layout.shifted(labels))`, and pass
    `layout.positions`. If the backward recomputes activations, call `backward` inside, too: the
    context applies to all threads in the process.

    Args:
        layout: which rank has which tokens.
        method: as in `tilewise.distributed.attention`.
        bitwise: as there.

    Raises:
        NotImplementedError: a call inside is not supported, for example with `cu_seqlens` or a
            cache; it never attends within the shard.
    """
    with sharded_by(Attention(check_layout(layout), method, bitwise=bitwise)):
        yield


class Attention:
    """Attention inside of a context."""

    def __init__(self, layout: Layout, method: str | None, *, bitwise: bool) -> None:
        self.layout, self.method, self.bitwise = layout, method, bitwise

    def __call__(self, *, q: Any, k: Any, v: Any, layout: str = "bshd", **options: Any) -> Any:
        """Takes the arguments of `tilewise.attention`, by name."""
        settings = dict(method=self.method, bitwise=self.bitwise, order=layout)
        return attention(q, k, v, layout=self.layout, **settings, **options)

    def reporting(self, *tensors: Any) -> contextlib.AbstractContextManager[Any]:
        """Leaves an error inside for the other ranks, which would wait for this one."""
        return reporting(self.layout, tensors)
