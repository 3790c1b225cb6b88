"""Tensors that are made once and kept for as long as the process lives."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch

Tensor = torch.Tensor
ONES = 2**14  # of a device: 64 KB

_kept: list[Tensor] = []  # a launch or a captured graph may still read any
_ones: dict[int, Tensor] = {}


def kept(make: Callable[[], Tensor], index: int) -> Tensor:
    """What `make` returns, on device `index`, to be used by any stream from now on.

    Another thread makes it: memory of this one may come from a pool, such as that of the graphs of
    torch.compile(mode="reduce-overhead"), which refuses what a first call there keeps, or hands it
    out again.
    """

    def made() -> Tensor:
        tensor = make()
        if tensor.is_cuda:
            torch.cuda.current_stream(index).synchronize()
        return tensor

    with ThreadPoolExecutor(1) as other:
        tensor = other.submit(made).result()
    _kept.append(tensor)
    return tensor


def ones(count: int, device: torch.device) -> Tensor | None:
    """Ones in fp32, not to be written, without a launch. None where they are very many, and while
    a graph is captured before any were made.
    """
    index = torch.cuda.current_device() if device.index is None else device.index
    if index not in _ones:
        if torch._C._cuda_isCurrentStreamCapturing():
            return None
        where = torch.device(device.type, index)
        _ones[index] = kept(lambda: torch.ones(ONES, dtype=torch.float32, device=where), index)
    return _ones[index][:count] if count <= ONES else None
