"""Memory: tensors of the call, shared memory, parameters; loads, stores and atomics.

An address must lie in one of a space's allocations and be a multiple of the access's size. Global
addresses are those of the CPU tensors. Shared memory begins at SHARED, as the first KiB of a CTA's
is the system's on sm_90.
"""

import ctypes
from typing import Any

import numpy as np
import torch

from .errors import AsyncFault, BarrierFault, MemoryFault
from .moves import put
from .parse import Address, Instruction, Register, Vector
from .program import Program, Step, instruction, unknown
from .registers import WIDTH, numpy_type

SHARED = 1024  # where dynamic shared memory begins
PARAMETERS = 1 << 60  # where parameters do, which are read by address
IGNORED = {
    *("ca", "cg", "cs", "cv", "wb", "wt", "nc", "volatile", "weak", "relaxed", "acquire"),
    *("release", "acq_rel", "cta", "cluster", "gpu", "sys", "L1::evict_first", "L1::evict_last"),
    *("L1::no_allocate", "L1::evict_normal", "L2::128B", "L2::cache_hint"),
}
SPACES = ("global", "shared", "shared::cta", "param", "local")


class GlobalMemory:
    """The memory of a call's tensors, by address."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        spans = sorted({_span(x) for x in tensors if x.numel()})
        joined: list[list[int]] = []
        for first, stop in spans:
            if joined and first <= joined[-1][1]:
                joined[-1][1] = max(joined[-1][1], stop)
            else:
                joined.append([first, stop])
        self.first = np.array([x[0] for x in joined], np.uint64)
        self.stop = np.array([x[1] for x in joined], np.uint64)
        self.bytes = [_bytes_at(first, stop - first) for first, stop in joined]

    def places(self, addresses: np.ndarray, size: int, one: Instruction) -> list[tuple]:
        """(bytes, offsets, which of the addresses) for each allocation that they are in."""
        addresses = addresses.astype(np.uint64)
        if (addresses % np.uint64(size)).any():
            wrong = addresses[addresses % np.uint64(size) != 0][0]
            raise MemoryFault(f"{one}: {wrong:#x} is no multiple of {size} bytes")
        which = np.searchsorted(self.first, addresses, "right").astype(np.int64) - 1
        stops = self.stop[np.maximum(which, 0)] if len(self.stop) else addresses
        outside = (which < 0) | (addresses + np.uint64(size) > stops)
        if outside.any():
            raise MemoryFault(f"{one}: {self._words(int(addresses[outside][0]), size)}")
        return [
            (self.bytes[n], (addresses[which == n] - self.first[n]).astype(np.int64), which == n)
            for n in np.unique(which)
        ]

    def load(self, addresses: np.ndarray, size: int, one: Instruction) -> np.ndarray:
        """(addresses, size) bytes."""
        found = np.empty((len(addresses), size), np.uint8)
        for memory, offsets, which in self.places(addresses, size, one):
            found[which] = memory[offsets[:, None] + np.arange(size)]
        return found

    def store(self, addresses: np.ndarray, data: np.ndarray, one: Instruction, _=None) -> None:
        """The opposite."""
        size = data.shape[1]
        for memory, offsets, which in self.places(addresses, size, one):
            memory[offsets[:, None] + np.arange(size)] = data[which]

    def _words(self, address: int, size: int) -> str:
        if not len(self.first):
            return f"{size} bytes at {address:#x}, and the call has no tensor"
        at = max(int(np.searchsorted(self.first, np.uint64(address), "right")) - 1, 0)
        first, stop = int(self.first[at]), int(self.stop[at])
        return (
            f"{size} bytes at {address:#x} are outside of every tensor; the nearest below are "
            f"{stop - first} bytes at {first:#x}, of which it is {address - first} bytes on"
        )


def _span(x: torch.Tensor) -> tuple[int, int]:
    """The bytes from its first element to its last one, with the padding of the last row."""
    *others, width = sorted(zip(x.stride(), x.shape), reverse=True) or [(1, 1)]
    row = 1 + width[0] * (width[1] - 1)
    pitch = min((stride for stride, n in others if n > 1 and stride > row), default=row)
    last = sum(stride * (n - 1) for stride, n in others) + pitch
    storage = x.untyped_storage()
    stop = min(x.data_ptr() + last * x.element_size(), storage.data_ptr() + storage.nbytes())
    return x.data_ptr(), stop


def _bytes_at(address: int, count: int) -> np.ndarray:
    return np.frombuffer((ctypes.c_uint8 * count).from_address(address), np.uint8)


class SharedMemory:
    """A CTA's. It begins poisoned.

    wgmma and bulk copies read it through the async proxy: what threads wrote must be followed by
    `fence.proxy.async`, of the warp that wrote, or of those that issue what reads.
    """

    UNIT = 8  # bytes of which fences are known together

    def __init__(self, size: int) -> None:
        self.size = size
        self.bytes = np.full(SHARED + size, 0xFF, np.uint8)  # NaN in every format
        self.is_barrier = np.zeros(SHARED + size, np.bool_)
        units = (SHARED + size) // self.UNIT + 1
        self.unfenced = np.zeros(units, np.uint32)  # a bit for each warp that wrote
        self.fenced_by = np.zeros(units, np.uint32)  # for each that fenced after all of these

    def places(self, addresses: np.ndarray, size: int, one: Instruction) -> np.ndarray:
        """(addresses, size) of indices, checked."""
        addresses = addresses.astype(np.int64)
        if (addresses % size).any():
            raise MemoryFault(f"{one}: {addresses[addresses % size != 0][0]:#x} is not aligned")
        outside = (addresses < SHARED) | (addresses + size > SHARED + self.size)
        if outside.any():
            raise MemoryFault(
                f"{one}: byte {addresses[outside][0] - SHARED} of {self.size} of shared memory"
            )
        return addresses[:, None] + np.arange(size)

    def load(self, addresses: np.ndarray, size: int, one: Instruction) -> np.ndarray:
        """(addresses, size) bytes."""
        return self.bytes[self.places(addresses, size, one)]

    def store(self, addresses, data: np.ndarray, one: Instruction, warps: np.ndarray) -> None:
        """By threads of these warps."""
        places = self.places(addresses, data.shape[1], one)
        if self.is_barrier[places].any():
            raise BarrierFault(f"{one}: overwrites an mbarrier that was not invalidated")
        self.bytes[places] = data
        self.mark(places, warps)

    def mark(self, places: np.ndarray, warps: np.ndarray) -> None:
        """Written by threads. Of a unit that is written as a whole, no earlier writer is left."""
        units = places // self.UNIT
        if places.shape[1] % self.UNIT == 0:
            self.unfenced[units] = 0
        np.bitwise_or.at(self.unfenced, units, np.uint32(1) << warps.astype(np.uint32)[:, None])
        self.fenced_by[units] = 0

    def store_by_proxy(self, places: np.ndarray, data: Any, one: Instruction) -> None:
        """By a bulk copy."""
        if self.is_barrier[places].any():
            raise BarrierFault(f"{one}: overwrites an mbarrier that was not invalidated")
        self.bytes[places] = data
        self.unfenced[places // self.UNIT] = 0

    def fence(self, warps: np.ndarray) -> None:
        """`fence.proxy.async` of some warps."""
        for warp in np.unique(warps):
            bit = np.uint32(1) << np.uint32(warp)
            self.unfenced &= ~bit
            self.fenced_by[self.unfenced != 0] |= bit

    def check_fenced(self, places: np.ndarray, warps: list[int], one: Instruction) -> None:
        """Before the async proxy reads: these warps issue what does."""
        units = np.unique(places // self.UNIT)
        readers = np.uint32(sum(1 << warp for warp in warps))
        missing = (self.unfenced[units] != 0) & ((self.fenced_by[units] & readers) != readers)
        if missing.any():
            at = int(units[missing][0]) * self.UNIT - SHARED
            raise AsyncFault(f"{one} reads byte {at}, written by threads without fence.proxy.async")


def address_slot(code: Program, address: Address) -> tuple[int, int]:
    """The slot of its base, and what is added."""
    width = 64
    if isinstance(address.base, Register):
        width = code.slots.width(address.base)
    return code.slots.read(address.base, f"u{width}"), address.offset


def addresses_of(r: dict, slot: int, offset: int, group) -> np.ndarray:
    """Of the active lanes."""
    found = np.broadcast_to(r[slot], group.lanes.stop - group.lanes.start)
    found = found.astype(np.int64) + offset
    return found if group.where is True else found[group.where]


def active_warps(group) -> np.ndarray:
    """The warp of each active lane."""
    found = np.arange(group.lanes.start, group.lanes.stop) // 32
    return found if group.where is True else found[group.where]


def memory_of(group, space: str):
    """The memory of a state space."""
    return group.cta.shared if space.startswith("shared") else group.cta.machine.memory


class Access:
    """What the modifiers of a load, a store or an atomic say."""

    def __init__(self, one: Instruction) -> None:
        left = [x for x in one.modifiers if x not in IGNORED]
        self.space = left.pop(0) if left and left[0] in SPACES else ""
        self.type = left.pop()
        vectors = [x for x in left if x in ("v2", "v4", "v8")]
        self.count = int(vectors[0][1:]) if vectors else 1
        left = [x for x in left if x not in vectors]
        self.operation = left.pop(0) if left and one.opcode in ("atom", "red") else ""
        if left or not self.space:
            raise unknown(one, *left)
        self.bytes = WIDTH[self.type] // 8


@instruction("ld", "ldu")
def load(code: Program, one: Instruction) -> Step:
    """Of one element or of several that follow each other; a wider register is extended."""
    access = Access(one)
    target, address = one.operands
    targets = target.items if isinstance(target, Vector) else (target,)
    if len(targets) != access.count:
        raise unknown(one)
    if access.space == "param":
        return _load_parameter(code, targets, address, access)
    slots = [code.slots.write(x, wider(code, x, access.type)) for x in targets]
    base, offset = address_slot(code, address)
    kind, size = numpy_type(access.type), access.bytes

    def step(r, group):
        at = addresses_of(r, base, offset, group)
        memory = memory_of(group, access.space)
        found = memory.load(at, size * access.count, one).view(kind)
        for n, d in enumerate(slots):
            put_active(r[d], found[:, n], group)

    return step


def wider(code: Program, register, type_: str) -> str:
    """The type of a register that holds one of `type_`: it may be wider."""
    if not isinstance(register, Register) or code.slots.width(register) == WIDTH[type_]:
        return type_
    return f"{'s' if type_[0] == 's' else 'u'}{code.slots.width(register)}"


def put_active(target: np.ndarray, values: np.ndarray, group) -> None:
    """Writes values of the active lanes alone."""
    if group.where is True:
        target[:] = values
    else:
        target[group.where] = values


def active(values: np.ndarray, group) -> np.ndarray:
    """The active lanes of a register or constant."""
    whole = np.broadcast_to(values, group.lanes.stop - group.lanes.start)
    return whole if group.where is True else whole[group.where]


def _load_parameter(code: Program, targets, address: Address, access: Access) -> Step:
    slots = [code.slots.write(x, wider(code, x, access.type)) for x in targets]
    name, offset = address.base.name, address.offset
    kind, size = numpy_type(access.type), access.bytes

    def step(r, group):
        data = group.cta.machine.parameters[name]
        for n, d in enumerate(slots):
            first = offset + n * size
            put(r[d], np.frombuffer(data[first : first + size], kind)[0], group)

    return step


@instruction("st")
def store(code: Program, one: Instruction) -> Step:
    """The opposite; of a wider register the low bits."""
    access = Access(one)
    address, source, *_ = one.operands  # and the policy of the L2 cache
    sources = source.items if isinstance(source, Vector) else (source,)
    if len(sources) != access.count or access.space == "param":
        raise unknown(one)
    slots = [code.slots.read(x, wider(code, x, access.type)) for x in sources]
    base, offset = address_slot(code, address)
    kind = numpy_type(access.type)

    def step(r, group):
        at = addresses_of(r, base, offset, group)
        columns = [active(r[x], group).astype(kind) for x in slots]
        data = np.ascontiguousarray(np.stack(columns, 1)).view(np.uint8)
        memory_of(group, access.space).store(at, data, one, active_warps(group))

    return step


ATOMICS = {
    "add": np.add,
    "exch": lambda x, y: y,
    "min": np.minimum,
    "max": np.maximum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}


@instruction("atom", "red")
def atomic(code: Program, one: Instruction) -> Step:
    """Lane after lane where addresses are the same; of vectors element by element."""
    access = Access(one)
    if access.operation not in (*ATOMICS, "cas") or "x2" in access.type or access.type == "bf16":
        raise unknown(one, access.operation)
    operands = [list(x.items) if isinstance(x, Vector) else [x] for x in one.operands]
    targets = operands.pop(0) if one.opcode == "atom" else []
    base, offset = address_slot(code, operands.pop(0)[0])
    targets = [code.slots.write(x, access.type) for x in targets]
    sources = [code.sources(x, access.type) for x in operands]
    if any(len(x) != access.count for x in sources):
        raise unknown(one)
    kind, size = numpy_type(access.type), access.bytes * access.count

    def after(before: np.ndarray, given: list[np.ndarray]) -> np.ndarray:
        if access.operation == "cas":
            return np.where(before == given[0], given[1], before)
        return ATOMICS[access.operation](before, given[0])

    def step(r, group):
        at, warps = addresses_of(r, base, offset, group), active_warps(group)
        memory = memory_of(group, access.space)
        given = [np.stack([active(r[y], group) for y in x], 1) for x in sources]
        found = np.empty((len(at), access.count), kind)
        is_apart = len(set(at.tolist())) == len(at)
        for n in [slice(None)] if is_apart else [slice(n, n + 1) for n in range(len(at))]:
            found[n] = memory.load(at[n], size, one).view(kind)
            data = after(found[n], [x[n] for x in given]).astype(kind)
            memory.store(at[n], np.ascontiguousarray(data).view(np.uint8), one, warps[n])
        for n, d in enumerate(targets):
            put_active(r[d], found[:, n], group)

    return step


@instruction("fence", "membar", "griddepcontrol", "nanosleep", "createpolicy", "prefetch")
def without_effect(code: Program, one: Instruction) -> Step:
    """Accesses are in program order here, but for those of the async proxy."""
    if one.opcode == "fence" and "proxy" in one.modifiers:
        if one.modifiers[1:2] != ("async",):
            raise unknown(one, *one.modifiers)
        return _proxy_fence
    return lambda r, group: None


def _proxy_fence(r, group) -> None:
    group.cta.shared.fence(active_warps(group))
