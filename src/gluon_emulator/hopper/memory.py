"""Shared memory as its two kinds of readers see it.

Ordinary loads and stores go through the generic proxy; TMA and wgmma read through the asynchronous
proxy, which sees an ordinary store only after a `fence_async_shared` of the partition that stored.
Each allocation therefore holds two tensors. A store writes one and poisons the other until the
fence; a TMA load writes both. Unwritten memory holds NaN, or a large odd number.
"""

import math
from typing import Any

import torch

from .machine import Cta, HopperError, running
from .places import name_of
from .values import TORCH, Value, as_tensor, data_as

_POISON = 0x5A5A5A5A5A5A5A5B


class Allocation:
    """One call of allocate_shared_memory."""

    def __init__(self, cta: Cta, nbytes: int) -> None:
        self.cta, self.number = cta, len(cta.allocations)
        self._name: str | None = None
        cta.allocations.append(self)
        cta.claim(nbytes)

    def name(self) -> str:
        """What the kernel calls it, or the function that does if the kernel does not."""
        if self._name is None:
            partitions = [p for p in self.cta.machine.partitions if p.cta is self.cta]
            frames = [frame for partition in partitions for frame in partition.frames()[::-1]]
            self._name = name_of(self, frames[:1])
            return self._name or name_of(self, frames) or f"allocation {self.number}"
        return self._name


class SmemView:
    """A view of shared memory: what `gl.shared_memory_descriptor` is to a kernel."""

    __slots__ = ("_indexed", "allocation", "dtype", "fenced", "layout", "plain")

    def __init__(
        self, allocation: Any, dtype: Any, layout: Any, plain: torch.Tensor, fenced: torch.Tensor
    ) -> None:
        self.allocation, self.dtype, self.layout = allocation, dtype, layout
        self.plain = plain  # what loads see
        self.fenced = fenced  # what TMA and wgmma see
        self._indexed: dict[int, SmemView] = {}

    def __repr__(self) -> str:
        return f"shared memory {self.allocation.name()} {self.shape}"

    @property
    def shape(self) -> list[int]:
        return list(self.plain.shape)

    @property
    def rank(self) -> int:
        return self.plain.dim()

    @property
    def numel(self) -> int:
        return self.plain.numel()

    @property
    def nbytes_per_cta(self) -> int:
        return self.numel * self.plain.element_size()

    @property
    def type(self) -> "SmemView":
        return self

    @property
    def element_ty(self) -> Any:
        return self.dtype

    def index(self, index: Any) -> "SmemView":
        i = int(index)
        if i not in self._indexed:
            self._check(0, i, 1)
            self._indexed[i] = self._view(lambda tensor: tensor[i])
        return self._indexed[i]

    def slice(self, start: Any, length: Any, dim: Any = 0) -> "SmemView":
        start, length, dim = int(start), int(length), int(dim)
        self._check(dim, start, length)
        return self._view(lambda tensor: tensor.narrow(dim, start, length))

    def permute(self, order: Any) -> "SmemView":
        return self._view(lambda tensor: tensor.permute(*map(int, order)))

    def reshape(self, shape: Any) -> "SmemView":
        return self._view(lambda tensor: tensor.view(*map(int, shape)))

    def reinterpret(self, dtype: Any, shape: Any, layout: Any) -> "SmemView":
        kind, shape = TORCH[dtype], [int(n) for n in shape]
        size = math.prod(shape)

        def view(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.reshape(-1).view(kind)[:size].view(shape)

        if not self.plain.is_contiguous():
            raise HopperError(f"{self!r} is reinterpreted through a permuted view")
        return SmemView(self.allocation, dtype, layout, view(self.plain), view(self.fenced))

    _reinterpret = reinterpret

    def load(self, layout: Any = None) -> Value:
        running().pause()
        return Value(self.plain.clone(), self.dtype)

    def store(self, value: Any) -> None:
        running().pause()
        tensor = as_tensor(Value(data_as(value, self.dtype), self.dtype))
        if list(tensor.shape) != self.shape:
            raise ValueError(f"a block of {list(tensor.shape)} is stored into {self!r}")
        self.plain.copy_(tensor)
        poison(self.fenced)
        running().unfenced[self] = None

    def publish(self) -> None:
        """The asynchronous proxy sees what was stored."""
        self.fenced.copy_(self.plain)

    def _keep_alive(self) -> None:
        pass

    def _view(self, view: Any) -> "SmemView":
        fenced, plain = view(self.fenced), view(self.plain)
        return SmemView(self.allocation, self.dtype, self.layout, plain, fenced)

    def _check(self, dim: int, start: int, length: int) -> None:
        if not 0 <= start <= start + length <= self.plain.shape[dim]:
            raise IndexError(f"{self!r} has no [{start}:{start + length}] in dimension {dim}")


def allocate(dtype: Any, shape: Any, layout: Any, value: Any = None) -> SmemView:
    """Room for one tensor, with nothing in it, or with a block stored."""
    cta = running().cta
    plain = torch.empty([int(n) for n in shape], dtype=TORCH[dtype])
    allocation = Allocation(cta, plain.numel() * plain.element_size())
    memory = SmemView(allocation, dtype, layout, poison(plain), poison(torch.empty_like(plain)))
    if value is not None:
        memory.store(value)
    return memory


def poison(tensor: torch.Tensor) -> torch.Tensor:
    """Fill memory with what a correct kernel never lets through."""
    if tensor.dtype.is_floating_point:
        if tensor.element_size() == 1:
            return tensor.copy_(torch.tensor(math.nan))
        return tensor.fill_(math.nan)
    if tensor.dtype == torch.bool:
        return tensor.fill_(True)
    return tensor.fill_(_POISON >> 8 * (8 - tensor.element_size()))


def fence_async_shared(cluster: Any = False) -> None:
    """What this partition stored and initialised, and copies that have landed, become visible to
    TMA, wgmma and others.
    """
    partition = running()
    partition.log("fence", lambda: f"{len(partition.unfenced)} writes")
    for written in (*partition.unfenced, *partition.cta.copied):
        written.publish()
    partition.cta.copied.clear()
    partition.unfenced.clear()
    partition.pause()
