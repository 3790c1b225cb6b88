"""Asynchronous copies: cp.async of threads, and cp.async.bulk.tensor by TMA.

A copy poisons what it writes when it is issued, and completes later (machine.py); what it reads, it
reads when it completes.
"""

from typing import Any, NamedTuple

import numpy as np

from .barriers import mbarrier_at
from .errors import MemoryFault, PtxError
from .memory import IGNORED, active, active_warps, address_slot, addresses_of
from .parse import Instruction
from .program import Program, Step, Wait, instruction, unknown, waiting

POISON = 0xFF
ALIGNMENT = 128  # of what TMA copies, in shared memory


class TensorMap(NamedTuple):
    """A CUtensorMap; dimensions begin with the innermost."""

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]  # bytes, of all dimensions but the innermost
    box: tuple[int, ...]
    element: int  # bytes
    swizzle: int  # bytes of a row that it permutes: 0, 32, 64 or 128
    fill: bytes  # of an element out of bounds

    def check(self) -> None:
        """What cuTensorMapEncodeTiled refuses."""
        row = self.box[0] * self.element
        claims = {
            "the address is a multiple of 16": self.address % 16 == 0,
            "strides are multiples of 16, below 2^40": all(
                x % 16 == 0 and 0 <= x < 2**40 for x in self.strides
            ),
            "dimensions are 1 to 2^32": all(1 <= x <= 2**32 for x in self.shape),
            "a box is 1 to 256 elements wide": all(1 <= x <= 256 for x in self.box),
            "a box's rows are multiples of 16 bytes": row % 16 == 0,
            "a box's rows fit the swizzle": not self.swizzle or row <= self.swizzle,
        }
        for claim, holds in claims.items():
            if not holds:
                raise PtxError(f"cuTensorMapEncodeTiled would refuse {self}: not {claim}")

    @property
    def bytes(self) -> int:
        """Of a box."""
        return int(np.prod(self.box)) * self.element

    def offsets(self) -> np.ndarray:
        """(rows of a box, bytes of one): places in shared memory, from its start on."""
        row = self.box[0] * self.element
        return np.arange(self.bytes).reshape(-1, row)

    def rows(self, first: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray, slice]:
        """Of the box at these coordinates: addresses of its rows, which of them exist, and bytes of
        a row that do. Addresses have 64 bits: they wrap.
        """
        addresses, exists = np.array([self.address], np.uint64), np.array([True])
        for dim in range(1, len(self.box)):
            index = first[dim] + np.arange(self.box[dim])
            step = index.astype(np.int64).view(np.uint64) * np.uint64(self.strides[dim - 1])
            addresses = (step[:, None] + addresses[None, :]).ravel()
            inside = (index >= 0) & (index < self.shape[dim])
            exists = (inside[:, None] & exists[None, :]).ravel()
        begin = min(max(0, -first[0]), self.box[0])
        end = max(begin, min(self.box[0], self.shape[0] - first[0]))
        addresses = addresses + np.int64((first[0] + begin) * self.element).view(np.uint64)
        return addresses, exists, slice(begin * self.element, end * self.element)


def swizzled(places: np.ndarray, swizzle: int) -> np.ndarray:
    """Addresses of shared memory with their 16-byte units permuted: bits 4 to 6 by bits 7 to 9."""
    if not swizzle:
        return places
    return places ^ (((places >> 7) & (swizzle // 16 - 1)) << 4)


class Copy:
    """A copy in flight, of a CTA."""

    def __init__(self, group: Any, one: Instruction) -> None:
        self.cta, self.one, self.is_done = group.cta, one, False
        self.cta.in_flight.append(self)

    def complete(self) -> None:
        """Once."""
        if not self.is_done:
            self.is_done = True
            self.cta.in_flight.remove(self)
            self.move()

    def move(self) -> None:
        """What it does."""
        raise NotImplementedError


class Load(Copy):
    """A box to shared memory, and its bytes to an mbarrier."""

    def __init__(self, group, one, tensor_map: TensorMap, first, place: int, barrier) -> None:
        self.map, self.barrier = tensor_map, barrier
        self.places = _places(group, one, tensor_map, place)
        group.cta.shared.store_by_proxy(self.places, POISON, one)
        self.rows = tensor_map.rows(first)
        super().__init__(group, one)

    def move(self) -> None:
        addresses, exists, inside = self.rows
        data = np.empty(self.places.shape, np.uint8)
        data.reshape(-1, len(self.map.fill))[:] = np.frombuffer(self.map.fill, np.uint8)
        if exists.any() and inside.stop > inside.start:
            found = _by_bytes(addresses[exists], inside.stop - inside.start)
            memory = self.cta.machine.memory
            rows = memory.load(found.ravel(), 1, self.one).reshape(found.shape)
            data[np.flatnonzero(exists)[:, None], np.arange(inside.start, inside.stop)] = rows
        self.cta.shared.store_by_proxy(self.places, data, self.one)
        self.barrier.complete(self.map.bytes)


class Store(Copy):
    """A box from shared memory."""

    def __init__(self, group, one, tensor_map: TensorMap, first, place: int) -> None:
        self.places = _places(group, one, tensor_map, place)
        warps = [int(x) for x in np.unique(active_warps(group))]
        group.cta.shared.check_fenced(self.places, warps, one)
        self.rows = tensor_map.rows(first)
        super().__init__(group, one)

    def move(self) -> None:
        addresses, exists, inside = self.rows
        if exists.any() and inside.stop > inside.start:
            rows = self.cta.shared.bytes[self.places][exists][:, inside]
            found = _by_bytes(addresses[exists], inside.stop - inside.start)
            self.cta.machine.memory.store(found.ravel(), rows.reshape(-1, 1), self.one)


def _places(group, one: Instruction, tensor_map: TensorMap, place: int) -> np.ndarray:
    if place % ALIGNMENT:
        raise MemoryFault(f"{one}: {place:#x} is no multiple of {ALIGNMENT} bytes")
    if tensor_map.swizzle and tensor_map.swizzle != tensor_map.box[0] * tensor_map.element:
        raise unknown(one, f"swizzle of {tensor_map.swizzle} bytes for other rows")
    found = swizzled(place + tensor_map.offsets(), tensor_map.swizzle)
    group.cta.shared.places(np.array([found.min(), found.max()]), 1, one)
    return found


def _by_bytes(addresses: np.ndarray, count: int) -> np.ndarray:
    return addresses[:, None] + np.arange(count, dtype=np.uint64)


@instruction("cp")
def copy(code: Program, one: Instruction) -> Step:
    """cp.async in all its forms, but for waits."""
    if one.modifiers[:3] == ("async", "bulk", "tensor"):
        return _bulk_tensor(code, one)
    if one.modifiers == ("async", "bulk", "commit_group"):
        return _commit("bulk", "bulk_groups")
    if one.modifiers == ("async", "commit_group"):
        return _commit("copies", "groups")
    if one.modifiers[:3] == ("async", "mbarrier", "arrive"):
        return _arrive_later(code, one)
    left = [x for x in one.modifiers if x not in IGNORED]
    if left != ["async", "shared", "global"] and left != ["async", "shared::cta", "global"]:
        raise unknown(one, *left)
    return _copy_by_threads(code, one)


def _bulk_tensor(code: Program, one: Instruction) -> Step:
    target, source, *barrier = one.operands
    is_load = bool(barrier)
    kinds = {"1d", "2d", "3d", "4d", "5d", "tile", "shared::cluster", "shared::cta", "global"}
    kinds |= {"mbarrier::complete_tx::bytes", "bulk_group", "L2::cache_hint"}
    if left := set(one.modifiers[3:]) - kinds:
        raise unknown(one, *left)
    in_global, in_shared = (source, target) if is_load else (target, source)
    map_slot = address_slot(code, in_global)
    place_slot = address_slot(code, in_shared)
    coordinates = code.sources(in_global.coordinates.items, "s32")
    barrier_slot = address_slot(code, barrier[0]) if is_load else None

    def step(r, group):
        warps = active_warps(group)
        for n in range(len(warps)):  # mostly of one thread
            tensor_map = group.cta.machine.tensor_maps.get(
                int(addresses_of(r, *map_slot, group)[n])
            )
            if tensor_map is None:
                raise MemoryFault(f"{one}: no tensor map is at this address")
            first = tuple(int(active(r[x], group)[n]) for x in coordinates)
            place = int(addresses_of(r, *place_slot, group)[n])
            if is_load:
                at = int(addresses_of(r, *barrier_slot, group)[n])
                group.cta.shared.check_fenced(np.array([at]), [int(warps[n])], one)
                Load(group, one, tensor_map, first, place, mbarrier_at(group, at, one))
            else:
                made = Store(group, one, tensor_map, first, place)
                group.cta.warps[warps[n]].bulk.append(made)

    return step


def _commit(pending: str, groups: str) -> Step:
    """What a warp has issued becomes a group."""

    def step(r, group):
        for warp in group.warps:
            getattr(warp, groups).append(list(getattr(warp, pending)))
            getattr(warp, pending).clear()

    return step


@waiting("cp.async.bulk.wait_group", "cp.async.wait_group", "cp.async.wait_all")
def wait_group(code: Program, one: Instruction) -> Wait:
    """Completes all groups but the newest; of bulk copies, those that only have to read, too."""
    name = "bulk_groups" if "bulk" in one.modifiers else "groups"
    count = one.operands[0].value if one.operands else 0

    def wait(r, group, warp):
        groups = getattr(warp, name)
        if one.modifiers[-1] == "wait_all":
            groups.append(list(warp.copies))
            warp.copies.clear()
        while len(groups) > count:
            for made in groups.pop(0):
                made.complete()

    return wait


class ThreadCopy(Copy):
    """A cp.async of some lanes of one warp; those before it complete first."""

    def __init__(self, group, warp, one, places: np.ndarray, sources, counts: np.ndarray) -> None:
        self.warp, self.places, self.sources, self.counts = warp, places, sources, counts
        self.before = list(warp.copies)
        warp.copies.append(self)
        super().__init__(group, one)
        self.put(np.full((len(places), sources[1]), POISON, np.uint8))

    def put(self, data: np.ndarray) -> None:
        """Into shared memory, as a thread does or, unless the machine is strict, as TMA does."""
        shared, size = self.cta.shared, data.shape[1]
        if self.cta.machine.strict:
            shared.store(self.places, data, self.one, np.full(len(data), self.warp.index))
        else:
            shared.store_by_proxy(shared.places(self.places, size, self.one), data, self.one)

    def move(self) -> None:
        for other in self.before:
            other.complete()
        addresses, size = self.sources
        data = np.zeros((len(addresses), size), np.uint8)
        for count in np.unique(self.counts[self.counts > 0]):
            which = self.counts == count
            whole = addresses[which].astype(np.uint64)
            if (whole % np.uint64(size)).any():
                raise MemoryFault(f"{self.one}: a source is no multiple of {size} bytes")
            found = _by_bytes(whole, int(count))
            memory = self.cta.machine.memory
            data[which, :count] = memory.load(found.ravel(), 1, self.one).reshape(found.shape)
        self.put(data)


def _copy_by_threads(code: Program, one: Instruction) -> Step:
    target, source, size, *more = one.operands
    to, from_ = address_slot(code, target), address_slot(code, source)
    if len(more) > 1 or size.value not in (4, 8, 16):
        raise unknown(one)
    count_slot = code.slots.read(more[0], "u32") if more else None

    def step(r, group):
        places, addresses = addresses_of(r, *to, group), addresses_of(r, *from_, group)
        counts = np.full(len(places), size.value)
        if count_slot is not None:
            counts = active(r[count_slot], group).astype(np.int64)
        if (counts > size.value).any():
            raise MemoryFault(f"{one}: more bytes than {size.value}")
        warps = active_warps(group)
        for warp in group.warps:
            of = warps == warp.index
            if of.any():
                sources = addresses[of], size.value
                ThreadCopy(group, warp, one, places[of], sources, counts[of])

    return step


class LaterArrival(Copy):
    """Arrivals at mbarriers once the warp's copies before it are complete."""

    def __init__(self, group, warp, one, barriers: list[Any]) -> None:
        self.before, self.barriers = list(warp.copies), barriers
        for groups in warp.groups:
            self.before += groups
        warp.copies.append(self)
        super().__init__(group, one)

    def move(self) -> None:
        for other in self.before:
            other.complete()
        for barrier in self.barriers:
            barrier.arrive(1, self.one)


def _arrive_later(code: Program, one: Instruction) -> Step:
    if "noinc" not in one.modifiers:
        raise unknown(one, *one.modifiers)
    base, offset = address_slot(code, one.operands[0])

    def step(r, group):
        at, warps = addresses_of(r, base, offset, group), active_warps(group)
        for warp in group.warps:
            barriers = [mbarrier_at(group, x, one) for x in at[warps == warp.index].tolist()]
            warp.copies = [x for x in warp.copies if not x.is_done]
            if barriers and (warp.copies or any(warp.groups)):
                LaterArrival(group, warp, one, barriers)
            else:
                for barrier in barriers:
                    barrier.arrive(1, one)

    return step
