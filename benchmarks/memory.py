"""`python -m benchmarks memory`: whose peak memory grows with S, and whose with S squared.

A peak is what a call holds at once beside its inputs: results, gradients and whatever it keeps in
between. Out of memory is a result, not an end.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import click
import torch

from tilewise.cli.options import DTYPES, IntList, NameList
from tilewise.cli.picture import Axes
from tilewise.cli.tables import console, table
from tilewise.explain.shapes import Shape

from .bench.providers import Provider
from .bench.row import Row, Stamp
from .bench.run import Outcome, Run, Stage
from .options import (
    HeadList,
    fail_if,
    output_options,
    pass_option,
    print_rows,
    progress,
    providers_of,
    sizes_on,
)
from .peak import is_out_of_memory, peak_bytes
from .pictures import lines

NO_ROOM = ("OutOfMemoryError", "MemoryError")
BY_SIZE = "its score matrices need"  # as `providers.too_large` begins
GPU = dict(seqlens=tuple(1024 << n for n in range(7)), heads=((16, 16, 128),), dtype="bf16")
CPU = dict(seqlens=(1024, 2048, 4096), heads=((2, 2, 64),), dtype="fp32")


class Peak(NamedTuple):
    """What one provider's call took: a number, no room, or why it was not measured."""

    shape: Shape
    provider: str
    peak: int | None
    no_room: str = ""
    refused: str = ""
    wrong: str = ""
    row: Row | None = None  # of a number, or of no room


@click.command()
@click.option("--seqlens", type=IntList(), help="1k to 64k; on a CPU 1k to 4k.")
@pass_option("fwd,fwd+bwd")
@click.option("--heads", type=HeadList(), help="16x128; on a CPU 2x64. The first counts.")
@click.option("--causal", is_flag=True)
@click.option("--dtype", type=click.Choice(list(DTYPES)), help="bf16; on a CPU fp32.")
@click.option("--provider", "ours", default="tilewise", show_default=True)
@click.option(
    "--against",
    type=NameList(),
    default="standard,math,flash,cudnn,efficient",
    show_default=True,
    help="standard, and the backends of torch's SDPA; or any that `bench` knows.",
)
@output_options
def memory(passes, causal, ours, against, device, save, as_json, png, **asked) -> None:
    """Peak memory of one sequence against its length, beside the inputs.

    Results, gradients and all that a call keeps in between count. On a GPU torch's allocator tells,
    on a CPU torch's profiler, which sees each allocation of torch's allocator there. Each result is
    held to fp64 first. A call that does not fit is a row that says so. The exponent is the slope of
    log(bytes) over log(S): 1 is O(N), 2 is the score matrix.
    """
    sizes = sizes_on(device, GPU, CPU, asked)
    chosen, screen = providers_of(ours, against), console(as_json)
    shapes = shapes_of(passes, sizes["seqlens"], sizes["heads"][0], DTYPES[sizes["dtype"]], causal)
    done = run_memory(shapes, chosen, device=device, save=save, show=progress(screen))
    print_rows((one.row for one in done), as_json)
    for direction in passes:
        show(screen, [one for one in done if one.shape.direction == direction], direction)
    if png:
        draw(png, done)
    fail_if(any(one.wrong for one in done if one.provider == chosen[0].name))


def shapes_of(
    directions: Iterable[str],
    seqlens: Iterable[int],
    heads: tuple[int, int, int],
    dtype: str,
    is_causal: bool = False,
) -> list[Shape]:
    """One sequence at a time, so that nothing but its length changes."""
    nheads, nheads_k, headdim = heads
    return [
        Shape(direction, 1, s, s, nheads, nheads_k, headdim, headdim, is_causal, dtype)
        for direction in directions
        for s in seqlens
    ]


def run_memory(
    shapes: Iterable[Shape],
    providers: Sequence[Provider],
    *,
    device: str = "cpu",
    save: str | Path | None = None,
    show: Callable[[str], None] = print,
) -> list[Peak]:
    """Checks and measures each provider at each shape. Rows are appended to `save` shape by shape;
    `show` is told of each.
    """
    run, done = Run("memory", device, save, show), []
    for shape in shapes:
        if device.startswith("cuda"):
            torch.cuda.empty_cache()
        stage = Stage(shape, device)
        found = [measure(stage, one, run.common) for one in providers]
        run.keep(found, [f"{shape}: {', '.join(f'{x.provider} {cell(x)}' for x in found)}"])
        done += found
    return done


def measure(stage: Stage, one: Provider, common: Stamp) -> Peak:
    """A provider's peak, once its result is right."""
    shape, device = stage.shape, stage.device
    tried = stage.ready(_trying(one, device))
    if isinstance(tried, Outcome):
        reason = tried.refused or ""
        if reason.startswith((*NO_ROOM, BY_SIZE)):
            return _no_room(shape, one.name, reason, common)
        return Peak(shape, one.name, None, refused=reason, wrong=tried.wrong or "")
    try:
        peak = peak_bytes(tried.call, device)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        return _no_room(shape, one.name, str(error).splitlines()[0], common)
    extra = {"peak_bytes": peak, "input_bytes": input_bytes(stage)}
    row = Row.of(common, shape, one.name, [0.0], tried.verdict, extra=extra)
    return Peak(shape, one.name, peak, row=row)


def _trying(one: Provider, device: str) -> Provider:
    """On a GPU the same, but tried where it thinks that there is no room: that ends in an error,
    where a CPU's process would be killed.
    """

    def refuse(shape: Shape, device: str) -> str | None:
        reason = one.refuse(shape, device)
        return None if reason is not None and reason.startswith(BY_SIZE) else reason

    return one._replace(refuse=refuse) if device.startswith("cuda") else one


def _no_room(shape: Shape, name: str, reason: str, common: Stamp) -> Peak:
    row = Row.of(common, shape, name, [0.0], None, extra={"out_of_memory": reason[:200]})
    return Peak(shape, name, None, no_room=reason, row=row)


def input_bytes(stage: Stage) -> int:
    """Of q, k and v, and of dout where there is a backward."""
    inputs = stage.inputs["bshd"]
    tensors = inputs[:3] if stage.shape.direction == "fwd" else inputs[:4]
    return sum(x.numel() * x.element_size() for x in tensors)


def exponent(points: Mapping[int, int]) -> float | None:
    """The slope of log(bytes) over log(S), by least squares; None with fewer than two points.

    >>> exponent({1024: 10, 2048: 40, 4096: 160})
    2.0
    """
    logs = [(math.log2(x), math.log2(y)) for x, y in points.items() if y > 0]
    return statistics.linear_regression(*zip(*logs)).slope if len(logs) > 1 else None


def curves(done: Sequence[Peak]) -> dict[tuple[str, str], dict[int, int]]:
    """For each direction and provider: peak by length."""
    found: dict[tuple[str, str], dict[int, int]] = {}
    for one in done:
        if one.peak is not None:
            key = one.shape.direction, one.provider
            found.setdefault(key, {})[one.shape.seqlen_q] = one.peak
    return found


def show(screen, done: list[Peak], direction: str) -> None:
    """Lengths down, providers across, exponents below, reasons last."""
    by_place = {(one.shape.seqlen_q, one.provider): one for one in done}
    lengths, names = (list(dict.fromkeys(keys)) for keys in zip(*by_place))
    rows = [(f"{s:,}", *(cell(by_place[s, name]) for name in names)) for s in lengths]
    slopes = [exponent(curves(done).get((direction, name), {})) for name in names]
    rows.append(("exponent", *("-" if x is None else f"{x:.2f}" for x in slopes)))
    screen.print(f"\n{direction}: MiB at most, beside the inputs")
    screen.print(table(["S", *names], rows, numbers=["S", *names]))
    for name, slope in zip(names, slopes):
        if slope is not None:
            screen.print(f"{name}: grows with S^{slope:.2f}{meaning(slope)}")
    for name in names:
        reasons = {one.refused or one.wrong for one in done if one.provider == name}
        for reason in sorted(reasons - {""}):
            screen.print(f"{name}: {reason}", style="dim")


def meaning(slope: float) -> str:
    """What an exponent tells; what is kept at any length hides it where sequences are short."""
    if slope < 1.25:
        return ", O(N)"
    return ", O(N^2): the score matrix" if slope > 1.75 else "; longer sequences would tell"


def cell(one: Peak) -> str:
    """MiB, or what there is in their place."""
    if one.peak is not None:
        return f"{one.peak / 2**20:,.1f}"
    return "no room" if one.no_room else "WRONG" if one.wrong else "-"


def draw(path: str, done: list[Peak]) -> None:
    """Bytes over lengths, both in logarithms."""
    series: dict[str, dict[float, float]] = {
        f"{provider}, {direction}": {s: peak / 2**20 for s, peak in points.items()}
        for (direction, provider), points in curves(done).items()
    }
    first = done[0].shape
    title = f"Peak memory, H{first.nheads} D{first.headdim} {first.dtype}"
    lines(path, Axes(title, "sequence length", "MiB beside the inputs", (True, True)), series)
