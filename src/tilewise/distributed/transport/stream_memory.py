"""Writes and copies of the driver, in the order of a stream: writes of a number without an SM, and
copies without what torch does around each; and a stream that is current for them.

A kernel that fills the GPU may wait for such a number: it is written by the stream's own engine,
behind a fence of system scope, so that what reads it sees the copies before it, too (CUDA driver
API, cuStreamWriteValue32). A kernel that writes it would need an SM, which all may be waiting.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ...errors import warn_slow
from ...kernels.common.building import on_device

Tensor = torch.Tensor
Writer = Callable[[int, int, int], None]  # a stream, an address, a number of 32 bits
Copier = Callable[[int, int, int, int], None]  # a stream, to and from where, bytes
WRITE = "cuStreamWriteValue32_v2", (ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint)
COPY = "cuMemcpyDtoDAsync_v2", (ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t)


@contextlib.contextmanager
def beside(stream: Any, before: Any) -> Iterator[None]:
    """Makes a stream of the current device current inside, after which the stream `before` is.
    `torch.cuda.stream` also looks up what both are, which takes the host longer.
    """
    inside, after = (
        dict(stream_id=x.stream_id, device_index=x.device_index, device_type=x.device_type)
        for x in (stream, before)
    )
    torch._C._cuda_setStream(**inside)
    try:
        yield
    finally:
        torch._C._cuda_setStream(**after)


def writer_of(words: Tensor) -> Writer | None:
    """Returns a checked writer on the device of `words`, int32; else None, with a warning."""

    def check(write: Writer, stream: int, number: int) -> Tensor:
        write(stream, words.data_ptr(), number)
        return words[0]

    remedy = "attention begins when all keys have arrived"
    return _checked(_writer, check, device=words.device, otherwise=remedy)


def copier_of(words: Tensor) -> Copier | None:
    """Returns a checked copier on the device of `words`; else None, with a warning."""

    def check(copy: Copier, stream: int, number: int) -> Tensor:
        words[0] = number
        copy(stream, words.data_ptr() + words.itemsize, words.data_ptr(), words.itemsize)
        return words[1]

    remedy = "torch copies what is pulled, which costs the host more"
    return _checked(_copier, check, device=words.device, otherwise=remedy)


def _checked(
    load: Callable[[], Any],
    check: Callable[[Any, int, int], Tensor],
    *,
    device: torch.device,
    otherwise: str,
) -> Any:
    """Loads a call of the driver, and checks what it writes; None, with a warning, if it fails."""
    try:
        call = load()
        with on_device(device):
            stream = torch.cuda.current_stream(device)
            for number in (7, 0):
                value = check(call, stream.cuda_stream, number)
                stream.synchronize()
                if int(value) != number:
                    raise RuntimeError("it has no effect")
        return call
    except (OSError, AttributeError, RuntimeError) as error:
        warn_slow(f"tilewise.distributed: a call of the driver fails ({error}): {otherwise}")
        return None


@functools.cache
def _writer() -> Writer:
    """Loads cuStreamWriteValue32; OSError or AttributeError where the driver has none."""
    call = _driver(WRITE[0], (ctypes.c_void_p, *WRITE[1]))

    def write(stream: int, address: int, number: int) -> None:
        if status := call(stream, address, number, 0):  # 0: behind a fence
            raise RuntimeError(f"{WRITE[0]}: CUDA error {status}")

    return write


@functools.cache
def _copier() -> Copier:
    """Loads cuMemcpyDtoDAsync, between addresses of one device's map, with peers' memory."""
    call = _driver(COPY[0], (*COPY[1], ctypes.c_void_p))

    def copy(stream: int, to: int, source: int, nbytes: int) -> None:
        if status := call(to, source, nbytes, stream):
            raise RuntimeError(f"{COPY[0]}: CUDA error {status}")

    return copy


def _driver(name: str, types: tuple[Any, ...]) -> Any:
    call = getattr(ctypes.CDLL("libcuda.so.1"), name)
    call.argtypes, call.restype = types, ctypes.c_int
    return call
