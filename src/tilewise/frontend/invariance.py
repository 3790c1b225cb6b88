"""`tilewise.batch_invariant`: whether calls with a KV cache ask for the contract of pieces."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from .. import switches
from ..errors import ArgumentError
from ..tile import split_kv
from .scalars import as_int, check_flag

# Of the process, not of a thread, and what a compiler reads, so that a graph which was compiled
# without it is not run with it
is_on = switches.is_on("TILEWISE_BATCH_INVARIANT")
depth = 0  # how many blocks have begun and not ended


def batch_invariant(enabled: bool = True) -> BatchInvariant:
    """Makes calls with a KV cache give a token the same bits in a prefill, in chunks of it and one
    by one, from here on or within a `with` block.

    Example:
        >>> import torch, tilewise
        >>> q, k = torch.randn(1, 3, 4, 16), torch.randn(1, 9, 4, 16)
        >>> used = torch.tensor([9], dtype=torch.int32)
        >>> with tilewise.batch_invariant():
        ...     out = tilewise.flash_attn_with_kvcache(q, k, k, cache_seqlens=used, causal=True)
        >>> out.shape
        torch.Size([1, 3, 4, 16])

    Such calls then sum keys in pieces of `split_size=None`'s table: 512 for up to 4 query heads per
    key head, 1024 for up to 8, 2048 for more. A `split_size` of a call's own wins. Without it a
    row's bits depend on its own sequence and the form of the call, not on its batch, and chunks of
    many queries may be faster (see the page on the cache). TILEWISE_BATCH_INVARIANT=1 in the
    environment, when tilewise is imported, does the same.

    Args:
        enabled: False turns it off.

    Returns:
        A context manager, whose end restores what was before, and a decorator of functions. Blocks
        nest. It is the process's, not a thread's: with threads or asyncio tasks call it once, as
        blocks that overlap raise a RuntimeError. Compiled functions are compiled again.
    """
    global is_on
    block = BatchInvariant(check_flag("enabled", enabled), is_on)
    is_on = enabled
    return block


def check_split_size(split_size: Any, group: int) -> int:
    """The keys of a piece; 0 where nothing asks for pieces."""
    if split_size is None:
        return split_kv.default_split_size(group) if is_on else 0
    size = as_int(split_size)
    if size is None or size < 1:
        raise ArgumentError(
            f"split_size={split_size!r}: it must be an int of at least 1, or None for the default"
        )
    return size


class BatchInvariant:
    """The context manager that `batch_invariant` returns: its end reverts the call."""

    def __init__(self, enabled: bool, before: bool) -> None:
        self._enabled, self._before = enabled, before
        self._depth = 0  # of its last block; 0 before the first, which the call has begun

    def __enter__(self) -> None:
        global is_on, depth
        if self._depth:
            self._before, is_on = is_on, self._enabled
        depth += 1
        self._depth = depth

    def __exit__(self, *raised: object) -> None:
        global is_on, depth
        is_last = depth == self._depth
        depth -= 1
        if not is_last:
            raise RuntimeError(
                "blocks of tilewise.batch_invariant overlap, in threads or asyncio tasks: it is "
                "the process's, so call it once, without a block"
            )
        is_on = self._before

    def __call__(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, each call of it in a block."""
        global is_on
        is_on = self._before

        @functools.wraps(function)
        def run(*args: Any, **options: Any) -> Any:
            with batch_invariant(self._enabled):
                return function(*args, **options)

        return run
