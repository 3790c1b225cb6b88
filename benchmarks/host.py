"""What a call costs the host, in microseconds: the time until Python may go on.

On a GPU that is checking, choosing and launching; the kernel runs meanwhile, and nobody waits for
it. A step of decoding launches thousands of times a second, so this bounds it. On a CPU the call's
own work is in it: the shape is kept tiny, and torch has one thread.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from tilewise.bench.providers import Attend, Provider
from tilewise.bench.row import append, stamp
from tilewise.bench.run import Outcome, Ready, Stage, time_ready
from tilewise.bench.shapes import Shape
from tilewise.bench.timer import HostClock

MODES = {
    "no_grad": "eager, no gradient wanted",
    "autograd": "eager forward that records its graph",
    "fwd+bwd": "eager forward, then the gradients",
    "compile": "under torch.compile, no gradient wanted",
    "graph": "replay of a CUDA graph of one call",
}


class Cost(NamedTuple):
    """What a mode of a provider's call costs the host."""

    mode: str
    provider: str
    outcome: Outcome

    @property
    def microseconds(self) -> float | None:
        """The median, if it was timed."""
        return self.outcome.row.median_ms * 1e3 if self.outcome.row else None


def run_host(
    shape: Shape,
    providers: Sequence[Provider],
    modes: Iterable[str] = MODES,
    *,
    device: str = "cpu",
    rounds: int = 7,
    round_ms: float = 20.0,
    save: str | Path | None = None,
) -> list[Cost]:
    """Checks every provider in every mode, then times all in turns."""
    with contextlib.nullcontext() if device.startswith("cuda") else one_thread():
        done = _timed(shape, providers, modes, device, (rounds, round_ms))
    if save is not None:
        append(save, [one.outcome.row for one in done if one.outcome.row is not None])
    return done


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Without threads, which a call of microseconds would only wait for."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _timed(shape: Shape, providers, modes, device: str, timing: tuple[int, float]) -> list[Cost]:
    common = stamp("host", device)
    stages = {
        direction: Stage(shape._replace(direction=direction), device)
        for direction in ("fwd", "fwd+bwd")
    }
    asked = [(mode, one) for mode in modes for one in providers]
    tried = {f"{one.name} {mode}": ready_in(mode, one, stages, device) for mode, one in asked}
    entries = {f"{one.name} {mode}": (_stage_of(mode, stages).shape, one) for mode, one in asked}
    outcomes = time_ready(entries, tried, common, device, *timing, HostClock(device))
    done = []
    for (mode, one), outcome in zip(asked, outcomes):
        if (row := outcome.row) is not None:
            extra = {"mode": mode, "host_us": row.median_ms * 1e3}
            extra |= {} if device.startswith("cuda") else {"threads": 1}
            row = dataclasses.replace(row, tflops=0.0, extra={**row.extra, **extra})
        done.append(Cost(mode, one.name, outcome._replace(row=row)))
    return done


def _stage_of(mode: str, stages: dict[str, Stage]) -> Stage:
    return stages["fwd+bwd" if mode in ("autograd", "fwd+bwd") else "fwd"]


def ready_in(mode: str, one: Provider, stages: dict[str, Stage], device: str) -> Ready | Outcome:
    """A provider in a mode once its result there is right."""
    stage = _stage_of(mode, stages)
    if mode == "graph" and not device.startswith("cuda"):
        return Outcome(stage.shape, one.name, None, refused="CUDA graphs are of CUDA GPUs")
    if mode in WRAPPED:
        wrap = WRAPPED[mode]
        prepare = one.prepare
        one = one._replace(prepare=lambda shape, device: wrap(prepare(shape, device)))
    ready = stage.ready(one)
    if mode == "autograd" and isinstance(ready, Ready):
        attend = one.prepare(stage.shape, device)
        arguments, _ = stage.inputs[one.layout].leaves(stage.shape)
        ready = ready._replace(call=lambda: attend(*arguments))
    return ready


def _compiled(attend: Attend) -> Attend:
    return torch.compile(attend, dynamic=False, fullgraph=True)


class Captured:
    """A call that is captured the first time, for the tensors of that time, and then replayed."""

    def __init__(self, attend: Attend) -> None:
        self.attend = attend
        self.graph: torch.cuda.CUDAGraph | None = None
        self.held: tuple = ()  # the tensors that the graph reads and writes

    def __call__(self, *arguments: torch.Tensor) -> torch.Tensor:
        graph = self._capture(arguments) if self.graph is None else self.graph
        graph.replay()
        return self.held[-1]

    def _capture(self, arguments: tuple[torch.Tensor, ...]) -> torch.cuda.CUDAGraph:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):  # compiles, and allocates what is kept
                self.attend(*arguments)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = self.attend(*arguments)
        self.graph, self.held = graph, (*arguments, out)
        return graph


WRAPPED: dict[str, Callable[[Attend], Attend]] = {"compile": _compiled, "graph": Captured}
