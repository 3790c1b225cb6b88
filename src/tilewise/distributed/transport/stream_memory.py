"""Writes and copies of the driver, in the order of a stream: writes of a number without an SM, and
copies without what torch does around each.

A kernel that fills the GPU may wait for such a number: it is written by the stream's own engine,
behind a fence of system scope, so that what reads it sees the copies before it, too (CUDA driver
API, cuStreamWriteValue32). A kernel that writes it would need an SM, which all may be waiting.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any

import torch

from ...errors import warn_slow
from ...kernels.common.building import on_device

Tensor = torch.Tensor
Writer = Callable[[int, int, int], None]  # a stream, an address, a number of 32 bits
Copier = Callable[[int, int, int, int], None]  # a stream, to and from where, bytes
WRITE = "cuStreamWriteValue32_v2", (ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint)
COPY = "cuMemcpyDtoDAsync_v2", (ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t)


def writer_of(words: Tensor) -> Writer | None:
    """Returns a checked writer on the device of `words`, int32; else None, with a warning."""

    def check(write: Writer, stream: int) -> None:
        for number in (7, 0):
            write(stream, words.data_ptr(), number)
            _check(words, 0, number=number)

    remedy = "attention begins when all keys have arrived"
    return _checked(_writer, check, words=words, otherwise=remedy)


def copier_of(words: Tensor) -> Copier | None:
    """Returns a checked copier on the device of `words`; else None, with a warning."""

    def check(copy: Copier, stream: int) -> None:
        for number in (7, 0):
            words[0] = number
            copy(stream, words.data_ptr() + words.itemsize, words.data_ptr(), words.itemsize)
            _check(words, 1, number=number)

    remedy = "torch copies what is pulled, which costs the host more"
    return _checked(_copier, check, words=words, otherwise=remedy)


def _checked(
    load: Callable[[], Any], check: Callable[[Any, int], None], *, words: Tensor, otherwise: str
) -> Any:
    """Loads and checks a call of the driver; None, with a warning, where that fails."""
    try:
        call = load()
        with on_device(words.device):
            check(call, torch.cuda.current_stream(words.device).cuda_stream)
        return call
    except (OSError, AttributeError, RuntimeError) as error:
        warn_slow(f"tilewise.distributed: a call of the driver fails ({error}): {otherwise}")
        return None


def _check(words: Tensor, place: int, *, number: int) -> None:
    torch.cuda.current_stream(words.device).synchronize()
    if int(words[place]) != number:
        raise RuntimeError("it has no effect")


@functools.cache
def _writer() -> Writer:
    """Loads cuStreamWriteValue32; OSError or AttributeError where the driver has none."""
    call = _driver(WRITE[0], ctypes.c_void_p, *WRITE[1])

    def write(stream: int, address: int, number: int) -> None:
        if status := call(stream, address, number, 0):  # 0: behind a fence
            raise RuntimeError(f"{WRITE[0]}: CUDA error {status}")

    return write


@functools.cache
def _copier() -> Copier:
    """Loads cuMemcpyDtoDAsync, between addresses of one device's map, with peers' memory."""
    call = _driver(COPY[0], *COPY[1], ctypes.c_void_p)

    def copy(stream: int, to: int, source: int, nbytes: int) -> None:
        if status := call(to, source, nbytes, stream):
            raise RuntimeError(f"{COPY[0]}: CUDA error {status}")

    return copy


def _driver(name: str, *types: Any) -> Any:
    call = getattr(ctypes.CDLL("libcuda.so.1"), name)
    call.argtypes, call.restype = types, ctypes.c_int
    return call
