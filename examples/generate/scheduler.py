"""Continuous batching: in each step, which tokens of which requests are computed.

A step is one forward over at most `max_tokens` tokens. The oldest request comes first; each takes
the tokens whose keys are not cached yet: one while it decodes, a chunk of its prompt before. So
decodes and chunks of prefill share a step, a request that ends leaves at once, and the next one
takes its place (Orca, Yu et al. 2022; chunks: Sarathi, Agrawal et al. 2023).

Pages are handed out as keys are written. Where none is free, the youngest request is preempted: it
gives its pages back, waits at the head of the queue, and is computed again, prompt and generated
tokens, when there is room. The oldest request always gets on, so every request ends.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from .pages import Pages
from .requests import Request


class Chunk(NamedTuple):
    """Tokens [first, last) of a request, computed in one step."""

    request: Request
    first: int
    last: int

    @property
    def is_prefill(self) -> bool:
        """Whether it has more than the one token of a decode."""
        return self.last - self.first > 1


class Scheduler:
    """A queue of requests that wait, and those that run, the oldest first."""

    def __init__(self, pages: Pages, max_tokens: int) -> None:
        self.pages, self.max_tokens = pages, max_tokens
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []

    def add(self, request: Request) -> None:
        """Puts a request at the end of the queue."""
        needed = self.pages.needed(request.longest)
        if needed > self.pages.count:
            raise ValueError(
                f"a request of {request.longest} keys needs {needed} pages and the pool has "
                f"{self.pages.count}: make the pool larger"
            )
        self.waiting.append(request)

    def plan(self) -> list[Chunk]:
        """The chunks of the next step, with pages for their keys."""
        chunks: list[Chunk] = []
        budget = self.max_tokens
        was_full = False
        for request in list(self.running):
            last = min(request.length, request.cached + budget)
            if request not in self.running or last == request.cached:
                continue
            while not self.pages.extend(request.pages, last):
                was_full = True
                if self._preempt() is request:
                    break
            else:
                chunks.append(Chunk(request, request.cached, last))
                budget -= last - request.cached
        while self.waiting and budget and not was_full:
            request = self.waiting[0]
            if self.pages.needed(request.length) > self.pages.free:
                break
            last = min(request.length, budget)
            self.pages.extend(request.pages, last)
            self.running.append(self.waiting.popleft())
            chunks.append(Chunk(request, 0, last))
            budget -= last
        return chunks

    def _preempt(self) -> Request:
        """Sends the youngest request back to the queue."""
        request = self.running.pop()
        self.pages.release(request.pages)
        request.cached = 0
        request.preemptions += 1
        self.waiting.appendleft(request)
        return request

    def record(self, chunks: list[Chunk], tokens: list[int], logits: list[float]) -> list[Request]:
        """Takes what a step computed: keys of every chunk, and the next token where a chunk reached
        the end of what was known. Requests that are done leave, and are returned.
        """
        done = []
        for chunk, token, logit in zip(chunks, tokens, logits, strict=True):
            request = chunk.request
            request.cached = chunk.last
            if chunk.last < request.length:
                continue
            request.generated.append(token)
            request.logits.append(logit)
            if request.is_done:
                self.running.remove(request)
                self.pages.release(request.pages)
                done.append(request)
        return done
