"""Writes and copies of the driver, in the order of a stream: writes of a number without an SM, and
copies without what torch does around each; and a stream that is current for them.

A kernel that fills the GPU may wait for such a number: it is written by the stream's own engine,
behind a fence of system scope, so that what reads it sees the copies before it, too (CUDA driver
API, cuStreamWriteValue32). A kernel that writes it would need an SM, which all may be waiting.
"""

from __future__ import annotations

import ctypes
import struct
from typing import Any

import torch

from ...errors import warn_slow
from ...kernels.common.building import on_device

Tensor = torch.Tensor
WRITE = "cuStreamWriteValue32_v2", (ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint)
COPY = "cuMemcpyDtoDAsync_v2", (ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t)
COPY_ROWS = "cuMemcpy2DAsync_v2", (ctypes.c_void_p,)
# CUDA_MEMCPY2D: first column and row, kind of memory, on the host, on a device, as an array, pitch
ROWS = struct.Struct("=2QI4x4Q2QI4x4Q2Q")
UNIFIED = 4  # addresses of one device's map, as it is with peers' memory


class Beside:
    """Makes a stream current inside of a guard of its device, after which the stream `before` is.
    `torch.cuda.stream` also looks up what both are, which takes the host longer.
    """

    def __init__(self, guard: Any, stream: Any, before: Any) -> None:
        self.guard = guard
        self.inside, self.after = (
            dict(stream_id=x.stream_id, device_index=x.device_index, device_type=x.device_type)
            for x in (stream, before)
        )

    def __enter__(self) -> None:
        self.guard.__enter__()
        torch._C._cuda_setStream(**self.inside)

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        torch._C._cuda_setStream(**self.after)
        self.guard.__exit__(kind, error, trace)


class Driver:
    """Calls of the driver, whose first argument is a stream. OSError or AttributeError where it has
    none.
    """

    def __init__(self) -> None:
        self._write = _driver(WRITE[0], (ctypes.c_void_p, *WRITE[1]))
        self._copy, self._copy_rows = (
            _driver(name, (*types, ctypes.c_void_p)) for name, types in (COPY, COPY_ROWS)
        )

    def write(self, stream: int, address: int, number: int) -> None:
        """Writes a number of 32 bits to an address."""
        if status := self._write(stream, address, number, 0):  # 0: behind a fence
            raise RuntimeError(f"{WRITE[0]}: CUDA error {status}")

    def copy(
        self, stream: int, to: int, source: int, nbytes: int, rows: int, pitch: int, step: int
    ) -> None:
        """Copies so many bytes of each of the rows, from an address to another."""
        if rows == 1:
            status = self._copy(to, source, nbytes, stream)
        else:
            places = (0, 0, UNIFIED, 0, source, 0, pitch, 0, 0, UNIFIED, 0, to, 0, step)
            status = self._copy_rows(ROWS.pack(*places, nbytes, rows), stream)
        if status:
            raise RuntimeError(f"{COPY[0]}: CUDA error {status}")


def driver_of(words: Tensor) -> Driver | None:
    """Returns calls that work on the device of `words`, int32; else None, with a warning."""
    begin, size = words.data_ptr(), words.itemsize
    try:
        driver = Driver()
        with on_device(words.device):
            stream = torch.cuda.current_stream(words.device)
            raw = stream.cuda_stream
            for number in (7, 0):
                driver.write(raw, begin, number)
                driver.copy(raw, begin + size, begin, size, rows=1, pitch=0, step=0)
                driver.copy(raw, begin + 2 * size, begin, size, rows=2, pitch=size, step=size)
                stream.synchronize()
                if words[:4].tolist() != [number] * 4:
                    raise RuntimeError("it has no effect")
        return driver
    except (OSError, AttributeError, RuntimeError) as error:
        warn_slow(
            f"tilewise.distributed: a call of the driver fails ({error}): torch copies what is "
            "pulled, which costs the host more, and attention begins when all keys have arrived"
        )
        return None


def _driver(name: str, types: tuple[Any, ...]) -> Any:
    call = getattr(ctypes.CDLL("libcuda.so.1"), name)
    call.argtypes, call.restype = types, ctypes.c_int
    return call
