"""cp.async: copies of single elements that threads start and do not wait for.

They land late, through the generic proxy: wgmma sees them after a `fence_async_shared` by a
partition that has waited for the barrier at which the copying threads arrive.
"""

import math
from typing import Any

import torch

from . import barriers
from .machine import HopperError, running
from .memory import poison
from .pointers import touched
from .values import TORCH, convert


class Copy:
    """One copy of a block in flight."""

    def __init__(self, target: Any, values: Any) -> None:
        self.target, self.values, self.cta = target, values, running().cta
        self.has_landed = False

    def land(self) -> bool:
        self.target.plain.copy_(self.values())
        poison(self.target.fenced)
        self.cta.copied.append(self.target)
        self.cta.loads -= 1
        self.has_landed = True
        return True


def async_copy_global_to_shared(smem: Any, pointer: Any, mask: Any = None, **_: Any) -> None:
    """Start copying a block; zeros where the mask is False."""
    partition = running()
    offset, keep = touched("async copy", pointer, mask)
    offset = torch.as_tensor(offset).expand(smem.shape)
    keep = torch.as_tensor(True if keep is None else keep).expand(smem.shape)
    dtype = pointer.dtype.element_ty

    def values() -> torch.Tensor:
        loaded = convert(pointer.flat[torch.where(keep, offset, 0)], dtype)
        return torch.where(keep, loaded, torch.zeros((), dtype=TORCH[dtype]))

    partition.log("async copy", lambda: f"{smem.allocation.name()}, {math.prod(smem.shape)}")
    for memory in (smem.plain, smem.fenced):
        poison(memory)
    copy = Copy(smem, values)
    partition.copies.append(copy)
    partition.cta.loads += 1
    partition.machine.launch(copy.land)
    partition.pause()


def mbarrier_arrive(mbarrier: Any, increment_count: Any = True, **_: Any) -> None:
    """Each thread arrives when its own copies have landed."""
    if increment_count:
        raise HopperError("arrivals that a barrier does not count in advance are not emulated")
    partition = running()
    awaited, partition.copies = partition.copies, []
    arrivals = 32 * partition.num_warps
    if not awaited:
        barriers.arrive(mbarrier, count=arrivals)
        return
    barrier = mbarrier.one.usable()

    def arrive() -> bool:
        if not all(copy.has_landed for copy in awaited):
            return False
        partition.log("arrive", lambda: f"{barrier.name()} phase {barrier.phase}")
        barrier.arrive(arrivals)
        return True

    partition.machine.launch(arrive)
    partition.pause()
