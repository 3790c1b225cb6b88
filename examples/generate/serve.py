"""The loop of a server: requests arrive, steps are planned, computed and recorded."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Protocol

import torch

from .batch import Batch, batch_of
from .requests import Request
from .scheduler import Scheduler


class Steps(Protocol):
    """A model over a paged cache."""

    width: int  # of a row of its page table

    def step(self, batch: Batch) -> torch.Tensor:
        """Logits of the token after each chunk, (batch, vocabulary)."""
        ...


@dataclass
class Served:
    """What it took."""

    steps: int = 0
    mixed_steps: int = 0  # with decodes beside chunks of prefill
    computed_tokens: int = 0
    most_pages: int = 0
    most_requests: int = 0
    seconds: float = 0.0


def serve(model: Steps, scheduler: Scheduler, requests: list[Request], device: str) -> Served:
    """Serves requests from the first to arrive to the last to end."""
    coming = sorted(requests, key=lambda request: request.arrival)
    served, now, start = Served(), 0, time.perf_counter()
    while coming or scheduler.waiting or scheduler.running:
        while coming and coming[0].arrival <= now:
            scheduler.add(coming.pop(0))
        chunks = scheduler.plan()
        if chunks:
            best = model.step(batch_of(chunks, model.width, device)).max(-1)
            count(served, scheduler, chunks)
            found = best.indices.tolist(), best.values.tolist()  # the step's only wait
            for request in scheduler.record(chunks, *found):
                request.ended = now
        now += 1
    served.seconds = time.perf_counter() - start
    return served


def warm_up(model: Steps, scheduler: Scheduler, device: str) -> None:
    """A short request, so that no kernel is compiled in what is timed."""
    serve(model, scheduler, [Request([1] * scheduler.pages.page_size, 2)], device)


def count(served: Served, scheduler: Scheduler, chunks: list) -> None:
    """Adds a step to what it took."""
    served.steps += 1
    served.mixed_steps += len({chunk.is_prefill for chunk in chunks}) == 2
    served.computed_tokens += sum(chunk.last - chunk.first for chunk in chunks)
    pages = scheduler.pages
    served.most_pages = max(served.most_pages, pages.count - pages.free)
    served.most_requests = max(served.most_requests, len(chunks))
