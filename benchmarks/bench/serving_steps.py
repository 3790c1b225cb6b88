"""The steps of a server under load: which tokens of which requests each of them computes.

The example's scheduler plans them (`examples.generate`): requests arrive one after the other, long
prompts come in chunks, and decodes share steps with them. What a step needs to know is kept in
tensors of the host, so that all providers run the same steps.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from examples.generate.batch import Batch
from examples.generate.pages import Pages
from examples.generate.requests import Request
from examples.generate.scheduler import Scheduler
from examples.generate.serve import serve

Tensor = torch.Tensor
NOWHERE = -1  # the slot of a token that only fills a graph


class Serving(NamedTuple):
    """A load, and the model that serves it. `part` is what a step computes: "attention", appends
    and attention alone, or "model", with norms, projections and the MLP of each layer.
    """

    part: str
    requests: int
    prompts: tuple[int, int]  # the shortest and the longest prompt
    answers: tuple[int, int]  # the fewest and the most tokens that follow
    every: int  # steps between two arrivals
    chunk: int  # tokens that a step computes at most
    page_size: int
    layers: int
    nheads: int
    nheads_k: int
    headdim: int
    intermediate: int  # of the MLP
    dtype: str = "bfloat16"

    @property
    def hidden(self) -> int:
        """Features of a token between the layers."""
        return self.nheads * self.headdim

    def __str__(self) -> str:
        heads = f"H{self.nheads}:{self.nheads_k} D{self.headdim}"
        load = f"{self.requests} requests, chunks of {self.chunk}, pages of {self.page_size}"
        return f"serving, {self.part}: {self.layers} layers {heads} {self.dtype}, {load}"


class Step(NamedTuple):
    """A step's tokens, on the host."""

    starts: Tensor  # int32 (rows + 1,), where the tokens of each request begin
    used: Tensor  # int32 (rows,), keys of each request, with those of this step
    table: Tensor  # int32 (rows, width), its pages; 0 past its end, as vLLM has it
    slots: Tensor  # int64 (tokens,), where keys and values are written
    most_queries: int

    @property
    def rows(self) -> int:
        """How many requests it serves."""
        return len(self.used)

    @property
    def tokens(self) -> int:
        """How many tokens it computes."""
        return len(self.slots)

    @property
    def is_decode(self) -> bool:
        """Whether each request has one token."""
        return self.most_queries == 1


class Plan(NamedTuple):
    """The steps of a load, and what a cache needs for them."""

    steps: list[Step]
    pages: int
    width: int  # of a row of the page table
    answered: int  # tokens that followed the prompts

    @property
    def tokens(self) -> int:
        """How many tokens are computed in all."""
        return sum(step.tokens for step in self.steps)


class Recorder:
    """Stands in for the example's model: keeps each step and says any next token."""

    def __init__(self, width: int, page_size: int) -> None:
        self.width, self.page_size = width, page_size
        self.steps: list[Step] = []

    def step(self, batch: Batch) -> Tensor:
        """Logits of a vocabulary of one token."""
        counts = batch.cu_seqlens_q.diff()
        rows = torch.repeat_interleave(torch.arange(len(counts)), counts)
        pages = batch.page_table[rows, batch.positions // self.page_size].long()
        slots = pages * self.page_size + batch.positions % self.page_size
        table = batch.page_table.clamp(min=0)
        most = int(counts.max())
        self.steps.append(Step(batch.cu_seqlens_q, batch.seqused_k, table, slots, most))
        return torch.zeros(len(counts), 1)


def plan_of(of: Serving, seed: int = 0) -> Plan:
    """Serves the load on the host. Lengths of prompts are drawn evenly on a logarithmic scale, and
    the pool has room for three quarters of the requests at their longest.
    """
    generator = torch.Generator().manual_seed(seed)

    def draw(least: int, most: int) -> int:
        at = torch.rand((), generator=generator).item()
        return round(math.exp(math.log(least) + at * math.log(most / least)))

    requests = [
        Request([0] * draw(*of.prompts), draw(*of.answers), arrival=of.every * number)
        for number in range(of.requests)
    ]
    answered = sum(request.new_tokens for request in requests)
    needed = [-(-request.longest // of.page_size) for request in requests]
    pool = Pages(max(3 * sum(needed) // 4, max(needed)), of.page_size)
    recorder = Recorder(max(needed), of.page_size)
    serve(recorder, Scheduler(pool, of.chunk), requests, "cpu")
    return Plan(recorder.steps, pool.count, recorder.width, answered)


def padded(step: Step, rows: int) -> Step:
    """The tensors of a decoding step for a graph of `rows` requests: those that are not there have
    neither a query nor a key, and what is computed for their tokens is written nowhere.
    """
    more = rows - step.rows
    return Step(
        torch.cat([step.starts, step.starts[-1:].expand(more)]),
        torch.nn.functional.pad(step.used, (0, more)),
        torch.nn.functional.pad(step.table, (0, 0, 0, more)),
        torch.nn.functional.pad(step.slots, (0, more), value=NOWHERE),
        most_queries=1,
    )
