"""`context_parallel`: inside of it, models that call tilewise attend to whole sequences, of which
each rank has its shard. Nothing is patched: the calls look for the context.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from ..ops.context_parallel import sharded_by
from .arena import reporting
from .attention import attention, check_layout
from .layout import Layout


@contextlib.contextmanager
def context_parallel(
    layout: Layout, *, method: str | None = None, bitwise: bool = True
) -> Iterator[None]:
    """Inside, `tilewise.attention`, `flash_attn_func` and its packed twins, and
    `scaled_dot_product_attention` (ours, and torch's under `enable_sdpa`) are
    `tilewise.distributed.attention` with this layout, and so are the layers of transformers' models
    that were loaded with `attn_implementation="tilewise"`.

    >>> import torch, tilewise, tilewise.distributed as td
    >>> layout = td.zigzag(64, 1)  # one rank; in a program, the process group
    >>> q, k, v = (layout.shard(x) for x in torch.randn(3, 2, 64, 4, 32))
    >>> with td.context_parallel(layout):
    ...     out = tilewise.attention(q, k, v, causal=True)
    >>> torch.equal(out, layout.shard(tilewise.attention(q, k, v, causal=True)))
    True

    q, k and v are this rank's rows, of equally many queries and keys. Ids, labels and positions are
    dealt by `layout.shard(ids)`, `layout.shard(layout.shifted(labels))` and `layout.positions`.
    Call `backward` inside, too, where activations are recomputed in it: the context is one of the
    process, for all its threads. What is not served, such as `cu_seqlens` or a cache, is a
    NotImplementedError and never an attention of the shard alone.
    """
    with sharded_by(Attention(check_layout(layout), method, bitwise)):
        yield


class Attention:
    """The calls inside of a context."""

    def __init__(self, layout: Layout, method: str | None, bitwise: bool) -> None:
        self.layout, self.method, self.bitwise = layout, method, bitwise

    def __call__(self, *, q: Any, k: Any, v: Any, layout: str = "bshd", **asked: Any) -> Any:
        """`tilewise.attention` with its arguments, by name."""
        given = dict(layout=self.layout, method=self.method, bitwise=self.bitwise)
        return attention(q, k, v, order=layout, **given, **asked)

    def reporting(self, *tensors: Any) -> contextlib.AbstractContextManager[Any]:
        """Inside, an error of this rank is left for the others, which would wait for it."""
        return reporting(self.layout, *tensors)
