"""Calls as a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

WARM_UP = 3  # calls that compile, and allocate what is kept


class Replayed:
    """A CUDA graph of several calls, which hold the tensors that it reads."""

    def __init__(self, calls: Sequence[Callable[[], Any]]) -> None:
        self.calls = calls
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM_UP):
                calls[0]()
        torch.cuda.current_stream().wait_stream(stream)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.outs = [call() for call in calls]

    def __call__(self) -> list[Any]:
        self.graph.replay()
        return self.outs
