"""`python -m benchmarks host`: what a call costs the host, in microseconds: until Python may go on.

On a GPU that is checking, choosing and launching; the kernel runs meanwhile, and the host does not
wait for it. A step of decoding launches thousands of times a second, so this bounds it. On a CPU
the call's own work is in it: the shape is kept tiny, and torch has one thread.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import click
import torch

from tilewise.cli.explain_tables import plain
from tilewise.cli.options import DTYPES, NameList, OneInt
from tilewise.cli.picture import Axes
from tilewise.cli.tables import console, table
from tilewise.explain.shapes import Shape

from .bench.graphs import Replayed
from .bench.providers import Attend, Provider, chosen_once
from .bench.row import append, stamp
from .bench.run import Outcome, Ready, Stage, time_ready
from .bench.timer import HostClock, one_thread
from .options import (
    HeadList,
    fail_if,
    output_options,
    print_rows,
    providers_of,
    round_options,
    sizes_on,
)
from .pictures import bars

MODES = {
    "no_grad": "eager, no gradient wanted",
    "autograd": "eager forward that records its graph",
    "fwd+bwd": "eager forward, then the gradients",
    "compile": "under torch.compile, no gradient wanted",
    "graph": "replay of a CUDA graph of one call",
}
GPU = dict(seqlen=128, heads=((16, 16, 128),), dtype="bf16")
CPU = dict(seqlen=16, heads=((2, 2, 32),), dtype="fp32")


class Cost(NamedTuple):
    """What a mode of a provider's call costs the host."""

    mode: str
    provider: str
    outcome: Outcome

    @property
    def microseconds(self) -> float | None:
        """The median, if it was timed."""
        return self.outcome.row.median_ms * 1e3 if self.outcome.row else None


@click.command()
@click.option(
    "--modes",
    type=NameList(lambda: MODES),
    default=",".join(MODES),
    help="Of no_grad,autograd,fwd+bwd,compile,graph; all.",
)
@click.option("--batch", type=click.IntRange(1), default=1, show_default=True)
@click.option("--seqlen", type=OneInt(), help="128; on a CPU 16.")
@click.option("--heads", type=HeadList(), help="16x128; on a CPU 2x32. The first counts.")
@click.option("--causal/--full", default=True, show_default=True)
@click.option("--dtype", type=click.Choice(list(DTYPES)), help="bf16; on a CPU fp32.")
@click.option("--provider", "ours", default="tilewise", show_default=True)
@click.option(
    "--against", type=NameList(), default="flash,cudnn", show_default=True, help="As for `bench`."
)
@round_options
@output_options
def host(modes, batch, causal, ours, against, as_json, png, **options) -> None:
    """What a call costs the host: microseconds until Python may go on.

    On a GPU that is checks, choice and launch, and not the kernel's own time; the shape is small,
    so that the queue never fills. On a CPU the work itself is in it, on one thread. Rounds are
    interleaved; each mode's result is held to fp64 first. The backend of torch's own attention is
    chosen once, outside of what is timed; views of (batch, seqlen, nheads, headdim) are inside.

    no_grad: eager, where no gradient is wanted. autograd: an eager forward that records its graph.
    fwd+bwd: that and the gradients. compile: under torch.compile, no gradient wanted. graph: the
    replay of a CUDA graph of one call.
    """
    sizes = sizes_on(options["device"], GPU, CPU, options)
    nheads, nheads_k, headdim = sizes["heads"][0]
    each = sizes["seqlen"], sizes["seqlen"], nheads, nheads_k, headdim, headdim
    shape = Shape("fwd", batch, *each, causal, DTYPES[sizes["dtype"]])
    chosen = providers_of(ours, against)
    done = run_host(shape, chosen, modes, **options)
    print_rows((one.outcome.row for one in done), as_json)
    title = str(shape._replace(direction="")).strip()
    show(console(as_json), done, title)
    if png:
        draw(png, done, title)
    fail_if(any(one.outcome.wrong for one in done if one.provider == chosen[0].name))


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
    """Checks every provider in every mode, then times all in interleaved rounds."""
    with contextlib.nullcontext() if device.startswith("cuda") else one_thread():
        done = _timed(shape, providers, modes, device, (rounds, round_ms))
    if save is not None:
        append(save, [one.outcome.row for one in done if one.outcome.row is not None])
    return done


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
    if isinstance(ready, Ready):
        call: Any = functools.partial(ready.call)
        call.within = functools.partial(chosen_once, one.name)
        ready = ready._replace(call=call)
    return ready


def _compiled(attend: Attend) -> Attend:
    return torch.compile(attend, dynamic=False, fullgraph=True)


def _captured(attend: Attend) -> Attend:
    """A call that is captured the first time, for the tensors of that time, and then replayed."""
    graphs: list[Replayed] = []

    def replay(*arguments: torch.Tensor) -> torch.Tensor:
        if not graphs:
            graphs.append(Replayed([lambda: attend(*arguments)]))
        return graphs[0]()[0]

    return replay


WRAPPED: dict[str, Callable[[Attend], Attend]] = {"compile": _compiled, "graph": _captured}


def show(screen, done: list[Cost], title: str) -> None:
    """Modes down, providers across; then why some have no time."""
    by_place = {one[:2]: one for one in done}  # mode and provider
    modes, names = (list(dict.fromkeys(keys)) for keys in zip(*by_place))
    rows = [(mode, *(cell(by_place[mode, name]) for name in names)) for mode in modes]
    screen.print(f"\n{title}: host microseconds a call, median (p20-p80)")
    screen.print(table(["call", *names], rows, numbers=["call", *names]))
    for one in done:
        if one.outcome.row is None:
            why = one.outcome.wrong or one.outcome.refused
            screen.print(f"{one.provider}, {one.mode}: {why}", style="dim")


def cell(one: Cost) -> str:
    """A cost in microseconds."""
    row = one.outcome.row
    if row is None:
        return "WRONG" if one.outcome.wrong else "-"
    low, middle, high = (plain(x * 1e3) for x in (row.p20_ms, row.median_ms, row.p80_ms))
    return f"{middle} ({low}-{high})"


def draw(path: str, done: list[Cost], title: str) -> None:
    """A bar a provider in each mode."""
    modes, names = (list(dict.fromkeys(keys)) for keys in zip(*(one[:2] for one in done)))
    series = {name: [x.microseconds for x in done if x.provider == name] for name in names}
    bars(path, Axes(f"Host time, {title}", "", "microseconds a call"), modes, series)
