"""Launches straight to the driver. A kernel's parameters lie in memory that is kept from launch to
launch, and of which only the stream and what moves is written again. Triton's launcher reads every
argument out of Python's tuples: most of the time that a short call takes.

The driver says how large each parameter is, which must agree with the types that the kernel was
compiled for. Where it does not, or the driver does not say, Triton's launcher is called as before,
and so it is for a launch that the driver refuses: by a thread without a context, which it makes.
"""

from __future__ import annotations

import ctypes
import functools
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from .operand import Gap

NUMBERS = {"i1": "b", "i8": "b", "i16": "h", "i32": "i", "i64": "q"}
NUMBERS |= {"u1": "B", "u8": "B", "u16": "H", "u32": "I", "u64": "Q", "fp32": "f", "fp64": "d"}
POINTER, MAP = "pointer", "map"  # a TMA descriptor
MOVING = "moving"
MAP_BYTES = 128
NUMBERS |= {POINTER: "Q", MAP: f"{MAP_BYTES}s"}
# CUlaunchConfig: grid, block, shared memory; the stream; where attributes are, and how many
CONFIG = struct.Struct("=7I4xQQI4x")
STREAM = 32  # its place
# CUlaunchAttribute: that the kernel may begin before the one in front of it has ended
EARLY = struct.pack("=I4xI60x", 6, 1)


@functools.lru_cache(maxsize=1)
def driver() -> Any:
    """The library, or None where it has not got these functions: before CUDA 12.4."""
    address = ctypes.c_void_p
    try:
        library = ctypes.CDLL("libcuda.so.1")
        library.cuLaunchKernelEx.argtypes = (address,) * 4
        library.cuFuncGetParamInfo.argtypes = (address, ctypes.c_size_t, address, address)
    except (OSError, AttributeError):
        return None
    return library


class Map(bytes):
    """A descriptor's bytes, and Triton's object of them."""

    tensor_map: Any


def map_of(tensor_map: Any) -> Map | None:
    """The bytes lie behind the head of Triton's object; None of others."""
    if type(tensor_map).__basicsize__ != 2 * MAP_BYTES or id(tensor_map) % MAP_BYTES:
        return None
    descriptor = Map(ctypes.string_at(id(tensor_map) + MAP_BYTES, MAP_BYTES))
    descriptor.tensor_map = tensor_map
    return descriptor


class Packed:
    """A launch: called with a stream, and a number or a `Map` for each of what moves."""

    def __init__(
        self,
        launch: Callable[..., int],
        function: int,
        config: tuple[int, ...],
        moving: Sequence[str],
        parameters: Sequence[tuple[str, Any]],
        otherwise: Callable[..., None],
        is_early: bool,
    ) -> None:
        """`moving` are the types of what moves; a parameter is a type and its number, or MOVING
        and which one of those it is. `is_early`: it is launched with EARLY.
        """
        self.launch, self.function, self.otherwise = launch, function, otherwise
        values = "".join(NUMBERS[x] for x in moving)
        self.pack = struct.Struct(f"=QQI4x{values}").pack_into
        sizes = [struct.calcsize(NUMBERS[x]) for x in moving]
        fixed = CONFIG.size + sum(sizes)
        pointers = fixed + 8 * len(parameters)
        end = pointers + 8 * len(parameters)
        self.memory = ctypes.create_string_buffer(end + len(EARLY))
        self.memory[end:] = EARLY
        start = ctypes.addressof(self.memory)
        self.attributes, self.attribute_count = (start + end, 1) if is_early else (0, 0)
        self.config, self.pointers = start, start + pointers
        CONFIG.pack_into(self.memory, 0, *config, 0, 0, 0)
        for n, (kind, value) in enumerate(parameters):
            offset = fixed + 8 * n
            if kind == MOVING:
                offset = CONFIG.size + sum(sizes[:value])
            else:
                struct.pack_into(NUMBERS[kind], self.memory, offset, value)
            struct.pack_into("=Q", self.memory, pointers + 8 * n, start + offset)
        self.lock = threading.Lock()

    def __call__(self, stream: int, values: Sequence[Any]) -> None:
        if self.lock.acquire(False):  # else another thread is here, or a signal's handler
            try:
                attributes = self.attributes, self.attribute_count
                self.pack(self.memory, STREAM, stream, *attributes, *values)
                failed = self.launch(self.config, self.function, self.pointers, None)
            finally:
                self.lock.release()
            if not failed:
                return
        self.otherwise(stream, [x.tensor_map if type(x) is Map else x for x in values])


def packed(
    compiled: Any, programs: int, args: tuple, names: Sequence[str], otherwise: Callable[..., None]
) -> Packed | None:
    """A kernel's launch with all its arguments, constants too, of which the gaps with these names
    move. None where the driver does not agree.
    """
    libcuda = driver()
    metadata = getattr(compiled, "packed_metadata", None)
    if libcuda is None or type(metadata) is not tuple or len(metadata) != 3:
        return None
    run, (warps, blocks, shared) = compiled.run, metadata
    if blocks != 1 or run.launch_cooperative_grid or not programs:
        return None
    if run.global_scratch_size or run.profile_scratch_size:  # memory of Triton's for each launch
        return None
    places = {name: place for place, name in enumerate(names)}
    moving, parameters = [POINTER] * len(names), []
    for kind, item in flat(tuple(compiled.src.signature.values()), iter(args)):
        place = places.get(item.name) if isinstance(item, Gap) else None
        if place is not None and kind in NUMBERS:
            parameters.append((MOVING, place))
            moving[place] = kind
        elif item is None and kind == POINTER:
            parameters.append((POINTER, 0))
        elif kind in NUMBERS and isinstance(item, (bool, int, float)):
            parameters.append((kind, item))
        elif kind != "constexpr":
            return None
    sizes = [sized(kind, value, moving) for kind, value in parameters]
    reported = sizes_of(compiled.function, libcuda)
    scratch = reported[len(sizes) :]  # of no bytes: null
    if reported[: len(sizes)] != sizes or any(size != 8 for size in scratch):
        return None
    parameters += [(POINTER, 0)] * len(scratch)
    config = programs, 1, 1, 32 * warps, 1, 1, shared
    launch = libcuda.cuLaunchKernelEx
    is_early = bool(run.launch_pdl)
    return Packed(launch, compiled.function, config, moving, parameters, otherwise, is_early)


def sized(kind: str, value: Any, moving: Sequence[str]) -> int:
    """Bytes of a parameter."""
    kind = moving[value] if kind == MOVING else kind
    return struct.calcsize(NUMBERS[kind])


def sizes_of(function: int, libcuda: Any) -> list[int]:
    """Sizes of all parameters of a kernel, as the driver knows them."""
    sizes: list[int] = []
    offset, size = ctypes.c_size_t(), ctypes.c_size_t()
    at_offset, at_size = ctypes.byref(offset), ctypes.byref(size)
    while not libcuda.cuFuncGetParamInfo(function, len(sizes), at_offset, at_size):
        sizes.append(size.value)
    return sizes


def flat(kinds: tuple, args: Iterator[Any]) -> Iterator[tuple[str, Any]]:
    """The types of what a kernel is passed, and the arguments, of which descriptors have been taken
    apart.
    """
    for kind in kinds:
        if isinstance(kind, tuple):
            yield from flat(kind, iter(next(args)))
        elif kind.startswith("tensordesc"):
            yield MAP, next(args)
            dimensions = kind.partition("[")[2].partition("]")[0].count(",") + 1
            for part in ("i32",) * dimensions + ("i64",) * dimensions:
                yield part, next(args)
        else:
            yield (POINTER if kind.startswith("*") else kind), next(args)
