"""TMA: copies between global and shared memory that run by themselves and land late.

A load poisons its target when it is issued, so that reading early shows, and lands at some later
time, out of order. A store reads shared memory at some time before `store_wait` returns, and writes
global memory later still. Both take shared memory as the asynchronous proxy sees it.
"""

import math
from typing import Any

import torch
import triton.language as tl

from .machine import HopperError, running
from .memory import SmemView, poison
from .values import TRITON, to_value

ALIGNMENT = 16  # bytes


class Descriptor:
    """A tensor in global memory that is copied in blocks: a kernel's view of a descriptor.

    Addresses are TMA's: 64 bits that wrap around, so that a stride may act as a negative one. Each
    is checked against the memory of the tensor.
    """

    def __init__(self, flat: torch.Tensor, first: int, geometry: Any, padding: str) -> None:
        shape, strides, block_shape, self.layout = geometry
        self.flat, self.first = flat, first  # the memory, and where in it the tensor begins
        self.sizes, self.steps = list(map(int, shape)), list(map(int, strides))
        self.block_shape = [int(n) for n in block_shape]
        self.dtype = TRITON[flat.dtype]
        self.fill = math.nan if padding == "nan" else 0
        self.block_type = tl.block_type(self.dtype, self.block_shape)
        self.nbytes_per_cta = math.prod(self.block_shape) * flat.element_size()
        self.shape, self.strides = to_value(tuple(self.sizes)), to_value(tuple(self.steps))

    @classmethod
    def from_host(cls, descriptor: Any) -> "Descriptor":
        base = descriptor.base.detach()
        if base.device.type != "cpu":
            raise ValueError(f"the emulator runs on CPU tensors, got one on {base.device}")
        size = base.untyped_storage().nbytes() // base.element_size()
        flat = base.as_strided((size,), (1,), 0)
        x = descriptor
        geometry = x.shape, x.strides, x.block_shape, x.layout
        return cls(flat, base.storage_offset(), geometry, getattr(x, "padding", "zero"))

    def window(self, coord: Any) -> tuple[torch.Tensor, tuple[slice, ...]]:
        """The part of a block that lies within the tensor, and where in the block it lies."""
        if len(coord) != len(self.block_shape):
            raise ValueError(f"{len(coord)} coordinates for a block of {self.block_shape}")
        if int(coord[-1]) * self.flat.element_size() % ALIGNMENT:
            raise ValueError(
                f"TMA by {running()} at {[int(i) for i in coord]}: a block begins at a multiple of "
                f"{ALIGNMENT} bytes of its row; an H200 stops with an illegal instruction"
            )
        offset, outer, inner = self.first, [], []
        for start, width, size, step in zip(
            map(int, coord), self.block_shape, self.sizes, self.steps
        ):
            low, high = min(max(start, 0), size), min(max(start + width, 0), size)
            offset += low * step
            outer.append(high - low)
            inner.append(slice(low - start, high - start))
        if 0 in outer:
            return self.flat[:0].view(outer), tuple(inner)
        # a dimension of one element is nowhere stepped along, whatever its stride
        steps = [step if size > 1 else 0 for step, size in zip(self.steps, outer)]
        around = 2**64 // self.flat.element_size()
        offset = (offset + around // 2) % around - around // 2
        last = offset + sum(step * (size - 1) for step, size in zip(steps, outer))
        if not 0 <= offset <= last < self.flat.numel():
            raise IndexError(
                f"TMA by {running()} at {[int(i) for i in coord]}: elements {offset} to {last} of a"
                f" tensor whose memory has {self.flat.numel()}"
            )
        return self.flat.as_strided(outer, steps, offset), tuple(inner)

    def in_shared(self, memory: SmemView) -> SmemView:
        """The shared memory of one block, in the shape of the block."""
        if memory.dtype != self.dtype or memory.numel != math.prod(self.block_shape):
            raise ValueError(
                f"{memory!r} of {memory.dtype} for a block of {self.block_shape} of {self.dtype}"
            )
        return memory if memory.shape == self.block_shape else memory.reshape(self.block_shape)


def make_tensor_descriptor(
    base: Any, shape: Any, strides: Any, block_shape: Any, layout: Any, padding_option: Any = "zero"
) -> Descriptor:
    geometry = shape, strides, block_shape, layout
    return Descriptor(base.flat, base.offset, geometry, padding_option)


def load(
    tensor_desc: Any, coord: Any, barrier: Any, result: Any, pred: Any = True, **_: Any
) -> None:
    """Start copying a block into shared memory; the barrier gets its bytes when it lands."""
    if not pred:
        return
    partition, target = running(), tensor_desc.in_shared(result)
    mbarrier = barrier.one.usable(by_tma=True)
    cta, nbytes = partition.cta, tensor_desc.nbytes_per_cta
    coord = [int(i) for i in coord]
    name = result.allocation.name() if partition.machine.trace else ""
    partition.log("TMA load", lambda: f"{name} from {coord}, {nbytes} bytes")
    if partition.machine.arrivals is not None:
        partition.machine.arrivals.check(tensor_desc.window(coord)[0], partition)
    for memory in (target.plain, target.fenced):
        poison(memory)
    cta.loads += 1

    def land() -> bool:
        source, inside = tensor_desc.window(coord)
        for memory in (target.plain, target.fenced):
            if source.shape != memory.shape:
                memory.fill_(tensor_desc.fill)
            memory[inside] = source
        cta.loads -= 1
        mbarrier.land(nbytes)
        partition.log("TMA load landed", lambda: f"{name} from {coord}")
        return True

    partition.machine.launch(land)
    partition.pause()


class Store:
    """A copy out of shared memory: it reads once, late, and writes later."""

    def __init__(self, descriptor: Descriptor, coord: Any, source: SmemView, combine: Any) -> None:
        self.descriptor, self.coord = descriptor, [int(i) for i in coord]
        self.source, self.combine = descriptor.in_shared(source), combine
        self.data: torch.Tensor | None = None
        self.has_landed = self.was_awaited = False

    @property
    def has_read(self) -> bool:
        return self.data is not None

    def read(self) -> None:
        self.data = self.source.fenced.clone()

    def advance(self) -> bool:
        if self.data is None:
            self.read()
            return False
        target, inside = self.descriptor.window(self.coord)
        self.combine(target, self.data[inside])
        self.has_landed = True
        return True


def _store(event: str, combine: Any) -> Any:
    def tma_store(tensor_desc: Any, coord: Any, src: Any, **_: Any) -> None:
        partition = running()
        store = Store(tensor_desc, coord, src, combine)
        partition.log(event, lambda: f"{src.allocation.name()} to {store.coord}")
        partition.stores.append(store)
        if partition.machine.random.random() < 0.3:
            store.read()
        partition.machine.launch(store.advance)
        partition.pause()

    return tma_store


store = _store("TMA store", lambda target, data: target.copy_(data))
atomic_add = _store("TMA add", lambda target, data: target.add_(data))
atomic_max = _store("TMA max", lambda target, data: target.copy_(torch.maximum(target, data)))
atomic_min = _store("TMA min", lambda target, data: target.copy_(torch.minimum(target, data)))


def store_wait(pendings: Any = 0, read_only: Any = True) -> None:
    """Wait until all but the last `pendings` stores of this partition have read their source.

    With `read_only=False`, until they have been written to global memory.
    """
    partition, pendings = running(), int(pendings)
    awaited = partition.stores[: len(partition.stores) - pendings]
    partition.log("store wait", lambda: f"{len(awaited)} stores")

    def is_over() -> bool:
        return all(s.has_read if read_only else s.has_landed for s in awaited)

    partition.wait(is_over, lambda: f"waits for {len(awaited)} TMA stores")
    for one in awaited:
        one.was_awaited = True
    done = [s for s in awaited if s.has_landed]
    partition.stores = [s for s in partition.stores if s not in done]


def check_end(cta: Any) -> None:
    """What must hold when a CTA has ended."""
    if cta.loads:
        raise HopperError(f"{cta} ends with {cta.loads} copies in flight to shared memory")
