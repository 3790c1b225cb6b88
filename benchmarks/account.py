"""`python -m benchmarks io`: FLOPs, bytes and time of standard attention and of ours, pass by pass,
beside the table of FlashAttention's paper (Dao et al. 2022, arXiv 2205.14135, figure 2).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

import click
import torch

from tilewise import dispatch
from tilewise.cli.options import DTYPES, OneInt, together
from tilewise.cli.picture import Axes
from tilewise.cli.tables import console, digits, table
from tilewise.explain.call import call_of
from tilewise.explain.dense import MATMULS
from tilewise.explain.launches import launches_of
from tilewise.explain.shapes import Shape
from tilewise.explain.traffic import PASSES, moved
from tilewise.kernels.cpu import tiles
from tilewise.tuning.select import architecture

from .bench.providers import provider
from .bench.run import Outcome, Run, run_entries
from .bench.shapes import SUITES
from .counters import Counted, Unavailable, count
from .options import (
    fail_if,
    output_options,
    pass_option,
    print_rows,
    progress,
    round_options,
    sizes_on,
)
from .pictures import bars
from .steps import standard_steps

PAPER_SHAPE = SUITES["gpt2-medium"][0]
STANDARD, OURS = "standard", "tilewise"
STANDARD_MATMULS = {"fwd": 2, "bwd": 4}  # backward: dV, dP, dQ, dK


# Queries and keys of a tile, forward and backward
Blocks = tuple[tuple[int, int], tuple[int, int]]


class Published(NamedTuple):
    """A line of the paper's table: forward and backward on an A100."""

    name: str
    gflop: float
    gigabytes: float
    ms: float


PAPER = (Published("standard", 66.6, 40.3, 41.7), Published("flash", 75.2, 4.4, 7.3))


class Entry(NamedTuple):
    """A line of ours. `tiled` is None for standard attention, which has no tiles."""

    name: str
    shape: Shape
    matmuls: int
    gflop: float  # of these matmuls
    moved: float  # bytes by formula; ours: each tensor once a kernel
    tiled: float | None  # ours, were there no cache
    counted: Counted | None = None
    uncounted: str = ""  # why not, where it was asked
    outcome: Outcome | None = None  # of a run

    @property
    def ms(self) -> float | None:
        """The measured time, if there is one."""
        row = self.outcome.row if self.outcome else None
        return row.median_ms if row else None


def account(shape: Shape, name: str, backend: str, blocks: Blocks) -> Entry:
    """The formulas for a shape; `backend` and its tiles are those of ours."""
    passes = PASSES[shape.direction]
    if name == STANDARD:
        total = sum(step.read + step.written for step in standard_steps(shape))
        matmuls = sum(STANDARD_MATMULS[direction] for direction in passes)
        whole = shape._replace(causal=False)  # it computes what it then masks
        return Entry(name, shape, matmuls, matmuls * matmul_gflop(whole), total, None)
    ours = moved(shape, blocks[0], backend, blocks[1])
    matmuls = sum(MATMULS[backend][direction] for direction in passes)
    return Entry(name, shape, matmuls, matmuls * matmul_gflop(shape), *ours)


def matmul_gflop(shape: Shape) -> float:
    """Of one matmul over all pairs: 2 FLOPs a pair and column."""
    return shape.pairs * shape.nheads * (shape.headdim + shape.headdim_v) / 1e9


def served_by(shape: Shape, device: str) -> tuple[str, Blocks]:
    """Our backend on a device, and its tiles forward and backward; of the CPU's fused kernel those
    of the blockwise one. Without a device, "", those of an H200.
    """
    call = call_of(shape._replace(batch=1))
    if not device:
        backend, target = "hopper", "sm90"
    else:
        where = torch.device(device)
        backend = dispatch.choose(call.problem, where).NAME
        target = architecture(where)
    launches = launches_of(call, backend, target, ("fwd", "bwd"))
    if launches:
        first, *_, last = launches
        return backend, ((first.block_m, first.block_n), (last.block_m, last.block_n))
    own = tiles.BLOCK_M, tiles.BLOCK_N
    return backend, (own, own)


def run_account(
    shape: Shape,
    directions: Iterable[str] = ("fwd", "bwd", "fwd+bwd"),
    *,
    device: str = "",
    with_counters: bool = False,
    rounds: int = 5,
    round_ms: float = 30.0,
    save: str | Path | None = None,
    show: Callable[[str], None] = print,
) -> list[Entry]:
    """The account of each pass; timed and counted on a device, by formula alone without one."""
    backend, blocks = served_by(shape, device)
    run, done = Run("io", device, save, show) if device else None, []
    for direction in directions:
        at = shape._replace(direction=direction)
        entries = [account(at, name, backend, blocks) for name in (STANDARD, OURS)]
        if run is not None:
            timed = {name: (at, provider(name)) for name in (OURS, STANDARD)}
            outcomes = run_entries(timed, run.common, device, rounds, round_ms)
            by_name = {outcome.provider: outcome for outcome in outcomes}
            entries = [_finished(one, by_name[one.name], device, with_counters) for one in entries]
            run.keep(outcomes_of(entries), [f"{at}: measured"])
        done += entries
    return done


def _finished(entry: Entry, outcome: Outcome, device: str, with_counters: bool) -> Entry:
    """With its time and, where they are asked for, its counters; its row says all of it."""
    counted, why = None, ""
    if with_counters and outcome.row is not None:
        try:
            counted = count(entry.shape, entry.name, device)
        except Unavailable as reason:
            why = str(reason)
    if outcome.row is not None:
        extra = {"matmuls": entry.matmuls, "gflop": entry.gflop, "bytes": entry.moved}
        if entry.tiled is not None:
            extra["bytes_tiled"] = entry.tiled
        if counted is not None:
            extra |= {"bytes_read": counted.read, "bytes_written": counted.written}
        row = dataclasses.replace(outcome.row, extra={**outcome.row.extra, **extra})
        outcome = outcome._replace(row=row)
    return entry._replace(outcome=outcome, counted=counted, uncounted=why)


def outcomes_of(entries: Iterable[Entry]) -> list[Outcome]:
    """Of those that ran."""
    return [one.outcome for one in entries if one.outcome]


def explanation(entries: list[Entry]) -> list[str]:
    """Why the counts of operations differ, here and in the paper."""
    whole = {x.name: x for x in entries if x.shape.direction == "fwd+bwd"}
    lines = []
    if whole:
        standard, ours = whole[STANDARD], whole[OURS]
        more = ours.matmuls - standard.matmuls
        what = "S = Q K^T once more" if more == 1 else "S = Q K^T twice more and dP once more"
        one = standard.gflop / standard.matmuls
        lines.append(
            f"Ours does {ours.matmuls} matmuls for {standard.matmuls}: it keeps no score matrix, "
            f"so that its backward computes {what}, {one:,.1f} GFLOP each over all pairs."
        )
    first, flash = PAPER
    shape = PAPER_SHAPE
    difference = flash.gflop - first.gflop
    one = matmul_gflop(shape)
    lines.append(
        f"In the paper {flash.gflop} - {first.gflop} = {difference:.1f} GFLOP, too, are one such "
        f"matmul, but over {shape.batch} heads of {shape.seqlen_q}: over the {shape.batch} x "
        f"{shape.nheads} of its caption one has {one:.1f} ({one / difference:.0f} times that), and "
        f"6 have {6 * one:.0f}. So compare its two counts with each other, not with ours."
    )
    complete = shape._replace(causal=True, modifier="dropout")
    plain, both = (
        sum(step.read + step.written for step in standard_steps(x)) / 1e9 for x in (shape, complete)
    )
    lines.append(
        f"Its {first.gigabytes} GB lie between {plain:.1f} GB by formula, without mask and dropout,"
        f" and {both:.1f} GB with both: each of these reads and writes the matrix again."
    )
    return lines


CPU = dict(batch=1, dtype="fp32")
NUMBERS = ("GFLOP", "GB", "no cache", "counted", "ms", "TFLOP/s")
size_options = together(
    click.option("--batch", type=click.IntRange(1), help="64; on a CPU 1."),
    click.option("--heads", type=click.IntRange(1), default=16, show_default=True),
    click.option("--seqlen", type=OneInt(), default="1k", show_default=True),
    click.option("--headdim", type=click.IntRange(1), default=64, show_default=True),
    click.option("--causal", is_flag=True),
    click.option("--dtype", type=click.Choice(list(DTYPES)), help="fp16; on a CPU fp32."),
)


@click.command()
@size_options
@pass_option("fwd,bwd,fwd+bwd")
@click.option("--counters", is_flag=True, help="Ask the GPU's counters, through Nsight Compute.")
@click.option("--formula", is_flag=True, help="Formulas alone, as for an H200: nothing runs.")
@click.option("--steps", is_flag=True, help="Also what each step of standard attention moves.")
@round_options
@output_options
def io(passes, counters, formula, steps, device, as_json, png, **options) -> None:
    """FLOPs, bytes of GPU memory and milliseconds, beside FlashAttention's paper.

    The sizes are those of the paper's table: a layer of GPT-2 medium, batch 64, 16 heads of 64,
    1024 tokens. Bytes are by formula: of standard attention the sum over its steps; of ours each
    tensor once a kernel, and, as if there were no cache, each tile reading what it visits. With
    --counters Nsight Compute says what one call really moves, where it may.
    """
    device = "" if formula else device
    shape, screen = shape_of(device, options), console(as_json)
    if formula:
        if options["save"] or counters:
            raise click.UsageError("--formula measures nothing: no --save, no --counters")
    entries = run_account(
        shape, passes, device=device, with_counters=counters, show=progress(screen), **options
    )
    print_rows((one.row for one in outcomes_of(entries)), as_json)
    show(screen, entries)
    if steps:
        show_steps(screen, shape, passes)
    for line in explanation(entries):
        screen.print(line)
    if png:
        draw(png, entries)
    fail_if(any(one.wrong for one in outcomes_of(entries) if one.provider == OURS))


def shape_of(device: str, options: dict) -> Shape:
    """The paper's shape, but for what is asked; one of the batch on a CPU."""
    usual = sizes_on(device or "cuda", dict(batch=64, dtype="fp16"), CPU, options)
    seqlen, heads, headdim = (options.pop(name) for name in ("seqlen", "heads", "headdim"))
    each = seqlen, seqlen, heads, heads, headdim, headdim
    dtype = DTYPES[usual["dtype"]]
    return Shape("fwd+bwd", usual["batch"], *each, options.pop("causal"), dtype)


def show(screen, entries: list) -> None:
    """A line a pass and attention, then the paper's."""
    screen.print(f"\n{str(entries[0].shape._replace(direction='')).strip()}")
    rows = [line(x) for x in entries]
    for one in PAPER:
        numbers = one.gflop, one.gigabytes, "", "", one.ms, ""
        rows.append(("fwd+bwd", f"paper: {one.name}", *map(str, numbers)))
    screen.print(table(["pass", "attention", *NUMBERS], rows, numbers=("pass", *NUMBERS)))
    sizes = str(PAPER_SHAPE._replace(direction="")).strip()
    screen.print(f"GB: by formula. paper: {sizes}, on an A100", style="dim")
    for x in entries:
        if x.outcome and x.outcome.row is None:
            why = x.outcome.wrong or x.outcome.refused
            screen.print(f"{x.name} {x.shape.direction}: {why}", style="dim")
    for why in sorted({x.uncounted for x in entries if x.uncounted}):
        screen.print(f"no counters: {why}")


def line(x) -> tuple:
    """An entry's cells."""
    counted = "-" if x.counted is None else gigabytes(x.counted.read + x.counted.written)
    rate = "-" if x.ms is None else digits(x.gflop / x.ms)
    tiled = "-" if x.tiled is None else gigabytes(x.tiled)
    figures = f"{x.gflop:,.1f}", gigabytes(x.moved), tiled, counted, digits(x.ms), rate
    return x.shape.direction, x.name, *figures


def gigabytes(value: float) -> str:
    """10^9 bytes, as the paper counts."""
    return f"{value / 1e9:,.2f}" if value >= 1e8 else f"{value / 1e9:.2g}"


def show_steps(screen, shape, passes) -> None:
    """Where standard attention's bytes go."""
    for direction in passes:
        rows = [
            (step.name, gigabytes(step.read), gigabytes(step.written))
            for step in standard_steps(shape._replace(direction=direction))
        ]
        heads = [f"standard, {direction}", "GB read", "GB written"]
        screen.print(table(heads, rows, numbers=heads[1:]))


def draw(path: str, entries: list) -> None:
    """Bytes by pass, by formula and counted."""
    passes = list(dict.fromkeys(x.shape.direction for x in entries))
    series = {}
    for name in dict.fromkeys(x.name for x in entries):
        mine = [x for x in entries if x.name == name]
        series[f"{name}, formula"] = [x.moved / 1e9 for x in mine]
        if all(x.tiled is not None for x in mine):
            series[f"{name}, no cache"] = [x.tiled / 1e9 for x in mine]
        if all(x.counted is not None for x in mine):
            series[f"{name}, counted"] = [(x.counted.read + x.counted.written) / 1e9 for x in mine]
    title = f"GB moved,{entries[0].shape._replace(direction='')}"
    bars(path, Axes(title, "", "GB"), passes, series)
