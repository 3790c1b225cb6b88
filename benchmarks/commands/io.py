"""`python -m benchmarks io`: FLOPs, bytes, time of standard attention and of ours."""

from __future__ import annotations

import click

from tilewise.cli.bench.options import print_rows, round_options, row_options
from tilewise.cli.options import DTYPES, Exit, OneInt, pass_option, together
from tilewise.cli.picture import png_option
from tilewise.cli.tables import console, digits, table

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
@row_options
@png_option
def io(passes, counters, formula, steps, device, as_json, png, **options) -> None:
    """FLOPs, bytes of GPU memory and milliseconds, beside FlashAttention's paper.

    The sizes are those of the paper's table: a layer of GPT-2 medium, batch 64, 16 heads of 64,
    1024 tokens. Bytes are by formula: of standard attention the sum over its steps; of ours each
    tensor once a kernel, and, as if there were no cache, each tile reading what it visits. With
    --counters Nsight Compute says what one call really moves, where it may.
    """
    device = "" if formula else device
    from ..account import explanation, run_account

    shape = shape_of(device, {name: options.pop(name) for name in SIZES})
    screen = console(as_json)
    tell = lambda line: screen.print(line, style="dim")  # noqa: E731
    if formula:
        if options["save"] or counters:
            raise click.UsageError("--formula measures nothing: no --save, no --counters")
    entries = run_account(
        shape, passes, device=device, with_counters=counters, show=tell, **options
    )
    print_rows((x.outcome.row for x in entries if x.outcome), as_json)
    show(screen, entries)
    if steps:
        show_steps(screen, shape, passes)
    for line in explanation(entries):
        screen.print(line)
    if png:
        draw(png, entries)
    if any(x.outcome.wrong for x in entries if x.outcome and x.name == "tilewise"):
        raise SystemExit(Exit.FAILED)


SIZES = ("batch", "heads", "seqlen", "headdim", "causal", "dtype")


def shape_of(device: str, sizes: dict):
    """The paper's shape, but for what is asked; one of the batch on a CPU."""
    from tilewise.bench.shapes import Shape

    on_cpu = device.startswith("cpu")
    batch = sizes["batch"] or (1 if on_cpu else 64)
    dtype = DTYPES[sizes["dtype"] or ("fp32" if on_cpu else "fp16")]
    seqlen, heads, headdim = sizes["seqlen"], sizes["heads"], sizes["headdim"]
    each = seqlen, seqlen, heads, heads, headdim, headdim
    return Shape("fwd+bwd", batch, *each, sizes["causal"], dtype)


def show(screen, entries: list) -> None:
    """A line a pass and attention, then the paper's."""
    from ..account import PAPER, PAPER_SHAPE

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
    from tilewise.bench.traffic import standard_steps

    for direction in passes:
        rows = [
            (step.name, gigabytes(step.read), gigabytes(step.written))
            for step in standard_steps(shape._replace(direction=direction))
        ]
        heads = [f"standard, {direction}", "GB read", "GB written"]
        screen.print(table(heads, rows, numbers=heads[1:]))


def draw(path: str, entries: list) -> None:
    """Bytes by pass, by formula and counted."""
    from tilewise.cli.picture import Axes, bars

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
