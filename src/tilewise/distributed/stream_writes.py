"""Writes of a number into a GPU's memory in the order of a stream, by the driver and without an SM.

A kernel that fills the GPU may wait for such a number: it is written by the stream's own engine,
behind a fence of system scope, so that what reads it sees the copies before it, too (CUDA driver
API, cuStreamWriteValue32). A kernel that writes it would need an SM, which all may be waiting.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

import torch

from ..errors import warn_slow
from ..kernels.common.building import on_device

Tensor = torch.Tensor
Writer = Callable[[int, int, int], None]  # a stream, an address, a number of 32 bits


def writer_of(words: Tensor) -> Writer | None:
    """What writes on the device of `words`, int32, once it has been seen to; else None, with a
    warning.
    """
    try:
        write = _driver()
        stream = torch.cuda.current_stream(words.device)
        for number in (7, 0):
            with on_device(words.device):
                write(stream.cuda_stream, words.data_ptr(), number)
            stream.synchronize()
            if int(words[0]) != number:
                raise RuntimeError("cuStreamWriteValue32 wrote nothing")
        return write
    except (OSError, AttributeError, RuntimeError) as error:
        warn_slow(
            f"tilewise.distributed: the driver writes no numbers in the order of a stream ({error})"
            ": attention begins when all keys have arrived"
        )
        return None


@functools.cache
def _driver() -> Writer:
    """cuStreamWriteValue32, for the current device; OSError or AttributeError where the driver has
    none.
    """
    call = ctypes.CDLL("libcuda.so.1").cuStreamWriteValue32_v2
    call.argtypes = ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint
    call.restype = ctypes.c_int

    def write(stream: int, address: int, number: int) -> None:
        if status := call(stream, address, number, 0):  # 0: behind a fence
            raise RuntimeError(f"cuStreamWriteValue32 failed with CUDA error {status}")

    return write
