"""Steps of one shape, each a CUDA graph on a GPU: a launch from Python takes longer than a small
layer runs.

A graph is captured once for a number of tokens and of rows, and replayed for every step that has no
more of them. What changes, lengths, page tables, how many tokens each request has, is in tensors
that the kernels read on the device. Rows without a request have no queries and no keys; tokens
behind the last request belong to none: they are computed with the others, and neither cached nor
read.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from .batch import NO_PAGE, Batch
from .model import PagedLlama

Tensor = torch.Tensor


class Captured(NamedTuple):
    """A graph, and what its replay writes."""

    graph: torch.cuda.CUDAGraph
    logits: Tensor


class PaddedStep:
    """The step of up to `tokens` tokens of up to `rows` requests, computed for so many."""

    def __init__(self, model: PagedLlama, tokens: int, rows: int, device: str) -> None:
        def integers(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(*shape, dtype=dtype, device=device)

        self.model, self.tokens, self.rows = model, tokens, rows
        self.inputs = Batch(
            integers(tokens, dtype=torch.int64),
            integers(tokens, dtype=torch.int64),
            integers(rows + 1),
            integers(rows),
            integers(rows, model.width).fill_(NO_PAGE),
        )
        self.captured: Captured | None = None

    def fits(self, batch: Batch) -> bool:
        """Whether it has room for a step."""
        return len(batch.ids) <= self.tokens and len(batch.seqused_k) <= self.rows

    def step(self, batch: Batch) -> Tensor:
        """Logits of the token after each chunk, (batch, vocabulary)."""
        tokens, rows = len(batch.ids), len(batch.seqused_k)
        for padded, given in zip(self.inputs, batch):
            padded[: len(given)].copy_(given)
        self.inputs.cu_seqlens_q[rows + 1 :].fill_(tokens)
        self.inputs.seqused_k[rows:].zero_()
        if not self.inputs.ids.is_cuda:
            return self.model.step(self.inputs)[:rows]
        if self.captured is None:
            self.captured = self._capture()
        self.captured.graph.replay()
        return self.captured.logits[:rows]

    def _capture(self) -> Captured:
        """After a step that compiles what has to be; it caches what the first replay caches again,
        in the same places.
        """
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self.model.step(self.inputs)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            logits = self.model.step(self.inputs)
        return Captured(graph, logits)


class PaddedSteps:
    """Two of them: of one token a request, as most steps are, and of as many as a step may have."""

    def __init__(self, model: PagedLlama, max_tokens: int, rows: int, device: str) -> None:
        rows = min(rows, max_tokens)
        sizes = sorted({rows, max_tokens})
        self.width = model.width
        self.sizes = [PaddedStep(model, tokens, rows, device) for tokens in sizes]

    def step(self, batch: Batch) -> Tensor:
        """Logits of the token after each chunk, (batch, vocabulary)."""
        return next(size for size in self.sizes if size.fits(batch)).step(batch)
