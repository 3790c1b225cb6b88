"""`python -m benchmarks memory`: peak memory against length, the O(N) proof."""

from __future__ import annotations

from typing import NamedTuple

import click

from tilewise.cli.bench.options import print_rows, providers_of, row_options
from tilewise.cli.options import DTYPES, Exit, HeadList, IntList, NameList, pass_option
from tilewise.cli.picture import png_option
from tilewise.cli.tables import console, table


class Sizes(NamedTuple):
    """Those of the calls that are measured."""

    seqlens: tuple[int, ...]
    heads: tuple[tuple[int, int, int], ...]
    dtype: str


GPU = Sizes(seqlens=tuple(1024 << n for n in range(7)), heads=((16, 16, 128),), dtype="bf16")
CPU = Sizes(seqlens=(1024, 2048, 4096), heads=((2, 2, 64),), dtype="fp32")


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
    help="standard, and the backends of torch's SDPA; or any that `tilewise bench` knows.",
)
@row_options
@png_option
def memory(passes, causal, ours, against, device, save, as_json, png, **sizes) -> None:
    """Peak memory of one sequence against its length, beside the inputs.

    Results, gradients and all that a call keeps in between count. On a GPU torch's allocator tells,
    on a CPU torch's profiler, which sees each allocation of torch's allocator there. Each result is
    held to fp64 first. A call that does not fit is a row that says so. The exponent is the slope of
    log(bytes) over log(S): 1 is O(N), 2 is the score matrix.
    """
    from ..memory import run_memory, shapes_of

    usual = GPU if device.startswith("cuda") else CPU
    asked = usual._replace(**{name: value for name, value in sizes.items() if value})
    chosen = providers_of(ours, against)
    screen = console(as_json)
    dtype = DTYPES[asked.dtype]
    shapes = shapes_of(passes, asked.seqlens, asked.heads[0], dtype, causal)
    tell = lambda line: screen.print(line, style="dim")  # noqa: E731
    done = run_memory(shapes, chosen, device=device, save=save, show=tell)
    print_rows((one.row for one in done), as_json)
    for direction in passes:
        show(screen, [one for one in done if one.shape.direction == direction], direction)
    if png:
        draw(png, done)
    if any(one.wrong for one in done if one.provider == chosen[0].name):
        raise SystemExit(Exit.FAILED)


def show(screen, done: list, direction: str) -> None:
    """Lengths down, providers across, exponents below, reasons last."""
    from ..memory import curves, exponent

    names = list(dict.fromkeys(one.provider for one in done))
    by_place = {(one.shape.seqlen_q, one.provider): one for one in done}
    lengths = list(dict.fromkeys(one.shape.seqlen_q for one in done))
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


def cell(one) -> str:
    """A number, or what there is in its place."""
    if one.peak is not None:
        return f"{one.peak / 2**20:,.1f}"
    return "no room" if one.no_room else "WRONG" if one.wrong else "-"


def draw(path: str, done: list) -> None:
    """Bytes over lengths, both in logarithms."""
    from tilewise.cli.picture import Axes, lines

    from ..memory import curves

    series: dict[str, dict[float, float]] = {
        f"{provider}, {direction}": {s: peak / 2**20 for s, peak in points.items()}
        for (direction, provider), points in curves(done).items()
    }
    first = done[0].shape
    title = f"Peak memory, H{first.nheads} D{first.headdim} {first.dtype}"
    lines(path, Axes(title, "sequence length", "MiB beside the inputs", (True, True)), series)
