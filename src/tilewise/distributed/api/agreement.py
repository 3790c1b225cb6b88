"""What a call over cache shards may be, on each rank, and that all ranks make the same one."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor, float32, int32, promote_types

from ...errors import ArgumentError, a_type
from ..transport.arena import Reporting, host_of
from .arguments import values_of


def check_pages(
    k_cache: Tensor, seqused_k: Any, *, page_table: Any, piece: int, batch: int
) -> None:
    """Checks a rank's pages, and the lengths of whole sequences."""
    if piece % k_cache.shape[1]:
        raise ArgumentError(
            f"k_cache has pages of {k_cache.shape[1]} keys: piece={piece} must be a multiple of "
            "that"
        )
    for name, x, dims in (("seqused_k", seqused_k, 1), ("page_table", page_table, 2)):
        if not isinstance(x, Tensor) or x.dtype != int32:
            raise ArgumentError(f"{name} is {a_type(x)}: it must be an int32 tensor")
        if x.dim() != dims or len(x) != batch:
            shape = f"({batch}, pages)" if dims == 2 else f"({batch},)"
            raise ArgumentError(f"{name} has shape {tuple(x.shape)}: it must be {shape}")
    if seqused_k.device.type == "cpu" and (seqused_k < 0).any():
        raise ArgumentError(f"seqused_k={seqused_k.tolist()}: lengths must be at least 0")


@contextlib.contextmanager
def answering(gather: Callable[[Tensor], Tensor], q: Tensor, shape: Sequence[int]) -> Iterator[Any]:
    """Sends NaN where this rank fails, else others would take part in the next call's exchange."""
    try:
        yield
    except Exception:
        gather(q.new_full(shape, math.nan, dtype=promote_types(q.dtype, float32)))
        raise


class Agreement:
    """Compares the calls of a group's ranks: on CPUs each, on GPUs the first of its kind."""

    def __init__(self, group: Any) -> None:
        self.group = group
        self.known: set[str] = set()  # calls on GPUs that all ranks have made

    def reporting(self) -> contextlib.AbstractContextManager[Any]:
        """Leaves an error inside for the other ranks."""
        host_of(self.group)
        return Reporting(self.group)

    def check(self, q: Tensor, tensors: dict[str, Tensor | None], about: str) -> None:
        """Raises RankMismatch on all ranks, unless q has the same shape on each, `tensors` have
        the same values, and the text is the same.
        """
        held = [f"{x} {tuple(y.shape)} {values_of(y)}" for x, y in tensors.items() if y is not None]
        dtype = str(q.dtype).removeprefix("torch.")
        call = ", ".join([f"q {tuple(q.shape)}", dtype, *held, about])
        if q.is_cpu or call not in self.known:
            host_of(self.group).meet(f"attention over cache shards: {call}")
            if not q.is_cpu:
                self.known.add(call)

    def meet(self) -> None:
        """Waits until all ranks are as far with the call."""
        host = host_of(self.group)
        host.meet(f"the exchange of {host.signature}")
